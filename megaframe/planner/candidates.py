"""Candidates of a search: all valid layouts of a config on a number of GPUs.

Layouts that another one always beats are left out: GPipe, and breadth-first where interleaved is
possible (1F1B and interleaved take as long and keep less), tensor groups larger than two nodes,
context ranks with too few tokens for a tile to be worth sending, and ZeRO without other ranks to
share with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from megaframe.config import ModelConfig, RunConfig, TrainConfig
from megaframe.errors import list_divisors
from megaframe.hardware.cluster import Cluster
from megaframe.planner.layout_sizes import RECOMPUTE, Array, LayoutSizes
from megaframe.planner.searched_schedules import (
    ScheduleColumn,
    get_config_value,
    list_searched_schedules,
)
from megaframe.schedule import NAMED_SCHEDULES, NamedSchedule
from megaframe.schedule.named import get_schedule_name
from megaframe.validate.context_parallel import find_context_mistakes
from megaframe.validate.limits import find_limit_mistakes
from megaframe.validate.tensor_parallel import find_chunk_mistakes

PARALLEL_KEYS = (
    "tensor",
    "context",
    "pipeline",
    "chunks",
    "data",
    "data_replicate",
    "expert",
    "expert_tensor",
    "zero",
)
"""Numeric keys of `parallel` that a search chooses."""
SEARCHED_KEYS = (*PARALLEL_KEYS, "recompute", "microbatch", "schedule")
"""All keys that a search chooses. `fixed` gives values for some of them."""
FixedKeys = Mapping[str, Any]
_CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_MICROBATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_LEAST_TOKENS = 1024
"""Least number of tokens of a sample per context rank, unless `fixed` asks for fewer."""
_MOST_TENSOR, _MOST_CONTEXT = 64, 64
_REPLICAS = 4
"""How many numbers of replicas above 1 are tried for each layout, the largest ones."""


@dataclass(frozen=True)
class Candidates:
    """Layouts to estimate; they must be valid.

    Everything that has no array here, such as `train.global_batch`, precision, model and optimizer,
    is that of the config.

    Attributes:
        recompute: Index into `RECOMPUTE`.
        schedule: Index into `schedules`.
        schedules: The schedules of all candidates.
    """

    tensor: Array
    context: Array
    pipeline: Array
    chunks: Array
    data: Array
    data_replicate: Array
    expert: Array
    expert_tensor: Array
    zero: Array
    recompute: Array
    microbatch: Array
    schedule: Array
    schedules: tuple[NamedSchedule, ...] = tuple(NAMED_SCHEDULES.values())

    def __len__(self) -> int:
        return len(self.tensor)

    def select(self, index: Array | slice) -> Candidates:
        """Return the candidates at these indices, or where this mask is true."""
        selected = {name: column[index] for name, column in self.columns.items()}
        return Candidates(**selected, schedules=self.schedules)

    def make_sizes(self, train: TrainConfig) -> LayoutSizes:
        """Return the sizes for the cost arithmetic."""
        sizes = {name: column for name, column in self.columns.items() if name != "schedule"}
        microbatches = train.global_batch // (self.microbatch * self.data)
        return LayoutSizes(**sizes, microbatches=microbatches)

    @property
    def columns(self) -> dict[str, Array]:
        """What differs between candidates, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "schedules"}

    @property
    def schedule_column(self) -> ScheduleColumn:
        """The schedule of each candidate."""
        return ScheduleColumn(self.schedules, self.schedule)

    def get_schedule(self, index: int) -> NamedSchedule:
        """Return the schedule of a candidate."""
        return self.schedules[int(self.schedule[index])]


class _AxisSizes(NamedTuple):
    """What rows of candidates with different schedules, ZeRO and recompute have in common."""

    tensor: int
    context: int
    pipeline: int
    data: int
    data_replicate: int
    expert: int
    expert_tensor: int
    microbatch: int


