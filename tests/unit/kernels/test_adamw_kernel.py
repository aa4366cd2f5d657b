"""AdamW and the sum of squares, against fp64, and the properties of stochastic rounding."""

import pytest
import torch
from kernel_exactness import assert_close, rand
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


def state(length, grad_dtype=torch.float32, moment_dtype=torch.float32, copy=torch.bfloat16):
    weights = rand(length)
    return [
        weights,
        rand(length, dtype=grad_dtype, seed=1),
        rand(length, dtype=moment_dtype, seed=2, scale=0.1),
        rand(length, seed=3, scale=0.1).square().to(moment_dtype),
        None if copy is None else weights.to(copy),
    ]


def both(name, given, **options):
    """Return the results of an implementation and of the fp64 reference, each on its own copy."""
    options = {**OPTIONS, **options}
    truth = adamw.run_reference(*[None if t is None else t.double() for t in given], **options)
    mine = [None if t is None else t.clone() for t in given]
    return adamw.KERNEL.implementations[name].run(*mine, **options), truth


@pytest.mark.parametrize("length", [0, 1, 2049, 5000])
@pytest.mark.parametrize("divisor", [None, 4.5])
def test_adamw(length, divisor):
    divisor = None if divisor is None else torch.tensor(divisor)
    got, want = both("triton", state(length), divisor=divisor)
    assert len(got) == 4
    for mine, true in zip(got, want, strict=True):
        assert_close(adamw.KERNEL, mine, true, 1, "state")


def test_a_beta_close_to_1_loses_no_digits():
    given = state(300)
    for moment in given[2:4]:
        moment.zero_()
    got, want = both("triton", given, beta1=0.99, beta2=0.9999, step=1)
    for mine, true in zip(got, want, strict=True):
        assert_close(adamw.KERNEL, mine, true, 1, "state")


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_adamw_with_low_precision_gradients_and_moments(low):
    got, want = both("triton", state(300, low, low, copy=None))
    for mine, true in zip(got, want, strict=True):
        assert_close(adamw.KERNEL, mine, true, 1, "state")


def test_torch_does_the_same():
    got, want = both("torch", state(300), divisor=torch.tensor(2.0), skip=torch.tensor(0.0))
    for mine, true in zip(got, want, strict=True):
        assert_close(adamw.KERNEL, mine, true, 1, "state")


def test_a_skipped_step_changes_nothing_whatever_the_gradients():
    given = state(50)
    given[1][7] = float("nan")
    before = [t.clone() for t in given]
    adamw.run_triton(*given, **OPTIONS, divisor=torch.tensor(1.0), skip=torch.tensor(1.0))
    for old, new in zip(before, given, strict=True):
        assert torch.equal(old.nan_to_num(1e9), new.nan_to_num(1e9))


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average():
    exact = torch.full((20000,), 1.0 + 2**-7 * 0.3)  # 0.3 of the way from 1 to the next bf16
    zeros = torch.zeros_like(exact)
    weights, copy = exact.clone(), exact.bfloat16()
    options = {**OPTIONS, "weight_decay": 0.0, "seed": 11}
    adamw.run_triton(weights, zeros.clone(), zeros.clone(), zeros.clone(), copy, **options)
    assert torch.equal(weights, exact)
    assert set(copy.unique().tolist()) == {1.0, 1.0 + 2**-7}
    share = (copy > 1).float().mean().item()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / 20000) ** 0.5


def test_random_bits_belong_to_elements_not_to_shards():
    given = [t.bfloat16() for t in state(700, copy=None)[:4]]
    whole, parts = [t.clone() for t in given], [t.clone() for t in given]
    adamw.run_triton(*whole, **OPTIONS, seed=5, first=2**33)
    for start, stop in ((0, 100), (100, 700)):
        shard = [t[start:stop] for t in parts]
        adamw.run_triton(*shard, **OPTIONS, seed=5, first=2**33 + start)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one, other)
    again = [t.clone() for t in given]
    adamw.run_triton(*again, **OPTIONS, seed=6, first=2**33)
    assert not torch.equal(again[0], whole[0])


def test_infinite_weights_stay_infinite_when_rounded():
    given = [t.bfloat16() for t in state(4, copy=None)[:4]]
    given[0][:2] = torch.tensor([float("inf"), -float("inf")])
    adamw.run_triton(*given, **OPTIONS, seed=5)
    assert given[0][0] == float("inf") and given[0][1] == -float("inf")


@pytest.mark.parametrize("length", [0, 1, 2049, 60001])
def test_square_sum(length):
    x = rand(length, scale=1e25)
    got, want = square_sum.launch_sum(x), square_sum.run_reference(x)
    assert_near(got, want, length)
    low = rand(length, dtype=torch.bfloat16)[::2]
    got, want = square_sum.launch_sum(low), square_sum.run_reference(low)
    assert_near(got, want, length)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_square_sum_shows_what_is_not_finite(bad):
    x = rand(3000)
    x[2999] = bad
    assert not torch.isfinite(square_sum.launch_sum(x))
