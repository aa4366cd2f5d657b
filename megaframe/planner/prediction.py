"""How long a step takes, where the time goes, whether it fits, and why.

    cluster = load_cluster("h100-ib")
    constants = get_cluster_constants(cluster)
    predict(config, layout, cluster, constants) -> Prediction      exact: the schedule is simulated
    estimate(space, constants, candidates) -> Estimates            closed forms on arrays

`estimate` is in `vectorized.py`. Both use the same arithmetic (`layer_times.py`), on numbers or on
numpy arrays. They differ in the bubble, which `predict` simulates and `estimate` takes from closed
forms, and in the stages, which `predict` adds up one by one while `estimate` only considers the
rank with most work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megaframe.architecture.absorption import decide_absorption
from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.quantised import compute_bits_per_element
from megaframe.architecture.stages import (
    PartWorks,
    PassWork,
    StagePlan,
    compute_block_work,
    compute_output_work,
    plan_stages,
)
from megaframe.config import ParallelConfig, RunConfig, TrainConfig
from megaframe.config.keys import format_value
from megaframe.errors import UserError
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.communication_times import (
    estimate_pipeline_wait_seconds,
    estimate_stage_transfer_seconds,
)
from megaframe.planner.constants import Constants
from megaframe.planner.data_parallel_times import (
    ParameterLoad,
    compute_block_load,
    count_buckets,
    count_layer_table_elements,
    count_overlapping_passes,
    count_table_elements,
    estimate_exposed_exchange_seconds,
    estimate_optimizer_seconds,
    resolve_bucket_size,
)
from megaframe.planner.goodput import estimate_straggler_share
from megaframe.planner.island_times import estimate_exposed_sync_seconds, explain_islands
from megaframe.planner.layer_times import (
    estimate_block_times,
    estimate_embedding_times,
    estimate_head_times,
)
from megaframe.planner.layout_sizes import make_layout_sizes
from megaframe.planner.machine import (
    CostBreakdown,
    Machine,
    PassTimes,
    compute_axis_span,
    find_outermost_tier,
)
from megaframe.planner.memory import RankMemory
from megaframe.planner.parameter_counts import count_rank_parameters, list_layer_kinds
from megaframe.planner.peak_memory import compute_pipeline_memory, select_nonzero_kinds
from megaframe.schedule import Schedule
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.named import find_named_schedule, get_schedule_name
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
    "islands": "islands",
}


@dataclass(frozen=True)
class Prediction:
    """Prediction of one step of a run.

    Attributes:
        step_seconds: Mean time of a step, including stragglers but not failures.
        breakdown: Seconds by part, which sum to `step_seconds`: compute; tensor, context, expert,
            data, pipeline and, if there are several, islands (exposed communication of each axis);
            bubble, optimizer, other.
        mfu, hfu: Shares of the chip's dense peak, with causal attention counted as half; hfu
            includes recompute. None if no peak is known.
        tflops_per_gpu: Model TFLOP/s per GPU, with causal attention counted as half.
        memory_bytes: Bytes by kind on the rank that needs most.
        fits: Whether the chip has as many.
        host_bytes: Bytes that this rank keeps in host memory.
        reasons: Sentences with numbers, the most important first.
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

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of weights and optimizer state that a rank saves, on the device and the host."""
        return self.host_bytes + sum(
            self.memory_bytes.get(kind, 0) for kind in ("weights", "optimizer")
        )


def predict(
    config: RunConfig, layout: Layout, cluster: Cluster, constants: Constants
) -> Prediction:
    """Predict a step of `config` on `layout`. With `parallel.layers_per_stage=measured` stages are
    divided by predicted times.

    Args:
        config: A config that has passed `check`.
        layout: The sizes of its axes.
        cluster: The chips and links that it runs on.
        constants: What kernels and collectives reach there.

    Raises:
        UserError: The cluster has fewer ranks, or its chip lacks the config's precision.
    """
    if layout.world > cluster.size:
        raise UserError(
            f"{layout.world} ranks are more than the {cluster.size} of cluster {cluster.name}; "
            f"use {cluster.size} or fewer"
        )
    config = resolve_bucket_size(decide_absorption(config), layout, cluster)
    sizes = make_layout_sizes(config.parallel, config.train, layout)
    machine, notes = Machine(config, cluster, constants, sizes), list[str]()
    if config.parallel.layers_per_stage == "measured":
        layers, note = _choose_division(machine)
        notes.append(note)
        config = config.replace(parallel={"layers_per_stage": layers})
        machine = Machine(config, cluster, constants, sizes)
    schedule = build_step_schedule(config, int(machine.sizes.microbatches))
    breakdown = estimate_step(machine, schedule)
    memories = compute_pipeline_memory(config, layout, schedule, cluster.chip).values()
    most = max(memories, key=lambda memory: memory.total)
    prediction = _make_prediction(layout, machine, breakdown, most)
    return replace(prediction, reasons=(*prediction.reasons, *notes))


def _choose_division(machine: Machine) -> tuple[tuple[int, ...], str]:
    """Return the layers of each stage that a run would choose if it measured the predicted times,
    and a sentence about them."""

    def predict_seconds(layers: tuple[int, ...]) -> float:
        config = machine.config.replace(parallel={"layers_per_stage": layers})
        divided = Machine(config, machine.cluster, machine.constants, machine.sizes)
        schedule = build_step_schedule(config, int(machine.sizes.microbatches))
        return sum(estimate_step(divided, schedule).values())

    by_work = tuple(len(plan.blocks) for plan in plan_stages(machine.config))
    steps = {layers: predict_seconds(layers) for layers in (divide_by_times(machine), by_work)}
    layers = min(steps, key=steps.__getitem__)
    return layers, (
        f"stages have {format_value(layers)} layers by predicted times, where a run measures "
        f"(parallel.layers_per_stage=measured); {format_value(by_work)}, by work, would take "
        f"{steps[by_work]:.3g} s a step"
    )


def divide_by_times(machine: Machine) -> tuple[int, ...]:
    """Return the layers of each stage, balanced by predicted times."""
    parts = (
        estimate_embedding_times(machine),
        estimate_head_times(machine),
        *_map_layers(machine, estimate_block_times),
    )
    passes = (part.combined for part in parts)
    embedding, output, *blocks = (
        PassWork(float(one.forward), float(one.backward), float(one.weight)) for one in passes
    )
    parallel = machine.config.parallel
    # What full recompute computes again is in the times of blocks.
    return PartWorks(embedding, tuple(blocks), output).divide(
        parallel.pipeline * parallel.chunks, recompute=False
    )


def estimate_step(machine: Machine, schedule: Schedule) -> dict[str, float]:
    """Return the seconds of a step by part, as in `Prediction.breakdown`.

    Args:
        machine: The run on its cluster.
        schedule: That of one step, not lowered.
    """
    plans = plan_stages(machine.config)
    blocks = _map_layers(machine, estimate_block_times)
    stage_times = [_estimate_stage_times(machine, plan, blocks) for plan in plans]
    timeline = simulate(schedule, _make_schedule_costs(machine, stage_times))
    return _break_down_step(machine, plans, stage_times, schedule, timeline)


def _map_layers(machine: Machine, function: Callable[[Machine, int], T]) -> list[T]:
    """Return `function` of every layer, called once for each kind of layer."""
    kinds = list_layer_kinds(machine.config.model, machine.config.frozen_patterns)
    by_kind = {kind: function(machine, kinds.index(kind)) for kind in set(kinds)}
    return [by_kind[kind] for kind in kinds]


def _estimate_stage_times(
    machine: Machine, plan: StagePlan, blocks: Sequence[CostBreakdown]
) -> CostBreakdown:
    """Return the seconds of a stage for one microbatch: its blocks, the products of the embedding
    if it is first, and the head if it is last."""
    block_times = [blocks[layer] for layer in plan.blocks]
    if plan.last:
        block_times.append(estimate_head_times(machine))
    total = estimate_embedding_times(machine) if plan.first else CostBreakdown(PassTimes())
    for number, part in enumerate(block_times):
        total = total + part
        is_recomputed = number < plan.recomputed and machine.config.train.recompute != "full"
        if is_recomputed:
            total = total + CostBreakdown(PassTimes(0.0, part.combined.forward, 0.0))
    return total


def _make_schedule_costs(machine: Machine, stage_times: Sequence[CostBreakdown]) -> ActionCosts:
    """Return the costs of every stage for the simulator. What a transfer adds to compute, by delay
    or by blocking it, is charged to the pass before it."""
    waiting = float(estimate_pipeline_wait_seconds(machine))
    last = len(stage_times) - 1
    return ActionCosts(
        forward=tuple(
            float(part.combined.forward) + waiting * (number < last)
            for number, part in enumerate(stage_times)
        ),
        backward=tuple(
            float(part.combined.backward) + waiting * (number > 0)
            for number, part in enumerate(stage_times)
        ),
        weight=tuple(float(part.combined.weight) for part in stage_times),
        comm=float(estimate_stage_transfer_seconds(machine))
        if machine.software.overlap_pipeline
        else 0.0,
    )


def _break_down_step(
    machine: Machine,
    plans: Sequence[StagePlan],
    stage_times: Sequence[CostBreakdown],
    schedule: Schedule,
    timeline: Timeline,
) -> dict[str, float]:
    """Return the seconds by part, for the rank that has most work."""
    microbatches = machine.sizes.microbatches
    rank = max(range(len(timeline.work)), key=lambda number: timeline.work[number])
    stages_of_rank = schedule.list_stages(rank)
    rank_times = CostBreakdown(PassTimes())
    for stage in stages_of_rank:
        rank_times = rank_times + stage_times[stage]
    seconds = {
        name: float(microbatches * part.total) for name, part in rank_times.split_by_cause().items()
    }
    work, step = float(timeline.work[rank]), float(timeline.time)
    if machine.software.steps_meet:
        step = float(max(timeline.spans))
    seconds["pipeline"] = max(0.0, work - sum(seconds.values()))
    loads = _map_layers(machine, compute_block_load)
    ends_of_step = []
    for number in range(len(timeline.work)):
        stages = schedule.list_stages(number)
        rank_plans = [plans[stage] for stage in stages]
        compute = sum((stage_times[stage].compute for stage in stages), PassTimes())
        ends_of_step.append(_estimate_end_of_step(machine, rank_plans, loads, compute))
    data, update = max(ends_of_step, key=sum)
    seconds["data"] = data
    seconds["bubble"] = step - work
    seconds["optimizer"] = update
    if machine.config.trains_in_islands:
        loads_of_ranks = (
            _sum_loads(machine, [plans[stage] for stage in schedule.list_stages(number)], loads)
            for number in range(len(timeline.work))
        )
        seconds["islands"] = max(
            float(estimate_exposed_sync_seconds(machine, load, sum(seconds.values())))
            for load in loads_of_ranks
        )
    straggling = estimate_straggler_share(machine.cluster, float(machine.sizes.world))
    seconds["other"] = machine.software.step_kernels * machine.rate.launch + straggling * (
        step + data + update
    )
    return {name: float(value) for name, value in seconds.items()}


def _estimate_end_of_step(
    machine: Machine, plans: Sequence[StagePlan], loads: Sequence[ParameterLoad], compute: PassTimes
) -> tuple[float, float]:
    """Return the seconds of the exposed exchange between data ranks and those of the update.

    Args:
        plans: Stages of the rank.
        loads: Parameters of every layer.
        compute: Seconds of one microbatch on the rank.
    """
    load = _sum_loads(machine, plans, loads)
    named = find_named_schedule(machine.config.parallel.schedule)
    overlapped = count_overlapping_passes(machine.sizes, named is not None and named.is_looped)
    data = float(estimate_exposed_exchange_seconds(machine, load, compute, overlapped))
    return data, float(estimate_optimizer_seconds(machine, load))


def _sum_loads(
    machine: Machine, plans: Sequence[StagePlan], loads: Sequence[ParameterLoad]
) -> ParameterLoad:
    """Return the parameters of a rank's stages, given those of every layer."""
    tied = machine.config.model.tie_embeddings
    layers = [layer for plan in plans for layer in plan.blocks]
    tables = sum(plan.first + (plan.last and not (plan.first and tied)) for plan in plans)
    blocks = sum((loads[layer] for layer in layers), ParameterLoad())
    return replace(
        blocks,
        tables=tables * count_table_elements(machine)
        + any(plan.first for plan in plans) * count_layer_table_elements(machine),
        buckets=count_buckets(machine, blocks.total, len(plans), len(layers)),
    )


