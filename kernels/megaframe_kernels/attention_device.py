"""Device code of attention; `attention.py` says what it computes.

Forward and backward walk the same way: a program has a block of queries (or keys), knows from their
spans which blocks of keys (or queries) any of them sees, and which of those all of them see; only
the others are masked. Scores are in units of log 2, because exponentials of 2 are what the hardware
has. Shape legend: M queries of a block, N keys of a block, D width of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megaframe_kernels.device_math import LOG2_E, LOG_2, product, tanh


@triton.jit
def _share(
    blocks: tl.tensor, together: tl.tensor, heads: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A program's turn among the blocks of a head, its head and its sample. Blocks of the same turn
    start together, of as many heads as keep what they read in the cache: of a causal mask the first
    turns are the longest, and the last programs of all are short."""
    pairs = tl.num_programs(0) // blocks
    first = tl.program_id(0) // (blocks * together) * together
    abreast = tl.minimum(pairs - first, together)
    rest = tl.program_id(0) % (blocks * together)
    pair = first + rest % abreast
    return rest // abreast, pair % heads, pair // heads


@triton.jit
def _visits(
    start: tl.tensor,
    stop: tl.tensor,
    inside: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Blocks low .. high - 1 hold all that the spans do; whole_low .. whole_high - 1 of them are in
    every span."""
    low = tl.min(tl.where(inside, start, length), 0) // BLOCK
    high = tl.maximum(tl.cdiv(tl.max(tl.where(inside, stop, 0), 0), BLOCK), low)
    whole_low = tl.cdiv(tl.max(tl.where(inside, start, 0), 0), BLOCK)
    whole_low = tl.minimum(tl.maximum(whole_low, low), high)
    whole_high = tl.min(tl.where(inside, stop, length), 0) // BLOCK
    whole_high = tl.maximum(tl.minimum(whole_high, high), whole_low)
    return low, high, whole_low, whole_high


@triton.jit
def _rows(
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
    """A block of rows [row, D] of a matrix; what is outside is 0. The block's place is one number
    of 64 bits, the places in it have 32: they stay in registers from one block to the next."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = base + tl.cast(block, tl.int64) * ROWS * stride + (row[:, None] * stride + column[None, :])
    if MASK:
        inside = row[:, None] < length - block * ROWS
        if EVEN:
            return tl.load(at, mask=inside, other=0.0)
        return tl.load(at, mask=inside & (column[None, :] < width), other=0.0)
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=column[None, :] < width, other=0.0)


