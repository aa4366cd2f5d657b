"""Memory that a run allocates on one rank, by kind, before it runs.

Exact for what megaframe itself keeps; the interpreter, torch and the temporaries of single
operations come on top.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megaframe.config.model import Model
from megaframe.config.schema import Optim, Parallel, RunConfig
from megaframe.plan.experts import has_experts
from megaframe.plan.room import CHUNK, ROOMS, moment_width, moments, passing_width, state_width
from megaframe.plan.stages import StagePlan, head_widths, latent_width
from megaframe.schedule import Action, Kind

WIDTH = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a value or an activation, by `train.precision`."""


_ON_THEIR_WAY = 3
"""Parts of a stage whose gradients are whole at a time."""


def most_logits(*, host: bool) -> int:
    """Logits that exist at once at most. On the host fewer make fp32 products slower (docs/log.md);
    the products of a GPU want many rows of few words."""
    return 12_900_000 if host else 1 << 28


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. weights: in master precision. values: what the model computes with beside
    them. gradients: with what compression has not sent of them. activations: what the backward of
    the microbatches in flight needs. logits: the chunk. messages: on their way between stages.
    rooms: for gradients that arrive, on a CPU, and for what comes from the host's memory.
    checkpoint: the copy that is written, where that is in the same memory. temporaries: of single
    operations. overhead: what the device's software takes for itself, and what its allocator cannot
    use. host: what is kept in the host's memory, where that is another."""

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
        """Those of the device by name."""
        return {kind: size for kind, size in asdict(self).items() if kind != "host"}

    @property
    def total(self) -> int:
        """Sum of all kinds on the device."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Held:
    """Parameters of one rank, undivided by ZeRO. vectors: all gains and biases. blocks: of each
    part of a block, attention and what comes after it, the matrices that tensor ranks divide.
    tables: each embedding table, and the head. experts: the matrices of experts in each part, 0
    where there are none. whole: those that all `tensor` ranks have; shared: those that each
    `copies` neighbours of them have."""

    vectors: int
    blocks: tuple[int, ...]
    tables: tuple[int, ...]
    experts: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    tensor: int = 1
    copies: int = 1

    @property
    def dense(self) -> int:
        """All but the experts."""
        return self.vectors + sum((*self.blocks, *self.tables, *self.whole, *self.shared))

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + sum(self.experts)

    @property
    def ends(self) -> int:
        """Those that are no matrices of blocks."""
        return self.vectors + sum(self.tables)

    def own(self, ranks: int, expert_ranks: int) -> int:
        """What is left of them where `ranks` ranks divide a copy, and `expert_ranks` experts."""
        divided = self.vectors + sum(self.blocks) + sum(self.tables)
        return (
            -(-divided // ranks)
            + -(-sum(self.whole) // (ranks * self.tensor))
            + -(-sum(self.shared) // (ranks * self.copies))
            + -(-sum(self.experts) // expert_ranks)
        )

    def largest(self, ranks: int, expert_ranks: int) -> int:
        """Of one bucket at most, where so many ranks divide a copy."""
        dense = max(self.vectors, *self.blocks, *self.tables, *self.whole, *self.shared)
        return max(-(-dense // ranks), -(-max(self.experts, default=0) // expert_ranks))

    @property
    def lent_values(self) -> int:
        """The buffers that hold whole values where ZeRO divides them: those of two blocks that
        follow each other, and one for each size of table."""
        of_parts = (self.blocks, self.experts, self.whole, self.shared)
        return sum(map(_in_use, of_parts)) + sum(set(self.tables))

    def parts(self, config: RunConfig, plans: Sequence[StagePlan]) -> dict[int, list[list[int]]]:
        """Of each of these stages, which are the rank's, the parts in the order of a backward pass,
        and of each part the sizes of its buckets."""
        rows = [*zip(self.blocks, self.experts, self.whole, self.shared, strict=True)]
        sizes = [[size for size in row if size] for row in rows]
        found, start = {}, 0
        for plan in plans:
            stop = start + 2 * len(plan.blocks)
            found[plan.number], start = sizes[start:stop][::-1], stop
            if plan.first:
                learned = config.model.position == "learned"
                found[plan.number].append([*self.tables[: 1 + learned]])
        for plan in plans:
            if plan.last:
                ahead = sizes[start:][::-1]  # the predictors, which look tokens up
                ends = [[self.tables[0]], *ahead, *([[self.tables[0]]] if ahead else [])]
                found[plan.number] = ends + found[plan.number]
        return found


def _in_use(sizes: Sequence[int], last: int = 4) -> int:
    """Buffers of these sizes, one after the other, of which so many last ones are in use at a time:
    those of two blocks have four parts."""
    windows = [sizes[i : i + last] for i in range(max(1, len(sizes) - last + 1))]
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
    """Memory of a rank that has the parameters `held`, of which `ranks` ranks share one copy, and
    `expert_ranks` one of the experts, and runs the stages of `plans`, in the order of its
    `actions`. host: it is the host's, where transfers need room of their own and checkpoints are
    copied."""
    width = WIDTH[config.train.precision]
    master = max(4, width)
    stage = config.parallel.zero
    own = held.own(ranks, expert_ranks) if stage else held.total
    ends = -(-held.ends // ranks) if stage else held.ends
    values = held.vectors + held.lent_values if stage == 3 else held.total
    if width == master:  # then the own weights are among the values, but for what is only lent
        values -= -(-held.vectors // ranks) if stage == 3 else own
    gradients = held.total
    if stage >= 2:
        lent = _lent_gradients(held.parts(config, plans), actions)
        gradients = held.vectors + lent + own - held.vectors // ranks
    unsent = _unsent(config.parallel, held, ranks, expert_ranks)
    gradients += unsent
    tokens = config.train.microbatch * config.train.seq
    tensor = config.parallel.tensor
    vocab = -(-(config.model.vocab or 0) // tensor)
    chunk = min(tokens, max(1, most_logits(host=host) // max(1, vocab)))
    state = state_bytes(config.optim, own, ends, master)
    away = config.optim.offload and not host
    rounded = away and width < master  # then what weights are rounded to is kept here instead
    if rounded and stage == 3:
        values += own
    rooms = _rooms(held, ranks, expert_ranks, stage) * master if host else 0
    if away:
        most = held.largest(ranks, expert_ranks) if stage else held.largest(1, 1)
        rooms += math.ceil(
            ROOMS * min(CHUNK, most) * passing_width(config.optim, master, weights=rounded)
        )
    # Tokens are dealt to the context ranks; rows, heads and widths to the tensor ranks.
    dealt = tensor * config.parallel.context
    kept, messages = _activations(config, plans, actions)
    saved = 0
    if host and config.checkpoint.every:
        alone = held.own(ranks, expert_ranks)
        ends = -(-held.ends // ranks)
        saved = (alone + unsent) * master
        saved += state_bytes(config.optim, alone, ends, master, saved=True)
    return Memory(
        weights=0 if rounded else own * master,
        values=values * width,
        gradients=gradients * master,
        optimizer=0 if away else state,
        activations=kept // dealt,
        logits=chunk * vocab * width if any(plan.last for plan in plans) else 0,
        messages=messages // dealt,
        rooms=rooms,
        checkpoint=saved,
        temporaries=max(
            2 * tokens * widest(config) * width // dealt,
            chunk * vocab * width if any(plan.last for plan in plans) else 0,
        ),
        host=(own * master if rounded else 0) + (state if away else 0),
    )


def _lent_gradients(parts: Mapping[int, list[list[int]]], actions: Sequence[Action]) -> int:
    """Elements of the buffers that hold whole gradients where ZeRO divides them: of the part that
    is computed, and of the two before it, which are still on their way."""
    split = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.W}
    order = [
        action.stage
        for action in actions
        if action.stage is not None
        and action.kind is (Kind.W if (action.stage, action.microbatch) in split else Kind.B)
    ]
    most: Counter[int] = Counter()
    for stages in {tuple(order[at : at + _ON_THEIR_WAY]) for at in range(len(order))}:
        behind = [part for stage in stages for part in parts[stage]]
        for at in range(len(behind)):
            window = behind[at : at + _ON_THEIR_WAY]
            if all(part is window[0] for part in window):
                window = window[:2]  # what has one part alone waits for that of the pass before
            most |= Counter(size for part in window for size in part)
    return sum(size * count for size, count in most.items())


def widest(config: RunConfig) -> int:
    """Elements of a token in the widest place of a block, which backward makes twice beside what is
    kept."""
    model = config.model
    if model.emulate is not None:
        return model.hidden
    up = 2 if model.activation == "swiglu" else 1
    moe = model.moe
    experts = 0 if moe is None else (moe.top_k + moe.shared) * (moe.ffn or model.ffn)
    return max(up * model.ffn, up * experts)


def _rooms(held: Held, ranks: int, expert_ranks: int, stage: int) -> int:
    """Elements of the buffers into which the other ranks' parts of gradients come."""
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
    # One part is still on its way when the next one starts.
    rest = others((*held.tables, held.vectors), ranks)
    return sum(_in_use(sizes, 2) for sizes in parts) + sum(set(rest))