def count_model_flops(config: RunConfig) -> tuple[float, float]:
    """Return the model FLOPs per token, with causal attention counted as half, and the same with
    recompute."""
    plans = plan_stages(config)
    block_flops = [
        compute_block_work(config.model, config.train, layer)
        for layer in range(config.model.layers)
    ]
    head_flops = compute_output_work(config.model, config.train)
    model = sum(w.forward + w.backward + w.weight for w in block_flops)
    for flops in (head_flops.forward, head_flops.backward, head_flops.weight):
        model += flops
    recomputed = sum(
        block_flops[layer].forward for plan in plans for layer in plan.blocks[: plan.recomputed]
    )
    return model, model + recomputed


def _make_prediction(
    layout: Layout, machine: Machine, breakdown: dict[str, float], rank_memory: RankMemory
) -> Prediction:
    step, cluster, config = float(sum(breakdown.values())), machine.cluster, machine.config
    memory, host = select_nonzero_kinds(rank_memory), rank_memory.host
    tokens = config.train.global_batch * config.train.seq
    model, hardware = count_model_flops(config)
    rate = model * tokens / step / layout.world
    peak = cluster.chip.peaks.get(config.train.precision)
    fits = sum(memory.values()) <= cluster.chip.memory
    return Prediction(
        step_seconds=step,
        breakdown=breakdown,
        mfu=None if peak is None else rate / peak,
        hfu=None if peak is None else rate / peak * hardware / model if model else 0.0,
        tflops_per_gpu=rate / 1e12,
        tokens_per_second=tokens / step,
        memory_bytes=memory,
        fits=fits,
        host_bytes=host,
        reasons=tuple(_explain_step(machine, layout, breakdown, memory, host)),
    )


