"""How islands of data ranks train together: keys of `sync`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.section import NonNegative, Positive, Section


class SyncConfig(Section):
    """How islands synchronise their weights, as in DiLoCo (Douillard et al. 2023) and Streaming
    DiLoCo (Douillard et al. 2025). They are ranks of one run (`parallel.islands`), or runs of their
    own with a `server`. With one island and no server nothing here is used."""

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
    server: str | None = None
    """Name of a parameter server (`tools/launch/ray_server.py`) on the Ray cluster that this
    machine is in. Each island is then a run of its own, and its `train.global_batch` and
    `parallel.data` are those of the island; islands may come, go and have different speeds."""
    islands: Positive = 1
    """server: number of islands that its data is divided among: of the `islands` times
    `train.global_batch` samples of a step each has its own."""
    island: NonNegative = 0
    """server: number of this island, from 0. An island that is started again, also elsewhere, keeps
    its number."""
    consistency: Literal["bulk_synchronous", "bounded_staleness", "asynchronous"] = (
        "bulk_synchronous"
    )
    """server: who waits for whom. `bulk_synchronous`: all for all, with the numbers of
    `parallel.islands`. `bounded_staleness`: an island may be `staleness` rounds of `every` steps
    ahead of the slowest (SSP, Ho et al. 2013). `asynchronous`: nobody. In the last two each
    difference is applied when it comes, divided by the islands that take part, and momentum moves
    once for as many (delayed Nesterov, Liu et al. 2024)."""
    staleness: NonNegative | None = None
    """bounded_staleness: rounds that an island may be ahead of the slowest."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """server: seconds after which the others go on without an island that has not finished a step;
    evaluations and saves must take less, too. For the server itself an island waits for
    `parallel.timeout`."""

    @property
    def kept_share(self) -> float:
        """The share of its own weights that an island keeps, decided."""
        if self.mix is not None:
            return self.mix
        return 0.5 if self.delay else 0.0
