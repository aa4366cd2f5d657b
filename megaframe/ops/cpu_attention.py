"""A tile of attention as matrix products, over some heads and some of their queries at a time.

PyTorch's fused attention for CPUs spends most of its time on products of small tiles and on
exponentials that MKL computes one at a time. Here all keys are scored against a block of queries at
once, few enough that the scores stay in cache between passes over them. Exponentials are powers of
2 (as in FlashAttention), for which torch has a vectorised routine. Scores are in at least fp32, and
the attention weights are rounded to the type of the values, as in the fused attention. This is 1.5
to 2 times as fast (docs/log.md).

Shape legend: B samples, Q queries, K keys, N query heads, G key/value heads, D width of a query or
key head, V width of a value head; H query heads of a block (over its samples), P key/value heads of
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from megaframe.ops.matmul import multiply_batched, multiply_batched_wide

_SCORES_PER_BLOCK = 1 << 20
"""Scores of a block: 4 MiB in fp32. With half or twice as many, attention takes 4% less to 9% more
time (benchmarks/cpu/cache_constants.py)."""
_QUERIES_PER_BLOCK = 64, 256
"""Fewest and most queries of a block. Products with fewer are slow; more do not fit in cache. Half
or twice as many take 5% less to 13% more time."""
_MIN_BLOCKS = 4
"""Least number of blocks of a tile, unless they would be too short. Of the scores of a causal tile
with n blocks, about one in n is computed for nothing."""
_LONG_SCORES = 1 << 20
"""Scores of a head from which a problem is long."""
_LOG2_E = math.log2(math.e)

AttentionSize = Literal["short", "long"]
"""Of attention: with less than `_LONG_SCORES` scores per head, or with more."""
AttentionMethod = Literal["fused", "blocks"]
"""fused: torch's fused attention for CPUs. blocks: the functions of this module."""
SIZES: tuple[AttentionSize, ...] = get_args(AttentionSize)
_method_of: dict[tuple[torch.dtype, AttentionSize], AttentionMethod] = {}


def list_methods(dtype: torch.dtype) -> tuple[AttentionMethod, ...]:
    """Return the methods for operands of a type, torch's own first. In other types than fp32 and
    bf16 the exponentials here would be as narrow as the operands, or nothing is gained."""
    return get_args(AttentionMethod) if dtype in (torch.float32, torch.bfloat16) else ("fused",)


def get_default_method(dtype: torch.dtype, size: AttentionSize) -> AttentionMethod:
    """Return the method to take where nothing was measured. In fp32 the products of blocks are no
    faster than the fused ones, but the passes over the scores are; in bf16 both are."""
    blocks = dtype is torch.bfloat16 or (dtype is torch.float32 and size == "long")
    return "blocks" if blocks else "fused"


def use_methods(dtype: torch.dtype, methods: Mapping[AttentionSize, AttentionMethod]) -> None:
    """Compute attention of operands of a type on the CPU by these methods from now on in this
    process; by `get_default_method` where none is given."""
    for size in SIZES:
        _method_of[dtype, size] = methods.get(size) or get_default_method(dtype, size)


def get_methods_in_use(dtype: torch.dtype) -> dict[AttentionSize, AttentionMethod]:
    """Return the method for operands of a type on the CPU, by size of the problem."""
    return {
        size: _method_of.get((dtype, size)) or get_default_method(dtype, size) for size in SIZES
    }


def is_faster(query_BNQD: Tensor, key_BGKD: Tensor) -> bool:
    """Return whether this is faster on a CPU than the fused attention."""
    size: AttentionSize = (
        "long" if query_BNQD.shape[2] * key_BGKD.shape[2] >= _LONG_SCORES else "short"
    )
    return get_methods_in_use(query_BNQD.dtype)[size] == "blocks"


