"""Division: the number of blocks of a rank, in closed form for many layouts at once.

`stages.divide` minimises the largest stage and then makes all stages as even as possible. For equal
blocks the same result follows from a few whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.architecture.stages import block_work, end_work
from megaframe.config.schema import RunConfig
from megaframe.planner.sizes import Sizes

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Division:
    """Blocks per rank. middle: of the rank that has most. end: of the rank with the last stage."""

    middle: Array
    end: Array


def division(config: RunConfig, sizes: Sizes) -> Division:
    """Return how the layers are divided, where the head counts as many blocks as it has work."""
    layers, stages = config.model.layers, sizes.pipeline * sizes.chunks
    weight = _head_weight(config, sizes)
    above, below = np.ceil(weight), np.floor(weight)
    even = np.maximum(np.ceil((layers + above) / stages), above)
    beside = np.maximum(0.0, np.ceil((layers - (stages - 1) * below) / stages)) + weight
    largest = np.minimum(even, beside)
    wanted = np.rint((layers + weight) / stages - weight)
    last = np.clip(wanted, 0.0, np.maximum(0.0, np.floor(largest - weight + 1e-9)))
    last = np.where(stages > 1, last, layers)
    # The other stages are as even as possible; those with one block more are consecutive.
    others = np.maximum(1, stages - 1)
    low = np.floor((layers - last) / others)
    more = np.ceil((layers - last - low * others) / sizes.pipeline)
    middle = sizes.chunks * low + np.minimum(more, sizes.chunks)
    end = (sizes.chunks - 1) * low + np.maximum(0.0, np.minimum(more, sizes.chunks) - 1) + last
    alone = sizes.pipeline == 1
    return Division(np.where(alone, layers, middle), np.where(alone, layers, end))


def _head_weight(config: RunConfig, sizes: Sizes) -> Array:
    """Return the work of the head in units of a block's work, as `plan.stages` counts it."""
    works = [block_work(config, layer) for layer in range(config.model.layers)]
    forward = sum(work.forward for work in works) / len(works)
    others = sum(work.backward + work.weight for work in works) / len(works)
    end = end_work(config)
    twice = np.where(sizes.recompute == 2, 2.0, 1.0)
    head = end.forward + end.backward + end.weight
    return head / np.maximum(twice * forward + others, 1e-30)