def enumerate_candidates(
    config: RunConfig, gpus: int, cluster: Cluster, fixed: FixedKeys | None = None
) -> Candidates:
    """Return all valid layouts on `gpus` GPUs, possibly none.

    Args:
        config: The run; its layout is ignored.
        gpus: Number of GPUs.
        cluster: Decides how large tensor groups and replicas may be.
        fixed: Values of keys of `SEARCHED_KEYS` that are given.
    """
    fixed = fixed or {}
    schedules = list_searched_schedules(fixed.get("schedule"))
    rows = [
        (*axes, schedule, chunks)
        for axes in _enumerate_axes(config, gpus, cluster, fixed)
        for schedule, chunks in _list_schedules_with_chunks(
            config.model, config.train, axes.pipeline, axes.data * axes.microbatch, fixed, schedules
        )
    ]
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 10)
    zero = _get_fixed_or(fixed, "zero", (0, 1, 2, 3))
    # Offload moves the inputs of recomputed blocks, so it needs full recompute.
    recompute_levels = (
        (RECOMPUTE.index("full"),) if config.train.offload else tuple(range(len(RECOMPUTE)))
    )
    recompute = _get_fixed_or(fixed, "recompute", recompute_levels)
    variants = len(zero) * len(recompute)
    columns = [np.repeat(column, variants) for column in table.T]
    t, c, p, d, r, e, et, mb, schedule, chunks = columns
    zeros = np.tile(np.repeat(zero, len(recompute)), len(table))
    recomputes = np.tile(np.asarray(recompute), len(zero) * len(table))
    candidates = Candidates(
        t, c, p, chunks, d, r, e, et, zeros, recomputes, mb, schedule, schedules
    )
    return candidates.select(_mask_useful_zero(candidates, fixed))


def apply_candidate(config: RunConfig, candidates: Candidates, index: int) -> RunConfig:
    """Return the config with the layout of a candidate.

    Args:
        config: The config of the search.
        candidates: The candidates.
        index: Which of them.
    """
    parallel = {name: int(getattr(candidates, name)[index]) for name in PARALLEL_KEYS}
    parallel_config = config.parallel
    parallel_update = {
        **parallel,
        "schedule": get_config_value(candidates.get_schedule(index)),
        "schedule_microbatches": None,
        "layers_per_stage": None,
        "tensor_chunks": parallel_config.tensor_chunks if parallel["tensor"] > 1 else 1,
        "expert_overlap": parallel_config.expert_overlap
        and parallel["pipeline"] > 1
        and parallel["expert"] * parallel["expert_tensor"] > 1
        and parallel["zero"] < 3,
    }
    train = {
        "microbatch": int(candidates.microbatch[index]),
        "recompute": RECOMPUTE[int(candidates.recompute[index])],
        "recompute_blocks": 0,
    }
    return config.model_copy(
        update={
            "parallel": parallel_config.model_copy(update=parallel_update),
            "train": config.train.model_copy(update=train),
        }
    )


