"""Matrix products against fp64: any strides of the operands, any size, added or written."""

import pytest
import torch
from slow_cases import slow
from tolerances import assert_near, assert_within, compute_allowance, compute_roundoff

from megaframe.ops import matmul as module
from megaframe.ops.matmul import (
    KINDS,
    get_libraries_in_use,
    get_row_multiple,
    list_libraries,
    multiply,
    multiply_batched,
    multiply_batched_wide,
    multiply_into,
    use_libraries,
    write_weight_gradient,
)

pytestmark = pytest.mark.numeric

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
CHOICES = [(dtype, library) for dtype in DTYPES for library in list_libraries(dtype)]
SIZES = [
    (1, 1, 1),
    (5, 7, 3),
    (64, 33, 130),
    (9, 300, 70),
    (300, 5, 9),
    (3, 4, 0),
    (0, 4, 2),
    (3, 0, 2),
]


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    """Each test starts without a choice of libraries and leaves none."""
    monkeypatch.setattr(module, "_library_of", {})


def take(choice):
    """Use a library for every kind of product of a type, and return the type."""
    dtype, library = choice
    use_libraries(dtype, dict.fromkeys(KINDS, library))
    return dtype


def make_operands(rows, inner, columns, dtype, *, transposed):
    shapes = ((inner, rows), (columns, inner)) if transposed else ((rows, inner), (inner, columns))
    left, right = (torch.randn(*shape).to(dtype) for shape in shapes)
    return (left.t(), right.t()) if transposed else (left, right)


def multiply_exactly(left, right):
    """Return the product in fp64, and the sum of the absolute values of its terms."""
    left, right = left.double(), right.double()
    return left @ right, left.abs() @ right.abs()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
def test_product_and_bias(rows, inner, columns, choice, transposed):
    dtype = take(choice)
    left, right = make_operands(rows, inner, columns, dtype, transposed=transposed)
    bias = torch.randn(columns).to(dtype)
    wanted, numbers = multiply_exactly(left, right)
    for actual, expected in (
        (multiply(left, right), wanted),
        (multiply(left, right, bias), wanted + bias),
    ):
        assert actual.dtype is dtype
        assert_near(actual, expected, inner + 2, size=numbers + bias.abs())


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [(5, 7, 3), (130, 160, 220)])
@pytest.mark.parametrize("heads", [1, 3])
def test_products_of_several(heads, size, choice, transposed):
    """Small products are computed at once, large ones in fp32 one by one. Wide products round only
    their sums, and restore torch's setting of precision."""
    dtype = take(choice)
    pairs = [make_operands(*size, dtype, transposed=transposed) for _ in range(heads)]
    left, right = (torch.stack([pair[side] for pair in pairs]) for side in (0, 1))
    expected, numbers = multiply_exactly(left, right)
    allowed = torch.backends.mkldnn.matmul.fp32_precision
    for make, kind in (
        (multiply_batched, dtype),
        (multiply_batched_wide, torch.promote_types(dtype, torch.float32)),
    ):
        actual = make(left, right)
        assert actual.dtype is kind
        assert_near(actual, expected, size[1], size=numbers)
    assert torch.backends.mkldnn.matmul.fp32_precision == allowed


# Added row by row and as a whole, written in pieces of a few.
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
@pytest.mark.parametrize(
    ("add", "piece"),
    [
        *((True, 1), (False, 700), (True, 1 << 20)),
        *(slow(False, 1), slow(True, 700), slow(False, 1 << 20)),
    ],
)
def test_written_or_added_in_pieces(rows, inner, columns, choice, add, piece, monkeypatch):
    dtype = take(choice)
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    left, right = make_operands(rows, inner, columns, dtype, transposed=True)
    old = torch.randn(rows, columns) if add else torch.full((rows, columns), torch.nan)
    product, numbers = multiply_exactly(left, right)
    for kind in {dtype, torch.promote_types(dtype, torch.float32)}:
        expected = product + (old.to(kind).double() if add else 0.0)
        # A product may be rounded to the type of its operands before it is added.
        first = compute_roundoff(dtype) * product.abs()
        total = numbers + (old.double().abs() if add else 0.0)
        allowed = compute_allowance(inner + 2, total, kind, result=expected.abs()) + first
        out = old.to(kind)
        write_weight_gradient(out, left.t(), right, add=add)
        assert_within(out, expected, allowed, f"{inner} products of {dtype}, a sum of {kind}")
        if not add:
            out = old.to(kind)
            multiply_into(out, left, right)
            assert_within(out, expected, allowed, f"{inner} products of {dtype} in {kind}")


def test_each_kind_of_product_has_a_library_of_its_own(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_get_library", lambda dtype, kind: asked.append(kind) or "torch")
    many, few = torch.ones(module.MAX_EXPERT_ROWS, 2), torch.ones(module.MAX_EXPERT_ROWS - 1, 2)
    weight, grad = torch.ones(2, 3), torch.zeros(2, 3)
    multiply(many, weight)
    multiply(few, weight)
    multiply_batched(many[None], weight[None])
    multiply_into(torch.empty(len(many), 3), many, weight)
    write_weight_gradient(grad, many, torch.ones(len(many), 3), add=False)
    write_weight_gradient(grad, many, torch.ones(len(many), 3), add=True)
    assert asked == ["dense", "experts", "batched", "into", "gradient", "gradient"]
    assert set(asked) == set(KINDS) and (grad == 2 * len(many)).all()


def test_only_onednn_wants_numbers_of_rows_that_repeat():
    """It prepares a routine for each; MKL, and torch in fp64, do not."""
    for dtype, library in CHOICES:
        take((dtype, library))
        narrow = dtype is torch.bfloat16 and library == "torch"
        expected = 8 if "onednn" in library or narrow else 1
        assert get_row_multiple(torch.ones(3, 2, dtype=dtype)) == expected, (dtype, library)


def test_gradients_were_once_multiplied_as_what_is_written():
    """A run that a checkpoint continues from before they were two kinds keeps its libraries."""
    other = list_libraries(torch.float32)[-1]
    use_libraries(torch.float32, {"dense": "torch", "into": other})
    assert get_libraries_in_use(torch.float32)["gradient"] == other
    use_libraries(torch.float32, {"into": other, "gradient": "torch"})
    assert get_libraries_in_use(torch.float32)["gradient"] == "torch"


def test_fp32_on_a_cpu_keeps_fp32_precision():
    """No lower precision is used: tf32 would give errors of about 0.03."""
    for library in list_libraries(torch.float32):
        take((torch.float32, library))
        left, right = make_operands(64, 4096, 64, torch.float32, transposed=False)
        expected, _ = multiply_exactly(left, right)
        assert_near(multiply(left, right), expected, 4096)  # about 0.008


def test_onednn_has_a_fast_routine_for_every_piece(capfd, monkeypatch):
    """oneDNN logs the routine of each product; its `ref` routine is a thousand times slower."""
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    if "onednn" in list_libraries(torch.float32):
        take((torch.float32, "onednn"))
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        for rows, columns in ((16, 200), (200, 16)):
            left, right = make_operands(rows, 64, columns, torch.float32, transposed=False)
            for stored in (left, left.t().contiguous().t()):
                multiply_into(torch.empty(rows, columns), stored, right)
                write_weight_gradient(torch.zeros(rows, columns), stored.t(), right, add=True)
    lines = [line for line in capfd.readouterr().out.splitlines() if ",exec," in line]
    products = [line for line in lines if ",matmul," in line or ",inner_product," in line]
    assert len(products) > 16 or not module._ONEDNN
    assert not [line for line in products if ",ref" in line]
