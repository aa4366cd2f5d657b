"""A half that a block does not have, described as a layer without parts. So what adds up the layers
of a block needs no exception for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.architecture.layer import (
    FeedForwardDescription,
    HasParameters,
    MixerDescription,
    SavedActivations,
)
from megaframe.config.parallel import ParallelConfig


class NoLayer:
    """What both of them say of themselves."""

    name = "none"
    input_products = 0
    keeps_output_gradient = False
    parts: Mapping[str, HasParameters] = {}

    def count_saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return nothing."""
        return SavedActivations()


@dataclass(frozen=True, kw_only=True)
class NoMixer(NoLayer, MixerDescription):
    """In place of a mixer."""

    context_kinds = ("ring", "all_to_all", "nested")


@dataclass(frozen=True, kw_only=True)
class NoFeedForward(NoLayer, FeedForwardDescription):
    """In place of an MLP or experts."""

    inner_elements = 0.0
    widest = 0
