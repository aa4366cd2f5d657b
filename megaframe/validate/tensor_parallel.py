"""Checks of tensor parallelism: rows that ranks can divide, and groups within a node."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megaframe.architecture.stages import StagePlan, describe_stage
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import TrainConfig
from megaframe.errors import TIMES
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.layout import Layout

BETWEEN_NODES = 50e9
"""Bytes/s of one rank to another node: a 400 Gb/s adapter per rank."""
WITHIN_NODE = 450e9
"""Bytes/s of one rank to ranks of its node: NVLink 4, one direction."""


def find_chunk_mistakes(parallel: ParallelConfig, train: TrainConfig) -> Iterator[str]:
    """Yield a message if parallel.tensor_chunks has no effect or divides too much."""
    chunks, tensor = parallel.tensor_chunks, parallel.tensor
    rows = -(-train.microbatch * train.seq // (tensor * parallel.context))
    if chunks > 1 and tensor == 1:
        yield (
            f"parallel.tensor_chunks={chunks} has no effect with parallel.tensor=1, where no rows "
            "travel; leave it out"
        )
    elif chunks > rows:
        yield (
            f"parallel.tensor_chunks={chunks} is more than the {rows} row{'s' * (rows > 1)} of a "
            f"microbatch (train.microbatch={train.microbatch}{TIMES}train.seq={train.seq}) that "
            f"each rank has; use {rows} or fewer"
        )


def find_node_crossing_warning(
    model: ModelConfig, train: TrainConfig, layout: Layout, node_size: int
) -> str | None:
    """Return a warning with the predicted cost if tensor groups span several nodes of `node_size`
    ranks; None if each group is within one node.

    The tensor axis varies fastest, so this is the case if a node holds whole groups.
    """
    tensor = layout.tensor
    if tensor == 1 or node_size >= layout.world or node_size % tensor == 0:
        return None
    size = count_tensor_parallel_bytes(model, train, layout)
    apart, together = size / BETWEEN_NODES, size / WITHIN_NODE
    return (
        f"parallel.tensor={tensor} crosses nodes of parallel.node_size={node_size} ranks: each "
        f"rank moves {size / 1e9:.3g} GB a step, {apart:.3g} s at {BETWEEN_NODES / 1e9:g} GB/s "
        f"between nodes instead of {together:.3g} s at {WITHIN_NODE / 1e9:g} GB/s within one; "
        f"parallel.tensor={gcd(tensor, node_size)} would stay inside"
    )


def count_tensor_parallel_bytes(model: ModelConfig, train: TrainConfig, layout: Layout) -> float:
    """Return the bytes of activations that a rank moves over the tensor axis in a step.

    What recomputed layers move again is not counted.
    """
    tokens = train.microbatch * train.seq / layout.context
    microbatches = train.global_batch // (train.microbatch * layout.data)
    stage = describe_stage(model, train, StagePlan(0, 1, range(model.layers)))
    assert stage.embedding is not None and stage.head is not None, "it is the whole model"
    parts = (stage.embedding, *stage.layers, *[stage.head] * stage.losses)
    traffic = [part.tensor_traffic for part in parts]
    moved = sum(part.forward + part.backward for part in traffic)
    elements = moved * tokens * microbatches / layout.pipeline
    return elements * DTYPE_BYTES[train.precision] * (layout.tensor - 1) / layout.tensor