def _explain_step(
    machine: Machine,
    layout: Layout,
    breakdown: Mapping[str, float],
    memory: Mapping[str, int],
    host_bytes: int,
) -> Iterator[str]:
    """Yield sentences about a predicted step: memory of the device, memory of the host, what is
    assumed about the machine, what the plan does not consider, compute, and then everything else
    that takes at least a fiftieth of the step, the longest first.

    Args:
        machine: The run on its cluster.
        layout: The sizes of its axes.
        breakdown: Seconds by part.
        memory: Bytes on the device by kind.
        host_bytes: Bytes in host memory.
    """
    config, cluster, constants = machine.config, machine.cluster, machine.constants
    step = sum(breakdown.values())
    total, capacity = sum(memory.values()), cluster.chip.memory
    kinds = sorted(memory, key=lambda kind: -memory[kind])[:2]
    largest = " and ".join(f"{kind} {memory[kind] / 2**30:.1f} GiB" for kind in kinds)
    if total > capacity:
        yield (
            f"does not fit: {total / 2**30:.1f} GiB of {capacity / 2**30:.1f} GiB on a "
            f"{cluster.chip.name}, mostly {largest}"
        )
    else:
        yield (
            f"fits with {(capacity - total) / 2**30:.1f} GiB to spare: {total / 2**30:.1f} GiB of "
            f"{capacity / 2**30:.1f} GiB, mostly {largest}"
        )
    if host_bytes:
        yield _explain_offload(host_bytes, cluster, breakdown["optimizer"])
    yield from cluster.notes
    if constants.unfitted:
        yield (
            f"speeds are not fitted to a {cluster.chip.name}: the shares of its peaks that kernels "
            f"reach are {constants.unfitted}, and `python tools/measure_kernels.py --write FILE` "
            "measures them"
        )
    elif constants.measured_on:
        yield f"the shares of its peaks that kernels reach were measured on {constants.measured_on}"
    if config.train.fp8 != "none" and "fp8" not in cluster.chip.peaks:
        yield (
            f"a {cluster.chip.name} has no products of 8 bits, so train.fp8={config.train.fp8} is "
            f"emulated there, and planned as products in {config.train.precision}"
        )
    if config.frozen_patterns:
        yield (
            "what optim.frozen names is planned without gradients, optimizer state and products of "
            "weight gradients; its tables are exchanged as if they were trained"
        )
    adapters = config.model.adapters
    if adapters is not None and adapters.quantize_base is not None:
        bits = float(compute_bits_per_element(adapters.quantize_base))
        yield (
            f"matrices of blocks are kept in {bits:.3g} bits per element, as "
            f"{adapters.quantize_base.type}; values of a block are made of them in each pass"
        )
    if config.trains_in_islands:
        parameters = count_rank_parameters(
            config.model, config.train, layout, plan_stages(config), config.frozen_patterns
        )
        own = parameters.count_shard(layout.data_shard * layout.context, layout.expert_shard)
        alone = step - breakdown["islands"]
        yield explain_islands(machine, layout, own / layout.pipeline, alone)
    yield f"compute is {breakdown['compute'] / step:.0%} of the step of {step:.3g} s"
    for part in sorted(breakdown, key=lambda name: -breakdown[name]):
        share = breakdown[part] / step
        if part == "compute" or share < _WORTH_TELLING:
            continue
        yield _explain_part(part, share, config.parallel, config.train, layout, cluster)