def _mask_useful_zero(c: Candidates, fixed: FixedKeys) -> Array:
    """Return the mask of candidates without ZeRO, with other ranks to share with, or with ZeRO as
    given."""
    alone = (c.data // c.data_replicate) * c.context == 1
    return (c.zero == 0) | ~alone | ("zero" in fixed)


def _enumerate_axes(
    config: RunConfig, gpus: int, cluster: Cluster, fixed: FixedKeys
) -> Iterator[_AxisSizes]:
    ramp, train = config.train.batch_ramp, config.train
    batch = train.global_batch
    if ramp is not None:
        batch = gcd(batch, ramp.start, ramp.increment)
    for tensor in _list_tensor_sizes(config, gpus, cluster, fixed):
        for context in _list_context_sizes(config, gpus // tensor, tensor, fixed):
            ranks_left = gpus // (tensor * context)
            for pipeline in _get_fixed_or(fixed, "pipeline", list_divisors(ranks_left)):
                if ranks_left % pipeline or pipeline > config.model.layers:
                    continue
                data = ranks_left // pipeline
                if batch % data or fixed.get("data", data) != data:
                    continue
                microbatches = [m for m in _MICROBATCHES if batch // data % m == 0]
                for replicas in _list_replica_counts(tensor * context, data, cluster, fixed):
                    copy_ranks = tensor * context * data // replicas
                    for expert, expert_tensor in _list_expert_sizes(
                        config, tensor, copy_ranks, fixed
                    ):
                        for microbatch in _get_fixed_or(fixed, "microbatch", tuple(microbatches)):
                            if batch // data % microbatch == 0:
                                yield _AxisSizes(
                                    tensor,
                                    context,
                                    pipeline,
                                    data,
                                    replicas,
                                    expert,
                                    expert_tensor,
                                    microbatch,
                                )


def _list_tensor_sizes(
    config: RunConfig, gpus: int, cluster: Cluster, fixed: FixedKeys
) -> list[int]:
    largest = min(_MOST_TENSOR, 2 * cluster.node)
    sizes = _get_fixed_or(fixed, "tensor", tuple(d for d in list_divisors(gpus) if d <= largest))
    return [
        t
        for t in sizes
        if gpus % t == 0
        and _can_be_divided(config, tensor=t)
        and not any(find_chunk_mistakes(_with_sizes(config, tensor=t)))
    ]


def _list_context_sizes(config: RunConfig, ranks: int, tensor: int, fixed: FixedKeys) -> list[int]:
    largest = max(1, min(_MOST_CONTEXT, config.train.seq // _LEAST_TOKENS))
    if config.parallel.context_kind == "nested":
        largest = 1
    sizes = _get_fixed_or(fixed, "context", tuple(d for d in list_divisors(ranks) if d <= largest))
    return [
        context
        for context in sizes
        if ranks % context == 0
        and (
            context == 1
            or (
                _can_be_divided(config, tensor=tensor, context=context)
                and not any(find_context_mistakes(_with_sizes(config, context=context)))
            )
        )
    ]


def _list_replica_counts(
    ranks_per_sample: int, data: int, cluster: Cluster, fixed: FixedKeys
) -> tuple[int, ...]:
    """Return the numbers of replicas to try. Each copy of the model is on whole nodes."""
    if "data_replicate" in fixed:
        return (fixed["data_replicate"],) if data % fixed["data_replicate"] == 0 else ()
    counts = [
        r
        for r in list_divisors(data)
        if (ranks_per_sample * data // r) % cluster.node == 0 and r > 1
    ]
    return (1, *counts[: -_REPLICAS - 1 : -1][::-1])


def _list_expert_sizes(
    config: RunConfig, tensor: int, stage: int, fixed: FixedKeys
) -> Iterator[tuple[int, int]]:
    """Yield pairs (expert, expert_tensor). stage: ranks of a stage that hold one copy."""
    moe = config.model.moe
    if moe is None:
        yield 1, 1
        return
    inner = _get_fixed_or(fixed, "expert_tensor", tuple(sorted({1, tensor})))
    outer = _get_fixed_or(fixed, "expert", list_divisors(moe.experts))
    for inside in inner:
        for expert in outer:
            is_possible = _can_be_divided(config, expert=expert, expert_tensor=inside)
            if stage % (expert * inside) == 0 and is_possible:
                yield expert, inside


def _list_schedules_with_chunks(
    model: ModelConfig,
    train: TrainConfig,
    pipeline: int,
    samples: int,
    fixed: FixedKeys,
    schedules: Sequence[NamedSchedule],
) -> Iterator[tuple[int, int]]:
    """Yield pairs (index into `schedules`, chunks) for a pipeline.

    Args:
        samples: Samples of a microbatch on all data ranks.
    """
    if pipeline == 1:
        if fixed.get("chunks", 1) == 1:
            yield [schedule.name for schedule in schedules].index("1f1b"), 1
        return
    ramp = train.batch_ramp
    fewest_microbatches = (train.global_batch if ramp is None else ramp.start) // samples
    wanted = None if "schedule" not in fixed else get_schedule_name(fixed["schedule"])
    for index, schedule in enumerate(schedules):
        limits = schedule.limits
        is_full = fewest_microbatches >= pipeline or not limits.needs_full_pipeline
        if not is_full or wanted not in (None, schedule.name):
            continue
        for chunks in _get_fixed_or(fixed, "chunks", _CHUNKS):
            is_possible = limits.find_nearest_chunks(chunks) == chunks
            is_wanted = wanted is not None or schedule.is_worth_trying(
                pipeline, chunks, fewest_microbatches
            )
            if is_possible and is_wanted and pipeline * chunks <= model.layers:
                yield index, chunks


def _get_fixed_or(fixed: FixedKeys, name: str, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
    if name not in fixed:
        return otherwise
    value = fixed[name]
    return (RECOMPUTE.index(value),) if name == "recompute" else (value,)


def _can_be_divided(config: RunConfig, **sizes: int) -> bool:
    """Return whether axes of these sizes can divide all layers, whatever the other axes are."""
    axes = {"tensor": 1, "context": 1, "expert": 1, "expert_tensor": 1, **sizes}
    return not any(find_limit_mistakes(_with_sizes(config, **axes)))


def _with_sizes(config: RunConfig, **sizes: int) -> RunConfig:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=sizes)})
