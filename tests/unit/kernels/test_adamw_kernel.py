"""AdamW and the sum of squares, against fp64."""

import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_exactness import assert_close, make_random
from megaframe_kernels.update import adamw, square_sum
from tolerances import assert_near

OPTIONS = {
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 3,
}


def make_state(length, grad_dtype=torch.float32, moment_dtype=torch.float32, copy=torch.bfloat16):
    weights = make_random(length)
    return [
        weights,
        make_random(length, dtype=grad_dtype, seed=1),
        make_random(length, dtype=moment_dtype, seed=2, scale=0.1),
        make_random(length, seed=3, scale=0.1).square().to(moment_dtype),
        None if copy is None else weights.to(copy),
    ]


def run_both(name, tensors, **options):
    """Return the results of an implementation and of the fp64 reference, each on its own copy."""
    options = {**OPTIONS, **options}
    truth = adamw.run_reference(*[None if t is None else t.double() for t in tensors], **options)
    copies = [None if t is None else t.clone() for t in tensors]
    return adamw.KERNEL.implementations[name].run(*copies, **options), truth


@pytest.mark.parametrize("length", [0, 1, 2049, 5000])
@pytest.mark.parametrize("divisor", [None, 4.5])
def test_adamw(length, divisor):
    divisor = None if divisor is None else torch.tensor(divisor)
    actual, expected = run_both("triton", make_state(length), divisor=divisor)
    assert len(actual) == 4
    for output, exact in zip(actual, expected, strict=True):
        assert_close(adamw.KERNEL, output, exact, 1, "state")


def test_a_beta_close_to_1_loses_no_digits():
    tensors = make_state(300)
    for moment in tensors[2:4]:
        moment.zero_()
    actual, expected = run_both("triton", tensors, beta1=0.99, beta2=0.9999, step=1)
    for output, exact in zip(actual, expected, strict=True):
        assert_close(adamw.KERNEL, output, exact, 1, "state")


def update_as_apex(chunk, flag, lists, lr, beta1, beta2, eps, step, mode, correct, decay, inverse):
    """Do what csrc/multi_tensor_adam.cu of NVIDIA/apex does in `AdamCapturableFunctor`, with the
    types of the pointers that it reads."""
    assert (flag.dtype, step.dtype) == (torch.int32, torch.int32) and chunk > 0
    assert (lr.dtype, inverse.dtype) == (torch.float32, torch.float32) and (mode, correct) == (1, 1)
    ((grad,), (weight,), (mean,), (square,)) = lists
    if int(flag) == 1:
        return
    grad.mul_(inverse)
    mean.mul_(beta1).add_(grad * (1 - beta1))
    square.mul_(beta2).add_(grad * grad * (1 - beta2))
    unbiased = mean / (1 - beta1 ** int(step)), square / (1 - beta2 ** int(step))
    weight.sub_(lr * (unbiased[0] / (unbiased[1].sqrt() + eps) + decay * weight))


@pytest.mark.parametrize(("divisor", "skip"), [(None, None), (4.5, 0.0), (4.5, 1.0)])
def test_apex_divides_gradients_and_skips_a_step(divisor, skip, monkeypatch):
    """The library itself needs a GPU; what it is called with is what its kernel takes."""
    apex = SimpleNamespace(multi_tensor_adam_capturable=update_as_apex)
    monkeypatch.setitem(sys.modules, "amp_C", apex)
    scalars = {"divisor": divisor, "skip": skip}
    options = {k: None if v is None else torch.tensor(v) for k, v in scalars.items()}
    actual, expected = run_both("apex", make_state(300), **options)
    for output, exact in zip(actual, expected, strict=True):
        assert_close(adamw.KERNEL, output, exact, 1, "state")
    refuses = adamw.KERNEL.implementations["apex"].refuses
    assert refuses(*make_state(8), **options) is None
    assert "must be of one type" in refuses(*make_state(8, torch.bfloat16), **options)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_adamw_with_low_precision_gradients_and_moments(low):
    actual, expected = run_both("triton", make_state(300, low, low, copy=None))
    for output, exact in zip(actual, expected, strict=True):
        assert_close(adamw.KERNEL, output, exact, 1, "state")


def test_torch_does_the_same():
    actual, expected = run_both(
        "torch", make_state(300), divisor=torch.tensor(2.0), skip=torch.tensor(0.0)
    )
    for output, exact in zip(actual, expected, strict=True):
        assert_close(adamw.KERNEL, output, exact, 1, "state")


def test_a_skipped_step_changes_nothing_whatever_the_gradients():
    tensors = make_state(50)
    tensors[1][7] = float("nan")
    before = [t.clone() for t in tensors]
    adamw.run_triton(*tensors, **OPTIONS, divisor=torch.tensor(1.0), skip=torch.tensor(1.0))
    for old, new in zip(before, tensors, strict=True):
        assert torch.equal(old.nan_to_num(1e9), new.nan_to_num(1e9))


def test_infinite_weights_stay_infinite_when_rounded():
    tensors = [t.bfloat16() for t in make_state(4, copy=None)[:4]]
    tensors[0][:2] = torch.tensor([float("inf"), -float("inf")])
    adamw.run_triton(*tensors, **OPTIONS)
    assert tensors[0][0] == float("inf") and tensors[0][1] == -float("inf")


@pytest.mark.parametrize("length", [0, 1, 2049, 60001])
def test_square_sum(length):
    x = make_random(length, scale=1e25)
    actual, expected = square_sum.launch_sum(x), square_sum.run_reference(x)
    assert_near(actual, expected, length)
    low = make_random(length, dtype=torch.bfloat16)[::2]
    actual, expected = square_sum.launch_sum(low), square_sum.run_reference(low)
    assert_near(actual, expected, length)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_square_sum_shows_what_is_not_finite(bad):
    x = make_random(3000)
    x[2999] = bad
    assert not torch.isfinite(square_sum.launch_sum(x))
