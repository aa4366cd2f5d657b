"""Device code of recurrent mixers: what the tokens of a chunk are to each other and to the state.

All decays are exponentials of numbers at most 0: a pair of tokens decays by what is between them,
and where channels decay by themselves, the two tokens of a pair count from the middle of the block
of 2, 4, 8, ... tokens in whose halves they lie. So nothing overflows, however strong decays are.

Shape legend: B samples, S tokens, G key heads, H value heads, K and V their widths, C chunks, L
tokens of a chunk, F the channels that decay by themselves: K, or 1. In device code the last letters
stand for tiles, whose K is padded to WIDTH, and whose V is COLUMNS of the values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megaframe_kernels.device_math import multiply_add


@triton.jit
def locate(
    chunk: tl.tensor, length: tl.tensor, heads: tl.tensor, groups: tl.tensor, L: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return where the first row of a chunk is among those of value heads, and of key heads, and
    how many tokens it has. The first program id is a head of a sample."""
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    token = batch.to(tl.int64) * length + chunk * L
    key_row = token * groups + head // (heads // groups)
    return token * heads + head, key_row, tl.minimum(length - chunk * L, L)


@triton.jit
def load_tile(
    x: tl.tensor,
    row: tl.tensor,
    step: tl.tensor,
    count: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Return columns of some rows of x; 0 for rows from `count` on, and columns from `width` on.

    Args:
        x: Has rows of this width.
        row: Where the first one is, counted in rows.
        step: From row to row.
        count: Of rows.
        column: The columns.
        width: Of a row.
        ROWS: Of the tile.
    """
    place = tl.arange(0, ROWS)
    inside = (place < count)[:, None] & (column < width)[None, :]
    # One 64-bit base: registers hold offsets of 32 bits.
    offset = (place * (step * width))[:, None] + column[None, :]
    return tl.load(x + row * width + offset, mask=inside, other=0.0)


@triton.jit
def store_tile(
    x: tl.tensor,
    row: tl.tensor,
    step: tl.tensor,
    count: tl.tensor,
    column: tl.tensor,
    width: tl.tensor,
    tile: tl.tensor,
) -> None:
    """Store what `load_tile` would load."""
    place = tl.arange(0, tile.shape[0])
    inside = (place < count)[:, None] & (column < width)[None, :]
    offset = (place * (step * width))[:, None] + column[None, :]
    tl.store(x + row * width + offset, tile.to(x.dtype.element_ty), mask=inside)


@triton.jit
def load_sums(
    sums: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    place: tl.tensor,
    last: tl.tensor,
    width: tl.tensor,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Return the logarithms of decays from the chunk's start to some of its tokens, [places, F].
    Places after the last one have its numbers.

    Args:
        sums: [B, S, H, F].
        row: Where that of the chunk's first token is, counted in heads.
        heads: From token to token.
        place: Of the tokens in the chunk.
        last: The place of the last one.
        width: K.
        CHANNELS: Whether channels decay by themselves.
        WIDTH: K, padded.
    """
    offset = tl.minimum(place, last) * heads
    if CHANNELS:
        column = tl.arange(0, WIDTH)
        at = sums + row * width + ((offset * width)[:, None] + column[None, :])
        loaded = tl.load(at, mask=(column < width)[None, :], other=0.0)
    else:
        loaded = tl.load(sums + row + offset)[:, None]
    return loaded


@triton.jit
def load_documents(
    documents: tl.tensor, chunk: tl.tensor, length: tl.tensor, heads: tl.tensor, L: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the documents of a chunk's tokens, int32 [L], the last one, and that of the state
    before the chunk. Places after the last token are of none."""
    start = documents + (tl.program_id(0) // heads).to(tl.int64) * length + chunk * L
    count = tl.minimum(length - chunk * L, L)
    place = tl.arange(0, L)
    document = tl.load(start + place, mask=place < count, other=-1)
    # A piece begins in document 0, of which the state before it is.
    before = tl.load(start - 1, mask=chunk > 0, other=0)
    return document, tl.load(start + count - 1), before


@triton.jit
def load_decays(
    sums: tl.tensor,
    document: tl.tensor,
    newest: tl.tensor,
    oldest: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    CHANNELS: tl.constexpr,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return a chunk's logarithms of decays since its start, and the decays from its start to each
    token, from each token to its end, [L, F], and over all of it, [1, F]; 0 between documents.

    Args:
        sums: [B, S, H, F].
        document: As `load_documents` returned them, and so are the next two.
        newest: Of the last token.
        oldest: Of the state before the chunk.
        row: Where the sums of the first token are, counted in heads.
        heads: From token to token.
        count: Tokens of the chunk.
        width: K.
        CHANNELS: Whether channels decay by themselves.
        L: Tokens of a whole chunk.
        WIDTH: K, padded.
    """
    last = count - 1
    since = load_sums(sums, row, heads, tl.arange(0, L), last, width, CHANNELS, WIDTH)
    total = load_sums(sums, row, heads, last + tl.arange(0, 1), last, width, CHANNELS, WIDTH)
    before = tl.where((document == oldest)[:, None], tl.exp(since), 0.0)
    after = tl.where((document == newest)[:, None], tl.exp(total - since), 0.0)
    return since, before, after, tl.where(newest == oldest, tl.exp(total), 0.0)


@triton.jit
def store_sums(
    sums: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    tile_LK: tl.tensor,
    CHANNELS: tl.constexpr,
) -> None:
    """Store what `load_sums` would load, given it for each channel: where they decay as one, the
    sum over them."""
    if CHANNELS:
        column = tl.arange(0, tile_LK.shape[1])
        store_tile(sums, row, heads, count, column, width, tile_LK)
    else:
        place = tl.arange(0, tile_LK.shape[0])
        tl.store(sums + row + place * heads, tl.sum(tile_LK, 1), mask=place < count)


@triton.jit
def find_pairs(document_L: tl.tensor, STRICT: tl.constexpr) -> tl.tensor:
    """Return which tokens, in rows, see which: those of the same document up to themselves, or with
    STRICT before themselves, [L, L]."""
    place = tl.arange(0, document_L.shape[0])
    distance = place[:, None] - place[None, :]
    same = (document_L[:, None] == document_L[None, :]) & (document_L >= 0)[:, None]
    return same & (distance > 0) if STRICT else same & (distance >= 0)


@triton.jit
def find_halves(
    sums: tl.tensor,
    sums_LK: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    last: tl.tensor,
    width: tl.tensor,
    half: tl.tensor,
    WIDTH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """For blocks of 2 half tokens: return the decays from the middle to the tokens after it, and
    from those before it to the middle, [L, K], 0 for all others, and which tokens share a block."""
    place = tl.arange(0, sums_LK.shape[0])
    block, late = place // (2 * half), place % (2 * half) >= half
    middle = block * (2 * half) + half - 1
    middle_LK = load_sums(sums, row, heads, middle, last, width, True, WIDTH)
    after = tl.where(late[:, None], tl.exp(tl.minimum(sums_LK - middle_LK, 0.0)), 0.0)
    before = tl.where(late[:, None], 0.0, tl.exp(tl.minimum(middle_LK - sums_LK, 0.0)))
    return after, before, block[:, None] == block[None, :]


@triton.jit
def decay_pairs(sums_L1: tl.tensor) -> tl.tensor:
    """Return the decays from tokens, in columns, to tokens after them, [L, L]."""
    return tl.exp(tl.minimum(sums_L1 - tl.trans(sums_L1), 0.0))


@triton.jit
def multiply_decayed(
    left_LK: tl.tensor,
    right_LK: tl.tensor,
    sums: tl.tensor,
    sums_LF: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    last: tl.tensor,
    width: tl.tensor,
    CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return the products of each token's row with those of the tokens before it, and its own,
    decayed on the way, fp32 [L, L].

    Args:
        left_LK: Rows of the tokens that see.
        right_LK: Rows of those that are seen.
        sums: Logarithms of decays from the chunk's start, [B, S, H, F].
        sums_LF: Of this chunk.
        row: Where the sums of its first token are, counted in heads.
        heads: From token to token.
        last: The place of its last token.
        width: K.
        CHANNELS: Whether channels decay by themselves.
        LEVELS: Such that L is 2^LEVELS.
        WIDTH: K, padded.
        PRECISION: Of products.
    """
    if CHANNELS:
        place = tl.arange(0, left_LK.shape[0])
        own = tl.sum(left_LK.to(tl.float32) * right_LK.to(tl.float32), 1)
        met = tl.where(place[:, None] == place[None, :], own[:, None], 0.0)
        for level in range(LEVELS):
            after, before, shared = find_halves(
                sums, sums_LF, row, heads, last, width, 1 << level, WIDTH
            )
            late, early = (left_LK * after).to(left_LK.dtype), (right_LK * before).to(left_LK.dtype)
            met += tl.where(shared, multiply_add(late, tl.trans(early), None, PRECISION), 0.0)
    else:
        met = multiply_add(left_LK, tl.trans(right_LK), None, PRECISION) * decay_pairs(sums_LF)
    return met


@triton.jit
def differentiate_decayed(
    d_met_LL: tl.tensor,
    left_LK: tl.tensor,
    right_LK: tl.tensor,
    d_left_LK: tl.tensor,
    d_right_LK: tl.tensor,
    sums: tl.tensor,
    sums_LF: tl.tensor,
    row: tl.tensor,
    heads: tl.tensor,
    last: tl.tensor,
    width: tl.tensor,
    CHANNELS: tl.constexpr,
    LEVELS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the gradients of both sides of `multiply_decayed`, fp32 [L, K], added to what there
    is of them, apart from the products of tokens with themselves.

    Args:
        d_met_LL: Gradient of the products, 0 on the diagonal and where tokens do not see each
            other.
        left_LK: As for `multiply_decayed`, and so are those that are not named here.
        right_LK: As there.
        d_left_LK: What there is.
        d_right_LK: Likewise.
        sums: As there.
        sums_LF: As there.
        row: As there.
        heads: As there.
        last: As there.
        width: As there.
        CHANNELS: As there.
        LEVELS: As there.
        WIDTH: As there.
        PRECISION: As there.
    """
    if CHANNELS:
        for level in range(LEVELS):
            after, before, shared = find_halves(
                sums, sums_LF, row, heads, last, width, 1 << level, WIDTH
            )
            share = tl.where(shared, d_met_LL, 0.0).to(left_LK.dtype)
            early = (right_LK * before).to(left_LK.dtype)
            d_left_LK += after * multiply_add(share, early, None, PRECISION)
            late = (left_LK * after).to(left_LK.dtype)
            d_right_LK += before * multiply_add(tl.trans(share), late, None, PRECISION)
    else:
        share = (d_met_LL * decay_pairs(sums_LF)).to(left_LK.dtype)
        d_left_LK = multiply_add(share, right_LK, d_left_LK, PRECISION)
        d_right_LK = multiply_add(tl.trans(share), left_LK, d_right_LK, PRECISION)
    return d_left_LK, d_right_LK


@triton.jit
def read_state(
    x_LK: tl.tensor,
    state_KV: tl.tensor,
    decay_LF: tl.tensor,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return what rows read of a state that has decayed, fp32 [L, V]."""
    # Where a token has one decay, it multiplies the narrower side of the product.
    if CHANNELS:
        read = multiply_add((x_LK * decay_LF).to(x_LK.dtype), state_KV, None, PRECISION)
    else:
        read = multiply_add(x_LK, state_KV, None, PRECISION) * decay_LF
    return read


@triton.jit
def add_to_state(
    state_KV: tl.tensor,
    x_LK: tl.tensor,
    row_LV: tl.tensor,
    decay_LF: tl.tensor,
    CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Return a state to which rows have added rows, fp32 [K, V]: what `read_state` differentiates
    to."""
    if CHANNELS:
        keys = tl.trans((x_LK * decay_LF).to(x_LK.dtype))
        state_KV = multiply_add(keys, row_LV.to(x_LK.dtype), state_KV, PRECISION)
    else:
        row_LV = (row_LV * decay_LF).to(x_LK.dtype)
        state_KV = multiply_add(tl.trans(x_LK), row_LV, state_KV, PRECISION)
    return state_KV


@triton.jit
def invert(system_LL: tl.tensor, LEVELS: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """Return the inverse of I + A for a matrix A that is 0 on and above the diagonal, fp32 [L, L].

    The inverse of a block of two halves is that of each half, and between them minus their product
    around what is between them in A. So blocks of 2, 4, 8, ... rows follow from each other, without
    powers of A, which would grow and cancel.

    Args:
        system_LL: A, in fp32.
        LEVELS: Such that L is 2^LEVELS.
        PRECISION: Of products.
    """
    place = tl.arange(0, system_LL.shape[0])
    row, column = place[:, None], place[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for level in range(LEVELS):
        between = (row >> level + 1 == column >> level + 1) & (row >> level != column >> level)
        lower = tl.where(between, system_LL, 0.0)
        late = multiply_add(inverse, lower, None, PRECISION)
        inverse -= multiply_add(late, inverse, None, PRECISION)
    return inverse
