"""Elastic: a layout for as many ranks as there are.

A config names the layout that is wanted; nodes are lost and come back. Whatever fits is as right as
any other, since the layout changes no answer, so the rule is simple: of all layouts for the same
global batch that the checks accept, the one that changes least, data ranks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from megaframe.config import Parallel, RunConfig
from megaframe.config.numbers import divisors
from megaframe.errors import UserError
from megaframe.plan.check import mistakes

_MODEL_AXES = ("tensor", "pipeline", "context", "expert", "expert_tensor")
"""Axes that divide the model or samples, and so decide on the memory of a rank."""


def fitted(config: RunConfig, world: int) -> tuple[RunConfig, int]:
    """The config with a layout for `world` ranks, and how many of them it uses. It is the config
    itself where that fits.

    Raises `UserError` when none does.
    """
    if not mistakes(config, world, data=False):
        return config, world
    for sizes in _candidates(config.parallel, world):
        found = _with(config, sizes)
        used = sizes["data"] * sizes["tensor"] * sizes["pipeline"] * sizes["context"]
        if not mistakes(found, used, data=False):
            return found, used
    wrong = "\n  ".join(mistakes(config, world, data=False))
    raise UserError(
        f"faults.elastic found no layout for {world} ranks; the layout of the config:\n  {wrong}"
    )


def _candidates(parallel: Parallel, world: int) -> Iterator[Mapping[str, int]]:
    """Sizes to try, best first: those that divide the model as it was, with the most data ranks;
    then those that divide it less and less."""
    wanted = [getattr(parallel, axis) for axis in _MODEL_AXES]
    choices = [divisors(size) for size in wanted]
    shapes = sorted(product(*choices), key=lambda sizes: _loss(sizes, wanted))
    for shape in shapes:
        axes = dict(zip(_MODEL_AXES, shape, strict=True))
        rest = axes["tensor"] * axes["pipeline"] * axes["context"]
        for data in range(world // rest, 0, -1):
            for replicas in reversed(divisors(data)):
                if replicas <= parallel.data_replicate:
                    yield {**axes, "data": data, "data_replicate": replicas}


def _loss(shape: tuple[int, ...], wanted: list[int]) -> tuple[float, ...]:
    """How much less than wanted a shape divides the model: in all, and then which axes, the last
    ones given up first."""
    shares = [now / then for now, then in zip(shape, wanted, strict=True)]
    in_all = 1.0
    for share in shares:
        in_all *= share
    return (-in_all, *(-share for share in shares))


def _with(config: RunConfig, sizes: Mapping[str, int]) -> RunConfig:
    """The config with these sizes; what was said of single stages goes when they are others."""
    changes: dict[str, object] = dict(sizes)
    if sizes["pipeline"] != config.parallel.pipeline:
        changes["layers_per_stage"] = None
    parallel = config.parallel.model_copy(update=changes)
    train = config.train
    if "layers_per_stage" in changes and isinstance(train.recompute_blocks, tuple):
        train = train.model_copy(update={"recompute_blocks": max(train.recompute_blocks)})
    return config.model_copy(update={"parallel": parallel, "train": train})
