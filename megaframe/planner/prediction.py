"""How long a step takes, where the time goes, whether it fits, and why.

    cluster = load_cluster("h100-ib")
    constants = cluster_constants(cluster)
    predict(config, layout, cluster, constants) -> Prediction      exact: the schedule is simulated
    estimate(config, cluster, constants, candidates) -> Estimates  closed forms on arrays

`estimate` is in `vectorized.py`. Both use the same arithmetic (`layer_times.py`), on numbers or on
numpy arrays. They differ in the bubble, which `predict` simulates and `estimate` takes from closed
forms, and in the stages, which `predict` adds up one by one while `estimate` only considers the
rank with most work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import StagePlan, block_work, output_work, stage_plans
from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.communication_times import pipeline_wait_seconds, stage_transfer_seconds
from megaframe.planner.constants import Constants
from megaframe.planner.data_parallel_times import (
    ParameterLoad,
    block_load,
    exposed_exchange_seconds,
    num_buckets,
    optimizer_seconds,
    overlapping_passes,
    resolve_bucket_size,
    table_elements,
)
from megaframe.planner.goodput import straggler_share
from megaframe.planner.layer_times import block_times, head_times, layer_kinds
from megaframe.planner.layout_sizes import LOOPED_SCHEDULES, sizes_of
from megaframe.planner.machine import CostBreakdown, Machine, PassTimes, axis_span, outermost_tier
from megaframe.planner.peak_memory import compute_peak_memory, nonzero_kinds
from megaframe.schedule import Schedule
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.simulate import Timeline, simulate

T = TypeVar("T")
Number = Any
_WORTH_TELLING = 0.02
_AXES = {
    "tensor": "tensor ranks",
    "context": "context ranks",
    "expert": "expert ranks",
    "data": "data ranks",
    "pipeline": "pipeline ranks",
}


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
    config = resolve_bucket_size(config, layout, cluster)
    machine = Machine(config, cluster, constants, sizes_of(config, layout))
    plans = stage_plans(config)
    blocks = _map_layers(machine, block_times)
    parts = [_stage_times(machine, plan, blocks) for plan in plans]
    schedule = build_step_schedule(config, int(machine.sizes.microbatches))
    timeline = simulate(schedule, _schedule_costs(machine, parts))
    breakdown = _breakdown(machine, plans, parts, schedule, timeline)
    needed = compute_peak_memory(config, layout, schedule, cluster.chip)
    return _make_prediction(config, layout, machine, breakdown, nonzero_kinds(needed), needed.host)


def _map_layers(machine: Machine, function: Callable[[Machine, int], T]) -> list[T]:
    """Return `function` of every layer, called once for each kind of layer."""
    every = layer_kinds(machine.config.model)
    known = {kind: function(machine, every.index(kind)) for kind in set(every)}
    return [known[kind] for kind in every]


def _stage_times(
    machine: Machine, plan: StagePlan, blocks: Sequence[CostBreakdown]
) -> CostBreakdown:
    """Return the seconds of a stage for one microbatch: its blocks, and the head if it is last."""
    parts = [blocks[layer] for layer in plan.blocks]
    if plan.last:
        parts.append(head_times(machine))
    whole = CostBreakdown(PassTimes())
    for number, part in enumerate(parts):
        whole = whole + part
        again = number < plan.recomputed and machine.config.train.recompute != "full"
        if again:
            whole = whole + CostBreakdown(PassTimes(0.0, part.whole.forward, 0.0))
    return whole


def _schedule_costs(machine: Machine, parts: Sequence[CostBreakdown]) -> ActionCosts:
    """Return the costs of every stage for the simulator. What a transfer adds to compute, by delay
    or by blocking it, is charged to the pass before it."""
    waiting = float(pipeline_wait_seconds(machine))
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
        comm=float(stage_transfer_seconds(machine)) if machine.software.overlap_pipeline else 0.0,
    )


def _breakdown(
    machine: Machine,
    plans: Sequence[StagePlan],
    parts: Sequence[CostBreakdown],
    schedule: Schedule,
    timeline: Timeline,
) -> dict[str, float]:
    """Return the seconds by part, for the rank that has most work."""
    many = machine.sizes.microbatches
    rank = max(range(len(timeline.work)), key=lambda number: timeline.work[number])
    here = schedule.stages(rank)
    whole = CostBreakdown(PassTimes())
    for stage in here:
        whole = whole + parts[stage]
    found = {name: float(many * part.total) for name, part in whole.named().items()}
    work, step = float(timeline.work[rank]), float(timeline.time)
    if machine.software.steps_meet:
        step = float(max(timeline.spans))
    found["pipeline"] = max(0.0, work - sum(found.values()))
    owned = _map_layers(machine, block_load)
    ends = []
    for number in range(len(timeline.work)):
        stages = schedule.stages(number)
        own = [plans[stage] for stage in stages]
        window = sum((parts[stage].compute for stage in stages), PassTimes())
        ends.append(_end_of_step(machine, own, owned, window))
    data, update = max(ends, key=sum)
    found["data"] = data
    found["bubble"] = step - work
    found["optimizer"] = update
    slow = straggler_share(machine.cluster, float(machine.sizes.world))
    found["other"] = machine.software.step_kernels * machine.rate.launch + slow * (
        step + data + update
    )
    return {name: float(value) for name, value in found.items()}


def _end_of_step(
    machine: Machine, plans: Sequence[StagePlan], owned: Sequence[ParameterLoad], window: PassTimes
) -> tuple[float, float]:
    """Return the seconds of the exposed exchange between data ranks and those of the update.

    plans: stages of the rank. owned: parameters of every layer. window: compute of one microbatch
    on the rank.
    """
    tied = machine.config.model.tie_embeddings
    layers = [layer for plan in plans for layer in plan.blocks]
    tables = sum(plan.first + (plan.last and not (plan.first and tied)) for plan in plans)
    blocks = sum((owned[layer] for layer in layers), ParameterLoad())
    held = replace(
        blocks,
        tables=tables * table_elements(machine),
        buckets=num_buckets(machine, blocks.total, len(plans), len(layers)),
    )
    passes = overlapping_passes(machine.sizes, machine.config.parallel.schedule in LOOPED_SCHEDULES)
    data = float(exposed_exchange_seconds(machine, held, window, passes))
    return data, float(optimizer_seconds(machine, held))


def model_flops(config: RunConfig) -> tuple[float, float]:
    """Return the model FLOPs per token, with causal attention counted as half, and the same with
    recompute."""
    plans = stage_plans(config)
    works = [block_work(config, layer) for layer in range(config.model.layers)]
    end = output_work(config)
    model = sum(w.forward + w.backward + w.weight for w in works) + end.forward + end.backward
    model += end.weight
    again = sum(works[layer].forward for plan in plans for layer in plan.blocks[: plan.recomputed])
    return model, model + again


def _make_prediction(
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
        reasons=tuple(
            explain_step(config, layout, cluster, machine.constants, breakdown, needed, host)
        ),
    )


def explain_step(
    config: RunConfig,
    layout: Layout,
    cluster: Cluster,
    constants: Constants,
    breakdown: Mapping[str, float],
    needed: Mapping[str, int],
    host: int,
) -> Iterator[str]:
    """Yield sentences about a predicted step: memory of the device, memory of the host, what is
    assumed about the machine, what the plan does not consider, compute, and then everything else
    that takes at least a fiftieth of the step, the longest first.

    breakdown: seconds by part. needed: bytes on the device by kind. host: bytes in host memory.
    """
    step = sum(breakdown.values())
    total, there = sum(needed.values()), cluster.chip.memory
    kinds = sorted(needed, key=lambda kind: -needed[kind])[:2]
    most = " and ".join(f"{kind} {needed[kind] / 2**30:.1f} GiB" for kind in kinds)
    if total > there:
        yield (
            f"does not fit: {total / 2**30:.1f} GiB of {there / 2**30:.1f} GiB on a "
            f"{cluster.chip.name}, mostly {most}"
        )
    else:
        yield (
            f"fits with {(there - total) / 2**30:.1f} GiB to spare: {total / 2**30:.1f} GiB of "
            f"{there / 2**30:.1f} GiB, mostly {most}"
        )
    if host:
        yield _explain_offload(host, cluster, breakdown["optimizer"])
    yield from cluster.notes
    if constants.unfitted:
        yield (
            f"speeds are not fitted to a {cluster.chip.name}: the shares of its peaks that kernels "
            f"reach are {constants.unfitted}, and `python tools/measure_kernels.py --write FILE` "
            "measures them"
        )
    if config.optim.frozen:
        yield (
            "all of it is planned as if everything were trained: what optim.frozen names needs no "
            "gradients and no state, which a dry run of a rank counts"
        )
    yield f"compute is {breakdown['compute'] / step:.0%} of the step of {step:.3g} s"
    for part in sorted(breakdown, key=lambda name: -breakdown[name]):
        share = breakdown[part] / step
        if part == "compute" or share < _WORTH_TELLING:
            continue
        yield _explain_part(part, share, config, layout, cluster)


def _explain_part(
    part: str, share: float, config: RunConfig, layout: Layout, cluster: Cluster
) -> str:
    if part == "bubble":
        many = config.train.global_batch // (config.train.microbatch * layout.data)
        return (
            f"the bubble of {config.parallel.schedule} with pipeline {layout.pipeline} and {many} "
            f"microbatches is {share:.1%}"
        )
    if part not in _AXES:
        return f"{part} is {share:.1%}"
    tier = outermost_tier(cluster, *axis_span(part, layout))
    size = layout.sizes[part]
    what = f"{_AXES[part]} wait {share:.1%} of the step for transfers over {tier.name}"
    if part == "tensor" and tier is not cluster.tiers[0]:
        return f"tensor {size} crosses nodes of {cluster.node}: {what}"
    return f"{what} ({part} {size})"


def _explain_offload(host: int, cluster: Cluster, seconds: float) -> str:
    link, name = cluster.chip.host_link, cluster.chip.name
    what = f"{host / 2**30:.1f} GiB of a GPU's weights and state are in host memory"
    if link is None:
        return (
            f"{what}; the link of a {name} to it is not known, so the update counts as without it"
        )
    how = f"move at {link / 1e9:g} GB/s in each direction"
    return f"{what} and {how}: the update takes {seconds:.2g} s"
