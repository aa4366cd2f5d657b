"""Norms with a residual, against fp64."""

import pytest
import torch
from kernel_exactness import DTYPES, check, make_random
from megaframe_kernels.elementwise import norm

pytestmark = pytest.mark.numeric


def make_arguments(shape, dtype, kind, added, scale=1.0):
    """Return arguments of a norm. With a residual, the sum is exact, as in the fp64 reference."""
    width = shape[-1]
    x, residual = make_random(*shape, seed=0) * scale, None
    if added:
        x = (4 * x).round() / 4
        residual = ((4 * make_random(*shape, seed=3)).round() / 4).to(dtype).requires_grad_()
    gain = (1.0 + make_random(width, seed=1)).to(dtype).requires_grad_()
    bias = make_random(width, dtype=dtype, seed=2).requires_grad_() if kind == "layernorm" else None
    return x.to(dtype).requires_grad_(), gain, bias, residual


@pytest.mark.parametrize("name", ["triton", "torch"])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(name, kind, added, dtype):
    tensors = make_arguments((3, 5, 37), dtype, kind, added)
    check(norm.KERNEL, name, tensors, {"kind": kind}, 37, 3 * 5 * 37)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("shape", [(1, 1), (0, 8), (7, 16), (70, 130), (2, 3, 1025), (4, 9001)])
def test_odd_sizes(kind, shape):
    """In fp32 as far as it has kernels for so wide a row."""
    dtype = torch.bfloat16 if shape[-1] > norm._WHOLE else torch.float32
    tensors = make_arguments(shape, dtype, kind, added=True)
    check(norm.KERNEL, "triton", tensors, {"kind": kind}, shape[-1], 70 * shape[-1], scale=1e-2)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_rows_that_are_not_adjacent(kind):
    x, gain, bias, residual = make_arguments((6, 4, 40), torch.float32, kind, added=True)
    strided = x.detach()[::2, :, 3:36].requires_grad_()
    residual = residual.detach().flip(0)[:3, :, 3:36].transpose(0, 1).clone().transpose(0, 1)
    gain = gain.detach()[:33].requires_grad_()
    bias = None if bias is None else bias.detach()[:33].requires_grad_()
    tensors = (strided, gain, bias, residual.requires_grad_())
    check(norm.KERNEL, "triton", tensors, {"kind": kind}, 33, 12 * 33)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1e15), (torch.float16, 1e4)])
def test_large_values(dtype, scale):
    tensors = make_arguments((4, 64), dtype, "layernorm", False, scale)
    check(norm.KERNEL, "triton", tensors, {"kind": "layernorm"}, 64, 4 * 64)


def test_gradients_are_bitwise_repeatable():
    x, gain, _, _ = make_arguments((50, 24), torch.bfloat16, "rmsnorm", added=False)

    def gradients():
        y, _ = norm.run_triton(x, gain)
        return torch.autograd.grad(y.float().square().sum(), (x, gain))

    for first, second in zip(gradients(), gradients(), strict=True):
        assert torch.equal(first, second)


def test_what_does_not_fit_is_refused():
    wide = torch.zeros(1, 20000)
    assert "20000" in norm.KERNEL.implementations["triton"].explain_refusal(wide, wide[0])
    double = torch.zeros(2, 8, dtype=torch.float64)
    assert not norm.KERNEL.implementations["triton"].supports(double, double[0])
