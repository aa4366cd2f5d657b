"""How islands of data ranks train together: keys of `sync`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.section import NonNegative, Positive, Section


class SyncConfig(Section):
    """How islands (`parallel.islands`) synchronise their weights, as in DiLoCo (Douillard et al.
    2023) and Streaming DiLoCo (Douillard et al. 2025). With one island nothing here is used."""

    every: Positive = 50
    """Steps between two synchronisations of a weight. Each island takes them by itself, with its
    own optimizer state."""
    optimizer: Literal["nesterov", "sgd"] = "nesterov"
    """Outer optimizer: what is done with the mean over islands of the differences of weights since
    the last synchronisation. `sgd` with its defaults averages the weights."""
    outer_lr: Annotated[float, Field(gt=0)] = Field(
        default_factory=lambda values: 0.7 if values["optimizer"] == "nesterov" else 1.0
    )
    """Learning rate of the outer optimizer. Default: 0.7 for nesterov, 1 for sgd."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        default_factory=lambda values: 0.9 if values["optimizer"] == "nesterov" else 0.0
    )
    """Momentum of the outer optimizer. Default: 0.9 for nesterov, 0 for sgd."""
    fragments: Positive = 1
    """Parts of the model that are synchronised one after the other within `every` steps, so that
    the link carries an equal load. Fragment f has the blocks f, f + `fragments`, ...; the embedding
    is in the first one, and the head in the last one."""
    delay: NonNegative = 0
    """Steps that are computed while a fragment travels; fewer than `every`. With 0 all ranks wait
    for it."""
    mix: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of its own weights that an island keeps when a fragment has arrived. Default: 0.5 with
    `delay`, because they hold the steps taken meanwhile, and 0 without."""
    compress: Literal["none", "bf16", "fp16", "int8", "int4", "topk", "randomk", "threshold"] = (
        "none"
    )
    """How differences of matrices and tables travel; those of gains and biases are sent as they
    are. What a message leaves out is added to the next one. `none` sends them in master precision;
    the others are those of `parallel.compress`."""
    compress_keep: Annotated[float, Field(gt=0)] | None = None
    """How much is sent, as `parallel.compress_keep`."""

    @property
    def kept_share(self) -> float:
        """The share of its own weights that an island keeps, decided."""
        if self.mix is not None:
            return self.mix
        return 0.5 if self.delay else 0.0
