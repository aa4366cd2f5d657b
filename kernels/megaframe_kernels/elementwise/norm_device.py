"""Device code of LayerNorm and RMSNorm. `norm.py` says what it computes and how the work is
divided.

A row of up to 8192 elements fits in registers whole. In the backward pass a wider row does not,
because the sum of the gain's gradient must also stay there. Such a row is read in two halves, and
read a second time from the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward(
    x: tl.tensor,
    residual: tl.tensor,
    gain: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """t = x + residual; y = (t - mean) rsqrt(mean((t - mean)^2) + eps) gain + bias.

    Args:
        x: [rows, width].
        residual: [rows, width], or None for t = x.
        gain: [width].
        bias: [width], or None.
        y: Receives the result.
        total: Receives t, if there is a residual.
        means: Receives the mean of each row.
        scales: Receives the factor rsqrt(...) of each row.
        rows: Number of rows.
        width: Number of columns.
        x_stride: Elements from a row of x to the next.
        residual_stride: Elements from a row of the residual to the next.
        eps: Added to the mean square.
        CENTER: Subtract the mean; it is 0 otherwise.
        ROWS: Rows of a program.
        WIDTH: Columns of a program, a power of two.
    """
    # 64-bit: rows times width may exceed 32 bits.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    factor = tl.load(gain + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        at = residual + row[:, None] * residual_stride + column[None, :]
        added = value.to(tl.float32) + tl.load(at, mask=inside, other=0.0).to(tl.float32)
        # Added in fp32 and rounded. Statistics are those of the rounded sum, because that is what
        # the backward pass reads.
        value = added.to(total.dtype.element_ty)
        tl.store(total + row[:, None] * width + column[None, :], value, mask=inside)
    value = value.to(tl.float32)
    if CENTER:
        # Columns of padding are 0 and do not change the sum.
        mean = tl.sum(value, 1) / width
        tl.store(means + row, mean, mask=row < rows)
        # Padding would become -mean and count in the variance. The mean is subtracted before
        # squares are taken, so they do not cancel.
        value = tl.where(inside, value - mean[:, None], 0.0)
    # In fp32, and stored, so that the backward pass need not compute it again.
    scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
    tl.store(scales + row, scale, mask=row < rows)
    result = value * scale[:, None] * factor
    if bias is not None:
        result += shift
    tl.store(y + row[:, None] * width + column[None, :], result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward(
    d_y: tl.tensor,
    d_total: tl.tensor,
    total: tl.tensor,
    gain: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    d_x: tl.tensor,
    d_gain: tl.tensor,
    d_bias: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    d_y_stride: tl.tensor,
    d_total_stride: tl.tensor,
    total_stride: tl.tensor,
    CENTER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """With n = (t - mean) scale and g = d_y gain: d_t = scale (g - n mean(g n) [- mean(g)]).

    Args:
        d_y: Gradient of y, [rows, width].
        d_total: Gradient of t apart from that through y, [rows, width], or None.
        total: t, [rows, width].
        gain: [width].
        means: Mean of each row; read only with CENTER.
        scales: Factor of each row.
        d_x: Receives the gradient of t, [rows, width].
        d_gain: Receives the sum over the rows of each program, fp32 [num_programs, width].
        d_bias: Likewise, or None.
        rows: Number of rows.
        width: Number of columns.
        d_y_stride: Elements from a row of d_y to the next.
        d_total_stride: Elements from a row of d_total to the next.
        total_stride: Elements from a row of t to the next.
        CENTER: The mean was subtracted.
        ROWS: Rows that are handled at a time.
        WIDTH: Columns of a program, a power of two.
    """
    column = tl.arange(0, WIDTH)
    within = column[None, :] < width
    factor = tl.load(gain + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    # fp32, in registers for all rows of this program, which are those at a fixed stride.
    gain_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    if d_bias is not None:
        bias_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    # Prefetch the next rows if there are registers for it.
    STAGES: tl.constexpr = 2 if d_bias is None else 1
    blocks = tl.cdiv(rows, ROWS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(block, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & within
        at = row[:, None] * total_stride + column[None, :]
        normed = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * d_y_stride + column[None, :]
        inner = tl.load(d_y + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        if CENTER:
            normed -= tl.load(means + row, mask=row < rows, other=0.0)[:, None]
            # As in the forward pass, padding must not become -mean.
            normed = tl.where(inside, normed, 0.0)
        normed *= scale
        gain_sum += inner * normed
        if d_bias is not None:
            bias_sum += inner
        inner *= factor
        # The normalised row has a fixed length (and mean), so its gradient loses its part along it.
        result = inner - normed * (tl.sum(inner * normed, 1) / width)[:, None]
        if CENTER:
            result -= (tl.sum(inner, 1) / width)[:, None]
        result *= scale
        if d_total is not None:
            at = row[:, None] * d_total_stride + column[None, :]
            # The sum also goes on as the residual; its own gradient is added here, in fp32.
            result += tl.load(d_total + at, mask=inside, other=0.0).to(tl.float32)
        at = row[:, None] * width + column[None, :]
        tl.store(d_x + at, result.to(d_x.dtype.element_ty), mask=inside)
    # One row of partial sums per program instead of atomics, so the order of sums is fixed.
    row_start = tl.program_id(0) * width + column
    tl.store(d_gain + row_start, tl.sum(gain_sum, 0), mask=column < width)
    if d_bias is not None:
        tl.store(d_bias + row_start, tl.sum(bias_sum, 0), mask=column < width)


@triton.jit
def _read_half(
    d_y: tl.tensor,
    total: tl.tensor,
    gain: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return for half a row: its columns, d_y, the normalised row, and the gradient of the
    normalised row."""
    column = first + tl.arange(0, HALF)
    inside = column < width
    # Unlike (t - mean) scale, this is one instruction per element, and fp32 rows fit in registers.
    normed = tl.load(total + column, mask=inside, other=0.0).to(tl.float32) * scale - mean * scale
    normed = tl.where(inside, normed, 0.0)
    d_value = tl.load(d_y + column, mask=inside, other=0.0).to(tl.float32)
    return column, d_value, normed, d_value * tl.load(gain + column, mask=inside, other=0.0)


