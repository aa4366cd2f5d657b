"""Device code of recurrent mixers, backward: first the gradient of each state passes its chunks in
reverse, then all chunks at once make the gradients of their tokens.

`chunks_device.py` has the shape legend, and `pass_chunks` what is differentiated.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megaframe_kernels.device_math import multiply_add
from megaframe_kernels.recurrent.chunks_device import (
    add_to_state,
    differentiate_decayed,
    find_pairs,
    load_decays,
    load_documents,
    load_sums,
    load_tile,
    locate,
    multiply_decayed,
    read_state,
    store_sums,
    store_tile,
)


@triton.jit
def return_through_chunks(
    d_out: tl.tensor,
    d_final: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    strength: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    scores: tl.tensor,
    inverse: tl.tensor,
    d_corrections: tl.tensor,
    d_value: tl.tensor,
    d_states: tl.tensor,
    d_initial: tl.tensor,
    length: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    value_width: tl.tensor,
    chunks: tl.tensor,
    CORRECTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Pass the gradient dS of some columns of a state through its chunks, in reverse: the gradient
    of C is P^T dO + a' K dS; where that goes on to b (V - a K S), it is multiplied by
    (I + A)^-T.

    Args:
        d_out: Gradient of O, [B, S, H, V].
        d_final: Gradient of the state after all tokens, fp32 [B, H, K, V], or None for 0.
        query: [B, S, G, K].
        key: [B, S, G, K].
        strength: b, [B, S, H].
        sums: Logarithms of decays from the start of each chunk, [B, S, H, F].
        documents: Of the tokens, [B, S].
        scores: P, [B, H, C, L, L].
        inverse: (I + A)^-1, likewise.
        d_corrections: Receives the gradient of b (V - a K S), [B, S, H, V].
        d_value: Receives that of V, likewise.
        d_states: Receives that of the states after each chunk, [B, H, C, K, V].
        d_initial: Receives that of the state before all tokens, fp32 [B, H, K, V].
        length: S.
        heads: H.
        groups: G.
        width: K.
        value_width: V.
        chunks: C.
        CORRECTS: Whether tokens correct the state; otherwise they only add to it.
        CHANNELS: Whether F is K; otherwise 1.
        L: Tokens of a chunk.
        WIDTH: K, padded.
        COLUMNS: Of the state.
        PRECISION: Of products.
    """
    place, row = tl.arange(0, L), tl.arange(0, WIDTH)
    across = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(0).to(tl.int64)
    square = place[:, None] * L + place[None, :]
    d_state = tl.zeros([WIDTH, COLUMNS], tl.float32)
    if d_final is not None:
        d_state = load_tile(d_final, head * width, 1, width, across, value_width, WIDTH)
    for step in range(chunks):
        chunk = chunks - 1 - step
        value_row, key_row, count = locate(chunk, length, heads, groups, L)
        state_row = (head * chunks + chunk) * width
        store_tile(d_states, state_row, 1, width, across, value_width, d_state)
        q = load_tile(query, key_row, groups, count, row, width, L)
        k = load_tile(key, key_row, groups, count, row, width, L)
        d_o = load_tile(d_out, value_row, heads, count, across, value_width, L)
        document, newest, oldest = load_documents(documents, chunk, length, heads, L)
        _, before, after, left = load_decays(
            sums, document, newest, oldest, value_row, heads, count, width, CHANNELS, L, WIDTH
        )
        at = (head * chunks + chunk) * (L * L) + square
        new = d_state.to(q.dtype)
        d_c = read_state(k, new, after, CHANNELS, PRECISION)
        d_c = multiply_add(tl.trans(tl.load(scores + at)), d_o, d_c, PRECISION)
        d_state = add_to_state(d_state * tl.trans(left), q, d_o, before, CHANNELS, PRECISION)
        if CORRECTS:
            b = tl.load(strength + value_row + place * heads, mask=place < count, other=0.0)
            turned = tl.trans(tl.load(inverse + at))
            d_c = multiply_add(turned, d_c.to(d_o.dtype), None, PRECISION)
            store_tile(d_corrections, value_row, heads, count, across, value_width, d_c)
            d_c *= b[:, None]
            d_state = add_to_state(d_state, k, -d_c, before, CHANNELS, PRECISION)
        store_tile(d_value, value_row, heads, count, across, value_width, d_c)
    store_tile(d_initial, head * width, 1, width, across, value_width, d_state)


