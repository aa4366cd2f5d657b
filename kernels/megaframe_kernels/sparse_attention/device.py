"""Device code of attention to the latents of chosen keys.

A program has a query, and a block of its heads, which all see the same latents: so products are of
matrices, heads times keys, and what is read of memory is read once for all heads of the block.
Scores are in units of log 2. Shape legend: M heads of a block, N chosen keys of a block, S the part
of a latent that is only scored, V the part that is summed, too; both padded to SHARED and VALUES.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megaframe_kernels.device_math import LOG2_E, LOG_2, multiply_add


@triton.jit
def load_rows(
    base: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return columns of some rows, [rows, WIDTH], with 0 for what is outside.

    Args:
        base: Of the matrix.
        row: Numbers of the rows, int64.
        exists: Whether each row does.
        stride: Elements from a row to the next.
        first: Of the columns.
        width: Number of columns.
        WIDTH: The same, padded.
    """
    column = tl.arange(0, WIDTH)
    inside = exists[:, None] & (column < width)[None, :]
    return tl.load(base + row[:, None] * stride + first + column[None, :], mask=inside, other=0.0)


@triton.jit
def load_latents(
    latents: tl.tensor,
    places: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    chosen: tl.tensor,
    shared: tl.tensor,
    values: tl.tensor,
    SHARED: tl.constexpr,
    VALUES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return both parts of the latents of a query's keys, [N, SHARED] and [N, VALUES], and whether
    it sees each.

    Args:
        latents: [T, S + V].
        places: Rows of latents, int32 [Q, chosen]; -1 for none.
        query: Number of the query, int64.
        key: Numbers of its chosen keys.
        chosen: How many there are.
        shared: S.
        values: V.
        SHARED: S, padded.
        VALUES: V, padded.
    """
    place = tl.load(places + query * chosen + key, mask=key < chosen, other=-1).to(tl.int64)
    seen, width = place >= 0, shared + values
    k_NS = load_rows(latents, place, seen, width, 0, shared, SHARED)
    k_NV = load_rows(latents, place, seen, width, shared, values, VALUES)
    return k_NS, k_NV, seen


@triton.jit
def score(
    q_MS: tl.tensor,
    q_MV: tl.tensor,
    k_NS: tl.tensor,
    k_NV: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return the scores of heads and keys, [M, N] in units of log 2; -inf if a key is not seen."""
    s_MN = multiply_add(q_MV, tl.trans(k_NV), None, PRECISION)
    s_MN = multiply_add(q_MS, tl.trans(k_NS), s_MN, PRECISION)
    return tl.where(seen[None, :], s_MN * (scale * LOG2_E), -float("inf"))


@triton.jit
def attend(
    q: tl.tensor,
    latents: tl.tensor,
    places: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    heads: tl.tensor,
    chosen: tl.tensor,
    shared: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    SHARED: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """out = softmax(scale q k) v and lse = log(sum(exp(scale q k))), for a block of heads of a
    query (Dao et al. 2022). ends: the number of chosen keys after which it sees none, int32 [Q]."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * M + tl.arange(0, M)
    exists, row = head < heads, query * heads + head
    q_MS = load_rows(q, row, exists, shared + values, 0, shared, SHARED)
    q_MV = load_rows(q, row, exists, shared + values, shared, values, VALUES)
    total = tl.zeros([M], tl.float32)
    top = total - float("inf")
    result = tl.zeros([M, VALUES], tl.float32)
    for start in range(0, tl.load(ends + query), N):
        key = start + tl.arange(0, N)
        k_NS, k_NV, seen = load_latents(
            latents, places, query, key, chosen, shared, values, SHARED, VALUES
        )
        s_MN = score(q_MS, q_MV, k_NS, k_NV, seen, scale, PRECISION)
        highest = tl.maximum(top, tl.max(s_MN, 1))
        # -inf - (-inf) would be NaN, for a query that has seen nothing yet.
        shift = tl.where(highest == -float("inf"), 0.0, highest)
        shares = tl.exp2(s_MN - shift[:, None])
        less = tl.exp2(top - shift)
        total = total * less + tl.sum(shares, 1)
        result = multiply_add(shares.to(k_NV.dtype), k_NV, result * less[:, None], PRECISION)
        top = highest
    # A query that sees nothing gets 0 instead of 0 / 0, and a log-sum-exp of -inf.
    sees = total > 0.0
    total = tl.where(sees, total, 1.0)
    column = tl.arange(0, VALUES)
    written = exists[:, None] & (column < values)[None, :]
    at = out + row[:, None] * values + column[None, :]
    tl.store(at, (result / total[:, None]).to(out.dtype.element_ty), mask=written)
    sums = tl.where(sees, (top + tl.log2(total)) * LOG_2, -float("inf"))
    tl.store(lse + row, sums, mask=exists)


@triton.jit
def differentiate_scores(
    q_MS: tl.tensor,
    q_MV: tl.tensor,
    d_out_MV: tl.tensor,
    lse: tl.tensor,
    mean: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    k_NS: tl.tensor,
    k_NV: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the shares p = exp(s - lse) and what products have as gradients, scale p (d_out v -
    mean), both [M, N]. mean: sum(d_out out) of each head, [Q, H]."""
    s_MN = score(q_MS, q_MV, k_NS, k_NV, seen, scale, PRECISION)
    known = tl.load(lse + row, mask=exists, other=0.0) * LOG2_E
    known = tl.where(known == -float("inf"), 0.0, known)
    p_MN = tl.exp2(s_MN - known[:, None])
    average = tl.load(mean + row, mask=exists, other=0.0)
    d_p_MN = multiply_add(d_out_MV, tl.trans(k_NV), None, PRECISION)
    return p_MN, p_MN * (d_p_MN - average[:, None]) * scale


@triton.jit
def differentiate_queries(
    d_out: tl.tensor,
    q: tl.tensor,
    latents: tl.tensor,
    places: tl.tensor,
    ends: tl.tensor,
    lse: tl.tensor,
    mean: tl.tensor,
    d_q: tl.tensor,
    heads: tl.tensor,
    chosen: tl.tensor,
    shared: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    SHARED: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write the gradient of a block of heads of a query."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * M + tl.arange(0, M)
    exists, row, width = head < heads, query * heads + head, shared + values
    q_MS = load_rows(q, row, exists, width, 0, shared, SHARED)
    q_MV = load_rows(q, row, exists, width, shared, values, VALUES)
    d_out_MV = load_rows(d_out, row, exists, values, 0, values, VALUES)
    d_q_MS, d_q_MV = tl.zeros([M, SHARED], tl.float32), tl.zeros([M, VALUES], tl.float32)
    for start in range(0, tl.load(ends + query), N):
        key = start + tl.arange(0, N)
        k_NS, k_NV, seen = load_latents(
            latents, places, query, key, chosen, shared, values, SHARED, VALUES
        )
        _, d_s_MN = differentiate_scores(
            q_MS, q_MV, d_out_MV, lse, mean, row, exists, k_NS, k_NV, seen, scale, PRECISION
        )
        d_s_MN = d_s_MN.to(k_NV.dtype)
        d_q_MS = multiply_add(d_s_MN, k_NS, d_q_MS, PRECISION)
        d_q_MV = multiply_add(d_s_MN, k_NV, d_q_MV, PRECISION)
    store_rows(d_q, row, exists, width, 0, shared, d_q_MS)
    store_rows(d_q, row, exists, width, shared, values, d_q_MV)


@triton.jit
def store_rows(
    base: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    stride: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    tile: tl.tensor,
) -> None:
    """Store what `load_rows` would load."""
    column = tl.arange(0, tile.shape[1])
    inside = exists[:, None] & (column < width)[None, :]
    at = base + row[:, None] * stride + first + column[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def differentiate_latents(
    d_out: tl.tensor,
    q: tl.tensor,
    latents: tl.tensor,
    places: tl.tensor,
    ends: tl.tensor,
    lse: tl.tensor,
    mean: tl.tensor,
    parts: tl.tensor,
    first: tl.tensor,
    heads: tl.tensor,
    chosen: tl.tensor,
    shared: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    SHARED: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write what the heads of a query add to the gradients of the latents of a block of its keys,
    as rows of their own: fp32 [queries, chosen, S + V]. first: number of the first query."""
    own = tl.program_id(0).to(tl.int64)
    query, start = first + own, tl.program_id(1) * N
    # After the last key that the query sees, all that is left is not to write.
    visited = tl.where(start < tl.load(ends + query), heads, 0)
    key, width = start + tl.arange(0, N), shared + values
    k_NS, k_NV, seen = load_latents(
        latents, places, query, key, chosen, shared, values, SHARED, VALUES
    )
    d_k_NS, d_k_NV = tl.zeros([N, SHARED], tl.float32), tl.zeros([N, VALUES], tl.float32)
    for begin in range(0, visited, M):
        head = begin + tl.arange(0, M)
        exists, row = head < heads, query * heads + head
        q_MS = load_rows(q, row, exists, width, 0, shared, SHARED)
        q_MV = load_rows(q, row, exists, width, shared, values, VALUES)
        d_out_MV = load_rows(d_out, row, exists, values, 0, values, VALUES)
        p_MN, d_s_MN = differentiate_scores(
            q_MS, q_MV, d_out_MV, lse, mean, row, exists, k_NS, k_NV, seen, scale, PRECISION
        )
        p_NM, d_s_NM = tl.trans(p_MN.to(q_MV.dtype)), tl.trans(d_s_MN.to(q_MV.dtype))
        d_k_NS = multiply_add(d_s_NM, q_MS, d_k_NS, PRECISION)
        d_k_NV = multiply_add(d_s_NM, q_MV, d_k_NV, PRECISION)
        d_k_NV = multiply_add(p_NM, d_out_MV, d_k_NV, PRECISION)
    store_rows(parts, own * chosen + key, seen, width, 0, shared, d_k_NS)
    store_rows(parts, own * chosen + key, seen, width, shared, values, d_k_NV)


@triton.jit
def add_parts(
    parts: tl.tensor,
    order: tl.tensor,
    starts: tl.tensor,
    d_latents: tl.tensor,
    width: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Add to the gradient of a key's latent the parts of all queries that have chosen it, one after
    the other, so that no sum depends on which program is faster.

    Args:
        parts: Rows.
        order: Numbers of rows, those of a key together.
        starts: Where those of each key start, [T + 1].
        d_latents: fp32 [T, width].
        width: Of a row.
        WIDTH: The same, padded.
    """
    key = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    total = tl.load(d_latents + key * width + column, mask=inside, other=0.0)
    for entry in range(tl.load(starts + key), tl.load(starts + key + 1)):
        row = tl.load(order + entry).to(tl.int64)
        total += tl.load(parts + row * width + column, mask=inside, other=0.0)
    tl.store(d_latents + key * width + column, total, mask=inside)


@triton.jit
def sum_shares(
    q: tl.tensor,
    latents: tl.tensor,
    places: tl.tensor,
    lse: tl.tensor,
    shares: tl.tensor,
    heads: tl.tensor,
    chosen: tl.tensor,
    shared: tl.tensor,
    values: tl.tensor,
    scale: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    SHARED: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Write the sums over heads of exp(scale q k - lse) for a block of a query's keys."""
    query = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * N + tl.arange(0, N)
    k_NS, k_NV, seen = load_latents(
        latents, places, query, key, chosen, shared, values, SHARED, VALUES
    )
    total = tl.zeros([N], tl.float32)
    for begin in range(0, heads, M):
        head = begin + tl.arange(0, M)
        exists, row = head < heads, query * heads + head
        q_MS = load_rows(q, row, exists, shared + values, 0, shared, SHARED)
        q_MV = load_rows(q, row, exists, shared + values, shared, values, VALUES)
        s_MN = score(q_MS, q_MV, k_NS, k_NV, seen, scale, PRECISION)
        # A head that does not exist has a share of exp2(-inf) = 0.
        known = tl.load(lse + row, mask=exists, other=float("inf")) * LOG2_E
        known = tl.where(known == -float("inf"), 0.0, known)
        total += tl.sum(tl.exp2(s_MN - known[:, None]), 0)
    tl.store(shares + query * chosen + key, total, mask=key < chosen)
