"""What no prediction of a simple form can reach on rows of vTrain's 64 nodes, computed from these
rows alone: the least error where rows contradict each other, and the most that a layout can be
predicted to take.

A row is taken as the time of a layer and sample on all ranks that share it, without the schedule's
bubble: its cost. A form that knows of nothing but a price for each tensor size and microbatch gives
rows with both alike the same cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from published_tables import Row


@dataclass(frozen=True)
class Cost:
    """Rank seconds of a layer and sample of a row without its bubble. bubble: seconds of a step
    for each of them."""

    row: Row
    seconds: float
    bubble: float

    @property
    def tensor(self) -> int:
        """Tensor ranks."""
        return self.row.configs[0].parallel.tensor

    @property
    def microbatch(self) -> int:
        """Samples of a pass."""
        return self.row.configs[0].train.microbatch


def costs(rows: Sequence[Row], hidden: int) -> list[Cost]:
    """Of the rows of one width that ran 1F1B."""
    found = []
    for row in rows:
        config = row.configs[0]
        if config.model.hidden != hidden:
            continue
        parallel, train = config.parallel, config.train
        data = row.world // (parallel.tensor * parallel.pipeline)
        many = train.global_batch // (train.microbatch * data)
        passes = many + parallel.pipeline - 1
        step = passes / many * train.global_batch * config.model.layers / row.world
        found.append(Cost(row, row.seconds / step, step))
    return found


def contradictions(known: Sequence[Cost], apart: float) -> Iterator[tuple[Cost, Cost]]:
    """Pairs of which none has a row of another one, the worst first: the first row has no more
    tensor ranks and no smaller microbatches, so that it should cost no more, and costs more by the
    factor `apart`, which is left to all else that layouts differ in."""
    pairs = [
        (one, other)
        for one, other in permutations(known, 2)
        if one.tensor <= other.tensor
        and one.microbatch >= other.microbatch
        and one.seconds > apart * other.seconds
    ]
    used: set[str] = set()
    for one, other in sorted(pairs, key=lambda pair: pair[1].seconds / pair[0].seconds):
        if not used & {one.row.label, other.row.label}:
            used |= {one.row.label, other.row.label}
            yield one, other


def least_error(known: Sequence[Cost], apart: float) -> float:
    """Sum of errors (logarithms) that these pairs leave to any prediction for which more tensor
    ranks and smaller microbatches are no cheaper."""
    return sum(
        math.log(one.seconds / other.seconds / apart) for one, other in contradictions(known, apart)
    )


def smaller(known: Sequence[Cost], microbatch: int) -> float:
    """By what microbatches of half the size cost more with tensor 1."""
    own = {cost.microbatch: cost.seconds for cost in known if cost.tensor == 1}
    return own[microbatch // 2] / own[microbatch]


def most_seconds(known: Sequence[Cost], of: Cost, dearer: float) -> float:
    """The most that `of` can be predicted to take where what tensor ranks add to a layer's cost
    grows at least as their number less one, as bytes of transfers, undivided kernels and beginnings
    of products do: on the line from tensor 1 to the dearest row of the most tensor ranks. dearer:
    by what its microbatches cost more than those of tensor 1."""
    alone, most, dearest = _ends(known)
    line = alone + (dearest - alone) * (of.tensor - 1) / (most - 1)
    return line * dearer * of.bubble


def _ends(known: Sequence[Cost]) -> tuple[float, int, float]:
    most = max(cost.tensor for cost in known)
    alone = max(cost.seconds for cost in known if cost.tensor == 1)
    return alone, most, max(cost.seconds for cost in known if cost.tensor == most)


def least_loss(known: Sequence[Cost], dearer: float) -> float:
    """What the choice of any such prediction loses at least, if it is right about all rows with
    other tensor sizes than 2."""
    fastest = min(cost.row.seconds for cost in known)
    chosen = [
        cost.row.seconds
        for cost in known
        if cost.tensor == 2 and most_seconds(known, cost, dearer) < fastest
    ]
    return min(chosen, default=fastest) / fastest - 1


WIDTH, APART = 8192, 1.1
"""Of the rows that contradict each other; and by how much others may differ."""


def told(rows: Sequence[Row]) -> str:
    """These bounds in words, for the page."""
    known = costs(rows, WIDTH)
    dearer = smaller(costs(rows, 3072), 4)
    pairs = list(contradictions(known, APART))
    alone, most, dearest = _ends(known)
    fastest = min(cost.row.seconds for cost in known)
    two = [c for c in known if c.tensor == 2 and most_seconds(known, c, dearer) < fastest]
    limits = " and ".join(f"{most_seconds(known, cost, dearer):.1f}" for cost in two)
    took = " and ".join(f"{cost.row.seconds:.1f}" for cost in two)
    needed = max(fastest / cost.bubble for cost in two) / alone - 1
    thin = {(cost.tensor, cost.microbatch): cost.seconds for cost in costs(rows, 3072)}
    narrow = thin[2, 2] / thin[1, 2] - 1
    pair = f"{APART - 1:.0%}"
    return (
        "What no prediction can do is computed from these rows (`benchmarks/published_bounds.py`). "
        "A layer and sample, without the bubble and times the tensor ranks, should not cost more "
        "with fewer tensor ranks and microbatches at least as large. "
        f"{len(pairs)} pairs of rows, all different, say that it costs over {pair} more, and leave "
        f"{least_error(known, APART) / len(rows):.1%} of mean error, beyond those {pair}, to any "
        f"prediction of this kind. The cost is {alone:.3f} s with tensor 1 and at most "
        f"{dearest:.3f} s with tensor {most}. What tensor ranks add to it (bytes of transfers, "
        "kernels that are not divided, beginnings of products) grows as their number less one, or "
        f"faster, so that tensor 2 adds at most 1/{most - 1} of what tensor {most} does. With "
        f"{dearer - 1:.1%} more for small microbatches, as at width 3072, this is {limits} s for "
        f"two rows that took {took} s; the fastest row took {fastest:.1f} s. So a prediction that "
        f"is right about tensor 1 and {most} chooses one of the two, and loses "
        f"{least_loss(known, dearer):.1%} or more. To choose rightly, tensor 2 would have to cost "
        f"{needed:.0%} more than tensor 1; the authors' own table of all-reduces (0.405 ms for "
        "64 MiB on 2 GPUs; six for a layer and microbatch) makes it 3%, and what it cost more at "
        f"width 3072, {narrow:.0%}, becomes {narrow * 3072 / WIDTH:.0%} where it falls with the "
        "width."
    )