@triton.jit
def differentiate_chunks(
    d_out: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    corrections: tl.tensor,
    states: tl.tensor,
    d_states: tl.tensor,
    d_query: tl.tensor,
    d_key: tl.tensor,
    d_sums: tl.tensor,
    length: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    value_width: tl.tensor,
    CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Store the gradients of a chunk's queries, keys and decays, for one value head, apart from
    what the corrections bring.

    A decay exp(s_t - s_u) within a product of q_t and k_u has the gradients q_t dq_t and -k_u dk_u,
    so those of the sums follow from those of queries and keys.

    Args:
        d_out: Gradient of O, [B, S, H, V].
        query: [B, S, G, K].
        key: [B, S, G, K].
        sums: Logarithms of decays from the start of each chunk, [B, S, H, F].
        documents: Of the tokens, [B, S].
        corrections: C, [B, S, H, V].
        states: S before each chunk, [B, H, C, K, V].
        d_states: Gradients of the states after each chunk, likewise.
        d_query: Receives the gradient of the queries of each value head, [B, S, H, K].
        d_key: Likewise of the keys.
        d_sums: Receives that of the sums, [B, S, H, F].
        length: S.
        heads: H.
        groups: G.
        width: K.
        value_width: V.
        CHANNELS: Whether F is K; otherwise 1.
        LEVELS: Such that L is 2^LEVELS.
        L: Tokens of a chunk.
        WIDTH: K, padded.
        COLUMNS: Of the state, that are read at once.
        PRECISION: Of products.
    """
    chunk = tl.program_id(1)
    value_row, key_row, count = locate(chunk, length, heads, groups, L)
    place, row, last = tl.arange(0, L), tl.arange(0, WIDTH), count - 1
    document, newest, oldest = load_documents(documents, chunk, length, heads, L)
    state_row = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chunk) * width
    # Gradients of P, a Q, a' K and a_L.
    d_p = tl.zeros([L, L], tl.float32)
    d_q, d_k = tl.zeros([L, WIDTH], tl.float32), tl.zeros([L, WIDTH], tl.float32)
    d_left = tl.zeros([WIDTH], tl.float32)
    for start in range(0, value_width, COLUMNS):
        across = start + tl.arange(0, COLUMNS)
        d_o = load_tile(d_out, value_row, heads, count, across, value_width, L)
        c = load_tile(corrections, value_row, heads, count, across, value_width, L)
        old = load_tile(states, state_row, 1, width, across, value_width, WIDTH)
        new = load_tile(d_states, state_row, 1, width, across, value_width, WIDTH)
        d_left += tl.sum(old.to(tl.float32) * new.to(tl.float32), 1)
        d_p = multiply_add(d_o, tl.trans(c), d_p, PRECISION)
        d_q = multiply_add(d_o, tl.trans(old), d_q, PRECISION)
        d_k = multiply_add(c, tl.trans(new), d_k, PRECISION)
    q = load_tile(query, key_row, groups, count, row, width, L)
    k = load_tile(key, key_row, groups, count, row, width, L)
    s, before, after, left = load_decays(
        sums, document, newest, oldest, value_row, heads, count, width, CHANNELS, L, WIDTH
    )
    d_q, d_k = d_q * before, d_k * after
    d_total = tl.sum(k * d_k, 0) + tl.reshape(left, [left.shape[1]]) * d_left
    own = tl.sum(tl.where(place[:, None] == place[None, :], d_p, 0.0), 1)[:, None]
    d_p = tl.where(find_pairs(document, True), d_p, 0.0)
    d_q, d_k = differentiate_decayed(
        *(d_p, q, k, d_q, d_k, sums, s, value_row, heads, last, width),
        *(CHANNELS, LEVELS, WIDTH, PRECISION),
    )
    d_s = q * d_q - k * d_k + tl.where((place == last)[:, None], d_total[None, :], 0.0)
    # Nothing decays from a token to itself, so this comes after.
    d_q, d_k = d_q + own * k, d_k + own * q
    store_tile(d_query, value_row, heads, count, row, width, d_q)
    store_tile(d_key, value_row, heads, count, row, width, d_k)
    store_sums(d_sums, value_row, heads, count, width, d_s, CHANNELS)


@triton.jit
def differentiate_corrections(
    key: tl.tensor,
    value: tl.tensor,
    strength: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    corrections: tl.tensor,
    d_corrections: tl.tensor,
    states: tl.tensor,
    d_key: tl.tensor,
    d_strength: tl.tensor,
    d_sums: tl.tensor,
    length: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    value_width: tl.tensor,
    CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Store what the corrections of a chunk bring to the gradients of its keys and decays, and the
    gradients of its strengths, for one value head.

    With D the gradient of b (V - a K S), the system (I + A) C = b (V - a K S) has dA = -D C^T, and
    what is corrected is W = V - a K S - M C, where A = b M. So the gradient of b is D W, and
    nothing is divided by b.

    Args:
        key: [B, S, G, K].
        value: [B, S, H, V].
        strength: b, [B, S, H].
        sums: Logarithms of decays from the start of each chunk, [B, S, H, F].
        documents: Of the tokens, [B, S].
        corrections: C, [B, S, H, V].
        d_corrections: D, likewise.
        states: S before each chunk, [B, H, C, K, V].
        d_key: Receives this part of the gradient of the keys of each value head, [B, S, H, K].
        d_strength: Receives that of b, [B, S, H].
        d_sums: Receives this part of that of the sums, [B, S, H, F].
        length: S.
        heads: H.
        groups: G.
        width: K.
        value_width: V.
        CHANNELS: Whether F is K; otherwise 1.
        LEVELS: Such that L is 2^LEVELS.
        L: Tokens of a chunk.
        WIDTH: K, padded.
        COLUMNS: Of the state, that are read at once.
        PRECISION: Of products.
    """
    chunk = tl.program_id(1)
    value_row, key_row, count = locate(chunk, length, heads, groups, L)
    place, row, last = tl.arange(0, L), tl.arange(0, WIDTH), count - 1
    document, _, oldest = load_documents(documents, chunk, length, heads, L)
    state_row = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chunk) * width
    k = load_tile(key, key_row, groups, count, row, width, L)
    s = load_sums(sums, value_row, heads, place, last, width, CHANNELS, WIDTH)
    before = tl.where((document == oldest)[:, None], tl.exp(s), 0.0)
    b = tl.load(strength + value_row + place * heads, mask=place < count, other=0.0)
    m = multiply_decayed(
        k, k, sums, s, value_row, heads, last, width, CHANNELS, LEVELS, WIDTH, PRECISION
    )
    m = tl.where(find_pairs(document, True), m, 0.0).to(k.dtype)
    # Gradients of M, a K and b.
    d_m, d_k = tl.zeros([L, L], tl.float32), tl.zeros([L, WIDTH], tl.float32)
    d_b = tl.zeros([L], tl.float32)
    for start in range(0, value_width, COLUMNS):
        across = start + tl.arange(0, COLUMNS)
        c = load_tile(corrections, value_row, heads, count, across, value_width, L)
        old = load_tile(states, state_row, 1, width, across, value_width, WIDTH)
        d_c = load_tile(d_corrections, value_row, heads, count, across, value_width, L)
        w = load_tile(value, value_row, heads, count, across, value_width, L)
        w -= read_state(k, old, before, CHANNELS, PRECISION)
        w -= multiply_add(m, c, None, PRECISION)
        d_b += tl.sum(d_c * w, 1)
        d_w = (d_c * -b[:, None]).to(c.dtype)
        d_m = multiply_add(d_w, tl.trans(c), d_m, PRECISION)
        d_k = multiply_add(d_w, tl.trans(old), d_k, PRECISION)
    d_m = tl.where(find_pairs(document, True), d_m, 0.0)
    d_left, d_right = differentiate_decayed(
        *(d_m, k, k, d_k * before, tl.zeros([L, WIDTH], tl.float32)),
        *(sums, s, value_row, heads, last, width, CHANNELS, LEVELS, WIDTH, PRECISION),
    )
    store_tile(d_key, value_row, heads, count, row, width, d_left + d_right)
    tl.store(d_strength + value_row + place * heads, d_b, mask=place < count)
    d_s = k * (d_left - d_right)
    store_sums(d_sums, value_row, heads, count, width, d_s, CHANNELS)