@triton.jit
def _finish_half(
    d_total: tl.tensor,
    d_x: tl.tensor,
    column: tl.tensor,
    inner: tl.tensor,
    normed: tl.tensor,
    slope: tl.tensor,
    shift: tl.tensor,
    scale: tl.tensor,
    width: tl.tensor,
) -> None:
    # slope = mean(g n), shift = mean(g), which is 0 without centring.
    result = (inner - normed * slope - shift) * scale
    if d_total is not None:
        result += tl.load(d_total + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(d_x + column, result.to(d_x.dtype.element_ty), mask=column < width)


@triton.jit
def backward_wide(
    d_y: tl.tensor,
    d_total: tl.tensor,
    total: tl.tensor,
    gain: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    d_x: tl.tensor,
    d_gain: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    d_y_stride: tl.tensor,
    d_total_stride: tl.tensor,
    total_stride: tl.tensor,
    CENTER: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    """Like `backward` without a bias, one row at a time."""
    # Both halves of the gain's gradient stay in registers; of the row, only one half at a time.
    low_gain, high_gain = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for block in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(block, tl.int64)
        y_row, t_row, x_row = d_y + row * d_y_stride, total + row * total_stride, d_x + row * width
        added = d_total
        if d_total is not None:
            added = d_total + row * d_total_stride
        scale = tl.load(scales + row)
        mean = 0.0
        if CENTER:
            mean = tl.load(means + row)
        _, d_value, normed, inner = _read_half(y_row, t_row, gain, mean, scale, 0, width, HALF)
        low_gain += d_value * normed
        # Both means are over the whole row, so nothing can be stored before both halves are read.
        slope, shift = tl.sum(inner * normed, 0), tl.sum(inner, 0)
        _, d_value, normed, inner = _read_half(y_row, t_row, gain, mean, scale, HALF, width, HALF)
        high_gain += d_value * normed
        slope = (slope + tl.sum(inner * normed, 0)) / width
        shift = (shift + tl.sum(inner, 0)) / width
        if not CENTER:
            shift = 0.0
        # Without the barrier, the compiler would keep the halves in registers instead of reading
        # them again.
        tl.debug_barrier()
        column, _, normed, inner = _read_half(y_row, t_row, gain, mean, scale, 0, width, HALF)
        _finish_half(added, x_row, column, inner, normed, slope, shift, scale, width)
        column, _, normed, inner = _read_half(y_row, t_row, gain, mean, scale, HALF, width, HALF)
        _finish_half(added, x_row, column, inner, normed, slope, shift, scale, width)
    row_start = tl.program_id(0) * width
    low, high = tl.arange(0, HALF), HALF + tl.arange(0, HALF)
    tl.store(d_gain + row_start + low, low_gain, mask=low < width)
    tl.store(d_gain + row_start + high, high_gain, mask=high < width)
