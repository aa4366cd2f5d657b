"""Checks of a config that no section can make alone, all made before anything is built.

Each check yields a message with both numbers, the keys and the nearest valid values.
"""

from __future__ import annotations

from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.layout import Layout, axis_sizes
from megaframe.validate.blocks import block_mistakes
from megaframe.validate.checkpoint import (
    checkpoint_url_mistakes,
    fault_mistakes,
    path_mistakes,
    replica_comparison_warning,
    saving_mistakes,
)
from megaframe.validate.context_parallel import context_mistakes
from megaframe.validate.cuda_graph import graph_mistakes
from megaframe.validate.data import source_mistakes, split_mistakes
from megaframe.validate.experts import expert_mistakes
from megaframe.validate.model import model_mistakes, mtp_mistakes, vocabulary_mistakes
from megaframe.validate.optim import learning_rate_mistakes, optimizer_mistakes, warmup_warning
from megaframe.validate.pipeline import stage_mistakes, step_schedule_mistakes
from megaframe.validate.tensor_parallel import node_crossing_warning, tensor_mistakes
from megaframe.validate.train import batch_mistakes, compression_mistakes, precision_mistakes


def validate_config(config: RunConfig, world: int, *, data: bool = True) -> None:
    """Raise a `UserError` with all mistakes of a config that is to run on `world` ranks, if there
    are any.

    Args:
        config: The config.
        world: Number of ranks.
        data: Whether the config must name data sources; a dry run needs none.
    """
    mistakes = find_mistakes(config, world, data=data)
    if mistakes:
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        raise UserError("\n  ".join([f"{count} in the config", *mistakes]))


def find_mistakes(config: RunConfig, world: int, *, data: bool = True) -> list[str]:
    """Return the reasons why a config cannot run on `world` ranks; empty if it can.

    Args:
        config: The config.
        world: Number of ranks.
        data: Whether the config must name data sources; a dry run needs none.
    """
    sizes, layout_mistakes = axis_sizes(config.parallel, world)
    return [
        *layout_mistakes,
        *block_mistakes(config.model, config.parallel.tensor),
        *model_mistakes(config.model, config.train.seq),
        *tensor_mistakes(config),
        *expert_mistakes(config),
        *context_mistakes(config),
        *mtp_mistakes(config),
        *vocabulary_mistakes(config),
        *(batch_mistakes(config.train, sizes["data"]) if not layout_mistakes else ()),
        *stage_mistakes(config),
        *(step_schedule_mistakes(config, sizes["data"]) if not layout_mistakes else ()),
        *compression_mistakes(config),
        *precision_mistakes(config.train),
        *(graph_mistakes(config, sizes) if not layout_mistakes else ()),
        *learning_rate_mistakes(config.optim, config.train.steps),
        *optimizer_mistakes(config.optim),
        *saving_mistakes(config.checkpoint),
        *(source_mistakes(config) if data else ()),
        *split_mistakes(config),
        *checkpoint_url_mistakes(config.checkpoint),
        *path_mistakes(config),
        *fault_mistakes(config),
    ]


def find_warnings(config: RunConfig, layout: Layout, node_size: int) -> list[str]:
    """Return warnings about settings that work, but probably not as intended.

    Args:
        config: The config.
        layout: Its layout.
        node_size: Ranks per node.
    """
    warnings = (
        node_crossing_warning(config, layout, node_size),
        replica_comparison_warning(config, layout),
        warmup_warning(config.optim, config.train.steps),
    )
    return [f"warning: {warning}" for warning in warnings if warning is not None]
