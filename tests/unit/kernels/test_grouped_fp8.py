"""Experts in 8 bits: each is rounded as it would be alone, and products agree with fp64."""

import pytest
import torch
from kernel_exactness import DEVICE, DTYPES, assert_close, deterministic, make_random
from megaframe_kernels.fp8 import grouped_fp8, grouped_fp8_gradient, grouped_quantize, quantize
from megaframe_kernels.kernel import KernelError
from megaframe_kernels.registry import KERNELS
from slow_cases import mark_slow, slow
from torch._subclasses.fake_tensor import FakeTensorMode

COUNTS = [(3, 0, 200, 128, 0), (0, 0, 0), (1,), (0, 300, 0), (129, 127, 1, 31), tuple(range(12))]
FEW_COUNTS = [COUNTS[0], slow(COUNTS[1]), slow(COUNTS[4])]
SUMS = torch.float16 if DEVICE == "cuda" else None
"""Chips of generation 9 sum 8-bit products with 14 bits, so fp16's tolerance holds."""


def compute_ends(counts):
    return torch.tensor(counts).cumsum(0).int()


def view_bits(x):
    return x.view(torch.uint8)


def choose_kernel(name, *arguments):
    """Return Triton's implementation. Raises `KernelError` if it refuses the arguments."""
    implementation = KERNELS[name].implementations["triton"]
    reason = implementation.refuses(*arguments)
    if reason is not None:
        raise KernelError(reason)
    return implementation.run


def is_same(name, *arguments):
    """Return whether Triton and the reference agree bit by bit, with new memory filled by NaN."""
    with deterministic():
        actual = choose_kernel(name, *arguments)(*arguments)
    expected = KERNELS[name].reference(*arguments)
    assert actual[0].dtype == expected[0].dtype and actual[0].shape == expected[0].shape
    assert torch.equal(view_bits(actual[0]), view_bits(expected[0]))
    return torch.equal(actual[1], expected[1]) and actual[1].dtype == torch.float32


@pytest.mark.parametrize("counts", FEW_COUNTS)
@pytest.mark.parametrize("dtype", quantize.TYPES)
def test_every_expert_has_a_scale_of_its_own(counts, dtype):
    x = make_random(sum(counts) + 3, 40, scale=30.0)  # three rows belong to no expert
    assert is_same("quantise_experts", x, compute_ends(counts), dtype)


@pytest.mark.parametrize("counts", FEW_COUNTS)
@pytest.mark.parametrize("dtype", quantize.TYPES)
@pytest.mark.parametrize("sharing", grouped_quantize.SHARING)
def test_columns_are_quantized_as_each_expert_alone(counts, dtype, sharing):
    x = make_random(sum(counts), 75, scale=30.0)
    assert is_same("quantise_columns", x, compute_ends(counts), dtype, sharing)


@pytest.mark.parametrize("dtype", mark_slow(DTYPES, except_for=[torch.bfloat16]))
@pytest.mark.parametrize("sharing", grouped_quantize.SHARING)
def test_columns_of_strided_low_precision_with_zeros_and_rows_of_nobody(dtype, sharing):
    x = make_random(300, 150, dtype=dtype)[::2, 20:90]
    x[3:9] = 0.0
    x[:, 5] = 0.0
    assert is_same("quantise_columns", x, compute_ends((20, 0, 110)), quantize.TYPES[0], sharing)
    assert is_same("quantise_experts", x, compute_ends((20, 0, 110)), quantize.TYPES[0])
    turned = x.t()  # its rows are not contiguous
    assert is_same(
        "quantise_columns", turned, compute_ends((20, 0, 50)), quantize.TYPES[0], sharing
    )


