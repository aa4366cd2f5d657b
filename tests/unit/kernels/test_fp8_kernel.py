"""Quantisation to 8 bits: the same bits as the reference, with errors that the type allows."""

import pytest
import torch
from kernel_exactness import DEVICE, DTYPES, assert_close, make_random
from megaframe_kernels.fp8 import quantize, scaled_product
from tolerances import assert_near
from torch._subclasses.fake_tensor import FakeTensorMode

BLOCKS = [None, (1, 0), (1, 128), (4, 16), (0, 8), (3, 20)]


@pytest.mark.parametrize("dtype", quantize.TYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_quantise(dtype, block):
    x = make_random(9, 200, scale=30.0)
    actual, scales = quantize.run_triton(x, dtype, block)
    expected, true_scales = quantize.run_reference(x, dtype, block)
    assert torch.equal(scales, true_scales)
    assert actual.dtype == dtype and torch.equal(
        actual.view(torch.uint8), expected.view(torch.uint8)
    )
    # Half a unit in the last place of the number, or of the smallest normal number.
    eps, least = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal
    allowed = (x.abs() * 0.5).clamp_min(scales.max() * least * 0.5) * eps * 1.001
    assert ((quantize.restore(actual, scales, block) - x).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_strided_low_precision_and_zeros(dtype, block):
    x = make_random(12, 300, dtype=dtype)[::2, 20:150]
    x[3:] = 0.0
    actual, scales = quantize.run_triton(x, block=block)
    expected, true_scales = quantize.run_reference(x, block=block)
    assert torch.equal(scales, true_scales) and (scales > 0).all()
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", quantize.TYPES)
@pytest.mark.parametrize("block", [*BLOCKS, (128, 128)])
def test_a_transposed_matrix_is_quantised_as_its_copy(dtype, block):
    for rows, columns in ((130, 200), (8, 16), (1, 40), (300, 5)):
        wide = make_random(rows, columns + 3, scale=30.0)
        wide[rows // 2, columns // 2] = torch.nan
        turned = wide[:, 3:].t()
        actual, scales = quantize.run_triton(turned, dtype, block)
        expected, true_scales = quantize.run_reference(turned.contiguous(), dtype, block)
        assert actual.is_contiguous() and actual.shape == (columns, rows)
        assert torch.equal(scales.nan_to_num(-1.0), true_scales.nan_to_num(-1.0))
        assert torch.equal(actual.float().nan_to_num(), expected.float().nan_to_num())
        assert torch.equal(actual.isnan(), expected.isnan())


def test_a_transposed_matrix_is_not_copied(monkeypatch):
    x = make_random(40, 256)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    for block in (None, (1, 0), (1, 128), (128, 128)):
        quantize.run_triton(x.t(), block=block)


@pytest.mark.parametrize("block", BLOCKS)
def test_quantise_of_an_empty_tensor(block):
    for x in (torch.empty(0, 5), torch.empty(5, 0).t()):
        actual, scales = quantize.run_triton(x, block=block)
        assert actual.shape == (0, 5) and scales.isfinite().all()


def test_rows_that_registers_do_not_hold():
    x = make_random(3, 20000, dtype=torch.bfloat16)
    implementation = quantize.QUANTISE.implementations["triton"]
    assert "3 x 20000" in implementation.refuses(x, block=(3, 0))
    assert implementation.refuses(x, block=(1, 0)) is None
    actual, scales = quantize.run_triton(x, block=(1, 0))
    expected, true_scales = quantize.run_reference(x, block=(1, 0))
    assert torch.equal(scales, true_scales)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", quantize.TYPES)
@pytest.mark.parametrize("block", BLOCKS)
def test_what_is_not_finite_shows(dtype, block):
    for width in (200, 20000) if block == (1, 0) else (200,):
        x = make_random(9, width)
        x[1, 3], x[7, 150] = float("nan"), float("inf")
        actual, scales = quantize.run_triton(x, dtype, block)
        expected, true_scales = quantize.run_reference(x, dtype, block)
        assert actual[1, 3].float().isnan() and actual[7, 150].float().isnan()
        exact = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
        torch.testing.assert_close(scales, true_scales, **exact)
        torch.testing.assert_close(actual.float(), expected.float(), **exact)


def test_the_largest_number_survives():
    x = torch.tensor([[1e30, -3.0, 0.0, 1e-30]])
    actual, scales = quantize.run_triton(x)
    # The scale is a quotient, and what it gives a product: two roundings.
    assert_near(quantize.restore(actual, scales)[0, 0], x[0, 0], 2)
    assert torch.isfinite(actual.float()).all()


@pytest.mark.parametrize(
    ("a_scales", "b_scales", "major", "cuda", "why"),
    [
        ((1, 1), (1, 1), 10, "12.8", None),
        ((64, 1), (256, 1), 10, "12.8", None),
        ((64, 8), (2, 8), 9, "13.0", None),
        ((64, 6), (256, 6), 9, "12.9", None),
        ((64, 6), (256, 6), 9, "12.8", "CUDA 12.9"),
        ((64, 6), (2, 6), 9, "13.0", "groups of four"),
        ((64, 1), (2, 1), 9, "13.0", "groups of four"),
        ((1, 1), (2, 1), 9, "13.0", "groups of four"),
        ((64, 8), (2, 8), 10, "13.0", "capability 9.0"),
    ],
)
def test_what_the_scaled_product_refuses(a_scales, b_scales, major, cuda, why, monkeypatch):
    for module in (quantize, scaled_product):
        monkeypatch.setattr(module, "read_capability", lambda index: (major, 0))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    columns = a_scales[1] * 128
    with FakeTensorMode(), torch.device("cuda"):
        rows = a_scales[0] if b_scales != (1, 1) else 64
        a, b = (torch.empty(n, columns, dtype=torch.float8_e4m3fn) for n in (rows, 256))
        scales = torch.empty(a_scales), torch.empty(b_scales)
        reason = scaled_product.KERNEL.implementations["torch"].refuses(a, b, *scales)
    assert reason is None if why is None else why in reason


@pytest.mark.parametrize("rows", [1, 3])
def test_scales_of_a_single_row_are_not_those_of_a_tensor(rows):
    a, a_scales = quantize.run_reference(make_random(rows, 32), block=(1, 0))
    b, b_scales = quantize.run_reference(make_random(16, 32, seed=1), block=(1, 0))
    operands = a, b, a_scales, b_scales
    reason = scaled_product.KERNEL.implementations["torch"].refuses(*operands)
    if DEVICE == "cuda" and reason:  # a CPU has the product for tests alone
        pytest.skip(reason)
    try:
        product = scaled_product.run_torch(*operands)
    except RuntimeError as error:
        if torch.__version__ >= torch.torch_version.TorchVersion("2.12"):
            raise
        assert "only supports per-tensor scaling for CPU" in str(error)
        pytest.skip("before torch 2.12 a CPU has no product with a scale per row")
    expected = scaled_product.run_reference(*operands, torch.float64)
    assert_close(scaled_product.KERNEL, product, expected, 32, "product")