def _unsent(parallel: Parallel, held: Held, ranks: int, expert_ranks: int) -> int:
    """Elements of what compression hands on from step to step: of all matrices what a rank sends,
    which between replicas is its own part."""
    if parallel.compress == "none":
        return 0
    if parallel.data_replicate > 1:
        return held.own(ranks, expert_ranks) - held.vectors // ranks
    sent = (
        (ranks, (*held.blocks, *held.tables)),
        (ranks * held.tensor, held.whole),
        (ranks * held.copies, held.shared),
        (expert_ranks, held.experts),
    )
    return sum(sum(sizes) for among, sizes in sent if among > 1)


def state_bytes(optim: Optim, own: int, ends: int, master: int, *, saved: bool = False) -> int:
    """Bytes that the optimizer remembers of so many parameters, of which `ends` are no matrices of
    blocks; saved: as a checkpoint has them, which knows no blocks of numbers."""
    moment = 4.0 if saved and optim.state == "int8" else moment_width(optim, master)
    total = own * (moments(optim) * moment + (master if optim.ema is not None else 0))
    if optim.name == "muon":  # what is no matrix is AdamW's
        total += ends * (2 - moments(optim)) * moment
    return math.ceil(total)


def away_width(optim: Optim, precision: str) -> float:
    """Bytes of each element that the host keeps (`optim.offload`): its state, under Muon that of
    matrices, and the weight in master precision where the model computes with another."""
    width = WIDTH[precision]
    master = max(4, width)
    return state_width(optim, master) + (master if width < master else 0)


