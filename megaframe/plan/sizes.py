"""Sizes: the numbers of a layout that costs depend on, alike for one run and for many at once."""

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
    """Axes by their names; microbatch: samples of one pass. microbatches: passes of a step.
    recompute: index into `RECOMPUTE`."""

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
        """Ranks that share one copy of what is not an expert's."""
        return self.data * self.context // self.data_replicate


def sizes_of(config: RunConfig, layout: Layout) -> Sizes:
    """The sizes of one run."""
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