@pytest.mark.parametrize("sharing", grouped_quantize.SHARING)
def test_rounding_is_that_of_each_expert_alone(sharing):
    """In the transposed result, each expert's rows start at a multiple of 128."""
    x, counts = make_random(331, 48), (3, 0, 200, 128)
    block = {"expert": None, "column": (1, 0), "block": (1, 128)}[sharing]
    actual, scales = grouped_quantize.run_columns(x, compute_ends(counts), sharing=sharing)
    start = spaced = 0
    for expert, count in enumerate(counts):
        if count:
            expected, by = quantize.run_reference(x[start : start + count].t(), block=block)
            rows = slice(expert, expert + 1)
            if sharing == "block":
                rows = slice(spaced // 128, spaced // 128 + by.shape[1])
            assert torch.equal(view_bits(actual[:, spaced : spaced + count]), view_bits(expected))
            assert (scales[rows] == by.t()).all()
        start, spaced = start + count, spaced + -(-count // 128) * 128


@pytest.mark.parametrize("sharing", grouped_quantize.SHARING)
def test_what_is_not_finite_shows_in_the_products_of_its_expert_alone(sharing):
    counts = (40, 30, 50)
    ends, x, dy = compute_ends(counts), make_random(120, 16), make_random(120, 32, seed=1)
    x[45, 3] = float("nan")
    grads = torch.zeros(3, 32, 16)
    left, right = (grouped_quantize.run_columns(t, ends, sharing=sharing) for t in (dy, x))
    grouped_fp8_gradient.run_triton(grads, left[0], right[0], left[1], right[1], ends, False)
    assert grads[1, :, 3].isnan().all() and grads[[0, 2]].isfinite().all()
    weights, by = make_random(3, 8, 16, seed=2), (1, 0)
    q, scales = quantize.run_triton(x, block=by)
    matrices, matrix_scales = quantize.run_triton(weights.view(24, 16), block=by)
    operands = q, matrices.view(3, 8, 16), scales, matrix_scales.view(3, 8, 1), ends
    y = grouped_fp8.run_triton(*operands)
    assert y[45].isnan().all() and y[torch.arange(120) != 45].isfinite().all()


def make_operands(counts, outputs, inputs, blocks, left=torch.float8_e4m3fn, scale=1.0):
    """Return rows and matrices in 8 bits, with a scale per row or per block."""
    x = make_random(sum(counts), inputs, scale=scale)
    weights = make_random(len(counts) * outputs, inputs, seed=1)
    a, a_scales = quantize.run_reference(x, left, (1, 128) if blocks else (1, 0))
    if not blocks:
        b, b_scales = quantize.run_reference(weights, block=(1, 0))
    else:
        pairs = [quantize.run_reference(w, block=(128, 128)) for w in weights.split(outputs)]
        b = torch.cat([q.view(torch.uint8) for q, _ in pairs]).view(torch.float8_e4m3fn)
        b_scales = torch.cat([s for _, s in pairs])
    experts = len(counts)
    shaped = b.view(experts, outputs, inputs), b_scales.view(experts, -1, b_scales.shape[1])
    return a, shaped[0], a_scales, shaped[1], compute_ends(counts)


def test_a_result_may_be_rounded_to_its_own_type_whatever_sums_are_kept_in():
    exact = torch.tensor([[1 + 2**-8 - 2**-14]], dtype=torch.float64)
    rounded = (exact + 2**-13).bfloat16()  # what such a sum loses turns it to the other neighbour
    assert_close(grouped_fp8.KERNEL, rounded, exact, 1, "rounding", precision=torch.float16)


@pytest.mark.parametrize(
    ("dtype", "blocks"),
    [
        *((torch.bfloat16, False), (torch.bfloat16, True)),
        *(slow(torch.float32, False), slow(torch.float16, True)),
    ],
)
@pytest.mark.parametrize(
    ("counts", "outputs", "inputs"),
    [
        ((3, 0, 200, 128, 0), 144, 272),
        ((0, 0), 16, 16),
        ((1,), 16, 128),
        ((129, 0, 127, 31), 128, 400),
    ],
)
def test_grouped_product_in_8_bits_is_that_of_fp64(dtype, blocks, counts, outputs, inputs):
    operands = make_operands(counts, outputs, inputs, blocks)
    actual = choose_kernel("grouped_scaled_product", *operands, dtype)(*operands, dtype)
    expected = grouped_fp8.run_reference(*operands, torch.float64)
    # A sum may be much smaller than its terms, so errors are compared with at least 1.
    assert_close(grouped_fp8.KERNEL, actual, expected, inputs, "product", 1.0, SUMS)
    assert actual.dtype == dtype


def test_rows_of_matrices_may_lie_apart():
    a, b, *others = make_operands((3, 0, 40), 48, 96, False)
    apart = torch.zeros(3, 50, 160, dtype=torch.uint8).view(b.dtype)
    view_bits(apart)[:, :48, 32:128] = view_bits(b)
    actual = grouped_fp8.run_triton(a, apart[:, :48, 32:128], *others)
    assert torch.equal(actual, grouped_fp8.run_triton(a, b, *others)) and actual.any()
    turned = view_bits(b).mT.contiguous().view(b.dtype).mT  # the summed dim is not contiguous
    assert torch.equal(actual, grouped_fp8.run_triton(a, turned, *others))


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_products_of_two_types_and_of_any_size(scale):
    operands = make_operands((40, 0, 30), 48, 96, False, torch.float8_e5m2, scale)
    actual = grouped_fp8.run_triton(*operands, torch.float32)
    expected = grouped_fp8.run_reference(*operands, torch.float64)
    assert_close(grouped_fp8.KERNEL, actual, expected, 96, "product", scale, SUMS)


def test_all_numbers_of_the_types_are_multiplied_exactly():
    for kind in quantize.TYPES:
        numbers = torch.arange(256, dtype=torch.uint8).view(kind)
        numbers = numbers[numbers.float().isfinite()]
        a = torch.zeros(len(numbers), 16, dtype=torch.float32).to(kind)
        view_bits(a)[:, 3] = view_bits(numbers)
        b = torch.eye(16).to(torch.float8_e4m3fn)[None]
        scales = torch.ones(len(numbers), 1), torch.ones(1, 16, 1)
        actual = grouped_fp8.run_triton(a, b, *scales, compute_ends((len(numbers),)), torch.float32)
        assert torch.equal(actual[:, 3], numbers.float()) and (actual[:, :3] == 0).all()


def test_places_beyond_the_last_expert_are_zero():
    a, b, a_scales, b_scales, _ = make_operands((100, 60), 32, 48, False)
    a_scales[150:] = float("nan")
    for ends in ([3, 7], [33, 33], [0, 0], [0, 130]):
        operands = a, b, a_scales, b_scales, torch.tensor(ends, dtype=torch.int32)
        with deterministic():
            actual = grouped_fp8.run_triton(*operands)
        assert (actual[ends[-1] :] == 0).all() and actual.isfinite().all()
        if ends[-1]:
            assert (actual[: ends[-1]] != 0).any()


@pytest.mark.parametrize("sharing", grouped_quantize.SHARING)
@pytest.mark.parametrize("counts", [*map(slow, COUNTS[:3]), COUNTS[4]])
def test_grouped_gradient_in_8_bits_is_that_of_fp64(sharing, counts):
    ends = compute_ends(counts)
    dy, x = make_random(sum(counts), 144), make_random(sum(counts), 75, seed=1)
    wide = torch.float8_e5m2 if sharing == "expert" else torch.float8_e4m3fn
    left, right = (
        grouped_quantize.run_columns(t, ends, kind, sharing)
        for t, kind in ((dy, wide), (x, torch.float8_e4m3fn))
    )
    for dtype, add in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True)):
        operands = left[0], right[0], left[1], right[1], ends, add
        initial = make_random(len(counts), 144, 75, seed=2, dtype=dtype)
        expected = grouped_fp8_gradient.run_reference(initial.double(), *operands)
        run = choose_kernel("grouped_scaled_gradient", initial, *operands)
        actual = run(initial, *operands)
        assert actual is initial
        length, scale = max(counts), max(counts) ** 0.5
        assert_close(grouped_fp8_gradient.KERNEL, actual, expected, length, "gradient", scale, SUMS)


