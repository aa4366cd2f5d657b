"""How long a step takes, where the time goes, and whether it fits.

    cluster = load_cluster("h100-ib")
    constants = cluster_constants(cluster)
    predict(config, layout, cluster, constants) -> Prediction      exact: the schedule is simulated
    estimate(config, cluster, constants, candidates) -> Estimates  closed forms on arrays, `fast.py`

Both use the same arithmetic (`costs.py`), on numbers or on numpy arrays. They differ in the bubble,
which `predict` simulates and `estimate` takes from closed forms, and in the stages, which `predict`
adds up one by one while `estimate` only considers the rank with most work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megaframe.architecture.pipeline import step_schedule
from megaframe.architecture.stages import StagePlan, block_work, end_work, stage_plans
from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.block_costs import block, kinds
from megaframe.planner.candidates import CIRCLING
from megaframe.planner.constants import Constants
from megaframe.planner.machine import Machine, Part, Passes
from megaframe.planner.peak_memory import by_kind, worst_memory
from megaframe.planner.reasons import reasons
from megaframe.planner.sizes import sizes_of
from megaframe.planner.stragglers_and_failures import jitter
from megaframe.planner.update import (
    Owned,
    block_owned,
    bucket_count,
    data_seconds,
    head,
    passes_beside,
    stage_seconds,
    table_owned,
    update_seconds,
    waiting_seconds,
    with_bucket_size,
)
from megaframe.schedule import Schedule
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.simulate import Timeline, simulate

T = TypeVar("T")
Number = Any


@dataclass(frozen=True)
class Prediction:
    """Prediction of one step of a run.

    step_seconds: mean time of a step, including stragglers but not failures.
    breakdown: seconds by part, which sum to `step_seconds`: compute; tensor, context, expert, data,
    pipeline (exposed communication of each axis); bubble, optimizer, other.
    mfu, hfu: shares of the chip's dense peak, with causal attention counted as half; hfu includes
    recompute. None if no peak is known.
    tflops_per_gpu: model TFLOP/s per GPU, with causal attention counted as half.
    memory_bytes: bytes by kind on the rank that needs most. fits: whether the chip has as many.
    host_bytes: bytes that this rank keeps in host memory.
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
    """Predict a step of `config` on `layout`. The config must have passed `check`.

    Raises `UserError` if the cluster has fewer ranks, or if its chip lacks the config's precision.
    """
    if layout.world > cluster.size:
        raise UserError(
            f"{layout.world} ranks are more than the {cluster.size} of cluster {cluster.name}; "
            f"use {cluster.size} or fewer"
        )
    config = with_bucket_size(config, layout, cluster)
    machine = Machine(config, cluster, constants, sizes_of(config, layout))
    plans = stage_plans(config)
    blocks = _by_layer(machine, block)
    parts = [_stage(machine, plan, blocks) for plan in plans]
    schedule = step_schedule(config, int(machine.sizes.microbatches))
    timeline = simulate(schedule, _schedule_costs(machine, parts))
    breakdown = _breakdown(machine, plans, parts, schedule, timeline)
    needed = worst_memory(config, layout, schedule, cluster.chip)
    return _told(config, layout, machine, breakdown, by_kind(needed), needed.host)


def _by_layer(machine: Machine, function: Callable[[Machine, int], T]) -> list[T]:
    """Return `function` of every layer, called once for each kind of layer."""
    every = kinds(machine.config.model)
    known = {kind: function(machine, every.index(kind)) for kind in set(every)}
    return [known[kind] for kind in every]


def _stage(machine: Machine, plan: StagePlan, blocks: Sequence[Part]) -> Part:
    """Return the seconds of a stage for one microbatch: its blocks, and the head if it is last."""
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


def _schedule_costs(machine: Machine, parts: Sequence[Part]) -> ActionCosts:
    """Return the costs of every stage for the simulator. What a transfer adds to compute, by delay
    or by blocking it, is charged to the pass before it."""
    waiting = float(waiting_seconds(machine))
    last = len(parts) - 1
    return ActionCosts(
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
    """Return the seconds by part, for the rank that has most work."""
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
    """Return the seconds of the exposed exchange between data ranks and those of the update.

    plans: stages of the rank. owned: parameters of every layer. window: compute of one microbatch
    on the rank.
    """
    tied = machine.config.model.tie_embeddings
    layers = [layer for plan in plans for layer in plan.blocks]
    tables = sum(plan.first + (plan.last and not (plan.first and tied)) for plan in plans)
    blocks = sum((owned[layer] for layer in layers), Owned())
    held = replace(
        blocks,
        tables=tables * table_owned(machine),
        buckets=bucket_count(machine, blocks.total, len(plans), len(layers)),
    )
    passes = passes_beside(machine.sizes, machine.config.parallel.schedule in CIRCLING)
    data = float(data_seconds(machine, held, window, passes))
    return data, float(update_seconds(machine, held))


def model_flops(config: RunConfig) -> tuple[float, float]:
    """Return the model FLOPs per token, with causal attention counted as half, and the same with
    recompute."""
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
    machine: Machine,
    breakdown: dict[str, float],
    needed: dict[str, int],
    host: int,
) -> Prediction:
    step, cluster = float(sum(breakdown.values())), machine.cluster
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
        reasons=tuple(reasons(config, layout, cluster, machine.constants, breakdown, needed, host)),
    )
