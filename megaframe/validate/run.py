"""Checks of a config that no section can make alone, all made before anything is built.

Each check yields a message with both numbers, the keys and the nearest valid values.
"""

from __future__ import annotations

from megaframe.config.schema import RunConfig
from megaframe.errors import UserError
from megaframe.layout import Layout, resolve_axis_sizes
from megaframe.validate.absorption import find_absorption_mistakes
from megaframe.validate.adapters import find_adapter_import_mistakes, find_adapter_mistakes
from megaframe.validate.blocks import find_block_mistakes
from megaframe.validate.checkpoint import (
    find_best_mistakes,
    find_checkpoint_url_mistakes,
    find_fault_mistakes,
    find_path_mistakes,
    find_replica_comparison_warning,
    find_saving_mistakes,
)
from megaframe.validate.context_parallel import find_context_mistakes
from megaframe.validate.cross_layer_tensors import find_handed_mistakes
from megaframe.validate.cuda_graph import find_graph_obstacles
from megaframe.validate.data import find_source_mistakes, find_split_mistakes
from megaframe.validate.experts import find_expert_mistakes
from megaframe.validate.gradient_noise import find_gradient_noise_mistakes
from megaframe.validate.limits import find_limit_mistakes
from megaframe.validate.model import (
    find_model_mistakes,
    find_mtp_mistakes,
    find_vocabulary_mistakes,
    find_window_mistakes,
)
from megaframe.validate.optim import (
    find_learning_rate_mistakes,
    find_optimizer_mistakes,
    find_warmup_warning,
)
from megaframe.validate.parametrisation import find_parametrisation_mistakes
from megaframe.validate.pipeline import find_stage_mistakes, find_step_schedule_mistakes
from megaframe.validate.streams import find_laurel_mistakes, find_stream_mistakes
from megaframe.validate.sync import find_sync_mistakes
from megaframe.validate.tensor_parallel import find_chunk_mistakes, find_node_crossing_warning
from megaframe.validate.train import (
    find_batch_mistakes,
    find_compression_mistakes,
    find_loss_mistakes,
    find_precision_mistakes,
    find_sample_mistakes,
    find_task_mistakes,
)


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
    sizes, axis_mistakes = resolve_axis_sizes(config.parallel, world)
    has_graph = config.train.cuda_graph and not axis_mistakes
    graph_obstacles = find_graph_obstacles(config, sizes) if has_graph else ()
    # Without these, all layers can be described.
    block_mistakes = [*find_block_mistakes(config.model), *find_window_mistakes(config.model)]
    return [
        *axis_mistakes,
        *block_mistakes,
        *find_model_mistakes(config.model, config.train.seq),
        *(
            find_limit_mistakes(config.model, config.parallel, config.data)
            if not block_mistakes
            else ()
        ),
        *find_chunk_mistakes(config.parallel, config.train),
        *find_expert_mistakes(config.model, config.parallel),
        *(find_context_mistakes(config.model, config.parallel) if not block_mistakes else ()),
        *(find_adapter_mistakes(config.model) if not block_mistakes else ()),
        *find_adapter_import_mistakes(config.model, config.checkpoint),
        *(find_absorption_mistakes(config.model, config.train) if not block_mistakes else ()),
        *find_mtp_mistakes(config.model, config.train),
        *(find_handed_mistakes(config.model) if not block_mistakes else ()),
        *find_stream_mistakes(config.model),
        *(find_laurel_mistakes(config.model) if not block_mistakes else ()),
        *find_vocabulary_mistakes(config.model, config.data),
        *(find_batch_mistakes(config.train, sizes["data"]) if not axis_mistakes else ()),
        *find_stage_mistakes(config.model, config.parallel, config.train),
        *(
            find_step_schedule_mistakes(config.parallel, config.train, sizes["data"])
            if not axis_mistakes
            else ()
        ),
        *find_compression_mistakes(config.parallel, config.train),
        *find_sync_mistakes(config),
        *find_precision_mistakes(config.train),
        *find_loss_mistakes(config.train, config.kernels),
        *find_sample_mistakes(config.train, config.data),
        *find_task_mistakes(config.evaluate, config.data),
        *(f"train.cuda_graph=true cannot work here: {reason}" for reason in graph_obstacles),
        *(find_gradient_noise_mistakes(config, sizes) if not axis_mistakes else ()),
        *find_parametrisation_mistakes(config.model, config.optim),
        *find_learning_rate_mistakes(config.optim, config.train.steps),
        *find_optimizer_mistakes(config.optim),
        *find_saving_mistakes(config.checkpoint),
        *find_best_mistakes(config.train, config.checkpoint),
        *(find_source_mistakes(config.model, config.data) if data else ()),
        *find_split_mistakes(config.train, config.data),
        *find_checkpoint_url_mistakes(config.checkpoint),
        *find_path_mistakes(config),
        *find_fault_mistakes(config.train, config.checkpoint, config.faults),
    ]


def find_warnings(config: RunConfig, layout: Layout, node_size: int) -> list[str]:
    """Return warnings about settings that work, but probably not as intended.

    Args:
        config: The config.
        layout: Its layout.
        node_size: Ranks per node.
    """
    warnings = (
        find_node_crossing_warning(config.model, config.train, layout, node_size),
        find_replica_comparison_warning(config.parallel, config.faults, layout),
        find_warmup_warning(config.optim, config.train.steps),
    )
    return [f"warning: {warning}" for warning in warnings if warning is not None]
