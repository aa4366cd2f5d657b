"""Sorts the choices of tokens by expert.

This is a counting sort in three steps without atomics: each block counts its choices per expert,
the counts are summed along the blocks, and each block writes its choices to their places. The sort
is stable (by expert, then by token), so the order is the same in every run. Shape legend: T tokens,
K experts chosen by each, E experts, P = T K places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels import cuda_library
from megaframe_kernels.device import ceil_div, launch, next_power_of_2
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_place

_CHOICES = 128
_TILE = 16384
_MOST_EXPERTS = 1024


@dataclass(frozen=True)
class ExpertOrder:
    """Where the choices of a batch go.

    Attributes:
        order_P: The choice (t K + k) at each place, int32.
        places_TK: The place of each choice, int32.
        ends_E: Where each expert's places end, int32; they begin where the previous expert's
            end.
    """

    order_P: Tensor
    places_TK: Tensor
    ends_E: Tensor


def run_reference_order(experts_TK: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort choices by expert, then by token.

    Args:
        experts_TK: Experts (0 .. count - 1) that tokens chose.
        count: Number of experts E.

    Returns:
        The fields of `ExpertOrder`: order [P], places [T, K] and ends [E], int32.
    """
    flat = experts_TK.reshape(-1).long()
    order = flat.argsort(stable=True)
    places = torch.empty_like(order)
    # places is the inverse permutation of order.
    places[order] = torch.arange(len(flat), device=flat.device)
    ends = torch.bincount(flat, minlength=count)[:count].cumsum(0)
    return order.int(), places.view(experts_TK.shape).int(), ends.int()


@triton.jit
def _count(
    experts: tl.tensor,
    counts: tl.tensor,
    choices: tl.tensor,
    count: tl.tensor,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """counts[e, block] = number of choices of expert e in this program's block."""
    choice = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    chosen = tl.load(experts + choice, mask=choice < choices, other=-1)
    expert = tl.arange(0, EXPERTS)
    is_expert = (chosen[:, None] == expert[None, :]).to(tl.int32)
    # By expert, then block: one running sum over all counts then gives every block's start.
    at = expert * tl.num_programs(0) + tl.program_id(0)
    tl.store(counts + at, tl.sum(is_expert, 0), mask=expert < count)


@triton.jit
def _place(
    experts: tl.tensor,
    along: tl.tensor,
    order: tl.tensor,
    places: tl.tensor,
    choices: tl.tensor,
    count: tl.tensor,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    """places[c] = start of the expert's choices in this block + rank of c among them;
    order[places[c]] = c."""
    choice = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    inside = choice < choices
    # -1 matches no expert.
    chosen = tl.load(experts + choice, mask=inside, other=-1)
    expert = tl.arange(0, EXPERTS)
    is_expert = (chosen[:, None] == expert[None, :]).to(tl.int32)
    at = expert * tl.num_programs(0) + tl.program_id(0)
    # The running sum up to the entry before is where this block's choices of the expert start.
    start = tl.load(along + at - 1, mask=(expert < count) & (at > 0), other=0)
    # How many earlier choices of the block have the same expert: ranks in order of choices, so the
    # sort is stable.
    before = tl.cumsum(is_expert, 0) - is_expert + start[None, :]
    # One column per row is 1, so the sum selects it.
    place = tl.sum(before * is_expert, 1)
    tl.store(places + choice, place, mask=inside)
    tl.store(order + place, choice, mask=inside & (chosen >= 0) & (chosen < count))


def launch_order(experts_TK: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `run_reference_order` in Triton."""
    flat = experts_TK.contiguous()
    choices = flat.numel()
    padded = next_power_of_2(max(count, 16))
    # A program holds a matrix of choices and experts, of at most _TILE elements.
    block = max(16, min(_CHOICES, _TILE // padded))
    blocks = max(ceil_div(choices, block), 1)
    # Counts are ordered by expert, then block, so running sums are where each block's choices end.
    counts = torch.empty(count, blocks, dtype=torch.int32, device=flat.device)
    tile = {"CHOICES": block, "EXPERTS": padded}
    launch(_count, (blocks,), flat, counts, choices, count, **tile)
    along = counts.view(-1).cumsum(0, dtype=torch.int32)
    # Zeros, because a choice of an expert that does not exist leaves a place at the end unused.
    order = torch.zeros(choices, dtype=torch.int32, device=flat.device)
    places = torch.empty_like(flat, dtype=torch.int32)
    launch(_place, (blocks,), flat, along, order, places, choices, count, **tile)
    # The running sum after an expert's last block is where its places end.
    ends = along.view(count, blocks)[:, -1].contiguous()
    return order, places, ends


def launch_order_cuda(experts_TK: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `run_reference_order` in CUDA C++."""
    flat = experts_TK.contiguous()
    blocks = cuda_library.count("megaframe_expert_order_blocks", flat.numel())
    # Zeros, because choices of an expert that does not exist are not written.
    order, places = flat.new_zeros(flat.numel()), torch.zeros_like(flat)
    ends, starts = flat.new_empty(count), flat.new_empty(blocks, count)
    # The library gets addresses only. `starts` is freed on return; torch reuses it only for later
    # work on the same stream, so the kernels still have it.
    outputs = (t.data_ptr() for t in (starts, order, places, ends))
    arguments = flat.data_ptr(), flat.numel(), count, *outputs
    cuda_library.call("megaframe_expert_order", flat, *arguments)
    return order, places, ends


_order_op = torch.library.custom_op("megaframe::expert_order", launch_order, mutates_args=())
_order_cuda_op = torch.library.custom_op(
    "megaframe::expert_order_cuda", launch_order_cuda, mutates_args=()
)


@_order_op.register_fake
@_order_cuda_op.register_fake
def _(experts_TK: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    def make_empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=experts_TK.device)

    return make_empty(experts_TK.numel()), make_empty(*experts_TK.shape), make_empty(count)


_direct_order = bypass_dispatcher(_order_op, launch_order)
_direct_order_cuda = bypass_dispatcher(_order_cuda_op, launch_order_cuda)


def _order_refuses(experts_TK: Tensor, count: int) -> str | None:
    if count > _MOST_EXPERTS:
        return f"{count} experts; it takes at most {_MOST_EXPERTS}"
    if experts_TK.dtype != torch.int32:
        return f"experts are {experts_TK.dtype}, not int32"
    return refuse_place(experts_TK)


def _refuse_for_cuda_order(experts_TK: Tensor, count: int) -> str | None:
    reason = _order_refuses(experts_TK, count)
    return reason or (None if experts_TK.is_cuda else "experts are not on a GPU")


ORDER = Kernel(
    "expert_order",
    run_reference_order,
    {
        "triton": Implementation("triton", _direct_order, require_nothing, _order_refuses),
        "cuda": Implementation(
            "cuda", _direct_order_cuda, cuda_library.explain_missing_library, _refuse_for_cuda_order
        ),
    },
)