def attend(
    query_BNQD: Tensor, key_BGKD: Tensor, value_BGKV: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention of a tile in blocks.

    Args:
        query_BNQD: The queries, [B, N, Q, D].
        key_BGKD: The keys, [B, G, K, D].
        value_BGKV: The values, [B, G, K, V].
        causal: With as many queries as keys, each query sees itself and what is before it.
        scale: Factor on the scores.

    Returns:
        The output [B, N, Q, V] and the log-sum-exp [B, N, Q]; the latter is in at least fp32.
    """
    batch, heads, queries, _ = query_BNQD.shape
    wide = torch.promote_types(query_BNQD.dtype, torch.float32)
    # Tokens first in memory, so that the caller's transpose back gives a contiguous tensor.
    out = query_BNQD.new_empty(batch, queries, heads, value_BGKV.shape[3]).transpose(1, 2)
    lse = query_BNQD.new_empty(batch, heads, queries, dtype=wide)
    for block, shared in _iterate_head_blocks(query_BNQD, key_BGKD):
        query_HQD = query_BNQD[block].flatten(0, 1)
        key_HDK = _expand_heads(key_BGKD[shared], query_HQD).mT
        value_HKV = _expand_heads(value_BGKV[shared], query_HQD)
        shape = out[block].shape[:2]
        for rows, visible in _iterate_query_blocks(queries, key_BGKD.shape[2], causal):
            scores = multiply_batched_wide(query_HQD[:, rows], key_HDK[..., visible]).mul_(
                scale * _LOG2_E
            )
            if causal:
                # Only the last square of a block is on the diagonal; all keys before it are
                # visible.
                size = rows.stop - rows.start
                scores[..., -size:] += scores.new_full((size, size), -math.inf).triu_(1)
            # The largest score becomes 2^0, so no power overflows.
            top = scores.amax(-1, keepdim=True)
            # In place: scores are few enough to stay in cache between these passes.
            shares = scores.sub_(top).exp2_()
            total = shares.sum(-1, keepdim=True)
            # Divided after the product, whose result has V columns where the weights have K.
            result = multiply_batched(shares.to(value_HKV.dtype), value_HKV[:, visible]) / total
            out[block][:, :, rows] = result.unflatten(0, shape)
            # Back from powers of 2 to natural logarithms.
            lse[block][:, :, rows] = ((top + total.log2()) / _LOG2_E).view(*shape, -1)
    return out, lse


def attend_backward(
    d_out_BNQV: Tensor,
    query_BNQD: Tensor,
    key_BGKD: Tensor,
    value_BGKV: Tensor,
    out_BNQV: Tensor,
    lse_BNQ: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a tile adds to gradients, in blocks.

    With weights p and dp = d_out v^T: dv = p^T d_out, ds = scale p (dp - sum(d_out out)), dq =
    ds k, dk = ds^T q.

    Args:
        d_out_BNQV: Gradient of the output, [B, N, Q, V].
        query_BNQD: The queries, [B, N, Q, D].
        key_BGKD: The keys, [B, G, K, D].
        value_BGKV: The values, [B, G, K, V].
        out_BNQV: The output merged over all tiles, [B, N, Q, V].
        lse_BNQ: The log-sum-exp merged over all tiles, [B, N, Q].
        causal: With as many queries as keys, each query sees itself and what is before it.
        scale: Factor on the scores.

    Returns:
        The gradients of queries [B, N, Q, D], keys [B, G, K, D] and values [B, G, K, V].
    """
    dtype, wide = query_BNQD.dtype, lse_BNQ.dtype
    d_query = torch.empty_like(query_BNQD)
    # Sums over blocks of queries and over query heads are in at least fp32, and rounded once at the
    # end.
    d_key, d_value = (torch.zeros_like(x, dtype=wide) for x in (key_BGKD, value_BGKV))
    for block, shared in _iterate_head_blocks(query_BNQD, key_BGKD):
        query_HQD, d_out_HQV = (x[block].flatten(0, 1) for x in (query_BNQD, d_out_BNQV))
        key_HKD = _expand_heads(key_BGKD[shared], query_HQD)
        value_HKV = _expand_heads(value_BGKV[shared], query_HQD)
        # Transposed once for all blocks of queries.
        key_HDK = key_HKD.mT.contiguous()
        # Scores are multiples of log2(e), and so must be what is subtracted.
        lse2_HQ = lse_BNQ[block].flatten(0, 1) * _LOG2_E
        # sum(d_out out) equals sum(p dp) over all keys, of other tiles as well.
        mean_HQ = torch.linalg.vecdot(d_out_HQV.to(wide), out_BNQV[block].flatten(0, 1).to(wide))
        d_key_HKD, d_value_HKV = (torch.zeros_like(x, dtype=wide) for x in (key_HKD, value_HKV))
        for rows, visible in _iterate_query_blocks(query_BNQD.shape[2], key_BGKD.shape[2], causal):
            # Scores are keys by queries here, so three products need no transposed operand.
            shares = multiply_batched_wide(key_HKD[:, visible], query_HQD[:, rows].mT).mul_(
                scale * _LOG2_E
            )
            shares.sub_(lse2_HQ[:, None, rows]).exp2_()
            if causal:
                # Keys are rows here, so the visible part of the diagonal square is the upper
                # triangle.
                shares[:, rows.start - rows.stop :].triu_()
            d_scores = multiply_batched_wide(value_HKV[:, visible], d_out_HQV[:, rows].mT)
            # Rounded for the products only; they are taken of operands of one type.
            d_scores = d_scores.sub_(mean_HQ[:, None, rows]).mul_(shares).to(dtype)
            d_value_HKV[:, visible] += multiply_batched(shares.to(dtype), d_out_HQV[:, rows])
            d_key_HKD[:, visible] += multiply_batched(d_scores, query_HQD[:, rows])
            # The scale is applied to the results, which are smaller than the scores.
            result = multiply_batched(key_HDK[..., visible], d_scores).mT * scale
            d_query[block][:, :, rows] = result.unflatten(0, d_query[block].shape[:2])
        d_key[shared] += _sum_shared_heads(d_key_HKD, d_key[shared]) * scale
        d_value[shared] += _sum_shared_heads(d_value_HKV, d_value[shared])
    return d_query, d_key.to(dtype), d_value.to(dtype)


def _iterate_head_blocks(
    query_BNQD: Tensor, key_BGKD: Tensor
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Yield the samples and query heads of each block, and the same samples with the key/value
    heads that these use. A block has as many as it has room for: all heads of several samples, or,
    of one sample, some groups or a part of one group."""
    samples, heads, queries, _ = query_BNQD.shape
    groups, keys = key_BGKD.shape[1:3]
    members = heads // groups
    most_heads = max(1, _SCORES_PER_BLOCK // (_count_queries_per_block(queries, keys) * keys))
    groups_per_block = min(groups, max(1, most_heads // members))
    size = min(most_heads, groups_per_block * members)
    samples_per_block = max(1, most_heads // heads)
    for first in range(0, samples, samples_per_block):
        piece = slice(first, first + samples_per_block)
        for group in range(0, groups, groups_per_block):
            shared = slice(group, min(group + groups_per_block, groups))
            for start in range(group * members, shared.stop * members, size):
                stop = min(start + size, shared.stop * members)
                yield (piece, slice(start, stop)), (piece, shared)


def _iterate_query_blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries with the keys that they see."""
    step = _count_queries_per_block(queries, keys)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        yield slice(start, stop), slice(0, stop if causal else keys)


def _count_queries_per_block(queries: int, keys: int) -> int:
    """Return the number of queries of a block."""
    least, most = _QUERIES_PER_BLOCK
    return max(least, min(most, _SCORES_PER_BLOCK // keys, queries // _MIN_BLOCKS))


def _expand_heads(shared_BPKW: Tensor, query_HQD: Tensor) -> Tensor:
    """Expand key/value heads [B, P, K, W] to one for each query head, [H, K, W]."""
    shared_PKW = shared_BPKW.flatten(0, 1)
    return shared_PKW.repeat_interleave(len(query_HQD) // len(shared_PKW), 0)


def _sum_shared_heads(gradient_HKW: Tensor, shared_BPKW: Tensor) -> Tensor:
    """Sum the gradients of query heads over those that share a key/value head, [B, P, K, W]."""
    return gradient_HKW.unflatten(0, (*shared_BPKW.shape[:2], -1)).sum(2)
