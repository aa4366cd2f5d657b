"""Triton's interpreter, as the tests speed it up: it stays as strict."""

import pytest
import torch
import triton
import triton.language as tl
from megaframe_kernels.device import INTERPRETED, launch

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled on a GPU")
LAST = 2**31 - 1


@triton.jit
def _calculate(left, right, operation):
    if operation == 0:
        return left + right
    elif operation == 1:
        return left - right
    return left * right


@triton.jit
def _kernel(left, right, result, operation: tl.constexpr):
    places = tl.arange(0, 2)
    value = _calculate(tl.load(left + places), tl.load(right + places), operation)
    tl.store(result + places, value)


def calculate(left, right, operation, dtype=torch.int32):
    left, right = torch.tensor(left, dtype=dtype), torch.tensor(right, dtype=dtype)
    result = torch.zeros_like(left)
    launch(_kernel, (1,), left, right, result, operation=operation)
    return result.tolist()


@pytest.mark.parametrize(
    ("left", "right", "operation", "beyond"),
    [
        ([1, LAST - 1], [2, 1], 0, [2, 2]),
        ([1, 1 - LAST], [2, 2], 1, [2, 3]),
        ([-3, 2**16], [7, 2**15 - 1], 2, [7, 2**15]),
    ],
    ids=["add", "sub", "mul"],
)
def test_integers_that_overflow_are_noticed(left, right, operation, beyond):
    function = (int.__add__, int.__sub__, int.__mul__)[operation]
    assert calculate(left, right, operation) == [*map(function, left, right)]
    with pytest.raises(Exception, match="int32 overflow"):
        calculate(left, beyond, operation)
    assert calculate(left, beyond, operation, torch.int64) == [*map(function, left, beyond)]


@triton.jit
def _convert(source, result, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + places, tl.load(source + places).to(result.dtype.element_ty))


def test_numbers_are_rounded_as_by_torch():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator).int()
    bits[:: 1 << 8] &= -(1 << 16)  # exact, and
    bits[1 :: 1 << 8] = bits[:: 1 << 8] | 1 << 15  # in the middle between two
    numbers = bits.view(torch.float32)
    rounded, back = torch.empty(1 << 16, dtype=torch.bfloat16), torch.empty(1 << 16)
    launch(_convert, (4,), numbers, rounded, BLOCK=1 << 14)
    launch(_convert, (4,), rounded, back, BLOCK=1 << 14)
    torch.testing.assert_close(rounded, numbers.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, rounded.float(), rtol=0, atol=0, equal_nan=True)


def test_nothing_of_the_language_stays_replaced_after_a_launch_or_an_error():
    load = tl.load
    calculate([1, 2], [3, 4], 0)
    assert tl.load is load
    with pytest.raises(Exception, match="overflow"):
        calculate([1, LAST], [1, 1], 0)
    assert tl.load is load
