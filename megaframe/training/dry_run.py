"""What `--dry-run` prints: the resolved config, layout, parameter count, stages and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaframe.architecture.pipeline import build_step_schedule, summarize_pipeline
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig, dump
from megaframe.config.batch_ramp import count_samples
from megaframe.config.compare import PLACES, find_differences
from megaframe.data.blended_dataset import BlendedDataset
from megaframe.data.source_descriptions import describe_passes
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.metrics.run_summary import summarize_model
from megaframe.model.model_chunk import list_model_specs
from megaframe.optim.parameter_groups import find_frozen_names, format_parameter_groups
from megaframe.planner.memory import RankMemory, compute_rank_memory
from megaframe.schedule import lower
from megaframe.training.run_length import has_token_files
from megaframe.validate.invariance import describe_layout_dependence, find_layout_dependence
from megaframe.validate.run import find_warnings


def describe_run(
    config: RunConfig,
    layout: Layout,
    cluster: Cluster | None = None,
    before: RunConfig | None = None,
) -> str:
    """Describe the run, or a phase of it, as text, without allocating its tensors.

    Args:
        config: The config of the run.
        layout: The layout of its ranks.
        cluster: The machine of the run; by default some GPUs in one node.
        before: The config of the phase before, of which only what differs is repeated.
    """
    specs, train = list_model_specs(config.model, config.train), config.train
    microbatches = train.global_batch // (train.microbatch * layout.data)
    frozen = find_frozen_names(config.frozen_patterns, specs)
    schedule, plans = build_step_schedule(config, microbatches), plan_stages(config)
    lowered = lower(schedule)
    host = cluster is not None and cluster.chip.is_host
    default_node = layout.world if cluster is None or host else cluster.node
    node = config.parallel.node_size or default_node
    memories = [
        compute_rank_memory(config, layout, plans, lowered, rank, host=host)
        for rank in range(layout.pipeline)
    ]
    changes = (
        line.replace(" there, ", " before, ").replace(" here", " now")
        for line in find_differences(before, config, PLACES)
    )
    lines = [
        dump(config) if before is None else "\n".join([*changes, ""]),
        *summarize_model(config.train, config.data, layout, specs),
        *format_parameter_groups(config.optim, specs, frozen),
        *summarize_pipeline(config, schedule),
        *_describe_sources(config),
        *_format_memory_table(memories),
        *find_warnings(config, layout, node),
        *describe_layout_dependence(find_layout_dependence(config)),
    ]
    return "\n".join(lines)


def _describe_sources(config: RunConfig) -> Iterator[str]:
    """Yield how often the run sees each of its token files, if all of them are here."""
    data, train = config.data, config.train
    if not data.phases and has_token_files(data):
        dataset = BlendedDataset(config.model, train, data, "train", config.run.seed)
        start = (0,) * len(dataset.names)
        yield from describe_passes(dataset, start, count_samples(train, train.steps))


def _format_memory_table(columns: Sequence[RankMemory]) -> Iterator[str]:
    """Yield a table of memory by kind, with a column for each pipeline rank: the first of its
    tensor and data ranks."""
    yield "memory per rank, without interpreter and temporaries"
    if len(columns) > 1:
        yield f"  {'pipeline':<12}" + "".join(f"{rank:>12}" for rank in range(len(columns)))
    for kind in columns[0].kinds:
        yield f"  {kind:<12}" + "".join(_format_gib(column.kinds[kind]) for column in columns)
    yield f"  {'total':<12}" + "".join(_format_gib(column.total) for column in columns)
    if any(column.host for column in columns):
        yield f"  {'on the host':<12}" + "".join(_format_gib(column.host) for column in columns)


def _format_gib(size: int) -> str:
    return f"{size / 2**30:>8,.3f} GiB"
