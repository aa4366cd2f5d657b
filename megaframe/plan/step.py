"""How long a step takes, where the time goes, and whether it fits.

    cluster = load_cluster("h100-ib")
    constants = constants_of(cluster.chip.family)
    predict(config, layout, cluster, constants) -> Prediction      exact: the schedule is simulated
    estimate(config, cluster, constants, candidates) -> Estimates  closed forms on arrays, `fast.py`

Both are the same arithmetic (`costs.py`), on numbers or on numpy arrays; they differ in the bubble,
which `predict` simulates and `estimate` takes from closed forms, and in stages, whose unequal
works `estimate` only bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.plan.candidates import CIRCLING
from megaframe.plan.cluster import Cluster
from megaframe.plan.constants import Constants
from megaframe.plan.costs import block, kinds
from megaframe.plan.machine import Machine, Part, Passes
from megaframe.plan.reasons import reasons
from megaframe.plan.schedules import step_schedule
from megaframe.plan.sizes import sizes_of
from megaframe.plan.slow import jitter
from megaframe.plan.stages import StagePlan, block_work, end_work, stage_plans
from megaframe.plan.update import (
    Owned,
    block_owned,
    data_seconds,
    head,
    passes_beside,
    stage_seconds,
    table_owned,
    update_seconds,
    waiting_seconds,
)
from megaframe.plan.worst import by_kind, worst_memory
from megaframe.schedule import Schedule
from megaframe.schedule.costs import Costs
from megaframe.schedule.simulate import Timeline, simulate

T = TypeVar("T")
Number = Any


@dataclass(frozen=True)
class Prediction:
    """One step of a run, predicted.

    step_seconds: mean time of a step, stragglers included, failures not.
    breakdown: seconds by part, which add up to `step_seconds`: compute, tensor, context, expert,
    data, pipeline (exposed communication of each axis), bubble, optimizer, other.
    mfu, hfu: of the chip's dense peak, with causal attention; None where no peak is known.
    tflops_per_gpu: of the model, causal attention counted as half.
    memory_bytes: by kind, of the rank that needs most. fits: whether that is within the chip.
    host_bytes: that it keeps in the host's memory.
    reasons: sentences with numbers, the most important first.
    """

    step_seconds: float
    breakdown: Mapping[str, float]
    mfu: float | None
    hfu: float | None
    tflops_per_gpu: float
    tokens_per_second: float
    memory_bytes: Mapping[str, int]
    fits: bool
    host_bytes: int
    reasons: tuple[str, ...]


def predict(
    config: RunConfig, layout: Layout, cluster: Cluster, constants: Constants
) -> Prediction:
    """The step of `config` on `layout`; `config` has passed `check`.

    Raises `UserError` where the cluster has no such number of ranks, or its chip no such type.
    """
    if layout.world > cluster.size:
        raise UserError(
            f"{layout.world} ranks are more than the {cluster.size} of cluster {cluster.name}; "
            f"use {cluster.size} or fewer"
        )
    machine = Machine(config, cluster, constants, sizes_of(config, layout))
    plans = stage_plans(config)
    blocks = _by_layer(machine, block)
    parts = [_stage(machine, plan, blocks) for plan in plans]
    schedule = step_schedule(config, int(machine.sizes.microbatches))
    timeline = simulate(schedule, _schedule_costs(machine, parts))
    breakdown = _breakdown(machine, plans, parts, schedule, timeline)
    needed = worst_memory(config, layout, schedule, cluster.chip)
    return _told(config, layout, cluster, breakdown, by_kind(needed), needed.host)


def _by_layer(machine: Machine, function: Callable[[Machine, int], T]) -> list[T]:
    """`function` of every layer, asked once for each kind of them."""
    every = kinds(machine.config.model)
    known = {kind: function(machine, every.index(kind)) for kind in set(every)}
    return [known[kind] for kind in every]


def _stage(machine: Machine, plan: StagePlan, blocks: Sequence[Part]) -> Part:
    """All of a stage, for one microbatch."""
    parts = [blocks[layer] for layer in plan.blocks]
    if plan.last:
        parts.append(head(machine))
    whole = Part(Passes())
    for number, part in enumerate(parts):
        whole = whole + part
        again = number < plan.recomputed and machine.config.train.recompute != "full"
        if again:
            whole = whole + Part(Passes(0.0, part.whole.forward, 0.0))
    return whole


def _schedule_costs(machine: Machine, parts: Sequence[Part]) -> Costs:
    """Costs of every stage; a transfer that does not run beside compute is part of its pass."""
    waiting = float(waiting_seconds(machine))
    last = len(parts) - 1
    return Costs(
        forward=tuple(
            float(part.whole.forward) + waiting * (number < last)
            for number, part in enumerate(parts)
        ),
        backward=tuple(
            float(part.whole.backward) + waiting * (number > 0) for number, part in enumerate(parts)
        ),
        weight=tuple(float(part.whole.weight) for part in parts),
        comm=float(stage_seconds(machine)) if machine.software.overlap_pipeline else 0.0,
    )


def _breakdown(
    machine: Machine,
    plans: Sequence[StagePlan],
    parts: Sequence[Part],
    schedule: Schedule,
    timeline: Timeline,
) -> dict[str, float]:
    """Seconds by part, of the rank that has most to do."""
    many = machine.sizes.microbatches
    rank = max(range(len(timeline.work)), key=lambda number: timeline.work[number])
    here = schedule.stages(rank)
    whole = Part(Passes())
    for stage in here:
        whole = whole + parts[stage]
    found = {name: float(many * part.total) for name, part in whole.named().items()}
    work, step = float(timeline.work[rank]), float(timeline.time)
    if machine.software.steps_meet:
        step = float(max(timeline.spans))
    found["pipeline"] = max(0.0, work - sum(found.values()))
    owned = _by_layer(machine, block_owned)
    ends = []
    for number in range(len(timeline.work)):
        stages = schedule.stages(number)
        own = [plans[stage] for stage in stages]
        window = sum((parts[stage].compute for stage in stages), Passes())
        ends.append(_end_of_step(machine, own, owned, window))
    data, update = max(ends, key=sum)
    found["data"] = data
    found["bubble"] = step - work
    found["optimizer"] = update
    slow = jitter(machine.cluster, float(machine.sizes.world))
    found["other"] = machine.software.step_kernels * machine.rate.launch + slow * (
        step + data + update
    )
    return {name: float(value) for name, value in found.items()}


def _end_of_step(
    machine: Machine, plans: Sequence[StagePlan], owned: Sequence[Owned], window: Passes
) -> tuple[float, float]:
    """Exposed exchange of data ranks, and the update, of a rank with these stages. window: what it
    computes for one microbatch."""
    tied = machine.config.model.tie_embeddings
    layers = [layer for plan in plans for layer in plan.blocks]
    tables = sum(plan.first + (plan.last and not (plan.first and tied)) for plan in plans)
    held = replace(
        sum((owned[layer] for layer in layers), Owned()),
        tables=tables * table_owned(machine),
        buckets=machine.buckets(len(plans), len(layers)),
    )
    passes = passes_beside(machine.sizes, machine.config.parallel.schedule in CIRCLING)
    data = float(data_seconds(machine, held, window, passes))
    return data, float(update_seconds(machine, held))


def model_flops(config: RunConfig) -> tuple[float, float]:
    """Operations per token of the model, causal attention counted as half; and with what recompute
    adds."""
    plans = stage_plans(config)
    works = [block_work(config, layer) for layer in range(config.model.layers)]
    end = end_work(config)
    model = sum(w.forward + w.backward + w.weight for w in works) + end.forward + end.backward
    model += end.weight
    again = sum(works[layer].forward for plan in plans for layer in plan.blocks[: plan.recomputed])
    return model, model + again


def _told(
    config: RunConfig,
    layout: Layout,
    cluster: Cluster,
    breakdown: dict[str, float],
    needed: dict[str, int],
    host: int,
) -> Prediction:
    step = float(sum(breakdown.values()))
    tokens = config.train.global_batch * config.train.seq
    model, hardware = model_flops(config)
    rate = model * tokens / step / layout.world
    peak = cluster.chip.peaks.get(config.train.precision)
    fits = sum(needed.values()) <= cluster.chip.memory
    return Prediction(
        step_seconds=step,
        breakdown=breakdown,
        mfu=None if peak is None else rate / peak,
        hfu=None if peak is None else rate / peak * hardware / model if model else 0.0,
        tflops_per_gpu=rate / 1e12,
        tokens_per_second=tokens / step,
        memory_bytes=needed,
        fits=fits,
        host_bytes=host,
        reasons=tuple(reasons(config, layout, cluster, breakdown, needed, host)),
    )