@pytest.mark.parametrize("sharing", mark_slow(grouped_quantize.SHARING, except_for=["block"]))
def test_all_is_bitwise_repeatable(sharing):
    def products():
        ends = compute_ends((130, 0, 70))
        left, right = (
            grouped_quantize.run_columns(make_random(200, n), ends, sharing=sharing)
            for n in (32, 48)
        )
        grads = torch.zeros(3, 32, 48)
        grouped_fp8_gradient.run_triton(grads, left[0], right[0], left[1], right[1], ends, True)
        return grads, grouped_fp8.run_triton(*make_operands((130, 0, 70), 32, 48, False))

    for first, other in zip(products(), products(), strict=True):
        assert torch.equal(first, other)


def test_what_cannot_be_rounded_is_refused():
    x, ends = make_random(4, 16), compute_ends((4,))
    refuses = grouped_quantize.QUANTISE_COLUMNS.implementations["triton"].refuses
    assert refuses(x, ends) is None
    assert "int64" in refuses(x, ends.long())
    assert "float64" in refuses(x.double(), ends)
    assert "float16" in refuses(x, ends, torch.float16)
    assert "'row' is none of" in refuses(x, ends, torch.float8_e4m3fn, "row")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"major": 10}, "generation 9"),
        ({"major": 8}, "generation 9"),
        ({"a": (100, 40)}, "16 divides"),
        ({"a_scales": (100, 2)}, "one scale for a row"),
        ({"b_scales": (4, 1, 1)}, "one scale for a row"),
        ({"kind": torch.float8_e5m2}, "takes e4m3"),
        ({"out": torch.float32}, "gives bf16"),
        ({"ends": torch.int64}, "not int32"),
        ({"apart": 64}, None),
        ({"apart": 56}, "whole 16 bytes"),
    ],
)
def test_what_torch_is_not_given(change, why, monkeypatch):
    for module in (quantize, grouped_fp8):
        monkeypatch.setattr(module, "read_capability", lambda index: (change.get("major", 9), 0))
    with FakeTensorMode(), torch.device("cuda"):
        a = torch.empty(change.get("a", (100, 48)), dtype=change.get("kind", torch.float8_e4m3fn))
        apart = change.get("apart", a.shape[1])
        b = torch.empty_strided(
            (4, 32, a.shape[1]), (32 * apart, apart, 1), dtype=quantize.TYPES[0]
        )
        scales = change.get("a_scales", (100, 1)), change.get("b_scales", (4, 32, 1))
        ends = torch.empty(4, dtype=change.get("ends", torch.int32))
        operands = a, b, *map(torch.empty, scales), ends, change.get("out", torch.bfloat16)
        implementation = grouped_fp8.KERNEL.implementations["torch"]
        reason = implementation.refuses(*operands)
        if why is None:  # torch checks the rest itself
            monkeypatch.setattr(grouped_fp8.grouped_product, "clear", lambda *_: None)
            assert reason is None and implementation.run(*operands).shape == (100, 32)
        else:
            assert why in reason
