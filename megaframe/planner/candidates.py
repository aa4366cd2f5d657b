"""Candidates: many layouts of one config as arrays of integers, one element per layout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig
from megaframe.planner.sizes import Sizes

Array = np.ndarray[Any, Any]
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "breadth-first",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "v-half",
    "dualpipe-v",
)
CIRCLING = ("interleaved", "breadth-first")
"""Schedules that go through all ranks before they come to a rank's next stage."""


@dataclass(frozen=True)
class Candidates:
    """Layouts to estimate; they must be valid.

    recompute: index into `sizes.RECOMPUTE`. schedule: index into `SCHEDULES`. Everything else,
    such as `train.global_batch`, precision, model and optimizer, is that of the config.
    """

    tensor: Array
    context: Array
    pipeline: Array
    chunks: Array
    data: Array
    data_replicate: Array
    expert: Array
    expert_tensor: Array
    zero: Array
    recompute: Array
    microbatch: Array
    schedule: Array

    def __len__(self) -> int:
        return len(self.tensor)

    def taken(self, which: Array | slice) -> Candidates:
        """Return the candidates at these indices, or where this mask is true."""
        return Candidates(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

    def sizes(self, config: RunConfig) -> Sizes:
        """Return the sizes for the cost arithmetic."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "schedule"}
        microbatches = config.train.global_batch // (self.microbatch * self.data)
        return Sizes(**given, microbatches=microbatches)
