"""Device code of attention's backward pass, in two passes over the tiles.

`forward_device.py` has the shape legend and what is shared with the forward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megaframe_kernels.attention.forward_device import (
    find_visits,
    load_rows,
    scale_scores,
    share_programs,
)
from megaframe_kernels.device_math import LOG2_E, multiply_add

PADDING = tl.constexpr(128)
"""The backward pass pads what it stores for each query to a multiple of this many queries. Every
block size divides it, so programs need no mask to read it."""


@triton.jit
def _compute_slope(d_s: tl.tensor, s: tl.tensor, cap: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Multiply d_s, the gradient of the scores s, by the slope of the softcap, if there is one."""
    if CAP:
        # The slope of cap tanh(x / cap) is 1 - tanh^2, and s = cap tanh log2(e).
        bent = s / (cap * LOG2_E)
        return d_s * (1.0 - bent * bent)
    return d_s


@triton.jit
def prepare_backward(
    d_out: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    shift: tl.tensor,
    delta: tl.tensor,
    queries: tl.tensor,
    heads: tl.tensor,
    width: tl.tensor,
    d_batch: tl.tensor,
    d_stride: tl.tensor,
    d_head: tl.tensor,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Store what the other kernels need for each query, including padding.

    These are the two numbers of p = exp2(s - shift) and d_s = p (d_p - delta).

    Args:
        d_out: Gradient of the output, [B, Q, N, D].
        out: The output, [B, Q, N, D], contiguous.
        lse: Log-sum-exp, [B, N, Q].
        shift: Receives the log-sum-exp in units of log 2; infinite for a query that sees nothing,
            so that p is 0.
        delta: Receives sum(d_out out).
        queries: Number of queries, Q.
        heads: Number of query heads, N.
        width: Of a head, D.
        d_batch: Elements of d_out from a sample to the next.
        d_stride: Elements of d_out from a query to the next.
        d_head: Elements of d_out from a head to the next.
        M: Queries of a program.
        WIDTH: Columns of a program, a power of two.
    """
    # Programs cover the padding too, so that other kernels can read it without a mask.
    padded = tl.cdiv(queries, PADDING) * PADDING
    blocks = padded // M
    query = (tl.program_id(0) % blocks) * M + tl.arange(0, M)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    head, batch = pair % heads, pair // heads
    column = tl.arange(0, WIDTH)
    real = query < queries
    inside = real[:, None] & (column[None, :] < width)
    at = batch * d_batch + query[:, None].to(tl.int64) * d_stride + head * d_head + column[None, :]
    d_values = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    at = ((batch * queries + query)[:, None] * heads + head) * width + column[None, :]
    # sum over keys of p d_p equals d_out . out, because out = sum of p v (Dao et al. 2022). In
    # fp32.
    mean = tl.sum(d_values * tl.load(out + at, mask=inside, other=0.0).to(tl.float32), 1)
    tl.store(delta + pair * padded + query, mean)
    total = tl.load(lse + pair * queries + query, mask=real, other=-float("inf"))
    # Padding was loaded as -inf, so it gets an infinite shift like queries that see nothing.
    total = tl.where(total == -float("inf"), float("inf"), total * LOG2_E)
    tl.store(shift + pair * padded + query, total)


@triton.jit
def _compute_query_gradient(
    d_q: tl.tensor,
    q: tl.tensor,
    d_out: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    sums: tl.tensor,
    less: tl.tensor,
    block: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    keys: tl.tensor,
    width: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return d_q + d_s k for a block of keys, with d_s = p (d_p - delta), unscaled."""
    key = block * N + tl.arange(0, N)
    k_ND = load_rows(k, block, k_stride, keys, width, MASK, N, WIDTH, EVEN)
    v_ND = load_rows(v, block, v_stride, keys, width, MASK, N, WIDTH, EVEN)
    # Scores are computed again, because storing them would take memory of Q x K.
    s = scale_scores(multiply_add(q, tl.trans(k_ND), None, PRECISION), scale, cap, CAP)
    # The log-sum-exp is known, so p is normalised at once, without a running maximum.
    p = tl.exp2(s - sums[:, None])
    if MASK:
        visible = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        # Masked after exp2: the power of an unseen score may be infinite, but is not used.
        p = tl.where(visible, p, 0.0)
    d_p = multiply_add(d_out, tl.trans(v_ND), None, PRECISION)
    d_s = _compute_slope(p * (d_p - less[:, None]), s, cap, CAP)
    # Rounded for the matrix units; the sum over keys stays in fp32.
    return multiply_add(d_s.to(k_ND.dtype), k_ND, d_q, PRECISION)


@triton.jit
def backward_queries(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    d_out: tl.tensor,
    shift: tl.tensor,
    delta: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    d_q: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    together: tl.tensor,
    heads: tl.tensor,
    per_group: tl.tensor,
    width: tl.tensor,
    q_batch: tl.tensor,
    q_stride: tl.tensor,
    q_head: tl.tensor,
    k_batch: tl.tensor,
    k_stride: tl.tensor,
    k_head: tl.tensor,
    v_batch: tl.tensor,
    v_stride: tl.tensor,
    v_head: tl.tensor,
    d_batch: tl.tensor,
    d_stride: tl.tensor,
    d_head: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """d_q = scale sum over keys of d_s k, for one block of queries of a head."""
    blocks = tl.cdiv(queries, M)
    turn, head, sample = share_programs(blocks, together, heads)
    # With a causal mask the last queries see the most keys, so they start first.
    own_block = blocks - 1 - turn
    query = own_block * M + tl.arange(0, M)
    group = (head // per_group).to(tl.int64)
    head, batch = head.to(tl.int64), sample.to(tl.int64)
    inside = query < queries
    start = tl.load(starts + batch * queries + query, mask=inside, other=0)
    stop = tl.load(stops + batch * queries + query, mask=inside, other=0)
    low, high, whole_low, whole_high = find_visits(start, stop, inside, keys, N)
    q_rows, d_rows = q + batch * q_batch + head * q_head, d_out + batch * d_batch + head * d_head
    q_MD = load_rows(q_rows, own_block, q_stride, queries, width, True, M, WIDTH, EVEN)
    d_out_MD = load_rows(d_rows, own_block, d_stride, queries, width, True, M, WIDTH, EVEN)
    # No mask: the padding has an infinite shift, which makes p 0.
    at = (batch * heads + head) * (tl.cdiv(queries, PADDING) * PADDING) + query
    sums, less = tl.load(shift + at), tl.load(delta + at)
    k_rows, v_rows = k + batch * k_batch + group * k_head, v + batch * v_batch + group * v_head
    result = tl.zeros([M, WIDTH], tl.float32)
    left = whole_low - low
    # Masked blocks on both sides first, then the unmasked ones without comparisons.
    for visit in range(0, left + high - whole_high):
        block = tl.where(visit < left, low + visit, whole_high + visit - left)
        result = _compute_query_gradient(
            result, q_MD, d_out_MD, k_rows, v_rows, sums, less, block, start, stop, keys, width,
            k_stride, v_stride, scale, cap, CAP, True, N, WIDTH, EVEN, PRECISION,
        )  # fmt: skip
    for block in range(whole_low, whole_high):
        result = _compute_query_gradient(
            result, q_MD, d_out_MD, k_rows, v_rows, sums, less, block, start, stop, keys, width,
            k_stride, v_stride, scale, cap, CAP, False, N, WIDTH, EVEN, PRECISION,
        )  # fmt: skip
    column = tl.arange(0, WIDTH)
    at = d_q + ((batch * queries + query)[:, None] * heads + head) * width + column[None, :]
    written = inside[:, None] & (column[None, :] < width)
    # The scale is applied once, to the fp32 sum. Each row is written by one program only.
    tl.store(at, (result * scale).to(d_q.dtype.element_ty), mask=written)


@triton.jit
def _compute_key_gradients(
    d_k: tl.tensor,
    d_v: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q: tl.tensor,
    d_out: tl.tensor,
    shift: tl.tensor,
    delta: tl.tensor,
    row_offset: tl.tensor,
    block: tl.tensor,
    edge: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    queries: tl.tensor,
    width: tl.tensor,
    q_stride: tl.tensor,
    d_stride: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAP: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the gradients d_k and d_v of keys and values, plus what a block of queries contributes
    to them.

    Tiles just fit into registers, so as little as possible may be live across a
    product. edge: the tile is not inside all spans and needs the mask.
    """
    query = block * M + tl.arange(0, M)
    # Queries beyond the last are read as 0, and their infinite shift makes their shares 0.
    q_MD = load_rows(q, block, q_stride, queries, width, True, M, WIDTH, EVEN)
    d_out_MD = load_rows(d_out, block, d_stride, queries, width, True, M, WIDTH, EVEN)
    # Transposed, [N, M], so that the products for keys and values need no transpose of computed
    # tiles.
    s = scale_scores(multiply_add(k, tl.trans(q_MD), None, PRECISION), scale, cap, CAP)
    # Numbers of a query are loaded where they are used, not kept across a product.
    sums = tl.load(shift + row_offset + query)
    p = tl.exp2(s - sums[None, :])
    # Only tiles at an edge take this branch. A second loop would need more registers.
    if edge:
        visible = (query[None, :] >= first[:, None]) & (query[None, :] < last[:, None])
        p = tl.where(visible, p, 0.0)
    d_v = multiply_add(p.to(d_out_MD.dtype), d_out_MD, d_v, PRECISION)
    # The softcap's slope is applied before d_p exists, so s need not live across its product.
    slope = _compute_slope(p, s, cap, CAP)
    d_p = multiply_add(v, tl.trans(d_out_MD), None, PRECISION)
    less = tl.load(delta + row_offset + query)
    d_s = (slope * (d_p - less[None, :])).to(q_MD.dtype)
    d_k = multiply_add(d_s, q_MD, d_k, PRECISION)
    return d_k, d_v


@triton.jit
def backward_keys(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    d_out: tl.tensor,
    shift: tl.tensor,
    delta: tl.tensor,
    firsts: tl.tensor,
    lasts: tl.tensor,
    d_k: tl.tensor,
    d_v: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    together: tl.tensor,
    heads: tl.tensor,
    per_group: tl.tensor,
    width: tl.tensor,
    q_batch: tl.tensor,
    q_stride: tl.tensor,
    q_head: tl.tensor,
    k_batch: tl.tensor,
    k_stride: tl.tensor,
    k_head: tl.tensor,
    v_batch: tl.tensor,
    v_stride: tl.tensor,
    v_head: tl.tensor,
    d_batch: tl.tensor,
    d_stride: tl.tensor,
    d_head: tl.tensor,
    scale: tl.tensor,
    cap: tl.tensor,
    CAP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Compute the gradients of a block of keys and values.

    One program handles all query heads of a group, so these sums have a fixed order and need no
    atomics.
    """
    blocks, groups = tl.cdiv(keys, N), heads // per_group
    # With a causal mask the first keys are seen by the most queries.
    own_block, group, sample = share_programs(blocks, together, groups)
    key = own_block * N + tl.arange(0, N)
    batch = sample.to(tl.int64)
    inside = key < keys
    first = tl.load(firsts + batch * keys + key, mask=inside, other=0)
    last = tl.load(lasts + batch * keys + key, mask=inside, other=0)
    low, high, whole_low, whole_high = find_visits(first, last, inside, queries, M)
    if (
        own_block * N + N > keys
    ):  # the block extends beyond the last key, so all tiles need the mask
        whole_high = whole_low
    # 64-bit, because offsets of samples and heads may exceed 32 bits.
    wide = group.to(tl.int64)
    k_rows, v_rows = k + batch * k_batch + wide * k_head, v + batch * v_batch + wide * v_head
    k_ND = load_rows(k_rows, own_block, k_stride, keys, width, True, N, WIDTH, EVEN)
    v_ND = load_rows(v_rows, own_block, v_stride, keys, width, True, N, WIDTH, EVEN)
    # fp32 sums over all queries of all heads of the group, rounded once.
    k_sum, v_sum = tl.zeros([N, WIDTH], tl.float32), tl.zeros([N, WIDTH], tl.float32)
    # The first head of the group; the loop below goes on to the others.
    head = wide * per_group
    q_rows = q + batch * q_batch + head * q_head
    d_rows = d_out + batch * d_batch + head * d_head
    padded = tl.cdiv(queries, PADDING) * PADDING
    row_offset = (batch * heads + head) * padded
    block = low
    for _ in range(0, per_group * (high - low)):  # a single loop also loads ahead across heads
        edge = (block < whole_low) | (block >= whole_high)
        k_sum, v_sum = _compute_key_gradients(
            k_sum, v_sum, k_ND, v_ND, q_rows, d_rows, shift, delta, row_offset,
            block, edge, first,
            last, queries, width, q_stride, d_stride, scale, cap, CAP, M, WIDTH, EVEN,
            PRECISION,
        )  # fmt: skip
        block += 1
        is_last = block == high
        block = tl.where(is_last, low, block)
        # Incremented from head to head. Multiplied anew for each head, the 64-bit address would
        # need more registers.
        q_rows += tl.where(is_last, q_head, 0)
        d_rows += tl.where(is_last, d_head, 0)
        row_offset += tl.where(is_last, padded, 0)
    column = tl.arange(0, WIDTH)
    at = ((batch * keys + key)[:, None] * groups + group) * width + column[None, :]
    written = inside[:, None] & (column[None, :] < width)
    # d_k = scale sum(d_s q). Values take no part in the scores, so d_v has no scale.
    tl.store(d_k + at, (k_sum * scale).to(d_k.dtype.element_ty), mask=written)
    tl.store(d_v + at, v_sum.to(d_v.dtype.element_ty), mask=written)
