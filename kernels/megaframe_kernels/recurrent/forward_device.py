"""Device code of recurrent mixers, forward: first all chunks at once make what their tokens are to
each other, then each state passes its chunks in order.

`chunks_device.py` has the shape legend.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megaframe_kernels.device_math import multiply_add
from megaframe_kernels.recurrent.chunks_device import (
    add_to_state,
    find_pairs,
    invert,
    load_decays,
    load_documents,
    load_sums,
    load_tile,
    locate,
    multiply_decayed,
    read_state,
    store_tile,
)


@triton.jit
def prepare_chunks(
    query: tl.tensor,
    key: tl.tensor,
    strength: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    scores: tl.tensor,
    inverse: tl.tensor,
    length: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    CORRECTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Store the scores P of a chunk's tokens and, with CORRECTS, the inverse of their system,
    (I + A)^-1: P_tu = q_t k_u and A_tu = b_t k_t k_u, both decayed.

    Args:
        query: [B, S, G, K].
        key: [B, S, G, K].
        strength: b, [B, S, H].
        sums: Logarithms of decays from the start of each chunk, [B, S, H, F].
        documents: Of the tokens, [B, S].
        scores: Receives P, [B, H, C, L, L].
        inverse: Receives (I + A)^-1, likewise.
        length: S.
        heads: H.
        groups: G.
        width: K.
        CORRECTS: Whether tokens correct the state; otherwise they only add to it.
        CHANNELS: Whether F is K; otherwise 1.
        LEVELS: Such that L is 2^LEVELS.
        L: Tokens of a chunk.
        WIDTH: K, padded.
        PRECISION: Of products.
    """
    chunk = tl.program_id(1)
    value_row, key_row, count = locate(chunk, length, heads, groups, L)
    place, column = tl.arange(0, L), tl.arange(0, WIDTH)
    q = load_tile(query, key_row, groups, count, column, width, L)
    k = load_tile(key, key_row, groups, count, column, width, L)
    last = count - 1
    s = load_sums(sums, value_row, heads, place, last, width, CHANNELS, WIDTH)
    document, _, _ = load_documents(documents, chunk, length, heads, L)
    met = multiply_decayed(
        q, k, sums, s, value_row, heads, last, width, CHANNELS, LEVELS, WIDTH, PRECISION
    )
    met = tl.where(find_pairs(document, False), met, 0.0)
    square = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + chunk) * (L * L)
    square += place[:, None] * L + place[None, :]
    tl.store(scores + square, met.to(scores.dtype.element_ty))
    if CORRECTS:
        met = multiply_decayed(
            k, k, sums, s, value_row, heads, last, width, CHANNELS, LEVELS, WIDTH, PRECISION
        )
        b = tl.load(strength + value_row + place * heads, mask=place < count, other=0.0)
        system = tl.where(find_pairs(document, True), met, 0.0) * b[:, None]
        tl.store(inverse + square, invert(system, LEVELS, PRECISION).to(inverse.dtype.element_ty))


@triton.jit
def pass_chunks(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    strength: tl.tensor,
    sums: tl.tensor,
    documents: tl.tensor,
    initial: tl.tensor,
    scores: tl.tensor,
    inverse: tl.tensor,
    out: tl.tensor,
    corrections: tl.tensor,
    states: tl.tensor,
    final: tl.tensor,
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
    """Pass some columns of a state through its chunks: with the decays a_t since the chunk's start
    and a' until its end, C = (I + A)^-1 b (V - a K S), or V without corrections; O = a Q S + P C;
    S becomes a_L S + (a' K)^T C.

    Args:
        query: [B, S, G, K].
        key: [B, S, G, K].
        value: [B, S, H, V].
        strength: b, [B, S, H].
        sums: Logarithms of decays from the start of each chunk, [B, S, H, F].
        documents: Of the tokens, [B, S]; the state before them is of document 0.
        initial: The state before all tokens, fp32 [B, H, K, V], or None for 0.
        scores: P, [B, H, C, L, L].
        inverse: (I + A)^-1, likewise.
        out: Receives O, [B, S, H, V].
        corrections: Receives C, likewise.
        states: Receives the states before each chunk, [B, H, C, K, V].
        final: Receives the state after all tokens, fp32 [B, H, K, V].
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
    state = tl.zeros([WIDTH, COLUMNS], tl.float32)
    if initial is not None:
        state = load_tile(initial, head * width, 1, width, across, value_width, WIDTH)
    for chunk in range(chunks):
        value_row, key_row, count = locate(chunk, length, heads, groups, L)
        state_row = (head * chunks + chunk) * width
        store_tile(states, state_row, 1, width, across, value_width, state)
        q = load_tile(query, key_row, groups, count, row, width, L)
        k = load_tile(key, key_row, groups, count, row, width, L)
        c = load_tile(value, value_row, heads, count, across, value_width, L)
        document, newest, oldest = load_documents(documents, chunk, length, heads, L)
        _, before, after, left = load_decays(
            sums, document, newest, oldest, value_row, heads, count, width, CHANNELS, L, WIDTH
        )
        old = state.to(q.dtype)
        at = (head * chunks + chunk) * (L * L) + square
        if CORRECTS:
            b = tl.load(strength + value_row + place * heads, mask=place < count, other=0.0)
            wrong = c - read_state(k, old, before, CHANNELS, PRECISION)
            wrong = (wrong * b[:, None]).to(c.dtype)
            c = multiply_add(tl.load(inverse + at), wrong, None, PRECISION).to(c.dtype)
            store_tile(corrections, value_row, heads, count, across, value_width, c)
        o = read_state(q, old, before, CHANNELS, PRECISION)
        o = multiply_add(tl.load(scores + at), c, o, PRECISION)
        store_tile(out, value_row, heads, count, across, value_width, o)
        state = add_to_state(state * tl.trans(left), k, c, after, CHANNELS, PRECISION)
    store_tile(final, head * width, 1, width, across, value_width, state)