def _activations(
    config: RunConfig, plans: Sequence[StagePlan], actions: Sequence[Action]
) -> tuple[int, int]:
    """Most bytes kept between forward and backward at any time, and, where a block runs again,
    everything of that one; and how much more are messages, from the posting of a receive to the end
    of its consumer and from a producer to its send."""
    size = {plan.number: _stage_bytes(config, plan) for plan in plans}
    stream = config.train.microbatch * config.train.seq * config.model.hidden
    stream *= WIDTH[config.train.precision]
    split = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.W}
    sent = {(a.kind, a.stage, a.microbatch) for a in actions if a.kind in _SENDS}
    kept = waiting = most = together = 0
    arriving: set[tuple[Kind, int | None, int | None]] = set()
    for action in actions:
        kind, stage, number = action.kind, action.stage, action.microbatch
        if stage is None:
            continue
        if kind is Kind.F:
            kept += size[stage]
        elif kind is (Kind.W if (stage, number) in split else Kind.B):
            kept -= size[stage]
        if kind in _RECEIVED:
            waiting += stream
            arriving.add((_RECEIVED[kind], stage, number))
        elif (kind, stage, number) in arriving:
            waiting -= stream
        if kind in _SENDS:
            waiting -= stream
        elif (_SENT.get(kind), stage, number) in sent:
            waiting += stream
        most, together = max(most, kept), max(together, kept + waiting)
    again = [
        block_bytes(config, layer) for plan in plans for layer in plan.blocks[: plan.recomputed]
    ]
    if config.train.recompute == "full" and any(plan.last for plan in plans):
        again += [predictor_bytes(config, index) for index in range(config.model.mtp_depth)]
    brought = 0
    if config.train.offload and again:  # the one in use and the one that comes before it
        tokens = config.train.microbatch * config.train.seq
        brought = min(2, len(again)) * tokens * config.model.hidden * WIDTH[config.train.precision]
    return most + max(again, default=0) + brought, together - most


_SENT = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
_SENDS = (Kind.SEND_F, Kind.SEND_B)
_RECEIVED = {Kind.RECV_F: Kind.F, Kind.RECV_B: Kind.B}


def _stage_bytes(config: RunConfig, plan: StagePlan) -> int:
    """Bytes that a stage keeps of one microbatch: each block's input, all else of the blocks that
    do not run again, the tables of rotation, and for each depth the head's input with its gradient,
    and all else of the predictors."""
    tokens = config.train.microbatch * config.train.seq
    stream = tokens * config.model.hidden * WIDTH[config.train.precision]
    whole = sum(block_bytes(config, layer) for layer in plan.blocks[plan.recomputed :])
    depth = config.model.mtp_depth * plan.last
    streams = len(plan.blocks) + 2 * (plan.last + depth)
    if config.train.offload:
        streams -= plan.recomputed  # which are in the host's memory
    # Every tensor rank has the tables of rotation, all of them.
    whole += config.parallel.tensor * rotary_bytes(config)
    predictors = depth * tokens * _norm_bytes(config)
    if config.train.recompute != "full":
        predictors += sum(predictor_bytes(config, index) for index in range(depth))
    return streams * stream + whole + predictors


