"""What `--dry-run` prints: the resolved config, layout, parameter count, stages and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from megaframe.comm import ALONE
from megaframe.config import RunConfig, dump
from megaframe.layout import Layout
from megaframe.optim.choice import choices_table
from megaframe.parameter import Module
from megaframe.plan.experts import dropping
from megaframe.plan.memory import Held, Memory, memory
from megaframe.plan.nodes import crossing
from megaframe.plan.schedules import pipeline_summary, step_schedule
from megaframe.plan.stages import StagePlan, stage_plans
from megaframe.schedule import Schedule
from megaframe.spec import EXPERT_AXES, ParamSpec, active_parameters, parameter_count
from megaframe.stage import build_stages, model_specs


def describe(config: RunConfig, layout: Layout) -> str:
    """The run in words and numbers; nothing is allocated for it."""
    specs = model_specs(config)
    count = parameter_count(specs)
    train = config.train
    tokens = train.global_batch * train.seq
    microbatches = train.global_batch // (train.microbatch * layout.data)
    schedule = step_schedule(config, microbatches)
    node = config.parallel.node_size or layout.world
    warnings = (crossing(config, layout, node), dropping(config.model))
    lines = [
        dump(config),
        f"layout      {layout}",
        f"parameters  {count:,} in {len(specs)} tensors{_active(specs)}",
        f"batch       {train.global_batch} samples, {tokens:,} tokens a step, "
        f"{tokens * train.steps:,} in the run",
        *choices_table(config, specs),
        *pipeline_summary(config, schedule),
        *_memory(config, layout, schedule),
        *(f"warning: {warning}" for warning in warnings if warning is not None),
    ]
    return "\n".join(lines)


def _active(specs: Sequence[ParamSpec]) -> str:
    active = active_parameters(specs)
    return "" if active == parameter_count(specs) else f", {active:,} of which each token meets"


def _memory(config: RunConfig, layout: Layout, schedule: Schedule) -> Iterator[str]:
    """A column for each pipeline rank, the first of its tensor and data ranks."""
    plans = stage_plans(config)
    columns = [
        _of_rank(config, layout, [plans[stage] for stage in schedule.stages(rank)], schedule, rank)
        for rank in range(len(schedule.ranks))
    ]
    yield "memory per rank, without interpreter and temporaries"
    if len(columns) > 1:
        yield f"  {'pipeline':<12}" + "".join(f"{rank:>12}" for rank in range(len(columns)))
    for kind in asdict(columns[0]):
        yield f"  {kind:<12}" + "".join(_gib(asdict(column)[kind]) for column in columns)
    yield f"  {'total':<12}" + "".join(_gib(column.total) for column in columns)


def _of_rank(
    config: RunConfig,
    layout: Layout,
    plans: Sequence[StagePlan],
    schedule: Schedule,
    rank: int,
) -> Memory:
    stages = build_stages(config, plans, ALONE)
    held = held_by([unit for stage in stages.values() for unit in stage.units], layout)
    ranks = layout.data_shard * layout.context
    return memory(config, held, ranks, plans, schedule.ranks[rank], layout.expert_shard)


def held_by(units: Sequence[Module], layout: Layout) -> Held:
    """The parameters that the first tensor rank has of these units."""
    size = {
        parameter: (parameter.spec.local(layout.place(0), layout.sizes).size, unit)
        for unit in reversed(units)
        for parameter in unit.parameters()
    }
    vectors = sum(n for p, (n, _) in size.items() if p.spec.role in ("gain", "bias"))
    tables = [n for p, (n, _) in size.items() if p.spec.role in ("embedding", "head")]
    dense: dict[Module, int] = {}
    experts: dict[Module, int] = {}
    for parameter, (count, unit) in size.items():
        if parameter.spec.role == "matrix":
            of_experts = EXPERT_AXES[0] in parameter.spec.axes.values()
            dense.setdefault(unit, 0)
            experts.setdefault(unit, 0)
            (experts if of_experts else dense)[unit] += count
    return Held(vectors, tuple(dense.values()), tuple(tables), tuple(experts.values()))


def _gib(size: int) -> str:
    return f"{size / 2**30:>8,.3f} GiB"
