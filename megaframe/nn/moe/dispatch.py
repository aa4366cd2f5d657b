"""Dispatch: on which path each token reaches the experts that it chose.

Every way of sending is a list of the same few steps, so that all give one answer. What a rank must
know to make them is how many tokens come from where; those numbers are the only thing that the
host waits for.

Shape legend: R rows of this rank, K choices of a row, E experts, P pairs of a row and a choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaframe.comm import ALONE, Group, all_gather
from megaframe.comm.uneven import all_gather_uneven
from megaframe.kernels import NO_KERNELS, Kernels
from megaframe.nn.moe.path import Choose, Exchange, Gather, Local, Path, Pick, Sort, Step
from megaframe.spec import share

SENT_NOWHERE = -1
"""In the place of the expert of a choice that is dropped."""


@dataclass(frozen=True)
class Places:
    """Where experts lie. axis: the ranks that divide them. near: neighbours among those, in one
    node; far: those with the same place among their neighbours. inside: the ranks that divide each
    expert's matrices. sequence: those that have tokens of the same samples. kind: one of
    `parallel.dispatch`."""

    axis: Group = ALONE
    near: Group = ALONE
    far: Group = ALONE
    inside: Group = ALONE
    sequence: Group = ALONE
    kind: str = "all_to_all"


@dataclass(frozen=True)
class Route:
    """rows: from rows [R, ...] to those that arrive at this rank. last: from there to those that
    its experts get, expert after expert. gates: all the way, of one number for each choice, from
    [R, K]. counts: rows of each expert; or, on the device, where those of each one end, int32 [E].
    """

    rows: Path
    last: Local
    gates: Path
    counts: list[int] | Tensor


def route(chosen_RK: Tensor, experts: int, places: Places, kernels: Kernels = NO_KERNELS) -> Route:
    """The way of every row to the experts that it chose, or `SENT_NOWHERE`; all ranks of the expert
    axis make theirs at once. kernels: none where choices may be dropped."""
    if places.axis.size == 1 and places.inside.size == 1:
        chosen = chosen_RK.int()
        if run := kernels.find("expert_order", chosen, experts):
            order_P, places_RK, ends_E = run(chosen, experts)
            return _sorted_here(order_P, places_RK, ends_E, kernels)
    return _KINDS[places.kind](_Choice(chosen_RK, experts, places))


@dataclass
class _Choice:
    """chosen, and what follows from it. owner_E: the rank of the axis that has each expert."""

    chosen_RK: Tensor
    experts: int
    places: Places
    owner_E: Tensor = field(init=False)
    mine: slice = field(init=False)

    def __post_init__(self) -> None:
        axis, device = self.places.axis, self.chosen_RK.device
        spans = [share(self.experts, index, axis.size) for index in range(axis.size)]
        sizes = torch.tensor([size for _, size in spans], device=device)
        self.owner_E = torch.arange(axis.size, device=device).repeat_interleave(sizes)
        start, size = spans[axis.index]
        self.mine = slice(start, start + size)

    @property
    def rows(self) -> int:
        return self.chosen_RK.shape[0]

    @property
    def choices(self) -> int:
        return self.chosen_RK.shape[1]


def _sorted_here(order_P: Tensor, places_RK: Tensor, ends_E: Tensor, kernels: Kernels) -> Route:
    """All experts are here, and nobody waits for their numbers of rows."""
    rows, choices = places_RK.shape
    sort = Sort(order_P, places_RK, kernels)
    return Route([], sort, [Choose(order_P.long(), rows, choices)], ends_E)


def _direct(choice: _Choice) -> Route:
    """Each pair of a row and a choice straight to its rank."""
    axis = choice.places.axis
    pairs_P, load_E = _sorted(choice.chosen_RK.flatten(), choice.experts)
    loads_XE = all_gather(load_E[None], axis).wait()
    exchange = _among(
        Exchange(
            axis,
            _by_rank(load_E, choice.owner_E, axis.size),
            loads_XE[:, choice.mine].sum(1).tolist(),
        )
    )
    first, gates = _leaving(choice, pairs_P)
    return _arriving(choice, [first, *exchange], [gates, *exchange], loads_XE[:, choice.mine])


def _gathered(choice: _Choice) -> Route:
    """Every row to all ranks, each of which picks those that chose an expert of its own."""
    axis, chosen = choice.places.axis, choice.chosen_RK
    sizes = all_gather(torch.tensor([choice.rows], device=chosen.device), axis).wait().tolist()
    every = all_gather_uneven(chosen, sizes, axis).wait()
    here = torch.where(_within(every, choice.mine), every - choice.mine.start, SENT_NOWHERE)
    pairs_P, load = _sorted(here.flatten(), choice.mine.stop - choice.mine.start)
    gather = _among(Gather(axis, sizes))
    rows: list[Step] = [*gather, Pick(pairs_P // choice.choices, len(every))]
    gates: list[Step] = [*gather, Choose(pairs_P, len(every), choice.choices)]
    return _arriving(choice, rows, gates, load[None])


def _hierarchical(choice: _Choice) -> Route:
    """Within the node to the neighbour with the place that the expert's rank has in its own node,
    and from there across: few large messages between nodes."""
    near, far, axis = choice.places.near, choice.places.far, choice.places.axis
    place_E, node_E = choice.owner_E % near.size, choice.owner_E // near.size
    order_E = (
        place_E * choice.experts + torch.arange(choice.experts, device=place_E.device)
    ).argsort()
    rank_E = order_E.argsort()
    chosen = choice.chosen_RK.flatten()
    ranked = torch.where(chosen < 0, chosen, rank_E[chosen.clamp_min(0)])
    pairs_P, load = _sorted(ranked, choice.experts)
    loads_XE = all_gather(load[rank_E][None], axis).wait()
    grid = loads_XE.view(far.size, near.size, -1)  # of every rank, by its node and place
    passing = place_E == near.index  # experts at this place in all nodes
    first = Exchange(
        near,
        _by_rank(loads_XE[axis.index], place_E, near.size),
        grid[far.index][:, passing].sum(1).tolist(),
    )
    # They arrive neighbour by neighbour, each one's by expert, and so node by node.
    held = grid[far.index][:, passing]
    regroup = _transposed(held)
    second = Exchange(
        far,
        _by_rank(held.sum(0), node_E[passing], far.size),
        grid[:, :, choice.mine].sum((1, 2)).tolist(),
    )
    leaving, gates = _leaving(choice, pairs_P)
    steps = [*_among(first), Pick(regroup, len(regroup)), *_among(second)]
    # Node after node, and of each, as they were regrouped: expert after expert of all neighbours.
    arrivals = grid[:, :, choice.mine].sum(1)
    return _arriving(choice, [leaving, *steps], [gates, *steps], arrivals)


def _deduplicated(choice: _Choice) -> Route:
    """Once to each node that has an expert of it, to the rank with this one's place there, and
    within the node to each of them."""
    near, far = choice.places.near, choice.places.far
    chosen, device = choice.chosen_RK, choice.chosen_RK.device
    node_E = choice.owner_E // near.size
    node_RK = torch.where(chosen < 0, far.size, node_E[chosen.clamp_min(0)])
    wanted = torch.zeros(choice.rows, far.size + 1, dtype=torch.bool, device=device)
    wanted.scatter_(1, node_RK, True)
    node, row = wanted[:, : far.size].t().nonzero(as_tuple=True)  # node after node
    leaving = torch.bincount(node, minlength=far.size)
    matrix = all_gather(leaving[None], far).wait()
    across = Exchange(far, leaving.tolist(), matrix[:, far.index].tolist())
    first = Pick(row, choice.rows)
    arrived = across.there(chosen.index_select(0, row)).wait()
    experts = (node_E == far.index).nonzero().flatten()  # of this node, neighbour by neighbour
    start = int(experts[0]) if len(experts) else 0
    here = torch.where(_within(arrived, slice(start, start + len(experts))), arrived - start, -1)
    pairs_P, load = _sorted(here.flatten(), len(experts))
    loads = all_gather(load[None], near).wait()
    mine = slice(choice.mine.start - start, choice.mine.stop - start)
    within = Exchange(
        near,
        _by_rank(load, choice.owner_E[experts] % near.size, near.size),
        loads[:, mine].sum(1).tolist(),
    )
    pick, choose = (
        Pick(pairs_P // choice.choices, len(arrived)),
        Choose(pairs_P, len(arrived), choice.choices),
    )
    before, after = [first, *_among(across)], _among(within)
    rows, gates = [*before, pick, *after], [*before, choose, *after]
    return _arriving(choice, rows, gates, loads[:, mine])


_KINDS: Mapping[str, Callable[[_Choice], Route]] = {
    "all_to_all": _direct,
    "all_gather": _gathered,
    "hierarchical": _hierarchical,
    "deduplicated": _deduplicated,
}


def _among(step: Exchange | Gather) -> list[Step]:
    """Nothing is to be done among one rank."""
    return [step] if step.travels else []


def _leaving(choice: _Choice, pairs_P: Tensor) -> tuple[Step, Step]:
    """The first steps of rows and of gates: these pairs, in this order."""
    return (
        Pick(pairs_P // choice.choices, choice.rows),
        Choose(pairs_P, choice.rows, choice.choices),
    )


def _arriving(choice: _Choice, rows: list[Step], gates: list[Step], arrivals_SL: Tensor) -> Route:
    """The last steps: to the ranks that divide an expert's matrices, and expert after expert.
    arrivals: how many arrive for each expert from each source, one source after the other."""
    inside = choice.places.inside
    if inside.size > 1:
        sizes = all_gather(arrivals_SL.sum()[None], inside).wait().tolist()
        gather = Gather(inside, sizes)
        rows, gates = [*rows, gather], [*gates, gather]
        arrivals_SL = all_gather_uneven(
            arrivals_SL, [len(arrivals_SL)] * inside.size, inside
        ).wait()
    if len(arrivals_SL) > 1:
        order = _transposed(arrivals_SL)
        rows, gates = [*rows, Pick(order, len(order))], [*gates, Pick(order, len(order))]
    *rows, last = rows
    assert isinstance(last, Pick), "what comes from one source alone was picked here"
    return Route(rows, last, gates, arrivals_SL.sum(0).tolist())


def _sorted(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Numbers of the choices that are sent, expert after expert, and how many each expert has."""
    load = torch.bincount(chosen + 1, minlength=experts + 1)
    return chosen.argsort(stable=True)[load[0] :], load[1:]


def _by_rank(load_E: Tensor, rank_E: Tensor, ranks: int) -> list[int]:
    return load_E.new_zeros(ranks).index_add_(0, rank_E, load_E).tolist()


def _within(chosen: Tensor, span: slice) -> Tensor:
    return (chosen >= span.start) & (chosen < span.stop)


def _transposed(arrivals_SL: Tensor) -> Tensor:
    """Rows lie source after source, each one's label after label: the order in which they lie label
    after label."""
    labels = torch.arange(arrivals_SL.shape[1], device=arrivals_SL.device)
    each = labels.repeat(len(arrivals_SL)).repeat_interleave(arrivals_SL.flatten())
    return each.argsort(stable=True)
