"""Sizes: the numbers of a layout that its costs depend on, for one run or for many at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaframe.config.schema import RunConfig
from megaframe.layout import Layout

Number = Any
"""A whole number, or a numpy array of them."""
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the axes, under their names, and what else a layout's costs depend on.

    chunks: stages per rank. zero: ZeRO stage. recompute: index into `RECOMPUTE`. microbatch:
    samples per microbatch. microbatches: microbatches per step on each rank.
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

    @property
    def world(self) -> Number:
        """Number of ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def shard(self) -> Number:
        """Number of ranks that shard one copy of the parameters outside the experts."""
        return self.data * self.context // self.data_replicate


def sizes_of(config: RunConfig, layout: Layout) -> Sizes:
    """Return the sizes of one run."""
    parallel, train = config.parallel, config.train
    return Sizes(
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
    )
