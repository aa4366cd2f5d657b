"""The streams of a rank's GPU: one for each communicator, and those of products and copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megaframe.architecture.attention import count_exchanging_ranks
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import RunConfig
from megaframe.layout import AXIS_SETS, DATA_PARTS, EXPERT_SETS, resolve_axis_sizes

_COPIES = 2
"""Streams that bring metrics to the host and copy a checkpoint."""
_OFFLOAD = 2
"""Streams of what is kept in host memory: one in each direction."""
_STEPS = 3
"""Most steps of an exchange (`layout.exchange_steps`)."""
_SUMMED = (("data_shard", "context"), ("data_shard", "context", "tensor"), ("data_replicate",))
"""The axis sets over which gradients are summed, without those of experts and of copied heads."""


def count_streams(config: RunConfig, world: int) -> int | None:
    """Return how many streams a rank uses at most, None if `parallel.auto` has yet to choose the
    layout."""
    if config.parallel.auto:
        return None
    copies = _COPIES + _OFFLOAD * (config.train.offload + config.optim.offload)
    measured = bool(config.metrics.gradient_noise_every)
    return 1 + copies + count_communicators(config.model, config.parallel, world, noise=measured)


def count_communicators(
    model: ModelConfig, parallel: ParallelConfig, world: int, *, noise: bool = False
) -> int:
    """Return how many communicators a rank is in at most. The sizes of the axes need not form a
    layout, because this is asked before a config is checked.

    Args:
        model: The section.
        parallel: The section.
        world: Number of ranks.
        noise: Whether the noise of gradients is measured.
    """
    sizes = dict(resolve_axis_sizes(parallel, world)[0])
    sizes["data_shard"] = sizes["data"] // (parallel.data_replicate * parallel.islands)
    sizes["expert_shard"] = world  # not known without a layout
    axis_sets = _find_wide_axis_sets(AXIS_SETS, sizes)
    if model.moe is not None:
        axis_sets |= _find_wide_axis_sets(EXPERT_SETS, sizes)
    heads = count_exchanging_ranks(parallel)
    has_copies = 1 <= model.kv_heads < parallel.tensor
    attention_groups = [heads > 1, parallel.context > heads, has_copies]
    dispatch_groups = 2 * (model.moe is not None and parallel.expert > 1)
    # The gradients that are rounded may be summed in steps, each over a group of its own.
    reduced_sets = len(_find_wide_axis_sets(_SUMMED, sizes)) + (model.moe is not None) + has_copies
    steps = _STEPS * reduced_sets * (parallel.reduce_precision == "bf16")
    # What the ranks of a data rank each have a part of is summed over them for the noise.
    within = reduced_sets * (noise and parallel.tensor * parallel.context > 1)
    # The layers that are timed before stages are decided have groups of their own.
    timed = sum(attention_groups) + dispatch_groups
    timed *= parallel.layers_per_stage == "measured"
    # Two links to each neighbour; that of the embedding joins ranks with fewer of them.
    links = min(2 * (parallel.pipeline - 1), 4)
    made = len(axis_sets) + sum(attention_groups) + dispatch_groups + steps + links
    return made + within + timed


def _find_wide_axis_sets(
    axis_sets: Iterable[tuple[str, ...]], sizes: Mapping[str, int]
) -> set[frozenset[str]]:
    """Return the axis sets without axes of one rank; those that are alike have the same ranks."""
    wide_sets = set()
    for axes in axis_sets:
        parts = {part for axis in axes for part in (DATA_PARTS if axis == "data" else (axis,))}
        wide_sets.add(frozenset(part for part in parts if sizes[part] > 1))
    return wide_sets - {frozenset()}
