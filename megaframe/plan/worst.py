"""Room: whether a layout fits into a device's memory, exactly for one and at once for many.

Of many at once the ends of the pipeline are counted, as if all stages had as many blocks as the
fullest. A device that is the host has rooms for transfers and a checkpoint's copy as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.layout import Layout
from megaframe.plan.candidates import SCHEDULES
from megaframe.plan.chips import Chip
from megaframe.plan.division import division
from megaframe.plan.experts import has_experts
from megaframe.plan.held import held, rank_memory
from megaframe.plan.memory import (
    WIDTH,
    Memory,
    block_bytes,
    most_logits,
    rotary_bytes,
    widest,
)
from megaframe.plan.room import room, state_width
from megaframe.plan.sizes import RECOMPUTE, Sizes
from megaframe.plan.stages import StagePlan, stage_plans
from megaframe.schedule import Schedule, lower

Array = np.ndarray[Any, Any]
_MANY = 32
"""Pipeline ranks up to which all are looked at; of more only the ends and the middle."""


def worst_memory(config: RunConfig, layout: Layout, schedule: Schedule, chip: Chip) -> Memory:
    """Memory of the rank that needs most. schedule: that of a step."""
    plans, lowered, many = stage_plans(config), lower(schedule), len(schedule.ranks)
    ranks = range(many) if many <= _MANY else (0, 1, many // 2, many - 2, many - 1)
    host = chip.is_host
    found = (rank_memory(config, layout, plans, lowered, rank, host=host) for rank in ranks)
    worst = max(found, key=lambda one: one.total)
    return replace(worst, overhead=round(overhead(chip)))


def overhead(chip: Chip) -> float:
    """Bytes of a chip that no run can have."""
    return chip.memory - room(chip)


def by_kind(of: Memory) -> dict[str, int]:
    """Bytes of each kind on the device that there is any of."""
    return {kind: size for kind, size in of.kinds.items() if size}


def memory_bytes(config: RunConfig, chip: Chip, c: Sizes, schedule: Array) -> Array:
    """Bytes of the rank that needs most, for each candidate: that of the first or of the last
    stage, as if all stages had as many blocks as the fullest. schedule: indices into `SCHEDULES`.
    Within a few percent of `worst_memory`, which says what fits in the end."""
    of = _Blocks(config, c)
    v_shaped = np.isin(schedule, _V_SHAPED)
    first = _end_bytes(config, chip, _End(c, of, live_stages(c, schedule, True), True, v_shaped))
    last = _End(c, of, live_stages(c, schedule, False), False, v_shaped)
    return np.maximum(first, _end_bytes(config, chip, last))


@dataclass(frozen=True)
class _End:
    """The rank with the first stage, or that with the last. live: stages of microbatches whose
    activations it holds at most. v_shaped: where it has both stages."""

    c: Sizes
    of: _Blocks
    live: Array
    first: bool
    v_shaped: Array


class _Blocks:
    """Of each candidate the elements of one block of each kind, and the bytes that it keeps of a
    sample; looked up, because few sizes decide about them."""

    def __init__(self, config: RunConfig, c: Sizes) -> None:
        model = config.model
        kinds = [model.moe is not None and has_experts(model.moe, n) for n in range(model.layers)]
        self.layers = {kind: kinds.index(kind) for kind in set(kinds)}
        self.number = {kind: kinds.count(kind) for kind in self.layers}
        keys = np.stack([c.tensor, c.expert, c.expert_tensor, c.recompute])
        different, place = np.unique(keys, axis=1, return_inverse=True)
        place = place.reshape(-1)
        rows: dict[tuple[bool, str], list[int]] = {}
        tables = []
        for tensor, expert, expert_tensor, recompute in different.T.tolist():
            layout = Layout(
                tensor=tensor,
                data=expert * expert_tensor,
                expert=expert,
                expert_tensor=expert_tensor,
            )
            sizes = _with(config, tensor, expert_tensor, RECOMPUTE[recompute])
            for kind, layer in self.layers.items():
                one = held(config, layout, [StagePlan(1, 3, range(layer, layer + 1))])
                found = {
                    "vectors": one.vectors,
                    "split": sum(one.blocks),
                    "whole": sum(one.whole),
                    "shared": sum(one.shared),
                    "experts": sum(one.experts),
                    "keeps": 0 if recompute == 2 else block_bytes(sizes, layer),
                    "again": block_bytes(sizes, layer) if recompute == 2 else 0,
                    "copies": one.copies,
                }
                for name, value in found.items():
                    rows.setdefault((kind, name), []).append(value)
            tables.append(-(-(config.model.vocab or 0) // tensor) * config.model.hidden)
        self._of = {key: np.asarray(values, dtype=float)[place] for key, values in rows.items()}
        self.table = np.asarray(tables, dtype=float)[place]
        self.rotary = float(rotary_bytes(_with(config, 1, 1, "none")))
        divided = division(config, c)
        self.here = {True: divided.middle, False: divided.end}

    def count(self, kind: bool, first: bool) -> Array:
        """Blocks with or without experts of the rank with the first or the last stage."""
        routed = np.minimum(self.here[first], self.number.get(True, 0))
        return routed if kind else self.here[first] - routed

    def total(self, name: str, first: bool) -> Array:
        """Sum over the blocks of a rank."""
        return sum(self.count(kind, first) * self._of[kind, name] for kind in self.layers)

    def largest(self, name: str) -> Array:
        """Of one block, the larger kind."""
        return np.maximum.reduce([self._of[kind, name] for kind in self.layers])


def _end_bytes(config: RunConfig, chip: Chip, end: _End) -> Array:
    c, of, first = end.c, end.of, end.first
    model, train = config.model, config.train
    width = WIDTH[train.precision]
    master = max(4, width)
    both = (c.pipeline == 1) | (first & end.v_shaped)
    positions = (model.positions or train.seq) * model.hidden if model.position == "learned" else 0
    head = of.table * (1 - model.tie_embeddings)
    ends = of.table + positions * first + np.where(both, head, 0.0)
    if not first:
        ends = np.where(both, of.table + head + positions, of.table)
    names = ("vectors", "split", "whole", "shared", "experts")
    vectors, split, whole, shared, experts = (of.total(name, first) for name in names)
    dense = vectors + split + whole + shared + ends
    total = dense + experts
    ranks = c.data * c.context // c.data_replicate
    replicas = c.tensor * c.context * c.data // (c.expert * c.expert_tensor)
    own = (vectors + split + ends) / ranks + whole / (ranks * c.tensor)
    own = own + shared / (ranks * of.largest("copies"))
    own = own + experts / np.maximum(1, replicas // c.data_replicate)
    alone, own = own - vectors / ranks, np.where(c.zero > 0, own, total)
    lent = 2 * sum(of.largest(name) for name in names[1:]) + of.table
    values = np.where(c.zero == 3, vectors + lent, total)
    kept = master + state_width(config.optim, master)
    if width == master:
        values = values - np.where(c.zero == 3, vectors / ranks, own)
    if config.optim.offload and not chip.is_host:
        kept = float(master if width == master else 0)
        values = values + np.where((c.zero == 3) & (width < master), own, 0.0)
    around = of.table * (both & (c.microbatches > 1))
    gradients = np.where(c.zero >= 2, vectors + lent + around + own, total)
    if config.parallel.compress != "none":
        gradients = gradients + np.where(c.data_replicate > 1, alone, total - vectors)
    static = own * kept + values * width + gradients * master
    passing = _passing(config, end, most_logits(host=chip.is_host))
    return static + passing + overhead(chip)


_V_SHAPED = [SCHEDULES.index(name) for name in ("zb-v", "v-half", "dualpipe-v")]


def _passing(config: RunConfig, end: _End, most: int) -> Array:
    """Bytes that come and go in a step: activations, messages, logits, `most` at once, and
    temporaries."""
    c, of = end.c, end.of
    model, train = config.model, config.train
    width, dealt = WIDTH[train.precision], c.tensor * c.context
    rows = c.microbatch * train.seq
    stream = rows * model.hidden * width
    keeps = of.total("keeps", end.first) * c.microbatch / c.chunks
    stage = keeps + of.rotary * c.tensor
    if not train.offload:  # which takes the inputs of all blocks away
        stage = stage + of.here[end.first] / c.chunks * stream
    last = (c.pipeline == 1) | end.v_shaped if end.first else np.full(len(c.tensor), True)
    vocab = np.ceil((model.vocab or 0) / c.tensor)
    logits = np.minimum(rows, np.maximum(1, most // np.maximum(1, vocab))) * vocab * width
    temporaries = np.maximum(2 * rows * widest(config) * width / dealt, logits * last)
    messages = np.where(c.pipeline > 1, 2 * stream / dealt, 0.0)
    inputs = 2 * stream * (last + train.offload)
    kept = (end.live * stage + of.largest("again") * c.microbatch + inputs) / dealt
    return kept + messages + logits * last + temporaries


def live_stages(c: Sizes, schedule: Array, first: bool) -> Array:
    """Stages of microbatches whose activations the first rank holds at most, or the last one."""
    p, v, m = c.pipeline, c.chunks, c.microbatches
    turns = (v - 1) * p + 1
    by_name = {
        "gpipe": m,
        "1f1b": np.minimum(p if first else 1, m),
        "interleaved": np.minimum(m * v, turns + 2 * (p - 1) * first),
        "breadth-first": m * v,
        "zb-h1": np.minimum(p, m),
        "zb-h2": np.minimum(2 * p - 1 if first else p, m),
        "zb-v": np.minimum(2 * p, 2 * m),
        "v-half": np.minimum(p + 2, 2 * m),
        "dualpipe-v": np.minimum(2 * p + 1, 2 * m),
    }
    table = np.stack([by_name[name] * np.ones_like(p) for name in SCHEDULES])
    return np.where(p > 1, table[schedule, np.arange(len(p))], 1)


def _with(config: RunConfig, tensor: int, expert_tensor: int, recompute: str) -> RunConfig:
    """The config of one sample on a microbatch, with these sizes."""
    parallel = config.parallel.model_copy(
        update={"tensor": tensor, "expert_tensor": expert_tensor, "context": 1}
    )
    train = config.train.model_copy(update={"microbatch": 1, "recompute": recompute})
    return config.model_copy(update={"parallel": parallel, "train": train})
