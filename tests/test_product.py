"""Matrix products against fp64: any strides of the operands, any size, added or written."""

import pytest
import torch
from tolerances import allowance, assert_near, assert_within

from megaframe import product as module
from megaframe.product import product, product_into, products, wide_products

pytestmark = pytest.mark.numeric

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
SIZES = [(1, 1, 1), (5, 7, 3), (64, 33, 130), (3, 4, 0), (0, 4, 2), (3, 0, 2)]


def operands(rows, inner, columns, dtype, *, transposed):
    shapes = ((inner, rows), (columns, inner)) if transposed else ((rows, inner), (inner, columns))
    left, right = (torch.randn(*shape).to(dtype) for shape in shapes)
    return (left.t(), right.t()) if transposed else (left, right)


def exactly(left, right):
    """Return the product in fp64, and the sum of the absolute values of its terms."""
    left, right = left.double(), right.double()
    return left @ right, left.abs() @ right.abs()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
def test_product_and_bias(rows, inner, columns, dtype, transposed):
    left, right = operands(rows, inner, columns, dtype, transposed=transposed)
    bias = torch.randn(columns).to(dtype)
    wanted, size = exactly(left, right)
    for found, expected in (
        (product(left, right), wanted),
        (product(left, right, bias), wanted + bias),
    ):
        assert found.dtype is dtype
        assert_near(found, expected, inner + 1, size=size + bias.abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(5, 7, 3), (130, 160, 220)])
@pytest.mark.parametrize("heads", [1, 3])
def test_products_of_several(heads, size, dtype, transposed):
    """Small products are computed at once, large ones in fp32 one by one. Wide products round only
    their sums, and restore torch's setting of precision."""
    pairs = [operands(*size, dtype, transposed=transposed) for _ in range(heads)]
    left, right = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    wanted, numbers = exactly(left, right)
    allowed = torch.backends.mkldnn.matmul.fp32_precision
    for make, kind in (
        (products, dtype),
        (wide_products, torch.promote_types(dtype, torch.float32)),
    ):
        found = make(left, right)
        assert found.dtype is kind
        assert_near(found, wanted, size[1], size=numbers)
    assert torch.backends.mkldnn.matmul.fp32_precision == allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
@pytest.mark.parametrize("piece", [1, 700, 1 << 20])
def test_written_or_added_in_pieces(rows, inner, columns, dtype, add, piece, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    left, right = operands(rows, inner, columns, dtype, transposed=True)
    old = torch.randn(rows, columns) if add else torch.full((rows, columns), torch.nan)
    for kind in {dtype, torch.promote_types(dtype, torch.float32)}:
        out = old.to(kind)
        before = out.clone().double() if add else torch.zeros(rows, columns).double()
        wanted, size = exactly(left, right)
        product_into(out, left, right, add=add)
        # The product is rounded to the operands' type, and so may be the sum.
        rounded = 2 * (wanted.abs() + before.abs())
        allowed = allowance(inner + 1, size + before.abs(), dtype, result=rounded)
        assert_within(out, wanted + before, allowed, f"{inner} terms, rounded to {dtype}")


def test_fp32_on_a_cpu_keeps_fp32_precision():
    """No lower precision is used: tf32 would give errors of about 0.03."""
    left, right = operands(64, 4096, 64, torch.float32, transposed=False)
    wanted, _ = exactly(left, right)
    assert_near(product(left, right), wanted, 4096)  # about 0.008


def test_onednn_has_a_fast_routine_for_every_piece(capfd, monkeypatch):
    """oneDNN logs the routine of each product; its `ref` routine is a thousand times slower."""
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for rows, columns in ((16, 200), (200, 16)):
            left, right = operands(rows, 64, columns, torch.float32, transposed=False)
            for stored in (left, left.t().contiguous().t()):
                product_into(torch.zeros(rows, columns), stored, right, add=True)
    lines = [line for line in capfd.readouterr().out.splitlines() if ",exec," in line]
    products = [line for line in lines if ",matmul," in line or ",inner_product," in line]
    assert len(products) > 8 or not module._ONEDNN
    assert not [line for line in products if ",ref" in line]
