"""Collectives on parts of any sizes along the first dim."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.collectives import Group, Pending, collective, sum_into, to_each


def all_to_all_uneven(
    parts: Tensor, leaving: Sequence[int], coming: Sequence[int], group: Group
) -> Pending[Tensor]:
    """Exchange parts of any sizes: the first leaving[0] rows of `parts` go to rank 0 of the group,
    and so on. The first coming[0] rows of the result come from rank 0, and so on."""
    if group.handle is None:
        return Pending(parts)
    parts = parts.contiguous()
    out = parts.new_empty((sum(coming), *parts.shape[1:]))
    size = parts.nbytes // max(1, len(parts))
    group.traffic.count((len(parts) - leaving[group.index]) * size)
    group.begin_parts(parts, leaving, coming)
    return collective(
        out,
        group,
        lambda: dist.all_to_all_single(
            out, parts, list(coming), list(leaving), group.handle, async_op=True
        ),
        "all_to_all",
        uneven=True,
    )


def all_gather_uneven(tensor: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """Gather the tensors of all ranks, concatenated. That of rank i has sizes[i] rows."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    out = tensor.new_empty((sum(sizes), *tensor.shape[1:]))
    parts = list(out.split(list(sizes)))
    group.traffic.count(tensor.nbytes * (group.size - 1))
    if not group.in_pairs(tensor):
        return collective(
            out,
            group,
            lambda: dist.all_gather(parts, tensor, group.handle, async_op=True),
            "all_gather",
        )
    parts[group.index].copy_(tensor)
    return to_each(out, [tensor] * group.size, parts, group, kind="all_gather", like=out)


def reduce_scatter_uneven(tensor: Tensor, sizes: Sequence[int], group: Group) -> Pending[Tensor]:
    """Sum the tensors of all ranks; the result is this rank's part. The first sizes[0] rows belong
    to rank 0, and so on."""
    if group.handle is None:
        return Pending(tensor)
    tensor = tensor.contiguous()
    leaving = list(tensor.split(list(sizes)))
    own = leaving[group.index]
    out = torch.empty_like(own)
    group.traffic.count(tensor.nbytes - own.nbytes)
    if not group.in_pairs(tensor):
        return collective(
            out,
            group,
            lambda: dist.reduce_scatter(out, leaving, group=group.handle, async_op=True),
            "reduce_scatter",
            uneven=True,
        )
    coming = [torch.empty_like(own) for _ in leaving]
    coming[group.index] = own
    add = partial(sum_into, out, coming)
    return to_each(out, leaving, coming, group, add, kind="reduce_scatter", like=tensor)
