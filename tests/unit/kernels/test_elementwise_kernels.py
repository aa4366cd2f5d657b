"""Activations and rotary positions, against fp64."""

import pytest
import torch
from kernel_exactness import DTYPES, check, make_random
from megaframe_kernels.elementwise import activation, qkv_rotary, rotary


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", activation.KINDS)
def test_activation(kind, dtype):
    scale = 6.0 if kind == "swiglu_clamped" else 2.0  # some are clamped
    x = make_random(3, 5, 66, dtype=dtype, scale=scale).requires_grad_()
    check(activation.KERNEL, "triton", (x, kind))


@pytest.mark.parametrize("kind", activation.KINDS)
@pytest.mark.parametrize("shape", [(1, 2), (0, 8), (4, 0), (3, 2050)])
def test_activation_of_odd_and_empty_sizes(kind, shape):
    check(activation.KERNEL, "triton", (make_random(*shape).requires_grad_(), kind))


def test_activation_of_strided_rows():
    x = make_random(6, 4, 40)[::2, :, 3:37].requires_grad_()
    for kind in activation.GATED:
        check(activation.KERNEL, "triton", (x, kind))
    check(activation.KERNEL, "triton", (x.detach().transpose(1, 2).requires_grad_(), "gelu"))


@pytest.mark.parametrize("kind", activation.KINDS)
def test_activation_of_large_values(kind):
    x = make_random(4, 32, dtype=torch.bfloat16, scale=1e15).requires_grad_()
    check(activation.KERNEL, "triton", (x, kind))


@pytest.mark.parametrize("kind", activation.KINDS)
def test_activation_of_nan(kind):
    x = make_random(2, 32)
    x[0, 3] = float("nan")
    x.requires_grad_()
    y = activation.KERNEL.implementations["triton"].run(x, kind)
    (d_x,) = torch.autograd.grad(y.sum(), x)
    assert y[0, 3].isnan() and d_x[0, 3].isnan()
    assert torch.isfinite(y[1]).all() and torch.isfinite(d_x[1]).all()


def make_table(shape, dtype=torch.float32):
    angle = make_random(*shape, seed=5, scale=3.0)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "half"),
    [((2, 7, 3, 16), 8), ((1, 3, 5, 20), 6), ((3, 1, 1, 2), 1), ((0, 4, 2, 8), 4)],
)
def test_rotary(shape, half, dtype):
    x = make_random(*shape, dtype=dtype).requires_grad_()
    check(rotary.KERNEL, "triton", (x, *make_table((shape[1], half))), length=2)
    check(rotary.KERNEL, "triton", (x, *make_table((*shape[:2], half), dtype)), length=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "half"),
    [((2, 7, 3, 4, 16), 8), ((1, 3, 1, 7, 20), 6), ((3, 1, 2, 3, 2), 1), ((0, 4, 2, 3, 8), 4)],
)
def test_rotary_of_the_joint_product_of_queries_keys_and_values(shape, half, dtype):
    qkv = make_random(*shape, dtype=dtype).requires_grad_()
    check(qkv_rotary.KERNEL, "triton", (qkv, *make_table((shape[1], half))), length=2)
    check(qkv_rotary.KERNEL, "triton", (qkv, *make_table((*shape[:2], half), dtype)), length=2)


def test_rotary_of_a_joint_product_does_not_mix_its_heads():
    """What is not finite stays in its head, and values are copied bit by bit."""
    qkv = make_random(1, 2, 2, 4, 8)
    qkv[0, 1, 0, 3] = torch.tensor([float("inf"), float("nan"), -0.0, 1.0] * 2)
    query, key, value = qkv_rotary.launch_forward(qkv, *make_table((2, 4)))
    assert value.view(torch.int32).equal(qkv[:, :, :, 3].contiguous().view(torch.int32))
    assert torch.isfinite(query).all() and torch.isfinite(key).all()
    back = qkv_rotary.launch_backward(query, key, value, *make_table((2, 4)))
    exactly = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(back[:, :, :, 3], value, **exactly)
    assert torch.isfinite(back[:, :, :, :3]).all()
    torch.testing.assert_close(back[:, :, :, :3], qkv[:, :, :, :3])


def test_rotary_of_a_slice_of_fused_heads():
    x = make_random(2, 5, 4, 3, 16)[:, ::2, :, 1].requires_grad_()
    check(rotary.KERNEL, "triton", (x, *make_table((3, 8))), length=2)
