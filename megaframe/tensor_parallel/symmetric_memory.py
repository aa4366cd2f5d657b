"""PyTorch's fused products and transfers over symmetric memory: each NVIDIA GPU reads what it needs
from its neighbours' memory while it multiplies what it has.

These paths have not been run on GPUs, so `parallel.symmetric_memory` is off by default. The tests
check when the paths are chosen, that torch has the operators, and that the operands are passed
correctly: torch's own reference of both operators must give the result of the plain path.

Shape legend: R rows of one rank, T = ranks * R rows of all ranks, I inputs, O outputs.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megaframe.distributed.collectives import Group

CAPABILITY = (9, 0)
"""Minimum compute capability: that of the first GPUs whose NVLink reaches every neighbour."""


def is_available(group: Group, node_size: int) -> bool:
    """Return whether this group's products can be fused: its ranks must be on one node, use NCCL
    for other transfers, and have GPUs that are new enough and can access each other's memory. All
    ranks of the group get the same answer if their GPUs are alike."""
    if group.handle is None or group.host_staged or dist.get_backend(group.handle) != "nccl":
        return False
    import torch.distributed._symmetric_memory  # defines the operators

    own_device, ranks = torch.cuda.current_device(), range(torch.cuda.device_count())
    return (
        # One node: GPUs read each other's memory directly.
        len({rank // node_size for rank in group.ranks}) == 1
        and torch.cuda.get_device_capability() >= CAPABILITY
        and all(
            torch.cuda.can_device_access_peer(own_device, other)
            for other in ranks
            if other != own_device
        )
    )


def gather_and_multiply(x_RI: Tensor, right_IO: Tensor, group: Group) -> Tensor:
    """Gather the rows of all ranks and multiply them by `right`, [T, O].

    Args:
        x_RI: This rank's rows.
        right_IO: The right operand.
        group: The tensor ranks.
    """
    group.traffic.count(x_RI.nbytes * (group.size - 1))
    # return_A=False: the gathered rows are not kept, because the backward pass gathers them again.
    _, (y_TO,) = torch.ops.symm_mem.fused_all_gather_matmul(
        x_RI, [right_IO], 0, _name(group), return_A=False
    )
    return y_TO


def multiply_and_scatter(x_TI: Tensor, right_IO: Tensor, group: Group) -> Tensor:
    """Multiply x by `right` and sum over the ranks; the result is this rank's rows [R, O].

    Args:
        x_TI: Rows of all ranks, with this rank's part of the inner dim.
        right_IO: The right operand.
        group: The tensor ranks.
    """
    y_RO = torch.ops.symm_mem.fused_matmul_reduce_scatter(x_TI, right_IO, "sum", 0, _name(group))
    group.traffic.count(y_RO.nbytes * (group.size - 1))
    return y_RO


def _name(group: Group) -> str:
    assert group.handle is not None, "a group of one rank communicates nothing"
    return group.handle.group_name
