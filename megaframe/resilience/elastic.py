"""Elastic: a layout for the available ranks when nodes have been lost or have come back.

The layout does not change the answer, so any layout that fits is correct. The rule is: of all
layouts for the same global batch that the checks accept, choose the one that changes least, and
change the number of data ranks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from megaframe.config import ParallelConfig, RunConfig, TrainConfig
from megaframe.errors import UserError, list_divisors
from megaframe.validate.run import find_mistakes

_MODEL_AXES = ("tensor", "pipeline", "context", "expert", "expert_tensor")
"""Axes that divide the model or samples, and so determine a rank's memory."""


def fit_layout(config: RunConfig, world: int) -> tuple[RunConfig, int]:
    """Return the config with a layout for at most `world` ranks, and the number of ranks that it
    uses. If the config's own layout fits, the config is returned unchanged.

    Raises:
        UserError: If no layout fits.
    """
    if not find_mistakes(config, world, data=False):
        return config, world
    for sizes in _list_candidates(config.parallel, world):
        candidate = config.replace(**_list_changes(config.parallel, config.train, sizes))
        ranks = sizes["data"] * sizes["tensor"] * sizes["pipeline"] * sizes["context"]
        if not find_mistakes(candidate, ranks, data=False):
            return candidate, ranks
    reasons = "\n  ".join(find_mistakes(config, world, data=False))
    raise UserError(
        f"faults.elastic found no layout for {world} ranks; the layout of the config:\n  {reasons}"
    )


def _list_candidates(parallel: ParallelConfig, world: int) -> Iterator[Mapping[str, int]]:
    """Yield sizes of axes to try, best first: those that divide the model as `parallel` does, with
    the most data ranks first; then those that divide it less and less."""
    configured = [getattr(parallel, axis) for axis in _MODEL_AXES]
    choices = [list_divisors(size) for size in configured]
    shapes = sorted(product(*choices), key=lambda sizes: _rank_shape(sizes, configured))
    for shape in shapes:
        axes = dict(zip(_MODEL_AXES, shape, strict=True))
        ranks_per_replica = axes["tensor"] * axes["pipeline"] * axes["context"]
        for data in range(world // ranks_per_replica, 0, -1):
            for replicas, islands in product(reversed(list_divisors(data)), repeat=2):
                if replicas <= parallel.data_replicate and islands <= parallel.islands:
                    parts = {"data_replicate": replicas, "islands": islands}
                    yield {**axes, "data": data, **parts}


def _rank_shape(shape: tuple[int, ...], configured: list[int]) -> tuple[float, ...]:
    """Return a sort key: how much less than wanted a shape divides the model in total, and for
    equal totals by axis, where the last axes are reduced first."""
    shares = [
        size / configured_size for size, configured_size in zip(shape, configured, strict=True)
    ]
    total = 1.0
    for share in shares:
        total *= share
    return (-total, *(-share for share in shares))


def _list_changes(
    parallel: ParallelConfig, train: TrainConfig, sizes: Mapping[str, int]
) -> dict[str, dict[str, object]]:
    """Return the keys that change with these sizes, by section. If the number of pipeline ranks
    changes, per-stage layers are dropped, and per-stage recompute blocks become their maximum for
    all stages."""
    changes: dict[str, object] = dict(sizes)
    blocks = train.recompute_blocks
    if sizes["pipeline"] != parallel.pipeline:
        if isinstance(parallel.layers_per_stage, tuple):
            changes["layers_per_stage"] = None
        if isinstance(blocks, tuple):
            blocks = max(blocks)
    return {"parallel": changes, "train": {"recompute_blocks": blocks}}
