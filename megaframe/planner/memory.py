"""Memory of one rank, by kind, computed before the run.

It is exact for what megaframe itself keeps. The interpreter, torch and the temporaries of single
operations come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from megaframe.architecture.optimizer_state import (
    OFFLOAD_BUFFERS,
    OFFLOAD_CHUNK,
    moment_bytes,
    num_moments,
    offload_bytes_per_element,
    state_bytes_per_element,
)
from megaframe.architecture.output_head import max_logits_per_chunk
from megaframe.architecture.stages import StagePlan
from megaframe.config.schema import OptimConfig, ParallelConfig, RunConfig
from megaframe.hardware.chips import WIDTH
from megaframe.layout import Layout
from megaframe.planner.activations import peak_activations
from megaframe.planner.parameter_counts import RankParameters, count_parameters
from megaframe.schedule import Action, Schedule
from megaframe.schedule.zero_buffers import peak_zero_buffers


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank, by kind.

    weights: in master precision. values: what the model computes with, where it is not the weights
    themselves. gradients: including what compression has not sent yet. activations: what the
    backward passes of the microbatches in flight need. logits: one chunk. messages: in transit
    between stages. rooms: buffers for arriving gradients on a CPU, and for offloaded data on its
    way through the device. checkpoint: the copy that is being written, where it is in the same
    memory. temporaries: of single operations. overhead: what the device's software takes, and what
    its allocator cannot use. host: what is kept in host memory, where the device has its own.
    """

    weights: int
    values: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    messages: int = 0
    rooms: int = 0
    checkpoint: int = 0
    temporaries: int = 0
    overhead: int = 0
    host: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes on the device by kind, so without `host`."""
        return {kind: size for kind, size in asdict(self).items() if kind != "host"}

    @property
    def total(self) -> int:
        """Sum of all kinds on the device."""
        return sum(self.kinds.values())


def _buffer_elements(sizes: Sequence[int]) -> int:
    """Return the elements of the buffers that serve requests of these sizes in order, where two
    consecutive requests are active at a time and a buffer serves requests of its own size only."""
    windows = [sizes[i : i + 2] for i in range(max(1, len(sizes) - 1))]
    return sum(size * max(window.count(size) for window in windows) for size in set(sizes))


def compute_memory(
    config: RunConfig,
    held: RankParameters,
    ranks: int,
    plans: Sequence[StagePlan],
    actions: Sequence[Action],
    expert_ranks: int = 1,
    *,
    host: bool = False,
) -> RankMemory:
    """Return the memory of one rank.

    held: its parameters. ranks: how many ranks share one copy of the dense ones. expert_ranks: how
    many share one copy of the experts. plans: the stages that it runs. actions: its list, in order.
    host: whether the device is the host, where transfers need buffers and checkpoints are copied in
    the same memory.
    """
    width = WIDTH[config.train.precision]
    master = max(4, width)
    stage = config.parallel.zero
    own = held.own(ranks, expert_ranks) if stage else held.total
    ends = held.own_ends(ranks) if stage else held.ends
    values, gradients = held.total, held.total
    if stage >= 2:
        lent_values, lent_gradients = peak_zero_buffers(
            held.units(config, plans),
            actions,
            _num_transfers(config.parallel),
            values=stage == 3,
            same_dtype=width == master,
        )
        gradients = held.vectors + lent_gradients + own - held.vectors // ranks
        values = held.vectors + lent_values if stage == 3 else values
    # With one precision the own weights are part of the whole values; peak_zero_buffers values are
    # apart.
    if width == master:
        values -= -(-held.vectors // ranks) if stage == 3 else own
    unsent = _residual_elements(config.parallel, held, ranks, expert_ranks)
    gradients += unsent
    tokens = config.train.microbatch * config.train.seq
    tensor = config.parallel.tensor
    vocab = -(-(config.model.vocab or 0) // tensor)
    chunk = min(tokens, max(1, max_logits_per_chunk(host=host) // max(1, vocab)))
    state = optimizer_state_bytes(config.optim, own, ends, master)
    away = config.optim.offload and not host
    rounded = away and width < master  # weights are on the host, rounded values on the device
    if rounded and stage == 3:
        values += own
    rooms = 0
    if host:
        rooms = (
            _receive_buffer_elements(held.in_buckets(config, plans), ranks, expert_ranks, stage)
            * master
        )
    if away:
        dealt = (ranks, expert_ranks) if stage else (1, 1)
        most = held.in_buckets(config, plans).largest(*dealt)
        width_on_device = offload_bytes_per_element(config.optim, master, weights=rounded)
        rooms += math.ceil(OFFLOAD_BUFFERS * min(OFFLOAD_CHUNK, most) * width_on_device)
    # Context ranks divide the tokens; tensor ranks divide rows, heads and widths.
    divided = tensor * config.parallel.context
    kept, messages = peak_activations(config, plans, actions)
    saved = 0
    if host and config.checkpoint.every:
        alone = held.own(ranks, expert_ranks)
        ends = held.own_ends(ranks)
        saved = (alone + unsent) * master
        saved += optimizer_state_bytes(config.optim, alone, ends, master, saved=True)
    return RankMemory(
        weights=0 if rounded else own * master,
        values=values * width,
        gradients=gradients * master,
        optimizer=0 if away else state,
        activations=kept // divided,
        logits=chunk * vocab * width if any(plan.last for plan in plans) else 0,
        messages=messages // divided,
        rooms=rooms,
        checkpoint=saved,
        temporaries=max(
            2 * tokens * max_width_per_token(config) * width // divided,
            chunk * vocab * width if any(plan.last for plan in plans) else 0,
        ),
        host=(own * master if rounded else 0) + (state if away else 0),
    )


def _num_transfers(parallel: ParallelConfig) -> int:
    """Return how many consecutive transfers a reduction takes until a rank has its part."""
    return 2 if parallel.compress == "powersgd" and parallel.data_replicate == 1 else 1


def max_width_per_token(config: RunConfig) -> int:
    """Return the elements per token at the widest place of a block. Backward has two such tensors
    on top of the kept activations."""
    model = config.model
    if model.emulate is not None:
        return model.hidden
    up = 2 if model.activation == "swiglu" else 1
    moe = model.moe
    experts = 0 if moe is None else (moe.top_k + moe.shared) * (moe.ffn or model.ffn)
    return max(up * model.ffn, up * experts)


def _receive_buffer_elements(
    held: RankParameters, ranks: int, expert_ranks: int, stage: int
) -> int:
    """Return the elements of the buffers that receive the other ranks' parts of gradients."""
    if not stage:
        return 0

    def others(sizes: Sequence[int], among: int) -> list[int]:
        return [size - size // among for size in sizes]

    parts = (
        others(held.blocks, ranks),
        others(held.experts, expert_ranks),
        others(held.whole, ranks * held.tensor),
        others(held.shared, ranks * held.copies),
    )
    # One part is still in transit when the next one starts.
    rest = others((*held.tables, held.vectors), ranks)
    rest += others((held.positions,), ranks * held.tensor)
    return sum(map(_buffer_elements, parts)) + sum(set(rest))


def _residual_elements(
    parallel: ParallelConfig, held: RankParameters, ranks: int, expert_ranks: int
) -> int:
    """Return the elements of the residuals that compression carries from step to step: one for each
    element of a matrix that a rank sends. Between replicas it sends only its own part."""
    if parallel.compress == "none":
        return 0
    if parallel.data_replicate > 1:
        return held.own(ranks, expert_ranks) - held.vectors // ranks
    sent = (
        (ranks, (*held.blocks, *held.tables)),
        (ranks * held.tensor, (*held.whole, held.positions)),
        (ranks * held.copies, held.shared),
        (expert_ranks, held.experts),
    )
    return sum(sum(sizes) for among, sizes in sent if among > 1)


def optimizer_state_bytes(
    optim: OptimConfig, own: int, ends: int, master: int, *, saved: bool = False
) -> int:
    """Return the bytes of optimizer state of `own` parameters, `ends` of which are not matrices of
    blocks.

    master: bytes of an element in master precision. saved: as in a checkpoint, which stores 8-bit
    blocks as fp32.
    """
    moment = 4.0 if saved and optim.state == "int8" else moment_bytes(optim, master)
    total = own * (num_moments(optim) * moment + (master if optim.ema is not None else 0))
    if optim.name == "muon":  # AdamW updates what is not a matrix
        total += ends * (2 - num_moments(optim)) * moment
    return math.ceil(total)


def host_bytes_per_element(optim: OptimConfig, precision: str) -> float:
    """Return the bytes per element that the host keeps under `optim.offload`: its state (under Muon
    that of matrices), and the weight in master precision if the model computes in another one."""
    width = WIDTH[precision]
    master = max(4, width)
    return state_bytes_per_element(optim, master) + (master if width < master else 0)


def compute_rank_memory(
    config: RunConfig,
    layout: Layout,
    plans: Sequence[StagePlan],
    schedule: Schedule,
    rank: int,
    *,
    host: bool = False,
) -> RankMemory:
    """Return the memory of the first of the ranks with pipeline coordinate `rank`.

    plans: all stages. schedule: if it is not lowered, messages are not counted. host: as in
    `compute_memory`.
    """
    here = [plans[stage] for stage in schedule.stages(rank)]
    return compute_memory(
        config,
        count_parameters(config, layout, here),
        layout.data_shard * layout.context,
        here,
        schedule.ranks[rank],
        layout.expert_shard,
        host=host,
    )
