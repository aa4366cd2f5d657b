"""A pipeline schedule from outside: 1F1B that begins with more forwards, so that a transfer has the
time of other passes to arrive.

python pretrain_gpt.py --config configs/demo.yaml "run.extensions=[examples/schedule.py]" \
    parallel.pipeline=2 "parallel.schedule={kind: eager, apart: 2}"
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from megaframe.extensions import PipelineSchedulePart, Registry
from megaframe.schedule import Action, ActionKind, PipelineSizes
from megaframe.schedule.building_blocks import alternate, list_passes
from megaframe.schedule.named_schedule import HeldActivations, Number, RanksHeld


class EagerConfig(PipelineSchedulePart):
    kind: Literal["eager"] = "eager"
    """1F1B with a longer warm-up. Bubble (p-1)(F+B+W); live (p-1) `apart` + 1, at most m."""
    apart: Annotated[int, Field(ge=1, le=8)] = 2
    """Forwards by which the warm-up of a rank is longer than that of the next one. 1 is 1f1b."""

    def list_actions(self, rank: int, sizes: PipelineSizes) -> list[Action]:
        """Return the warm-up, then a forward and a backward in turn."""
        forwards, backwards = (
            list_passes(kind, [rank], [sizes.microbatches]) for kind in (ActionKind.F, ActionKind.B)
        )
        return alternate(forwards, backwards, self.apart * (sizes.ranks - 1 - rank))

    def estimate_bubble(
        self, sizes: PipelineSizes, forward: Number, backward: Number, weight: Number
    ) -> Number:
        """Return the idle seconds: those of 1f1b."""
        return (sizes.ranks - 1) * (forward + backward + weight)

    def count_live(self, sizes: PipelineSizes) -> Number:
        """Return what the first rank holds."""
        return np.minimum(self.apart * (sizes.ranks - 1) + 1, sizes.microbatches)

    def count_held(self, sizes: PipelineSizes) -> RanksHeld:
        """Return what the first and the last rank hold."""
        return RanksHeld(HeldActivations(self.count_live(sizes)), HeldActivations(1))


def register(registry: Registry) -> None:
    """Called when the extension is loaded."""
    registry.register(EagerConfig)
