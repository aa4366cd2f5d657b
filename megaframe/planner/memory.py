"""Memory of one rank, by kind, computed before the run.

It is exact for what megaframe itself keeps. The interpreter, torch and the temporaries of single
operations come on top.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from megaframe.architecture.buckets import Blocks, bucket_blocks
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
from megaframe.planner.activations import activations
from megaframe.schedule import Action
from megaframe.schedule.zero_buffers import Bucket, StageUnits, Unit, lent


@dataclass(frozen=True)
class Memory:
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


@dataclass(frozen=True)
class Held:
    """Numbers of parameters of one rank, before ZeRO divides them.

    `blocks`, `experts`, `whole` and `shared` have an entry for each part of a block: attention, and
    the late part after it. vectors: all gains and biases. blocks: the matrices that tensor ranks
    divide. tables: each embedding table, and the head. experts: the matrices of experts, 0 where
    there are none. whole: the matrices that all `tensor` ranks have whole. shared: the matrices
    that groups of `copies` neighbouring tensor ranks have in common. positions: the table of
    positions, which is whole on all tensor ranks as well.
    """

    vectors: int
    blocks: tuple[int, ...]
    tables: tuple[int, ...]
    experts: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    positions: int = 0
    tensor: int = 1
    copies: int = 1

    @property
    def dense(self) -> int:
        """Number of parameters outside the experts."""
        matrices = (*self.blocks, *self.tables, *self.whole, *self.shared)
        return self.vectors + sum(matrices) + self.positions

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.dense + sum(self.experts)

    @property
    def ends(self) -> int:
        """Number of parameters that are not matrices of blocks."""
        return self.vectors + sum(self.tables) + self.positions

    def own_ends(self, ranks: int) -> int:
        """Return the number of `ends` in a rank's own part where `ranks` ranks divide a copy."""
        positions = -(-self.positions // (ranks * self.tensor))
        return -(-(self.vectors + sum(self.tables)) // ranks) + positions

    def own(self, ranks: int, expert_ranks: int) -> int:
        """Return the number of parameters in a rank's own part, where `ranks` ranks divide a copy
        of the dense parameters and `expert_ranks` ranks one of the experts."""
        divided = self.vectors + sum(self.blocks) + sum(self.tables)
        return (
            -(-divided // ranks)
            + -(-(sum(self.whole) + self.positions) // (ranks * self.tensor))
            + -(-sum(self.shared) // (ranks * self.copies))
            + -(-sum(self.experts) // expert_ranks)
        )

    def largest(self, ranks: int, expert_ranks: int) -> int:
        """Return the largest size of a rank's own part of one bucket; arguments as in `own`."""
        tables = (*self.tables, self.positions)
        dense = max(self.vectors, *self.blocks, *tables, *self.whole, *self.shared)
        return max(-(-dense // ranks), -(-max(self.experts, default=0) // expert_ranks))

    @property
    def _parts(self) -> list[tuple[int, ...]]:
        """The elements of each kind of matrices, for each part of a block."""
        return [*zip(self.blocks, self.experts, self.whole, self.shared, strict=True)]

    def blocks_together(self, config: RunConfig, plans: Sequence[StagePlan]) -> list[Blocks]:
        """Return which of the rank's blocks, counted over its stages, share buckets."""
        halves = [sum(sizes) for sizes in self._parts]
        sizes = [*zip(halves[1::2], halves[::2], strict=True)]
        least, start, found = config.parallel.bucket_size, 0, []
        for plan in plans:
            here = sizes[start : start + len(plan.blocks)]
            for of in bucket_blocks(here, 1 if least == "auto" else least):
                found.append(Blocks(start + of.start, start + of.stop, of.halves))
            start += len(plan.blocks)
        return found

    @property
    def of_blocks(self) -> list[int]:
        """The elements of the matrices of each block."""
        halves = [sum(sizes) for sizes in self._parts]
        return [rest + late for rest, late in zip(halves[::2], halves[1::2], strict=True)]

    def in_buckets(self, config: RunConfig, plans: Sequence[StagePlan]) -> Held:
        """Return the same parameters with an entry for each bucket instead of each part of a block.
        plans: the stages of this rank."""
        parts, found, stop = self._parts, [], 0
        for of in self.blocks_together(config, plans):
            stop = 2 * of.stop
            here = parts[2 * of.start : stop]
            found += here if of.halves else [_summed(here)]
        blocks, experts, whole, shared = (
            zip(*found, *parts[stop:], strict=True) if parts else ((),) * 4
        )
        return replace(self, blocks=blocks, experts=experts, whole=whole, shared=shared)

    def units(self, config: RunConfig, plans: Sequence[StagePlan]) -> dict[int, StageUnits]:
        """Return the units of each stage with their buckets. plans: the stages of this rank."""
        parts = self._parts
        blocks: list[Unit] = []
        for of in self.blocks_together(config, plans):
            number = 2 * of.start
            if of.halves:
                late, rest = (
                    _buckets(number + 1, parts[number + 1]),
                    _buckets(number, parts[number]),
                )
                blocks.append(Unit(late, rest))
                continue
            together = _buckets(number, _summed(parts[number : 2 * of.stop]))
            blocks += [
                Unit(rest=together, ends=block == of.start) for block in range(of.start, of.stop)
            ]
        for number in range(2 * len(blocks), len(parts), 2):
            late, rest = _buckets(number + 1, parts[number + 1]), _buckets(number, parts[number])
            blocks.append(Unit(late, rest))
        tables = _buckets(-1, self.tables)
        tokens, tied = tables[:1], config.model.tie_embeddings
        first = any(plan.first for plan in plans)
        layers = sum(len(plan.blocks) for plan in plans)
        # The first user of the token table reduces it: the embedding, a predictor, or a tied head.
        predictors = [replace(unit, tables=tokens) for unit in blocks[layers:]]
        if predictors and not first:
            predictors[0] = replace(predictors[0], own=tokens)
        used = tokens if tied else tables[-1:]
        head = Unit(tables=used, own=() if tied and (first or predictors) else used)
        embeddings = tokens + _buckets(-2, [self.positions])
        embedding = Unit(tables=embeddings, own=embeddings)
        found, start = {}, 0
        for plan in plans:
            stop = start + len(plan.blocks)
            here, start = (*blocks[start:stop], *(predictors if plan.last else ())), stop
            found[plan.number] = StageUnits(
                embedding if plan.first else None, here, head if plan.last else None
            )
        return found


def _buckets(part: int, sizes: Sequence[int]) -> tuple[Bucket, ...]:
    """Return the buckets of part number `part` of a rank; sizes: its elements of each kind."""
    return tuple(Bucket((part, kind), size) for kind, size in enumerate(sizes) if size)


def _summed(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the elements of each kind in all of these parts."""
    return tuple(map(sum, zip(*parts, strict=True)))


def _in_use(sizes: Sequence[int]) -> int:
    """Return the elements of the buffers that serve requests of these sizes in order, where two
    consecutive requests are active at a time and a buffer serves requests of its own size only."""
    windows = [sizes[i : i + 2] for i in range(max(1, len(sizes) - 1))]
    return sum(size * max(window.count(size) for window in windows) for size in set(sizes))


def memory(
    config: RunConfig,
    held: Held,
    ranks: int,
    plans: Sequence[StagePlan],
    actions: Sequence[Action],
    expert_ranks: int = 1,
    *,
    host: bool = False,
) -> Memory:
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
        lent_values, lent_gradients = lent(
            held.units(config, plans),
            actions,
            _transfers(config.parallel),
            values=stage == 3,
            alike=width == master,
        )
        gradients = held.vectors + lent_gradients + own - held.vectors // ranks
        values = held.vectors + lent_values if stage == 3 else values
    # With one precision the own weights are part of the whole values; lent values are apart.
    if width == master:
        values -= -(-held.vectors // ranks) if stage == 3 else own
    unsent = _unsent(config.parallel, held, ranks, expert_ranks)
    gradients += unsent
    tokens = config.train.microbatch * config.train.seq
    tensor = config.parallel.tensor
    vocab = -(-(config.model.vocab or 0) // tensor)
    chunk = min(tokens, max(1, max_logits_per_chunk(host=host) // max(1, vocab)))
    state = state_bytes(config.optim, own, ends, master)
    away = config.optim.offload and not host
    rounded = away and width < master  # weights are on the host, rounded values on the device
    if rounded and stage == 3:
        values += own
    rooms = 0
    if host:
        rooms = _rooms(held.in_buckets(config, plans), ranks, expert_ranks, stage) * master
    if away:
        dealt = (ranks, expert_ranks) if stage else (1, 1)
        most = held.in_buckets(config, plans).largest(*dealt)
        width_on_device = offload_bytes_per_element(config.optim, master, weights=rounded)
        rooms += math.ceil(OFFLOAD_BUFFERS * min(OFFLOAD_CHUNK, most) * width_on_device)
    # Context ranks divide the tokens; tensor ranks divide rows, heads and widths.
    divided = tensor * config.parallel.context
    kept, messages = activations(config, plans, actions)
    saved = 0
    if host and config.checkpoint.every:
        alone = held.own(ranks, expert_ranks)
        ends = held.own_ends(ranks)
        saved = (alone + unsent) * master
        saved += state_bytes(config.optim, alone, ends, master, saved=True)
    return Memory(
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
            2 * tokens * widest(config) * width // divided,
            chunk * vocab * width if any(plan.last for plan in plans) else 0,
        ),
        host=(own * master if rounded else 0) + (state if away else 0),
    )


def _transfers(parallel: ParallelConfig) -> int:
    """Return how many consecutive transfers a reduction takes until a rank has its part."""
    return 2 if parallel.compress == "powersgd" and parallel.data_replicate == 1 else 1


def widest(config: RunConfig) -> int:
    """Return the elements per token at the widest place of a block. Backward has two such tensors
    on top of the kept activations."""
    model = config.model
    if model.emulate is not None:
        return model.hidden
    up = 2 if model.activation == "swiglu" else 1
    moe = model.moe
    experts = 0 if moe is None else (moe.top_k + moe.shared) * (moe.ffn or model.ffn)
    return max(up * model.ffn, up * experts)


def _rooms(held: Held, ranks: int, expert_ranks: int, stage: int) -> int:
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
    return sum(map(_in_use, parts)) + sum(set(rest))


def _unsent(parallel: ParallelConfig, held: Held, ranks: int, expert_ranks: int) -> int:
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


def state_bytes(
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


def away_width(optim: OptimConfig, precision: str) -> float:
    """Return the bytes per element that the host keeps under `optim.offload`: its state (under Muon
    that of matrices), and the weight in master precision if the model computes in another one."""
    width = WIDTH[precision]
    master = max(4, width)
    return state_bytes_per_element(optim, master) + (master if width < master else 0)
