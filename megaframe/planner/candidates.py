"""Candidates of a search: all valid layouts of a config on a number of GPUs.

Layouts that another one always beats are left out: GPipe, and breadth-first where interleaved is
possible (1F1B and interleaved take as long and keep less), tensor groups larger than two nodes,
context ranks with too few tokens for a tile to be worth sending, and ZeRO without other ranks to
share with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from megaframe.config import RunConfig, TrainConfig
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

    def make_sizes(self, train: TrainConfig, islands: int) -> LayoutSizes:
        """Return the sizes for the cost arithmetic, with this many islands."""
        sizes = {name: column for name, column in self.columns.items() if name != "schedule"}
        microbatches = train.global_batch // (self.microbatch * self.data)
        return LayoutSizes(**sizes, microbatches=microbatches, islands=islands)

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


@dataclass(frozen=True)
class SearchSpace:
    """All valid layouts of a run on a number of GPUs.

    Attributes:
        config: The run; its layout is ignored.
        gpus: Number of GPUs.
        cluster: The chips and links. Decides how large tensor groups and replicas may be.
        fixed: Values of keys of `SEARCHED_KEYS` that are given.
    """

    config: RunConfig
    gpus: int
    cluster: Cluster
    fixed: FixedKeys = field(default_factory=dict)

    def list_candidates(self) -> Candidates:
        """Return the layouts, possibly none."""
        schedules = list_searched_schedules(self.fixed.get("schedule"))
        rows = [
            (*axes, schedule, chunks)
            for axes in self._enumerate_axes()
            for schedule, chunks in self._list_schedules_with_chunks(
                axes.pipeline, axes.data * axes.microbatch, schedules
            )
        ]
        table = np.asarray(rows, dtype=np.int64).reshape(-1, 10)
        zero = self._get_fixed_or("zero", (0, 1, 2, 3))
        # Offload moves the inputs of recomputed blocks, so it needs full recompute.
        full, every = (RECOMPUTE.index("full"),), tuple(range(len(RECOMPUTE)))
        recompute = self._get_fixed_or("recompute", full if self.config.train.offload else every)
        variants = len(zero) * len(recompute)
        columns = [np.repeat(column, variants) for column in table.T]
        t, c, p, d, r, e, et, mb, schedule, chunks = columns
        zeros = np.tile(np.repeat(zero, len(recompute)), len(table))
        recomputes = np.tile(np.asarray(recompute), len(zero) * len(table))
        candidates = Candidates(
            t, c, p, chunks, d, r, e, et, zeros, recomputes, mb, schedule, schedules
        )
        islands = self.config.parallel.islands
        return candidates.select(_mask_useful_zero(candidates, islands, self.fixed))

    def make_config(self, candidates: Candidates, index: int) -> RunConfig:
        """Return the config with the layout of one of the candidates."""
        sizes = {name: int(getattr(candidates, name)[index]) for name in PARALLEL_KEYS}
        parallel, expert_ranks = self.config.parallel, sizes["expert"] * sizes["expert_tensor"]
        return self.config.replace(
            parallel={
                **sizes,
                "schedule": get_config_value(candidates.get_schedule(index)),
                "schedule_microbatches": None,
                "layers_per_stage": None,
                "tensor_chunks": parallel.tensor_chunks if sizes["tensor"] > 1 else 1,
                "expert_overlap": parallel.expert_overlap
                and sizes["pipeline"] > 1
                and expert_ranks > 1
                and sizes["zero"] < 3,
            },
            train={
                "microbatch": int(candidates.microbatch[index]),
                "recompute": RECOMPUTE[int(candidates.recompute[index])],
                "recompute_blocks": 0,
            },
        )

    def _enumerate_axes(self) -> Iterator[_AxisSizes]:
        model, train, fixed = self.config.model, self.config.train, self.fixed
        ramp, batch = train.batch_ramp, train.global_batch
        if ramp is not None:
            batch = gcd(batch, ramp.start, ramp.increment)
        for tensor in self._list_tensor_sizes():
            for context in self._list_context_sizes(tensor):
                ranks_left = self.gpus // (tensor * context)
                for pipeline in self._get_fixed_or("pipeline", list_divisors(ranks_left)):
                    if ranks_left % pipeline or pipeline > model.layers:
                        continue
                    data = ranks_left // pipeline
                    if batch % data or fixed.get("data", data) != data:
                        continue
                    if data % self.config.parallel.islands:
                        continue
                    axes = tensor, context, pipeline, data
                    yield from self._enumerate_inner_axes(axes, batch // data)

    def _enumerate_inner_axes(
        self, axes: tuple[int, int, int, int], samples: int
    ) -> Iterator[_AxisSizes]:
        """Yield the axes with replicas, expert ranks and microbatch sizes. samples: of a data
        rank."""
        tensor, context, pipeline, data = axes
        microbatches = tuple(size for size in _MICROBATCHES if samples % size == 0)
        island_data = data // self.config.parallel.islands
        for replicas in self._list_replica_counts(tensor * context, island_data):
            copy_ranks = tensor * context * island_data // replicas
            for expert, expert_tensor in self._list_expert_sizes(tensor, copy_ranks):
                for microbatch in self._get_fixed_or("microbatch", microbatches):
                    if samples % microbatch == 0:
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

    def _list_tensor_sizes(self) -> list[int]:
        parallel, train = self.config.parallel, self.config.train
        largest = min(_MOST_TENSOR, 2 * self.cluster.node)
        divisors = tuple(d for d in list_divisors(self.gpus) if d <= largest)
        return [
            tensor
            for tensor in self._get_fixed_or("tensor", divisors)
            if self.gpus % tensor == 0
            and self._can_be_divided(tensor=tensor)
            and not any(find_chunk_mistakes(parallel.model_copy(update={"tensor": tensor}), train))
        ]

    def _list_context_sizes(self, tensor: int) -> list[int]:
        model, parallel, ranks = self.config.model, self.config.parallel, self.gpus // tensor
        largest = max(1, min(_MOST_CONTEXT, self.config.train.seq // _LEAST_TOKENS))
        if parallel.context_kind == "nested":
            largest = 1
        divisors = tuple(d for d in list_divisors(ranks) if d <= largest)
        return [
            context
            for context in self._get_fixed_or("context", divisors)
            if ranks % context == 0
            and (
                context == 1
                or (
                    self._can_be_divided(tensor=tensor, context=context)
                    and not any(
                        find_context_mistakes(
                            model, parallel.model_copy(update={"context": context})
                        )
                    )
                )
            )
        ]

    def _list_replica_counts(self, ranks_per_sample: int, data: int) -> tuple[int, ...]:
        """Return the numbers of replicas to try among the data ranks of an island. Each copy of the
        model is on whole nodes."""
        if "data_replicate" in self.fixed:
            replicas = self.fixed["data_replicate"]
            return (replicas,) if data % replicas == 0 else ()
        counts = [
            r
            for r in list_divisors(data)
            if (ranks_per_sample * data // r) % self.cluster.node == 0 and r > 1
        ]
        return (1, *counts[: -_REPLICAS - 1 : -1][::-1])

    def _list_expert_sizes(self, tensor: int, stage: int) -> Iterator[tuple[int, int]]:
        """Yield pairs (expert, expert_tensor). stage: ranks of a stage that hold one copy."""
        moe = self.config.model.moe
        if moe is None:
            yield 1, 1
            return
        inner = self._get_fixed_or("expert_tensor", tuple(sorted({1, tensor})))
        outer = self._get_fixed_or("expert", list_divisors(moe.experts))
        for inside in inner:
            for expert in outer:
                is_possible = self._can_be_divided(expert=expert, expert_tensor=inside)
                if stage % (expert * inside) == 0 and is_possible:
                    yield expert, inside

    def _list_schedules_with_chunks(
        self, pipeline: int, samples: int, schedules: Sequence[NamedSchedule]
    ) -> Iterator[tuple[int, int]]:
        """Yield pairs (index into `schedules`, chunks) for a pipeline.

        Args:
            samples: Samples of a microbatch on all data ranks.
        """
        model, train, fixed = self.config.model, self.config.train, self.fixed
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
            for chunks in self._get_fixed_or("chunks", _CHUNKS):
                is_possible = limits.find_nearest_chunks(chunks) == chunks
                is_wanted = wanted is not None or schedule.is_worth_trying(
                    pipeline, chunks, fewest_microbatches
                )
                if is_possible and is_wanted and pipeline * chunks <= model.layers:
                    yield index, chunks

    def _get_fixed_or(self, name: str, otherwise: tuple[Any, ...]) -> tuple[Any, ...]:
        if name not in self.fixed:
            return otherwise
        value = self.fixed[name]
        return (RECOMPUTE.index(value),) if name == "recompute" else (value,)

    def _can_be_divided(self, **sizes: int) -> bool:
        """Return whether axes of these sizes can divide all layers, whatever the others are."""
        axes = {"tensor": 1, "context": 1, "expert": 1, "expert_tensor": 1, **sizes}
        parallel = self.config.parallel.model_copy(update=axes)
        return not any(find_limit_mistakes(self.config.model, parallel, self.config.data))


def _mask_useful_zero(c: Candidates, islands: int, fixed: FixedKeys) -> Array:
    """Return the mask of candidates without ZeRO, with other ranks to share with, or with ZeRO as
    given."""
    alone = (c.data // (c.data_replicate * islands)) * c.context == 1
    return (c.zero == 0) | ~alone | ("zero" in fixed)
