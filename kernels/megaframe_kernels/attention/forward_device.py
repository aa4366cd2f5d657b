"""Device code of attention: the forward pass, and what it shares with the backward pass.

Both passes visit tiles in the same way. A program has a block of queries (or keys). From their
spans it knows which blocks of keys (or queries) any of them sees, and which of these all of them
see; only the others are masked. Scores are in units of log 2, because the hardware computes
exponentials of 2. Shape legend: M queries per block, N keys per block, D width of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megaframe_kernels.device_math import LOG2_E, LOG_2, multiply_add, tanh


@triton.jit
def share_programs(
    blocks: tl.tensor, together: tl.tensor, heads: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return a program's turn among the blocks of a head, its head and its sample.

    Programs start in groups of `together` pairs of a head and a sample, so few that what they read
    stays in the cache. Within a group, blocks of the same turn start together. With a causal mask
    the first turns take longest, so the last programs of all are short.

    Args:
        blocks: Blocks of a head.
        together: Pairs of a head and a sample in a group.
        heads: Heads of a sample.
    """
    pairs = tl.num_programs(0) // blocks
    first = tl.program_id(0) // (blocks * together) * together
    # The last group may have fewer pairs.
    abreast = tl.minimum(pairs - first, together)
    position = tl.program_id(0) % (blocks * together)
    pair = first + position % abreast
    # Neighbouring programs take the same turn of different pairs, so long programs start first for
    # all heads.
    return position // abreast, pair % heads, pair // heads


