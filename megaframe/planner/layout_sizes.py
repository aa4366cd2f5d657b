"""Layouts as numbers: the sizes of one layout, or arrays of them for many layouts at once.

The division into stages is a closed form here. `architecture.stages.divide` minimises the largest
stage and then makes all stages as even as possible; for equal blocks the same result follows from a
few whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.architecture.stages import compute_block_work, compute_output_work
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import TrainConfig
from megaframe.layout import Layout

Number = Any
"""A whole number, or a numpy array of them."""
RECOMPUTE = ("none", "selective", "full")
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LayoutSizes:
    """Sizes of the axes, under their names, and what else a layout's costs depend on.

    Attributes:
        chunks: Stages per rank.
        zero: ZeRO stage.
        recompute: Index into `RECOMPUTE`.
        microbatch: Samples per microbatch.
        microbatches: Microbatches per step on each rank.
        islands: The same for all layouts.
    """

    tensor: Number
    context: Number
    pipeline: Number
    chunks: Number
    data: Number
    data_replicate: Number
    expert: Number
    expert_tensor: Number
    zero: Number
    recompute: Number
    microbatch: Number
    microbatches: Number
    islands: int = 1

    @property
    def world(self) -> Number:
        """Number of ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def shard(self) -> Number:
        """Number of ranks that shard one copy of the parameters outside the experts."""
        return self.data * self.context // (self.data_replicate * self.islands)


def make_layout_sizes(parallel: ParallelConfig, train: TrainConfig, layout: Layout) -> LayoutSizes:
    """Return the sizes of one run."""
    return LayoutSizes(
        tensor=layout.tensor,
        context=layout.context,
        pipeline=layout.pipeline,
        chunks=parallel.chunks,
        data=layout.data,
        data_replicate=layout.data_replicate,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        zero=parallel.zero,
        recompute=RECOMPUTE.index(train.recompute),
        microbatch=train.microbatch,
        microbatches=train.global_batch // (train.microbatch * layout.data),
        islands=layout.islands,
    )


@dataclass(frozen=True)
class BlocksPerRank:
    """Numbers of blocks.

    Attributes:
        fullest: Of the rank that has most.
        last: Of the rank with the last stage.
    """

    fullest: Array
    last: Array


def count_blocks_per_rank(
    model: ModelConfig, train: TrainConfig, sizes: LayoutSizes, frozen: tuple[str, ...]
) -> BlocksPerRank:
    """Return how the layers are divided, where the head counts as many blocks as it has work.

    Args:
        model: The section `model`.
        train: The section `train`.
        sizes: Of the layouts.
        frozen: Patterns of the names of parameters that have no gradients.
    """
    layers, stages = model.layers, sizes.pipeline * sizes.chunks
    head_weight = _compute_head_weight(model, train, sizes, frozen)
    above, below = np.ceil(head_weight), np.floor(head_weight)
    even = np.maximum(np.ceil((layers + above) / stages), above)
    with_last_alone = (
        np.maximum(0.0, np.ceil((layers - (stages - 1) * below) / stages)) + head_weight
    )
    largest = np.minimum(even, with_last_alone)
    even_last = np.rint((layers + head_weight) / stages - head_weight)
    last = np.clip(even_last, 0.0, np.maximum(0.0, np.floor(largest - head_weight + 1e-9)))
    last = np.where(stages > 1, last, layers)
    # The other stages are as even as possible; those with one block more are consecutive.
    other_stages = np.maximum(1, stages - 1)
    fewest = np.floor((layers - last) / other_stages)
    longer_stages = np.ceil((layers - last - fewest * other_stages) / sizes.pipeline)
    fullest = sizes.chunks * fewest + np.minimum(longer_stages, sizes.chunks)
    last_rank = (
        (sizes.chunks - 1) * fewest
        + np.maximum(0.0, np.minimum(longer_stages, sizes.chunks) - 1)
        + last
    )
    alone = sizes.pipeline == 1
    return BlocksPerRank(np.where(alone, layers, fullest), np.where(alone, layers, last_rank))


def _compute_head_weight(
    model: ModelConfig, train: TrainConfig, sizes: LayoutSizes, frozen: tuple[str, ...]
) -> Array:
    """Return the work of the head in units of a block's work, as `stages` counts it."""
    works = [compute_block_work(model, train, layer, frozen) for layer in range(model.layers)]
    forward = sum(work.forward for work in works) / len(works)
    backward = sum(work.backward + work.weight for work in works) / len(works)
    end = compute_output_work(model, train, frozen)
    twice = np.where(sizes.recompute == 2, 2.0, 1.0)
    head = end.forward + end.backward + end.weight
    return head / np.maximum(twice * forward + backward, 1e-30)