def _explain_part(
    part: str,
    share: float,
    parallel: ParallelConfig,
    train: TrainConfig,
    layout: Layout,
    cluster: Cluster,
) -> str:
    if part == "bubble":
        microbatches = train.global_batch // (train.microbatch * layout.data)
        schedule = get_schedule_name(parallel.schedule)
        return (
            f"the bubble of {schedule} with pipeline {layout.pipeline} and "
            f"{microbatches} microbatches is {share:.1%}"
        )
    if part not in _AXES:
        return f"{part} is {share:.1%}"
    tier = find_outermost_tier(cluster, *compute_axis_span(part, layout))
    size = layout.sizes[part]
    text = f"{_AXES[part]} wait {share:.1%} of the step for transfers over {tier.name}"
    if part == "tensor" and tier is not cluster.tiers[0]:
        return f"tensor {size} crosses nodes of {cluster.node}: {text}"
    return f"{text} ({part} {size})"


def _explain_offload(host_bytes: int, cluster: Cluster, seconds: float) -> str:
    link, name = cluster.chip.host_link, cluster.chip.name
    text = f"{host_bytes / 2**30:.1f} GiB of a GPU's weights and state are in host memory"
    if link is None:
        return (
            f"{text}; the link of a {name} to it is not known, so the update counts as without it"
        )
    speed = f"move at {link / 1e9:g} GB/s in each direction"
    return f"{text} and {speed}: the update takes {seconds:.2g} s"