@triton.jit
def find_visits(
    start: tl.tensor,
    stop: tl.tensor,
    inside: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return which blocks the rows of a program visit: of keys, or of queries if the rows are keys.

    Args:
        start: Where the span of each row starts.
        stop: Where it ends.
        inside: Whether the row exists, and is not beyond the last one.
        length: What spans are in: number of keys, or of queries.
        BLOCK: Size of the blocks that are visited.

    Returns:
        Low, high, whole_low and whole_high. Blocks low .. high - 1 contain everything in the spans.
        Of these, blocks whole_low .. whole_high - 1 are inside every span.
    """
    # Queries beyond the last one must not count: they raise no maximum and lower no minimum.
    low = tl.min(tl.where(inside, start, length), 0) // BLOCK
    high = tl.maximum(tl.cdiv(tl.max(tl.where(inside, stop, 0), 0), BLOCK), low)
    # A block needs no mask if it begins at or after every span's start and ends at or before every
    # span's end.
    whole_low = tl.cdiv(tl.max(tl.where(inside, start, 0), 0), BLOCK)
    # Clamped, so that masked and unmasked blocks together are low .. high - 1, also if no block is
    # inside every span.
    whole_low = tl.minimum(tl.maximum(whole_low, low), high)
    whole_high = tl.min(tl.where(inside, stop, length), 0) // BLOCK
    whole_high = tl.maximum(tl.minimum(whole_high, high), whole_low)
    return low, high, whole_low, whole_high


@triton.jit
def load_rows(
    base: tl.tensor,
    block: tl.tensor,
    stride: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Load a block of rows [row, D] of a matrix, with 0 for what is outside the matrix.

    Args:
        base: Where the matrix starts.
        block: Number of the block.
        stride: Elements from a row to the next.
        length: Rows of the matrix.
        width: Columns of the matrix, D.
        MASK: Rows may be outside.
        ROWS: Rows of a block.
        WIDTH: Columns that are loaded, a power of two.
        EVEN: The matrix has WIDTH columns.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    # One 64-bit base per block, and 32-bit offsets within it that stay in registers: 64-bit
    # products for every row would fill the registers and spill.
    at = base + tl.cast(block, tl.int64) * ROWS * stride + (row[:, None] * stride + column[None, :])
    if MASK:
        inside = row[:, None] < length - block * ROWS
        # A head whose width is a power of two fills the tile, so columns need no mask.
        if EVEN:
            return tl.load(at, mask=inside, other=0.0)
        return tl.load(at, mask=inside & (column[None, :] < width), other=0.0)
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=column[None, :] < width, other=0.0)


@triton.jit
def scale_scores(
    product: tl.tensor, scale: tl.tensor, cap: tl.tensor, CAP: tl.constexpr
) -> tl.tensor:
    """Return scores in units of log 2.

    Args:
        product: The products of queries and keys.
        scale: Factor of the scores.
        cap: Bound of the scores; read only with CAP.
        CAP: Whether scores are bounded.
    """
    if CAP:
        # cap tanh(s / cap), with both factors folded into the scales before and after.
        return tanh(product * (scale / cap)) * (cap * LOG2_E)
    return product * (scale * LOG2_E)


@triton.jit
def _block_at(
    visit: tl.tensor,
    low: tl.tensor,
    left: tl.tensor,
    whole_low: tl.tensor,
    whole_high: tl.tensor,
    edges: tl.tensor,
) -> tl.tensor:
    """Return the block of a visit. The `edges` masked blocks come first: `left` of them are to the
    left of the unmasked blocks, the rest to the right."""
    edge = tl.where(visit < left, low + visit, whole_high + visit - left)
    return tl.where(visit < edges, edge, whole_low + visit - edges)


@triton.jit
def _attend(
    out: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    p: tl.tensor,
    decay: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    behind: tl.tensor,
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
    RAW: tl.constexpr,
    LATE: tl.constexpr,
    MASK: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add a block of keys to the running result (Dao et al. 2022).

    RAW: the scores have no softcap, and their positive scale is applied in the exponentials. LATE:
    the shares p of the previous visit, with their decay, are multiplied with its values between the
    scores of this visit and their exponentials, so that the matrix units work meanwhile (Shah et
    al. 2024).
    """
    # Shapes: q [M, D], s and p [M, N], out [M, D]; top, total and decay [M].
    key = block * N + tl.arange(0, N)
    k_ND = load_rows(k, block, k_stride, keys, width, MASK, N, WIDTH, EVEN)
    # Scores are fp32; 16-bit operands are multiplied exactly.
    s = multiply_add(q, tl.trans(k_ND), None, PRECISION)
    if LATE:
        # The block behind may be a masked one, so its rows are always checked. Its product does not
        # depend on this visit's exponentials and can run beside them.
        v_ND = load_rows(v, behind, v_stride, keys, width, True, N, WIDTH, EVEN)
        out = multiply_add(p, v_ND, out * decay[:, None], PRECISION)
    # With RAW, the maximum is taken over raw products, and scale and shift of a score are one
    # instruction instead of two.
    unit = scale * LOG2_E
    if not RAW:
        s, unit = scale_scores(s, scale, cap, CAP), 1.0
    if MASK:
        # exp2(-inf) is 0, so keys outside the span add nothing to the sums.
        visible = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        s = tl.where(visible, s, -float("inf"))
    # The running maximum is subtracted, so no power exceeds 1 (Milakov and Gimelshein 2018).
    highest = tl.maximum(top, tl.max(s, 1) * unit)
    shift = highest
    if MASK:  # for a query that has seen nothing yet
        # -inf - (-inf) would be NaN.
        shift = tl.where(highest == -float("inf"), 0.0, highest)
    shares = tl.exp2(s * unit - shift[:, None])
    # What was summed below the old maximum shrinks to the new one.
    less = tl.exp2(top - shift)
    # The sum takes the fp32 shares; only the product with the values rounds them.
    total = total * less + tl.sum(shares, 1)
    # `out` is still below the maximum before this visit; `less` is applied with these shares, in
    # the next one.
    if LATE:
        return out, highest, total, shares.to(p.dtype), less
    v_ND = load_rows(v, block, v_stride, keys, width, MASK, N, WIDTH, EVEN)
    out = multiply_add(shares.to(p.dtype), v_ND, out * less[:, None], PRECISION)
    return out, highest, total, p, decay


@triton.jit
def forward(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    sinks: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
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
    scale: tl.tensor,
    cap: tl.tensor,
    CAP: tl.constexpr,
    RAW: tl.constexpr,
    LATE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """out = softmax(scale q k) v and lse = log(sum(exp(scale q k))), for one block of queries of a
    head (Dao et al. 2022)."""
    blocks = tl.cdiv(queries, M)
    turn, head, sample = share_programs(blocks, together, heads)
    own_block = blocks - 1 - turn  # with a causal mask the last queries see the most keys
    query = own_block * M + tl.arange(0, M)
    # 64-bit from here, because offsets of samples and heads may exceed 32 bits.
    group = (head // per_group).to(tl.int64)
    head, batch = head.to(tl.int64), sample.to(tl.int64)
    inside = query < queries
    # A query beyond the last has an empty span; what it computes is not stored.
    start = tl.load(starts + batch * queries + query, mask=inside, other=0)
    stop = tl.load(stops + batch * queries + query, mask=inside, other=0)
    low, high, whole_low, whole_high = find_visits(start, stop, inside, keys, N)
    q_rows = q + batch * q_batch + head * q_head
    q_MD = load_rows(q_rows, own_block, q_stride, queries, width, True, M, WIDTH, EVEN)
    k_rows, v_rows = k + batch * k_batch + group * k_head, v + batch * v_batch + group * v_head
    # All running numbers are fp32, and are rounded once, when stored.
    total = tl.zeros([M], tl.float32)
    top = total - float("inf")
    if sinks is not None:
        # A sink is like a key seen first: it is the first maximum, and its exp2(0) = 1 starts the
        # sum. Its value is 0, so the result starts at 0.
        top = total + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    result = tl.zeros([M, WIDTH], tl.float32)
    # The first visit has no visit before it: shares of 0 add nothing.
    p, decay = tl.zeros([M, N], v.dtype.element_ty), tl.zeros([M], tl.float32)
    left = whole_low - low
    edges = left + high - whole_high
    # Masked blocks first, in a loop of their own, so the many unmasked blocks do no comparisons.
    for visit in range(0, edges):
        block = _block_at(visit, low, left, whole_low, whole_high, edges)
        behind = _block_at(tl.maximum(visit - 1, 0), low, left, whole_low, whole_high, edges)
        result, top, total, p, decay = _attend(
            result, top, total, p, decay, q_MD, k_rows, v_rows, behind, block, start, stop, keys,
            width, k_stride, v_stride, scale, cap, CAP, RAW, LATE, True, N, WIDTH, EVEN,
            PRECISION,
        )  # fmt: skip
    for visit in range(edges, high - low):
        block = _block_at(visit, low, left, whole_low, whole_high, edges)
        behind = _block_at(tl.maximum(visit - 1, 0), low, left, whole_low, whole_high, edges)
        result, top, total, p, decay = _attend(
            result, top, total, p, decay, q_MD, k_rows, v_rows, behind, block, start, stop, keys,
            width, k_stride, v_stride, scale, cap, CAP, RAW, LATE, False, N, WIDTH, EVEN,
            PRECISION,
        )  # fmt: skip
    if LATE:
        # The shares of the last visit have not met their values yet. Without any visit they are 0.
        behind = _block_at(tl.maximum(high - low - 1, 0), low, left, whole_low, whole_high, edges)
        v_ND = load_rows(v_rows, behind, v_stride, keys, width, True, N, WIDTH, EVEN)
        result = multiply_add(p, v_ND, result * decay[:, None], PRECISION)
    # A query that sees nothing gets 0 instead of 0 / 0, and a log-sum-exp of -inf.
    sees_keys = total > 0.0
    result = result / tl.where(sees_keys, total, 1.0)[:, None]
    column = tl.arange(0, WIDTH)
    # The output is contiguous [B, Q, N, D].
    at = out + ((batch * queries + query)[:, None] * heads + head) * width + column[None, :]
    written = inside[:, None] & (column[None, :] < width)
    tl.store(at, result.to(out.dtype.element_ty), mask=written)
    # Back from units of log 2 to natural logarithms.
    sums = tl.where(
        sees_keys, (top + tl.log2(tl.where(sees_keys, total, 1.0))) * LOG_2, -float("inf")
    )
    tl.store(lse + (batch * heads + head) * queries + query, sums, mask=inside)
