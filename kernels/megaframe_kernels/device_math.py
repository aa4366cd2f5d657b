"""Device functions on tiles that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)
LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def multiply_add(
    a: tl.tensor, b: tl.tensor, add: tl.tensor, PRECISION: tl.constexpr = "tf32"
) -> tl.tensor:
    """Return add + a b in fp32.

    Args:
        a: [rows, depth].
        b: [depth, columns].
        add: [rows, columns], or None for 0.
        PRECISION: Of products of fp32 operands, in Triton's sense.
    """
    # The interpreter would multiply the bits of bf16 as integers. In fp32 the products are the same
    # numbers.
    if INTERPRETED and a.dtype == tl.bfloat16:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, add, input_precision=PRECISION)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return the hyperbolic tangent in fp32, exact to a few units in the last place."""
    # The exponent is never above 0, so nothing overflows.
    small = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - small) / (1.0 + small)
    square = x * x
    # The Taylor series up to x^7. Near 0 the quotient would cancel.
    near = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))
