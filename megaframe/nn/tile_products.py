"""A tile of attention in matrix products of one head and some of its queries at a time.

PyTorch's fused attention for CPUs multiplies by the routine that `product.py` avoids, at less than
half of what the processor can do. Here all keys of a block of queries are scored at once, by the
fast routine, and the block is short enough that its scores stay in cache between the passes over
them: 1.2 to 1.4 times as fast (docs/log.md), where there is enough to multiply. Shape legend: B
samples, Q queries, K keys, N query heads, G key/value heads, D width of a query or key
head, V of a value head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megaframe.product import product

_SCORES = 1 << 19
"""Scores of a block, 2 MiB."""
_ROWS = 64, 256
"""Fewest and most queries of a block: products of fewer are slow, more find no room in cache."""
_ENOUGH = 1 << 19
"""Scores of a head, from which on calling the products costs little beside them."""


def pays(query_BNQD: Tensor, key_BGKD: Tensor) -> bool:
    """Whether this is faster than the fused attention: for fp32 on one thread, in large tiles."""
    enough = query_BNQD.shape[2] * key_BGKD.shape[2] >= _ENOUGH
    return query_BNQD.dtype is torch.float32 and torch.get_num_threads() == 1 and enough


def attend(
    query_BNQD: Tensor, key_BGKD: Tensor, value_BGKV: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, N, Q, V] and log-sum-exp [B, N, Q]."""
    batch, heads, queries, _ = query_BNQD.shape
    out = query_BNQD.new_empty(batch, queries, heads, value_BGKV.shape[3]).transpose(1, 2)
    lse = query_BNQD.new_empty(batch, heads, queries)
    for sample, group, members in _groups(query_BNQD, key_BGKD):
        key, value = key_BGKD[sample, group].contiguous(), value_BGKV[sample, group].contiguous()
        for head in members:
            for rows, seen in _blocks(queries, len(key), causal):
                scores = product(query_BNQD[sample, head, rows] * scale, key[seen].t())
                if causal:
                    size = rows.stop - rows.start
                    later = torch.ones(size, size, dtype=torch.bool).triu_(1)
                    scores[:, -size:].masked_fill_(later, -math.inf)
                top = scores.amax(-1, keepdim=True)
                total = scores.sub_(top).exp_().sum(-1, keepdim=True)
                out[sample, head, rows] = product(scores, value[seen]).div_(total)
                lse[sample, head, rows] = (top + total.log()).squeeze(-1)
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
    d_query = torch.empty_like(query_BNQD)
    d_key, d_value = torch.zeros_like(key_BGKD), torch.zeros_like(value_BGKV)
    mean_BNQ = torch.linalg.vecdot(d_out_BNQV, out_BNQV)
    for sample, group, members in _groups(query_BNQD, key_BGKD):
        key, value = key_BGKD[sample, group].contiguous(), value_BGKV[sample, group].contiguous()
        key_DK = key.t().contiguous()
        for head in members:
            for rows, seen in _blocks(query_BNQD.shape[2], len(key), causal):
                query = query_BNQD[sample, head, rows] * scale
                d_out = d_out_BNQV[sample, head, rows].contiguous()
                # Keys by queries: what differs by query is then the bias of a product.
                shares = product(key[seen], query.t(), -lse_BNQ[sample, head, rows]).exp_()
                if causal:
                    shares[-len(query) :].triu_()
                d_scores = product(value[seen], d_out.t(), -mean_BNQ[sample, head, rows])
                d_scores.mul_(shares)
                d_value[sample, group, seen] += product(shares, d_out)
                d_key[sample, group, seen] += product(d_scores, query)
                d_query[sample, head, rows] = product(key_DK[:, seen], d_scores).t().mul_(scale)
    return d_query, d_key, d_value


def _groups(query: Tensor, key: Tensor) -> Iterator[tuple[int, int, range]]:
    """Each sample and key/value head, with the query heads that share it."""
    members = query.shape[1] // key.shape[1]
    for sample in range(query.shape[0]):
        for group in range(key.shape[1]):
            yield sample, group, range(group * members, (group + 1) * members)


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that they see."""
    least, most = _ROWS
    step = max(least, min(most, _SCORES // keys))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        yield slice(start, stop), slice(0, stop if causal else keys)