def rotary_bytes(config: RunConfig) -> int:
    """Bytes of the cosines and sines of a microbatch, which are alike for all of its samples."""
    model = config.model
    if model.position != "rotary" or model.emulate is not None:
        return 0
    width = model.rotary_fraction * model.head_dim
    if model.latent is not None:
        width = model.latent.rotary_dim
    return config.train.seq * round(width) * WIDTH[config.train.precision]


def predictor_bytes(config: RunConfig, index: int) -> int:
    """Bytes that a predictor keeps of a microbatch beside the stream that it starts from: that
    after the norm of the depth before, the embeddings ahead, both normalised, what they are joined
    into, and all that its block and three norms keep."""
    tokens = config.train.microbatch * config.train.seq
    streams = 5 * config.model.hidden * WIDTH[config.train.precision]
    block = block_bytes(config, config.model.layers + index)
    return block + tokens * (streams + 3 * _norm_bytes(config))


def _norm_bytes(config: RunConfig) -> int:
    """Statistics that a norm keeps of a token: one in at least fp32, or the two of layernorm, which
    on a CPU are as wide as a value."""
    width = WIDTH[config.train.precision]
    return 2 * width if config.model.norm == "layernorm" else max(4, width)


def block_bytes(config: RunConfig, layer: int) -> int:
    """Bytes that one block keeps of a microbatch beside its input.

    What attention keeps, the stream between attention and MLP, and the MLP before its activation;
    unless they are computed again, also both norms' outputs with their statistics, and the MLP
    after its activation. Statistics are in at least fp32, but for those of layernorm on a CPU. Of
    experts as if all were equally busy, and without what their routes take.
    """
    model, width = config.model, WIDTH[config.train.precision]
    tokens = config.train.microbatch * config.train.seq
    selective = config.train.recompute == "selective"
    if model.latent is None:
        elements, statistics = _attention_keeps(model, max(model.kv_heads, config.parallel.tensor))
    else:
        elements, statistics = _latent_attention_keeps(model, selective)
    experts = model.moe is not None and has_experts(model.moe, layer)
    norms = (0 if selective else 1) + (experts or not selective)
    elements += (1 + norms) * model.hidden
    if model.norm == "layernorm":
        elements += 2 * norms
    else:
        statistics += norms
    size = elements * width + statistics * max(4, width)
    up = 2 if model.activation == "swiglu" else 1
    inner = up + (not selective)
    size += _expert_bytes(config, up, inner) if experts else inner * model.ffn * width
    return tokens * size


def _expert_bytes(config: RunConfig, up: int, inner: int) -> int:
    """Bytes that experts and their router keep of a token beside what it normalises. up, inner:
    times that an expert and a shared one keep their inner width."""
    model, width = config.model, WIDTH[config.train.precision]
    moe = model.moe
    assert moe is not None
    of_one = moe.ffn or model.ffn
    parallel = config.parallel
    copies = parallel.expert_tensor  # each of these has the rows of all, and part of a width
    arrive = moe.top_k * copies
    if parallel.expert * copies == 1:
        arrive = 0  # experts pick from the rows that are normalised
    elif parallel.dispatch == "all_gather" and copies == 1:
        arrive = parallel.expert
    elements = arrive * model.hidden + moe.top_k * (copies + up * of_one)
    elements += moe.shared * inner * of_one
    if moe.jitter:
        elements += 2 * model.hidden
    balanced = moe.balance_loss > 0 and moe.balance != "none"
    scores = moe.experts * (1 + balanced) + balanced
    scores += (moe.top_k + 2) * moe.normalise + (moe.z_loss > 0)
    return elements * width + scores * max(4, width) + 8 * moe.top_k + balanced


def _attention_keeps(model: Model, groups: int) -> tuple[int, int]:
    """Elements and statistics of a token: queries, keys and values of so many groups, the output
    with one log-sum-exp a head, and of queries and keys what was before their norms."""
    queries = model.heads * model.head_dim
    qkv = queries + 2 * groups * model.head_dim
    elements, statistics = qkv + queries, model.heads
    if model.qk_norm:
        elements += qkv
        statistics += model.heads + groups
    elif model.position != "rotary" and 1 < model.kv_heads < model.heads:
        elements += queries
    return elements, statistics


def _latent_attention_keeps(model: Model, selective: bool) -> tuple[int, int]:
    """The same; of the latents too, and unless they are computed again those that are normalised,
    with a statistic each."""
    latent = model.latent
    assert latent is not None
    elements = latent_width(latent) + 2 * model.heads * sum(head_widths(model))
    statistics = model.heads
    if not selective:
        elements += latent_width(latent) - latent.rotary_dim
        statistics += 1 + (latent.query_rank is not None)
    return elements, statistics
