"""Estimates of peak memory for many layouts at once, in closed form.

The estimate looks at three ranks of a pipeline, and assumes that all stages but the last have as
many blocks as the fullest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megaframe.architecture.experts import has_experts
from megaframe.architecture.optimizer_state import state_bytes_per_element
from megaframe.architecture.output_head import max_logits_per_chunk
from megaframe.architecture.stages import StagePlan
from megaframe.config.schema import RunConfig
from megaframe.hardware.chips import WIDTH, Chip
from megaframe.layout import Layout
from megaframe.planner.activations import block_bytes, rotary_bytes, weight_pass_bytes
from megaframe.planner.layout_sizes import RECOMPUTE, SCHEDULES, LayoutSizes, blocks_per_rank
from megaframe.planner.memory import max_width_per_token
from megaframe.planner.parameter_counts import count_parameters
from megaframe.planner.peak_memory import overhead_bytes

Array = np.ndarray[Any, Any]
_V_SHAPED = ("zb-v", "v-half", "dualpipe-v")
"""Schedules whose first rank also has the last stage."""


def estimate_peak_memory(config: RunConfig, chip: Chip, c: LayoutSizes, schedule: Array) -> Array:
    """Estimate the bytes of the rank that needs most, for each candidate.

    It is the largest of three ranks: that with the first stage, that with the last stage, and the
    one between them where weight passes wait longest. The first and the third are assumed to have
    as many blocks as the fullest rank. The result is within a few percent of `worst_memory`, which
    makes the final decision on what fits. schedule: indices into `SCHEDULES`.
    """
    of, alone = _BlockTable(config, c), c.pipeline == 1
    v_shaped, nobody = _has_schedule(schedule, *_V_SHAPED), np.zeros(len(schedule), dtype=bool)
    first = _count_on_first_rank(c, schedule)
    ranks = (
        _PipelineRank(c, of, first, ~nobody, alone | v_shaped, True),
        _PipelineRank(c, of, _count_on_last_rank(c, schedule, first), alone, ~nobody, False),
        _PipelineRank(c, of, _count_on_inner_rank(c, schedule, first), nobody, nobody, True),
    )
    return np.maximum.reduce([_rank_bytes(config, chip, rank) for rank in ranks])


def _has_schedule(schedule: Array, *names: str) -> Array:
    """Return the mask of the candidates whose schedule is one of `names`."""
    return np.array([name in names for name in SCHEDULES])[schedule]


class _ActivationCounts(NamedTuple):
    """The most that a rank holds at once, in activations of one microbatch on one stage: `kept`
    for backward passes, `left` by backward passes for weight passes, and `either`, each of which
    counts as the larger of the two."""

    kept: Array
    left: Array
    either: Array


@dataclass(frozen=True)
class _PipelineRank:
    """One rank of each candidate. first, last: whether it has the first and the last stage. full:
    whether it has as many blocks as the fullest rank; otherwise as many as the rank with the last
    stage."""

    c: LayoutSizes
    of: _BlockTable
    live: _ActivationCounts
    first: Array
    last: Array
    full: bool


class _BlockTable:
    """For each candidate, the elements of one block of each kind (with or without experts), and the
    bytes that it keeps per sample. They are computed once per distinct combination of the few sizes
    that they depend on, and then looked up."""

    def __init__(self, config: RunConfig, c: LayoutSizes) -> None:
        model = config.model
        kinds = [model.moe is not None and has_experts(model.moe, n) for n in range(model.layers)]
        self.layers = {kind: kinds.index(kind) for kind in set(kinds)}
        self.number = {kind: kinds.count(kind) for kind in self.layers}
        keys = np.stack([c.tensor, c.context, c.expert, c.expert_tensor, c.recompute])
        different, place = np.unique(keys, axis=1, return_inverse=True)
        place = place.reshape(-1)
        rows: dict[tuple[bool, str], list[int]] = {}
        tables = []
        for tensor, context, expert, expert_tensor, recompute in different.T.tolist():
            layout = Layout(
                tensor=tensor,
                data=expert * expert_tensor,
                expert=expert,
                expert_tensor=expert_tensor,
            )
            sizes = _with_sizes(
                config, tensor, context, expert, expert_tensor, RECOMPUTE[recompute]
            )
            for kind, layer in self.layers.items():
                one = count_parameters(config, layout, [StagePlan(1, 3, range(layer, layer + 1))])
                found = {
                    "vectors": one.vectors,
                    "split": sum(one.blocks),
                    "whole": sum(one.whole),
                    "shared": sum(one.shared),
                    "experts": sum(one.experts),
                    "keeps": 0 if recompute == 2 else block_bytes(sizes, layer),
                    "left": weight_pass_bytes(sizes, [layer]),
                    "again": block_bytes(sizes, layer) if recompute == 2 else 0,
                    "copies": one.copies,
                }
                for name, value in found.items():
                    rows.setdefault((kind, name), []).append(value)
            tables.append(-(-(config.model.vocab or 0) // tensor) * config.model.hidden)
        self._of = {key: np.asarray(values, dtype=float)[place] for key, values in rows.items()}
        self.table = np.asarray(tables, dtype=float)[place]
        self.rotary = float(rotary_bytes(_with_sizes(config, 1, 1, 1, 1, "none")))
        divided = blocks_per_rank(config, c)
        self.here = {True: divided.middle, False: divided.end}

    def count(self, kind: bool, first: bool) -> Array:
        """Return the number of blocks of a kind on a rank. kind: with experts. first: of the
        fullest rank; otherwise of the rank with the last stage."""
        routed = np.minimum(self.here[first], self.number.get(True, 0))
        return routed if kind else self.here[first] - routed

    def total(self, name: str, first: bool) -> Array:
        """Return the sum of a quantity over the blocks of a rank; first: as in `count`."""
        return sum(self.count(kind, first) * self._of[kind, name] for kind in self.layers)

    def largest(self, name: str) -> Array:
        """Return a quantity of one block, of the kind that has more of it."""
        return np.maximum.reduce([self._of[kind, name] for kind in self.layers])


def _rank_bytes(config: RunConfig, chip: Chip, rank: _PipelineRank) -> Array:
    c, of, full = rank.c, rank.of, rank.full
    model, train = config.model, config.train
    width = WIDTH[train.precision]
    master = max(4, width)
    positions = (model.positions or train.seq) * model.hidden if model.position == "learned" else 0
    both, tied = rank.first & rank.last, model.tie_embeddings
    tables = rank.first * 1 + rank.last - both * tied
    ends = of.table * tables + positions * rank.first
    names = ("vectors", "split", "whole", "shared", "experts")
    vectors, split, whole, shared, experts = (of.total(name, full) for name in names)
    dense = vectors + split + whole + shared + ends
    total = dense + experts
    ranks = c.data * c.context // c.data_replicate
    replicas = c.tensor * c.context * c.data // (c.expert * c.expert_tensor)
    own = (vectors + split + ends) / ranks + whole / (ranks * c.tensor)
    own = own + shared / (ranks * of.largest("copies"))
    own = own + experts / np.maximum(1, replicas // c.data_replicate)
    alone, own = own - vectors / ranks, np.where(c.zero > 0, own, total)
    block = sum(of.largest(name) for name in names[1:])
    least = config.parallel.bucket_size
    together = np.ceil((1 if least == "auto" else least) / np.maximum(block, 1))
    together = np.clip(together, 1.0, np.maximum(1.0, of.here[full] / c.chunks))
    lent = 2 * together * block + of.table
    values = np.where(c.zero == 3, vectors + lent, total)
    kept = master + state_bytes_per_element(config.optim, master)
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
    passing = _transient_bytes(config, rank, max_logits_per_chunk(host=chip.is_host))
    return static + passing + overhead_bytes(chip)


def _transient_bytes(config: RunConfig, rank: _PipelineRank, most: int) -> Array:
    """Return the bytes that come and go within a step: activations, messages, logits (at most
    `most` of them at once), and temporaries."""
    c, of, last = rank.c, rank.of, rank.last
    model, train = config.model, config.train
    width, dealt = WIDTH[train.precision], c.tensor * c.context
    rows = c.microbatch * float(train.seq)
    stream = rows * model.hidden * width
    stage, left = (
        of.total(name, rank.full) * c.microbatch / c.chunks + of.rotary * c.tensor
        for name in ("keeps", "left")
    )
    if not train.offload:  # which moves the inputs of all blocks to the host
        stage = stage + of.here[rank.full] / c.chunks * stream
    vocab = np.ceil((model.vocab or 0) / c.tensor)
    logits = np.minimum(rows, np.maximum(1, most // np.maximum(1, vocab))) * vocab * width
    temporaries = np.maximum(2 * rows * max_width_per_token(config) * width / dealt, logits * last)
    messages = np.where(c.pipeline > 1, 2 * stream / dealt, 0.0)
    inputs = 2 * stream * (last + train.offload)
    live = rank.live
    held = live.kept * stage + live.left * left + live.either * np.maximum(stage, left)
    kept = (held + of.largest("again") * c.microbatch + inputs) / dealt
    return kept + messages + logits * last + temporaries


def _count_on_first_rank(c: LayoutSizes, schedule: Array) -> _ActivationCounts:
    """Return what the first rank holds."""
    p, v, m = c.pipeline, c.chunks, c.microbatches
    many = _select_by_schedule(
        c,
        schedule,
        {
            "gpipe": m,
            "1f1b": np.minimum(p, m),
            "interleaved": np.minimum(m * v, (v + 1) * p - 1),
            "breadth-first": m * v,
            "zb-h1": np.minimum(p, m),
            "zb-h2": np.minimum(2 * p - 1, m),
            "zb-v": np.minimum(2 * p, m + 1),
            "v-half": np.minimum(p + 2, m + 1),
            "dualpipe-v": np.minimum(2 * p, m + 1),
        },
    )
    either = _has_schedule(schedule, "zb-h1", "zb-h2", "zb-v", "dualpipe-v") * 1
    either = (either + 2 * _has_schedule(schedule, "v-half")) * (p > 1)
    return _ActivationCounts(many - either, 0 * many, either)


def _count_on_last_rank(
    c: LayoutSizes, schedule: Array, first: _ActivationCounts
) -> _ActivationCounts:
    """Return what the rank with the last stage holds, where that is not the first rank. Under zb-h1
    and zb-h2 it is almost only what waits for weight passes. first: what the first rank holds."""
    p, v, m = c.pipeline, c.chunks, c.microbatches
    waits = _has_schedule(schedule, "zb-h1", "zb-h2") & (p > 1)
    interleaved = np.minimum(m * v, (v - 1) * p + 1)
    kept = {"gpipe": m, "interleaved": interleaved, "breadth-first": m * v}
    return _ActivationCounts(
        _select_by_schedule(c, schedule, kept) * ~waits, first.kept * waits, waits * 1
    )


def _count_on_inner_rank(
    c: LayoutSizes, schedule: Array, first: _ActivationCounts
) -> _ActivationCounts:
    """Return what an inner rank holds: the one before the last under zb-h1 and zb-h2, and the last
    one under zb-v and dualpipe-v, whose stages are V-shaped. Under other schedules inner ranks hold
    less than the first one, and count as nothing. first: what the first rank holds."""
    p = c.pipeline
    round_about = _has_schedule(schedule, "zb-h1", "zb-h2") & (p > 2)
    zb_v, dualpipe_v = (_has_schedule(schedule, name) & (p > 1) for name in ("zb-v", "dualpipe-v"))
    left = (first.kept - 1) * round_about + (2 * p - 2) * zb_v + (p - 1) * dualpipe_v
    return _ActivationCounts(round_about * 1, left, round_about | zb_v | dualpipe_v)


def _select_by_schedule(c: LayoutSizes, schedule: Array, by_name: Mapping[str, Array]) -> Array:
    """Return for each candidate the entry of its schedule; 1 for schedules that are not named, and
    without a pipeline."""
    table = [by_name.get(name, 1) * np.ones_like(c.pipeline) for name in SCHEDULES]
    return np.where(c.pipeline > 1, np.stack(table)[schedule, np.arange(len(schedule))], 1)


def _with_sizes(
    config: RunConfig, tensor: int, context: int, expert: int, expert_tensor: int, recompute: str
) -> RunConfig:
    """Return the config with these sizes and one sample per microbatch."""
    sizes = {"tensor": tensor, "context": context, "expert": expert, "expert_tensor": expert_tensor}
    parallel = config.parallel.model_copy(update=sizes)
    train = config.train.model_copy(update={"microbatch": 1, "recompute": recompute})
    return config.model_copy(update={"parallel": parallel, "train": train})
