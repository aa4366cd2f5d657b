"""A tile of attention in matrix products of some heads and some of their queries at a time.

PyTorch's fused attention for CPUs spends most of its time on products of little tiles and on
exponentials that MKL makes one after another. Here all keys of a block of queries are scored at
once, few enough that the scores stay in cache between the passes over them, and what is raised is 2
(as in FlashAttention), for which torch has a vectorised routine. Scores are fp32 at least, and the
shares of the keys are rounded to the type of the values, as in the fused attention: 1.5 to 2 times
as fast (docs/log.md). Shape legend: B samples, Q queries, K keys, N query heads, G key/value heads,
D width of a query or key head, V of a value head; H heads of a block, P key/value heads of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megaframe.product import fast_bf16, products, wide_products

_SCORES = 1 << 20
"""Scores of a block, 4 MiB in fp32."""
_ROWS = 64, 256
"""Fewest and most queries of a block: products of fewer are slow, more find no room in cache."""
_PIECES = 4
"""Blocks of a tile at least, where they are not too short: of a causal one's scores, nobody sees
one of as many."""
_ENOUGH = 1 << 20
"""Scores of a head from which on fp32, whose products are no faster here, wins by its passes."""
_LOG2_E = math.log2(math.e)


def pays(query_BNQD: Tensor, key_BGKD: Tensor) -> bool:
    """Whether this is faster than the fused attention, on a CPU."""
    if query_BNQD.dtype is torch.bfloat16:
        return fast_bf16()
    return query_BNQD.dtype is torch.float32 and query_BNQD.shape[2] * key_BGKD.shape[2] >= _ENOUGH


def attend(
    query_BNQD: Tensor, key_BGKD: Tensor, value_BGKV: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, N, Q, V] and log-sum-exp [B, N, Q]."""
    batch, heads, queries, _ = query_BNQD.shape
    wide = torch.promote_types(query_BNQD.dtype, torch.float32)
    out = query_BNQD.new_empty(batch, queries, heads, value_BGKV.shape[3]).transpose(1, 2)
    lse = query_BNQD.new_empty(batch, heads, queries, dtype=wide)
    for some, shared in _heads(query_BNQD, key_BGKD):
        query_HQD = query_BNQD[some].flatten(0, 1)
        key_HDK = _for_each(key_BGKD[shared], query_HQD).mT
        value_HKV = _for_each(value_BGKV[shared], query_HQD)
        shape = out[some].shape[:2]
        for rows, seen in _blocks(queries, key_BGKD.shape[2], causal):
            scores = wide_products(query_HQD[:, rows], key_HDK[..., seen]).mul_(scale * _LOG2_E)
            if causal:
                size = rows.stop - rows.start
                scores[..., -size:] += scores.new_full((size, size), -math.inf).triu_(1)
            top = scores.amax(-1, keepdim=True)
            shares = scores.sub_(top).exp2_()
            total = shares.sum(-1, keepdim=True)
            made = products(shares.to(value_HKV.dtype), value_HKV[:, seen]) / total
            out[some][:, :, rows] = made.unflatten(0, shape)
            lse[some][:, :, rows] = ((top + total.log2()) / _LOG2_E).view(*shape, -1)
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
    """Gradients of queries [B, N, Q, D], keys [B, G, K, D] and values [B, G, K, V]. With shares p
    and dp = d_out v^T: dv = p^T d_out, ds = scale p (dp - sum(d_out out)), dq = ds k, dk = ds^T q.
    """
    dtype, wide = query_BNQD.dtype, lse_BNQ.dtype
    d_query = torch.empty_like(query_BNQD)
    d_key, d_value = (torch.zeros_like(x, dtype=wide) for x in (key_BGKD, value_BGKV))
    for some, shared in _heads(query_BNQD, key_BGKD):
        query_HQD, d_out_HQV = (x[some].flatten(0, 1) for x in (query_BNQD, d_out_BNQV))
        key_HKD = _for_each(key_BGKD[shared], query_HQD)
        value_HKV = _for_each(value_BGKV[shared], query_HQD)
        key_HDK = key_HKD.mT.contiguous()
        lse2_HQ = lse_BNQ[some].flatten(0, 1) * _LOG2_E
        mean_HQ = torch.linalg.vecdot(d_out_HQV.to(wide), out_BNQV[some].flatten(0, 1).to(wide))
        d_key_HKD, d_value_HKV = (torch.zeros_like(x, dtype=wide) for x in (key_HKD, value_HKV))
        for rows, seen in _blocks(query_BNQD.shape[2], key_BGKD.shape[2], causal):
            # Keys by queries, which spares three products a transposed operand.
            shares = wide_products(key_HKD[:, seen], query_HQD[:, rows].mT).mul_(scale * _LOG2_E)
            shares.sub_(lse2_HQ[:, None, rows]).exp2_()
            if causal:
                shares[:, rows.start - rows.stop :].triu_()
            d_scores = wide_products(value_HKV[:, seen], d_out_HQV[:, rows].mT)
            d_scores = d_scores.sub_(mean_HQ[:, None, rows]).mul_(shares).to(dtype)
            d_value_HKV[:, seen] += products(shares.to(dtype), d_out_HQV[:, rows])
            d_key_HKD[:, seen] += products(d_scores, query_HQD[:, rows])
            made = products(key_HDK[..., seen], d_scores).mT * scale
            d_query[some][:, :, rows] = made.unflatten(0, d_query[some].shape[:2])
        d_key[shared] += _of_each(d_key_HKD, d_key[shared]) * scale
        d_value[shared] += _of_each(d_value_HKV, d_value[shared])
    return d_query, d_key.to(dtype), d_value.to(dtype)


def _heads(
    query_BNQD: Tensor, key_BGKD: Tensor
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Samples and query heads, as many as a block has room for, and the same samples with the
    key/value heads that those share: of several samples all, of one some groups or a part of
    one."""
    samples, heads, queries, _ = query_BNQD.shape
    groups, keys = key_BGKD.shape[1:3]
    members = heads // groups
    room = max(1, _SCORES // (_rows(queries, keys) * keys))
    together = min(groups, max(1, room // members))
    size = min(room, together * members)
    many = max(1, room // heads)
    for first in range(0, samples, many):
        piece = slice(first, first + many)
        for group in range(0, groups, together):
            shared = slice(group, min(group + together, groups))
            for start in range(group * members, shared.stop * members, size):
                stop = min(start + size, shared.stop * members)
                yield (piece, slice(start, stop)), (piece, shared)


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that they see."""
    step = _rows(queries, keys)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        yield slice(start, stop), slice(0, stop if causal else keys)


def _rows(queries: int, keys: int) -> int:
    """Queries of a block."""
    least, most = _ROWS
    return max(least, min(most, _SCORES // keys, queries // _PIECES))


def _for_each(shared_BPKW: Tensor, query_HQD: Tensor) -> Tensor:
    """Of key/value heads [B, P, K, W] the one of each query head, [H, K, W]."""
    shared_PKW = shared_BPKW.flatten(0, 1)
    return shared_PKW.repeat_interleave(len(query_HQD) // len(shared_PKW), 0)


def _of_each(gradient_HKW: Tensor, shared_BPKW: Tensor) -> Tensor:
    """The sum of what query heads give to the key/value heads that they share, [B, P, K, W]."""
    return gradient_HKW.unflatten(0, (*shared_BPKW.shape[:2], -1)).sum(2)
