"""Bounds that no prediction of a simple form can beat on the rows of vTrain's 64 nodes.

They are computed from these rows alone: the least error where rows contradict each other, and the
most time that a layout can be predicted to take. Each row is converted to its cost: the time of one
layer and sample, on all ranks that share it, without the schedule's bubble. A prediction that only
has a price for each tensor size and microbatch gives rows in which both are equal the same cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from published_tables import PublishedRun


@dataclass(frozen=True)
class LayerCost:
    """Rank-seconds of one layer and sample of a row, without its bubble.

    Attributes:
        layers: Number of layers that the pipeline runs one after the other in a step.
    """

    row: PublishedRun
    seconds: float
    layers: float

    @property
    def tensor(self) -> int:
        """Tensor ranks."""
        return self.row.configs[0].parallel.tensor

    @property
    def microbatch(self) -> int:
        """Samples of a microbatch."""
        return self.row.configs[0].train.microbatch

    @property
    def bubble(self) -> float:
        """Seconds of a step for each second of the cost."""
        return self.layers * self.microbatch / self.tensor


def compute_layer_costs(rows: Sequence[PublishedRun], hidden: int) -> list[LayerCost]:
    """Return the costs of the rows of one width that ran 1F1B."""
    costs = []
    for row in rows:
        config = row.configs[0]
        if config.model.hidden != hidden:
            continue
        parallel, train = config.parallel, config.train
        data = row.world // (parallel.tensor * parallel.pipeline)
        many = train.global_batch // (train.microbatch * data)
        layers = (many + parallel.pipeline - 1) * config.model.layers / parallel.pipeline
        step = layers * train.microbatch / parallel.tensor
        costs.append(LayerCost(row, row.seconds / step, layers))
    return costs


def find_contradictions(
    layer_costs: Sequence[LayerCost], apart: float
) -> Iterator[tuple[LayerCost, LayerCost]]:
    """Yield pairs of contradicting rows, worst first; no row is in two pairs.

    The first row has no more tensor ranks and no smaller microbatches, so it should not cost more,
    but it costs more than `apart` times as much. The factor allows for everything else in which
    layouts differ.
    """
    pairs = [
        (better, worse)
        for better, worse in permutations(layer_costs, 2)
        if better.tensor <= worse.tensor
        and better.microbatch >= worse.microbatch
        and better.seconds > apart * worse.seconds
    ]
    used_labels: set[str] = set()
    for better, worse in sorted(pairs, key=lambda pair: pair[1].seconds / pair[0].seconds):
        if not used_labels & {better.row.label, worse.row.label}:
            used_labels |= {better.row.label, worse.row.label}
            yield better, worse


def compute_error_bound(layer_costs: Sequence[LayerCost], apart: float) -> float:
    """Return the sum of errors (logarithms) on these pairs of any prediction in which more tensor
    ranks and smaller microbatches are not cheaper."""
    return sum(
        math.log(better.seconds / worse.seconds / apart)
        for better, worse in find_contradictions(layer_costs, apart)
    )


def compute_half_microbatch_cost(layer_costs: Sequence[LayerCost], microbatch: int) -> float:
    """Return by what factor microbatches of half the size cost more, with tensor 1."""
    seconds = {cost.microbatch: cost.seconds for cost in layer_costs if cost.tensor == 1}
    return seconds[microbatch // 2] / seconds[microbatch]


def compute_seconds_bound(layer_costs: Sequence[LayerCost], of: LayerCost, dearer: float) -> float:
    """Return the most time that `of` can be predicted to take if the extra cost of tensor ranks
    grows at least in proportion to their number minus one.

    Bytes of transfers, undivided kernels and starts of products grow like that. The bound is on the
    line from tensor 1 to the most expensive row of the most tensor ranks.

    Args:
        dearer: Factor by which its microbatches cost more than those of tensor 1.
    """
    alone, most, dearest = _find_ends(layer_costs)
    line = alone + (dearest - alone) * (of.tensor - 1) / (most - 1)
    return line * dearer * of.bubble


def _find_ends(layer_costs: Sequence[LayerCost]) -> tuple[float, int, float]:
    most = max(cost.tensor for cost in layer_costs)
    alone = max(cost.seconds for cost in layer_costs if cost.tensor == 1)
    return alone, most, max(cost.seconds for cost in layer_costs if cost.tensor == most)


def compute_loss_bound(layer_costs: Sequence[LayerCost], dearer: float) -> float:
    """Return the least that such a prediction's choice loses if it is right about all rows with
    tensor sizes other than 2."""
    fastest = min(cost.row.seconds for cost in layer_costs)
    chosen = [
        cost.row.seconds
        for cost in layer_costs
        if cost.tensor == 2 and compute_seconds_bound(layer_costs, cost, dearer) < fastest
    ]
    return min(chosen, default=fastest) / fastest - 1


WIDTH, APART = 8192, 1.1
"""Width of the contradicting rows, and the factor by which other differences may matter."""
ALIKE = (4, 6)
"""Tensor ranks and microbatch of three rows that differ only in stages."""


def describe_bounds(rows: Sequence[PublishedRun]) -> str:
    """Return these bounds in words, for the page."""
    layer_costs = compute_layer_costs(rows, WIDTH)
    mean, order = (
        _describe_mean(layer_costs, len(rows)),
        _describe_order(layer_costs, compute_layer_costs(rows, 3072)),
    )
    return f"  - Mean: {mean}\n  - Order: {order}"


def _describe_mean(layer_costs: Sequence[LayerCost], rows: int) -> str:
    alike = sorted(
        (cost for cost in layer_costs if (cost.tensor, cost.microbatch) == ALIKE),
        key=lambda cost: cost.layers,
    )
    durations = ", ".join(f"{cost.layers:.0f} in {cost.row.seconds:.1f} s" for cost in alike)
    pairs = list(find_contradictions(layer_costs, APART))
    return (
        f"with tensor {ALIKE[0]} and microbatches of {ALIKE[1]}, the time of a step does not grow "
        f"steadily with the number of layers run one after the other: {durations}. In {len(pairs)} "
        f"pairs of rows a layer and sample costs over {APART - 1:.0%} more although it has no more "
        "tensor ranks and no smaller microbatches. Any prediction that knows no reason for this "
        f"has a mean error of at least {compute_error_bound(layer_costs, APART) / rows:.1%} "
        "(`benchmarks/prediction/published_bounds.py`). Six rows of 39.1 billion parameters with "
        "tensor 2 and 4 make up more than half of the error."
    )


def _describe_order(layer_costs: Sequence[LayerCost], thin: Sequence[LayerCost]) -> str:
    unsplit = next(cost for cost in layer_costs if cost.tensor == 1)
    alone, most, dearest = _find_ends(layer_costs)
    fastest = min(cost.row.seconds for cost in layer_costs)
    two = min((cost for cost in layer_costs if cost.tensor == 2), key=lambda cost: cost.bubble)
    dearer = compute_half_microbatch_cost(thin, 4)
    adds = (compute_seconds_bound(layer_costs, two, dearer) / two.bubble / alone) - 1
    price = {(cost.tensor, cost.microbatch): cost.seconds for cost in thin}
    narrow = price[2, 2] / price[1, 2] - 1
    return (
        f"the row with tensor 1 takes {alone:.4f} s for a layer and sample ({unsplit.layers:.0f} "
        f"layers one after the other, with microbatches of {unsplit.microbatch}, in "
        f"{unsplit.row.seconds:.1f} s). If two ranks take half as long, a row with tensor 2 "
        f"({two.layers:.0f} layers, microbatches of {two.microbatch}) takes "
        f"{alone * two.bubble:.1f} s. The fastest row read, {fastest:.1f} s with tensor {most}, is "
        f"then chosen only if two ranks cost {fastest / two.bubble / alone - 1:.0%} more than one. "
        "They cost 3% more according to the authors' own all-reduces (six of 0.405 ms for a layer "
        f"and microbatch), {adds:.0%} if the extra cost of tensor {most} "
        f"({dearest / alone - 1:.0%} at most) grows with the number of ranks minus one, and "
        f"{narrow * 3072 / WIDTH:.0%} if the {narrow:.0%} of width 3072 fall with the width. The "
        f"row took {two.row.seconds:.1f} s: any prediction that is right about tensor 1 and {most} "
        f"chooses it or a slower one, and loses {compute_loss_bound(layer_costs, dearer):.1%} "
        "or more."
    )