@triton.jit
def _scores(product: tl.tensor, scale: tl.tensor, cap: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Scores in units of log 2."""
    if CAP:
        return tanh(product * (scale / cap)) * (cap * LOG2_E)
    return product * (scale * LOG2_E)


@triton.jit
def _slope(d_s: tl.tensor, s: tl.tensor, cap: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """Gradient of the products from that of capped scores."""
    if CAP:
        bent = s / (cap * LOG2_E)
        return d_s * (1.0 - bent * bent)
    return d_s


@triton.jit
def _block_at(
    visit: tl.tensor,
    low: tl.tensor,
    left: tl.tensor,
    whole_low: tl.tensor,
    whole_high: tl.tensor,
    edges: tl.tensor,
) -> tl.tensor:
    """The block of a visit: those that are masked come first, `left` of them before the others."""
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

    LATE: values are multiplied with the shares p and the decay of the visit before, between the
    scores of this one and their exponentials: matrix units work meanwhile (Shah et al. 2024).
    """
    key = block * N + tl.arange(0, N)
    k_ND = _rows(k, block, k_stride, keys, width, MASK, N, WIDTH, EVEN)
    s = product(q, tl.trans(k_ND), None, PRECISION)
    if LATE:
        v_ND = _rows(v, behind, v_stride, keys, width, True, N, WIDTH, EVEN)
        out = product(p, v_ND, out * decay[:, None], PRECISION)
    unit = scale * LOG2_E
    if not RAW:
        s, unit = _scores(s, scale, cap, CAP), 1.0
    if MASK:
        seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        s = tl.where(seen, s, -float("inf"))
    highest = tl.maximum(top, tl.max(s, 1) * unit)
    shift = highest
    if MASK:  # a query that has seen nothing yet
        shift = tl.where(highest == -float("inf"), 0.0, highest)
    shares = tl.exp2(s * unit - shift[:, None])
    less = tl.exp2(top - shift)
    total = total * less + tl.sum(shares, 1)
    if LATE:
        return out, highest, total, shares.to(p.dtype), less
    v_ND = _rows(v, block, v_stride, keys, width, MASK, N, WIDTH, EVEN)
    out = product(shares.to(p.dtype), v_ND, out * less[:, None], PRECISION)
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
    blocks = tl.cdiv(queries, M)
    turn, head, sample = _share(blocks, together, heads)
    mine = blocks - 1 - turn  # the last queries of a causal mask see most
    query = mine * M + tl.arange(0, M)
    group = (head // per_group).to(tl.int64)
    head, batch = head.to(tl.int64), sample.to(tl.int64)
    inside = query < queries
    start = tl.load(starts + batch * queries + query, mask=inside, other=0)
    stop = tl.load(stops + batch * queries + query, mask=inside, other=0)
    low, high, whole_low, whole_high = _visits(start, stop, inside, keys, N)
    q_rows = q + batch * q_batch + head * q_head
    q_MD = _rows(q_rows, mine, q_stride, queries, width, True, M, WIDTH, EVEN)
    k_rows, v_rows = k + batch * k_batch + group * k_head, v + batch * v_batch + group * v_head
    total = tl.zeros([M], tl.float32)
    top = total - float("inf")
    if sinks is not None:
        top = total + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    result = tl.zeros([M, WIDTH], tl.float32)
    p, decay = tl.zeros([M, N], v.dtype.element_ty), tl.zeros([M], tl.float32)
    left = whole_low - low
    edges = left + high - whole_high
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
        behind = _block_at(tl.maximum(high - low - 1, 0), low, left, whole_low, whole_high, edges)
        v_ND = _rows(v_rows, behind, v_stride, keys, width, True, N, WIDTH, EVEN)
        result = product(p, v_ND, result * decay[:, None], PRECISION)
    some = total > 0.0
    result = result / tl.where(some, total, 1.0)[:, None]
    column = tl.arange(0, WIDTH)
    at = out + ((batch * queries + query)[:, None] * heads + head) * width + column[None, :]
    written = inside[:, None] & (column[None, :] < width)
    tl.store(at, result.to(out.dtype.element_ty), mask=written)
    sums = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LOG_2, -float("inf"))
    tl.store(lse + (batch * heads + head) * queries + query, sums, mask=inside)


PADDING = tl.constexpr(128)
"""What the backward pass keeps of each query is padded to a multiple of this many queries, which
every block divides: no program needs a mask to read it or to add to it."""


@triton.jit
def prepare_backward(
    d_out: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    d_lse: tl.tensor,
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
    """What scores need of each query, padded: p = exp2(s - shift) and d_s = p (d_p - delta).

    shift: the log-sum-exp in units of log 2, infinite where nothing is seen and p must be 0.
    delta: sum(d_out out) - d_lse.
    """
    padded = tl.cdiv(queries, PADDING) * PADDING
    blocks = padded // M
    query = (tl.program_id(0) % blocks) * M + tl.arange(0, M)
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    head, batch = pair % heads, pair // heads
    column = tl.arange(0, WIDTH)
    real = query < queries
    inside = real[:, None] & (column[None, :] < width)
    at = batch * d_batch + query[:, None].to(tl.int64) * d_stride + head * d_head + column[None, :]
    given = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    at = ((batch * queries + query)[:, None] * heads + head) * width + column[None, :]
    mean = tl.sum(given * tl.load(out + at, mask=inside, other=0.0).to(tl.float32), 1)
    if d_lse is not None:
        mean -= tl.load(d_lse + pair * queries + query, mask=real, other=0.0)
    tl.store(delta + pair * padded + query, mean)
    total = tl.load(lse + pair * queries + query, mask=real, other=-float("inf"))
    total = tl.where(total == -float("inf"), float("inf"), total * LOG2_E)
    tl.store(shift + pair * padded + query, total)


@triton.jit
def _query_gradient(
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
    key = block * N + tl.arange(0, N)
    k_ND = _rows(k, block, k_stride, keys, width, MASK, N, WIDTH, EVEN)
    v_ND = _rows(v, block, v_stride, keys, width, MASK, N, WIDTH, EVEN)
    s = _scores(product(q, tl.trans(k_ND), None, PRECISION), scale, cap, CAP)
    p = tl.exp2(s - sums[:, None])
    if MASK:
        seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        p = tl.where(seen, p, 0.0)
    d_p = product(d_out, tl.trans(v_ND), None, PRECISION)
    d_s = _slope(p * (d_p - less[:, None]), s, cap, CAP)
    return product(d_s.to(k_ND.dtype), k_ND, d_q, PRECISION)


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
    blocks = tl.cdiv(queries, M)
    turn, head, sample = _share(blocks, together, heads)
    mine = blocks - 1 - turn
    query = mine * M + tl.arange(0, M)
    group = (head // per_group).to(tl.int64)
    head, batch = head.to(tl.int64), sample.to(tl.int64)
    inside = query < queries
    start = tl.load(starts + batch * queries + query, mask=inside, other=0)
    stop = tl.load(stops + batch * queries + query, mask=inside, other=0)
    low, high, whole_low, whole_high = _visits(start, stop, inside, keys, N)
    q_rows, d_rows = q + batch * q_batch + head * q_head, d_out + batch * d_batch + head * d_head
    q_MD = _rows(q_rows, mine, q_stride, queries, width, True, M, WIDTH, EVEN)
    d_out_MD = _rows(d_rows, mine, d_stride, queries, width, True, M, WIDTH, EVEN)
    at = (batch * heads + head) * (tl.cdiv(queries, PADDING) * PADDING) + query
    sums, less = tl.load(shift + at), tl.load(delta + at)
    k_rows, v_rows = k + batch * k_batch + group * k_head, v + batch * v_batch + group * v_head
    result = tl.zeros([M, WIDTH], tl.float32)
    left = whole_low - low
    for visit in range(0, left + high - whole_high):
        block = tl.where(visit < left, low + visit, whole_high + visit - left)
        result = _query_gradient(
            result, q_MD, d_out_MD, k_rows, v_rows, sums, less, block, start, stop, keys, width,
            k_stride, v_stride, scale, cap, CAP, True, N, WIDTH, EVEN, PRECISION,
        )  # fmt: skip
    for block in range(whole_low, whole_high):
        result = _query_gradient(
            result, q_MD, d_out_MD, k_rows, v_rows, sums, less, block, start, stop, keys, width,
            k_stride, v_stride, scale, cap, CAP, False, N, WIDTH, EVEN, PRECISION,
        )  # fmt: skip
    column = tl.arange(0, WIDTH)
    at = d_q + ((batch * queries + query)[:, None] * heads + head) * width + column[None, :]
    written = inside[:, None] & (column[None, :] < width)
    tl.store(at, (result * scale).to(d_q.dtype.element_ty), mask=written)


@triton.jit
def _add_rows(
    sums: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    BULK: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Add rows [M, D] to those of a matrix in global memory, in fp32 and as one of many programs.
    BULK: `sums` is a descriptor, and the copy engine adds while the program goes on."""
    if BULK:
        sums.atomic_add([row.to(tl.int32), 0], rows)
    else:
        place = tl.arange(0, M)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.atomic_add(sums + row * WIDTH + place, rows, sem="relaxed")


@triton.jit
def _key_gradients(
    d_k: tl.tensor,
    d_v: tl.tensor,
    d_q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    q: tl.tensor,
    d_out: tl.tensor,
    shift: tl.tensor,
    delta: tl.tensor,
    kept: tl.tensor,
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
    BULK: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add what a block of queries contributes to the gradients of keys and values, and with `d_q`
    also what these keys contribute to those of the queries, as unscaled sums.

    Scores are transposed here, [N, M]: the products for keys and values then need no transpose of
    what was computed. Tiles of 64 x 128 just fit into registers, so as little as possible may live
    across a product: the numbers of a query are loaded where they are used, the slope is applied
    before d_p exists, and only tiles at an `edge` are masked, in a branch.
    """
    query = block * M + tl.arange(0, M)
    q_MD = _rows(q, block, q_stride, queries, width, True, M, WIDTH, EVEN)
    d_out_MD = _rows(d_out, block, d_stride, queries, width, True, M, WIDTH, EVEN)
    s = _scores(product(k, tl.trans(q_MD), None, PRECISION), scale, cap, CAP)
    sums = tl.load(shift + kept + query)
    p = tl.exp2(s - sums[None, :])
    if edge:
        seen = (query[None, :] >= first[:, None]) & (query[None, :] < last[:, None])
        p = tl.where(seen, p, 0.0)
    d_v = product(p.to(d_out_MD.dtype), d_out_MD, d_v, PRECISION)
    slope = _slope(p, s, cap, CAP)
    d_p = product(v, tl.trans(d_out_MD), None, PRECISION)
    less = tl.load(delta + kept + query)
    d_s = (slope * (d_p - less[None, :])).to(q_MD.dtype)
    d_k = product(d_s, q_MD, d_k, PRECISION)
    if d_q is not None:
        rows = product(tl.trans(d_s), k, None, PRECISION)
        _add_rows(d_q, kept + block * M, rows, BULK, M, WIDTH)
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
    BULK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """All query heads of a group in one program: the sums of keys and values have one order, and
    need no atomics. d_q: what each block of keys adds to the queries' gradients, unscaled and in no
    fixed order; None where `backward_queries` computes those."""
    blocks, groups = tl.cdiv(keys, N), heads // per_group
    mine, group, sample = _share(blocks, together, groups)  # the first keys are seen by most
    key = mine * N + tl.arange(0, N)
    batch = sample.to(tl.int64)
    inside = key < keys
    first = tl.load(firsts + batch * keys + key, mask=inside, other=0)
    last = tl.load(lasts + batch * keys + key, mask=inside, other=0)
    low, high, whole_low, whole_high = _visits(first, last, inside, queries, M)
    if mine * N + N > keys:  # nor may a query see what is no key
        whole_high = whole_low
    wide = group.to(tl.int64)
    k_rows, v_rows = k + batch * k_batch + wide * k_head, v + batch * v_batch + wide * v_head
    k_ND = _rows(k_rows, mine, k_stride, keys, width, True, N, WIDTH, EVEN)
    v_ND = _rows(v_rows, mine, v_stride, keys, width, True, N, WIDTH, EVEN)
    k_sum, v_sum = tl.zeros([N, WIDTH], tl.float32), tl.zeros([N, WIDTH], tl.float32)
    head = wide * per_group
    q_rows = q + batch * q_batch + head * q_head
    d_rows = d_out + batch * d_batch + head * d_head
    padded = tl.cdiv(queries, PADDING) * PADDING
    kept = (batch * heads + head) * padded
    block = low
    for _ in range(0, per_group * (high - low)):  # one loop, whose loads run ahead across heads
        edge = (block < whole_low) | (block >= whole_high)
        k_sum, v_sum = _key_gradients(
            k_sum, v_sum, d_q, k_ND, v_ND, q_rows, d_rows, shift, delta, kept, block, edge, first,
            last, queries, width, q_stride, d_stride, scale, cap, CAP, BULK, M, WIDTH, EVEN,
            PRECISION,
        )  # fmt: skip
        block += 1
        done = block == high
        block = tl.where(done, low, block)
        q_rows += tl.where(done, q_head, 0)
        d_rows += tl.where(done, d_head, 0)
        kept += tl.where(done, padded, 0)
    column = tl.arange(0, WIDTH)
    at = ((batch * keys + key)[:, None] * groups + group) * width + column[None, :]
    written = inside[:, None] & (column[None, :] < width)
    tl.store(d_k + at, (k_sum * scale).to(d_k.dtype.element_ty), mask=written)
    tl.store(d_v + at, v_sum.to(d_v.dtype.element_ty), mask=written)
