"""Dispatch: the route of each token to the experts that it chose.

Every dispatch method is a list of the same few steps, so all give the same answer. To make the
steps, a rank must know how many rows come from where. The host waits only for these numbers, and
only once where rows go directly to their experts.

Shape legend: R rows of this rank, K choices of a row, E experts, P pairs of a row and a choice, S
sources of rows, L experts that they are for, X ranks of the expert axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from megaframe.distributed.collectives import ALONE, Group, all_gather, all_gather_uneven
from megaframe.expert_parallel.paths import (
    Choose,
    Dealt,
    Exchange,
    Gather,
    Local,
    Path,
    Pick,
    Sort,
    Step,
    counts,
)
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.parameters.spec import share

DROPPED = -1
"""Expert number of a choice that is dropped."""


@dataclass(frozen=True)
class ExpertParallel:
    """Which ranks hold experts.

    axis:     the ranks that divide the experts.
    near:     neighbours among these, within one node.
    far:      the ranks of the axis with the same index among their neighbours.
    inside:   the ranks that divide each expert's matrices.
    sequence: the ranks that have tokens of the same samples.
    kind:     one of `parallel.dispatch`.
    """

    axis: Group = ALONE
    near: Group = ALONE
    far: Group = ALONE
    inside: Group = ALONE
    sequence: Group = ALONE
    kind: str = "all_to_all"


@dataclass(frozen=True)
class TokenRoute:
    """The way of rows to their experts.

    rows:  from this rank's rows [R, ...] to the rows that arrive at this rank.
    last:  from the rows that arrive to the rows of each expert, expert after expert.
    gates: the whole way for one number per choice, from [R, K] to one per row of the experts.
    dealt: which of the rows belong to which expert.
    """

    rows: Path
    last: Local
    gates: Path
    dealt: Dealt


def route_tokens(
    chosen_RK: Tensor, experts: int, places: ExpertParallel, kernels: Kernels = NO_KERNELS
) -> TokenRoute:
    """Return the route of every row to the experts that it chose; `DROPPED` marks dropped
    choices. All ranks of the expert axis call this together. kernels: `NO_KERNELS` if choices may
    be dropped."""
    if places.axis.size == 1 and places.inside.size == 1:
        chosen = chosen_RK.int()
        if run := kernels.find("expert_order", chosen, experts):
            order_P, places_RK, ends_E = run(chosen, experts)
            return _sorted_here(order_P, places_RK, ends_E, kernels)
    return _KINDS[places.kind](_Choice(chosen_RK, experts, places))


@dataclass
class _Choice:
    """What every row chose, and what follows from it. spans: the experts of each rank of the axis.
    owner_E: the rank that has each expert. mine: the experts of this rank."""

    chosen_RK: Tensor
    experts: int
    places: ExpertParallel
    spans: list[slice] = field(init=False)
    owner_E: Tensor = field(init=False)
    mine: slice = field(init=False)

    def __post_init__(self) -> None:
        axis, device = self.places.axis, self.chosen_RK.device
        spans = [share(self.experts, index, axis.size) for index in range(axis.size)]
        self.spans = [slice(start, start + size) for start, size in spans]
        self.owner_E = _owners(self.experts, axis.size, device)
        self.mine = self.spans[axis.index]

    @property
    def rows(self) -> int:
        return self.chosen_RK.shape[0]

    @property
    def choices(self) -> int:
        return self.chosen_RK.shape[1]


@cache
def _owners(experts: int, ranks: int, device: torch.device) -> Tensor:
    """Return the rank that has each expert, copied to the device once."""
    sizes = torch.tensor([share(experts, index, ranks)[1] for index in range(ranks)])
    return torch.arange(ranks).repeat_interleave(sizes).to(device)


@cache
def _there(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return these numbers as a tensor, copied to the device once."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _sorted_here(
    order_P: Tensor, places_RK: Tensor, ends_E: Tensor, kernels: Kernels
) -> TokenRoute:
    """Return the route when this rank has all experts. The host does not wait for their numbers of
    rows."""
    rows, choices = places_RK.shape
    sort = Sort(order_P, places_RK, kernels)
    return TokenRoute([], sort, [Choose(order_P.long(), rows, choices)], Dealt(ends_E))


def _direct(choice: _Choice) -> TokenRoute:
    """Send each pair of a row and a choice directly to the rank of its expert."""
    axis = choice.places.axis
    order_P, load_E = _sorted(choice.chosen_RK.flatten(), choice.experts)
    loads_XE = all_gather(load_E[None], axis).wait()
    numbers = loads_XE.tolist()
    own, coming = numbers[axis.index], [row[choice.mine] for row in numbers]
    leaving = [sum(own[span]) for span in choice.spans]
    exchange = _among(Exchange(axis, leaving, list(map(sum, coming))))
    first, gates = _leaving(choice, _sent(order_P, own))
    arrivals_SL = loads_XE[:, choice.mine]
    return _arriving(choice, [first, *exchange], [gates, *exchange], arrivals_SL, coming)


def _gathered(choice: _Choice) -> TokenRoute:
    """Gather every row on all ranks; each rank picks the rows that chose one of its experts."""
    axis, chosen = choice.places.axis, choice.chosen_RK
    sizes = all_gather(_there((choice.rows,), chosen.device), axis).wait().tolist()
    every = all_gather_uneven(chosen, sizes, axis).wait()
    here = torch.where(_within(every, choice.mine), every - choice.mine.start, DROPPED)
    order_P, load = _sorted(here.flatten(), choice.mine.stop - choice.mine.start)
    numbers = load.tolist()
    pairs_P = _sent(order_P, numbers)
    gather = _among(Gather(axis, sizes))
    rows: list[Step] = [*gather, Pick(pairs_P // choice.choices, len(every))]
    gates: list[Step] = [*gather, Choose(pairs_P, len(every), choice.choices)]
    return _arriving(choice, rows, gates, load[None], [numbers])


def _hierarchical(choice: _Choice) -> TokenRoute:
    """Send each pair first within the node, to the neighbour with the index that the expert's rank
    has in its own node, and from there across nodes. This takes few large messages between
    nodes."""
    near, far, axis = choice.places.near, choice.places.far, choice.places.axis
    place_E = choice.owner_E % near.size
    order_E = (
        place_E * choice.experts + torch.arange(choice.experts, device=place_E.device)
    ).argsort()
    rank_E = order_E.argsort()
    chosen = choice.chosen_RK.flatten()
    ranked = torch.where(chosen < 0, chosen, rank_E[chosen.clamp_min(0)])
    order_P, load = _sorted(ranked, choice.experts)
    loads_XE = all_gather(load[rank_E][None], axis).wait()
    numbers = loads_XE.tolist()
    nodes = [numbers[start : start + near.size] for start in range(0, axis.size, near.size)]
    own, around = numbers[axis.index], nodes[far.index]
    # For each node, the experts of its rank with this rank's index.
    passing = [choice.spans[node * near.size + near.index] for node in range(far.size)]
    held = [[number for span in passing for number in row[span]] for row in around]
    at_place = (choice.spans[place :: near.size] for place in range(near.size))
    first = Exchange(
        near,
        [sum(sum(own[span]) for span in spans) for spans in at_place],
        list(map(sum, held)),
    )
    # Pairs arrive neighbour by neighbour, and from each by expert, therefore node by node.
    grid = loads_XE.view(far.size, near.size, -1)  # loads by node and index in the node
    places = tuple(expert for span in passing for expert in range(span.start, span.stop))
    there = grid[far.index].index_select(1, _there(places, loads_XE.device))
    regroup = _transposed(there, sum(map(sum, held)))
    mine = [[row[choice.mine] for row in rows] for rows in nodes]
    second = Exchange(
        far,
        [sum(sum(row[span]) for row in around) for span in passing],
        [sum(map(sum, rows)) for rows in mine],
    )
    leaving, gates = _leaving(choice, _sent(order_P, own))
    steps = [*_among(first), Pick(regroup, len(regroup)), *_among(second)]
    # Node after node, and of each, as regrouped there, expert after expert from all neighbours.
    arrivals = grid[:, :, choice.mine].sum(1)
    by_node = [[sum(column) for column in zip(*rows, strict=True)] for rows in mine]
    return _arriving(choice, [leaving, *steps], [gates, *steps], arrivals, by_node)


def _deduplicated(choice: _Choice) -> TokenRoute:
    """Send each row once to every node that has one of its experts, to the rank there with this
    rank's index, and distribute its pairs within that node."""
    near, far = choice.places.near, choice.places.far
    chosen, device = choice.chosen_RK, choice.chosen_RK.device
    node_E = choice.owner_E // near.size
    node_RK = torch.where(chosen < 0, far.size, node_E[chosen.clamp_min(0)])
    wanted = torch.zeros(choice.rows, far.size + 1, dtype=torch.bool, device=device)
    wanted.scatter_(1, node_RK, True)
    node, row = wanted[:, : far.size].t().nonzero(as_tuple=True)  # node after node
    matrix = all_gather(counts(node, far.size)[None], far).wait().tolist()
    across = Exchange(far, matrix[far.index], [row[far.index] for row in matrix])
    first = Pick(row, choice.rows)
    arrived = across.there(chosen.index_select(0, row)).wait()
    spans = choice.spans[far.index * near.size :][: near.size]  # of this node's ranks
    start, stop = spans[0].start, spans[-1].stop
    here = torch.where(_within(arrived, slice(start, stop)), arrived - start, DROPPED)
    order_P, load = _sorted(here.flatten(), stop - start)
    loads = all_gather(load[None], near).wait()
    numbers = loads.tolist()
    mine = slice(choice.mine.start - start, choice.mine.stop - start)
    own, coming = numbers[near.index], [row[mine] for row in numbers]
    leaving = [sum(own[span.start - start : span.stop - start]) for span in spans]
    within = Exchange(near, leaving, list(map(sum, coming)))
    pairs_P = _sent(order_P, own)
    pick, choose = (
        Pick(pairs_P // choice.choices, len(arrived)),
        Choose(pairs_P, len(arrived), choice.choices),
    )
    before, after = [first, *_among(across)], _among(within)
    rows, gates = [*before, pick, *after], [*before, choose, *after]
    return _arriving(choice, rows, gates, loads[:, mine], coming)


_KINDS: Mapping[str, Callable[[_Choice], TokenRoute]] = {
    "all_to_all": _direct,
    "all_gather": _gathered,
    "hierarchical": _hierarchical,
    "deduplicated": _deduplicated,
}


def _among(step: Exchange | Gather) -> list[Step]:
    """Return the step as a list, empty if its group has one rank."""
    return [step] if step.travels else []


def _leaving(choice: _Choice, pairs_P: Tensor) -> tuple[Step, Step]:
    """Return the first steps of rows and of gates, which select these pairs in this order."""
    return (
        Pick(pairs_P // choice.choices, choice.rows),
        Choose(pairs_P, choice.rows, choice.choices),
    )


def _arriving(
    choice: _Choice,
    rows: list[Step],
    gates: list[Step],
    arrivals_SL: Tensor,
    numbers: Sequence[Sequence[int]],
) -> TokenRoute:
    """Return the route with its last steps: to the ranks that divide an expert's matrices, and into
    the order expert after expert.

    arrivals_SL: how many rows arrive from each source for each expert. Rows lie source after
    source. numbers: the same for the host.
    """
    inside = choice.places.inside
    if inside.size > 1:
        sources = len(arrivals_SL)
        arrivals_SL = all_gather(arrivals_SL, inside).wait()
        numbers = arrivals_SL.tolist()
        parts = [numbers[start : start + sources] for start in range(0, len(numbers), sources)]
        gather = Gather(inside, [sum(map(sum, part)) for part in parts])
        rows, gates = [*rows, gather], [*gates, gather]
    each = [sum(column) for column in zip(*numbers, strict=True)]
    if len(numbers) > 1:
        order = _transposed(arrivals_SL, sum(each))
        rows, gates = [*rows, Pick(order, len(order))], [*gates, Pick(order, len(order))]
    *rows, last = rows
    assert isinstance(last, Pick), "what comes from one source alone was picked here"
    ends_L = arrivals_SL.sum(0).cumsum(0, dtype=torch.int32)
    return TokenRoute(rows, last, gates, Dealt(ends_L, each))


def _sorted(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the indices of all choices, first of those that are dropped and then expert after
    expert, and the number of choices of each expert."""
    return chosen.argsort(stable=True), counts(chosen + 1, experts + 1)[1:]


def _sent(order_P: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return those choices of a sorted order that are sent, given how many each expert has."""
    return order_P[len(order_P) - sum(numbers) :]


def _within(chosen: Tensor, span: slice) -> Tensor:
    return (chosen >= span.start) & (chosen < span.stop)


def _transposed(arrivals_SL: Tensor, rows: int) -> Tensor:
    """Return the order that takes `rows` rows from source after source, and label after label
    within each, to label after label."""
    labels = torch.arange(arrivals_SL.shape[1], device=arrivals_SL.device)
    labels = labels.repeat(len(arrivals_SL))
    each = labels.repeat_interleave(arrivals_SL.flatten(), output_size=rows)
    return each.argsort(stable=True)
