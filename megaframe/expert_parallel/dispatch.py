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

from megaframe.architecture.spec import locate_shard
from megaframe.distributed.collectives import ALONE, Group, all_gather, all_gather_v
from megaframe.expert_parallel.transfer import (
    AllGatherRows,
    AllToAllRows,
    ExpertRows,
    LocalStep,
    RouteStep,
    RouteSteps,
    SelectGates,
    SelectRows,
    SortByExpert,
    count_occurrences,
)
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels

DROPPED = -1
"""Expert number of a choice that is dropped."""


@dataclass(frozen=True)
class ExpertParallel:
    """Which ranks hold experts.

    Attributes:
        axis: The ranks that divide the experts.
        within_node: Neighbours among these, within one node.
        across_nodes: The ranks of the axis with the same index among their neighbours.
        tensor: The ranks that divide each expert's matrices.
        sequence: The ranks that have tokens of the same samples.
        method: One of `parallel.dispatch`.
    """

    axis: Group = ALONE
    within_node: Group = ALONE
    across_nodes: Group = ALONE
    tensor: Group = ALONE
    sequence: Group = ALONE
    method: str = "all_to_all"


@dataclass(frozen=True)
class TokenRoute:
    """The way of rows to their experts.

    Attributes:
        rows: From this rank's rows [R, ...] to the rows that arrive at this rank.
        last: From the rows that arrive to the rows of each expert, expert after expert.
        gates: The whole way for one number per choice, from [R, K] to one per row of the experts.
        expert_rows: Which of the rows belong to which expert.
    """

    rows: RouteSteps
    last: LocalStep
    gates: RouteSteps
    expert_rows: ExpertRows


def route_tokens(
    chosen_RK: Tensor, experts: int, parallel: ExpertParallel, kernels: Kernels = NO_KERNELS
) -> TokenRoute:
    """Return the route of every row to the experts that it chose. All ranks of the expert axis call
    this together.

    Args:
        chosen_RK: Experts of each row; `DROPPED` marks dropped choices.
        experts: Number of experts, E.
        parallel: Which ranks have them.
        kernels: `NO_KERNELS` if choices may be dropped.

    Returns:
        The route; the way back is its transpose.
    """
    if parallel.axis.size == 1 and parallel.tensor.size == 1:
        chosen = chosen_RK.int()
        if run := kernels.find("expert_order", chosen, experts):
            # The kernel sorts on the device, so the host need not know how many rows an expert has.
            order_P, places_RK, ends_E = run(chosen, experts)
            return _route_locally(order_P, places_RK, ends_E, kernels)
    return _METHODS[parallel.method](_Assignment(chosen_RK, experts, parallel))


@dataclass
class _Assignment:
    """What every row chose, and what follows from it.

    Attributes:
        chosen_RK: Experts of each row.
        experts: Number of experts, E.
        parallel: Which ranks have them.
        spans: The experts of each rank of the axis.
        owner_E: The rank that has each expert.
        own_experts: The experts of this rank.
    """

    chosen_RK: Tensor
    experts: int
    parallel: ExpertParallel
    spans: list[slice] = field(init=False)
    owner_E: Tensor = field(init=False)
    own_experts: slice = field(init=False)

    def __post_init__(self) -> None:
        axis, device = self.parallel.axis, self.chosen_RK.device
        spans = [locate_shard(self.experts, index, axis.size) for index in range(axis.size)]
        self.spans = [slice(start, start + size) for start, size in spans]
        self.owner_E = _list_expert_owners(self.experts, axis.size, device)
        self.own_experts = self.spans[axis.index]

    @property
    def rows(self) -> int:
        """Number of rows, R."""
        return self.chosen_RK.shape[0]

    @property
    def choices(self) -> int:
        """Number of experts that each row chooses, K."""
        return self.chosen_RK.shape[1]


@cache
def _list_expert_owners(experts: int, ranks: int, device: torch.device) -> Tensor:
    """Return the rank that has each expert, copied to the device once."""
    sizes = torch.tensor([locate_shard(experts, index, ranks)[1] for index in range(ranks)])
    return torch.arange(ranks).repeat_interleave(sizes).to(device)


@cache
def _to_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return these numbers as a tensor, copied to the device once."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _route_locally(
    order_P: Tensor, places_RK: Tensor, ends_E: Tensor, kernels: Kernels
) -> TokenRoute:
    """Return the route when this rank has all experts. The host does not wait for their numbers of
    rows."""
    rows, choices = places_RK.shape
    sort = SortByExpert(order_P, places_RK, kernels)
    return TokenRoute([], sort, [SelectGates(order_P.long(), rows, choices)], ExpertRows(ends_E))


def _route_all_to_all(choice: _Assignment) -> TokenRoute:
    """Send each pair of a row and a choice directly to the rank of its expert."""
    axis = choice.parallel.axis
    order_P, load_E = _sort_by_expert(choice.chosen_RK.flatten(), choice.experts)
    # Every rank learns how many rows each rank has for each expert: what it sends and what it
    # receives.
    loads_XE = all_gather(load_E[None], axis).wait()
    loads = loads_XE.tolist()  # the only time that the host waits
    own_load, arriving = loads[axis.index], [row[choice.own_experts] for row in loads]
    send_counts = [sum(own_load[span]) for span in choice.spans]
    exchange = _list_if_divided(AllToAllRows(axis, send_counts, list(map(sum, arriving))))
    rows, gates = _make_first_steps(choice, _drop_unsent(order_P, own_load))
    arrivals_SL = loads_XE[:, choice.own_experts]
    return _finish_route(choice, [rows, *exchange], [gates, *exchange], arrivals_SL, arriving)


def _route_all_gather(choice: _Assignment) -> TokenRoute:
    """Gather every row on all ranks; each rank selects the rows that chose one of its experts."""
    axis, chosen = choice.parallel.axis, choice.chosen_RK
    sizes = all_gather(_to_device((choice.rows,), chosen.device), axis).wait().tolist()
    all_chosen = all_gather_v(chosen, sizes, axis).wait()
    # No message says which rows are for whom: each rank finds its own among the choices of all.
    is_own = _is_within(all_chosen, choice.own_experts)
    local = torch.where(is_own, all_chosen - choice.own_experts.start, DROPPED)
    order_P, load = _sort_by_expert(
        local.flatten(), choice.own_experts.stop - choice.own_experts.start
    )
    loads = load.tolist()
    pairs_P = _drop_unsent(order_P, loads)
    gather = _list_if_divided(AllGatherRows(axis, sizes))
    rows = SelectRows(pairs_P // choice.choices, len(all_chosen))
    gates = SelectGates(pairs_P, len(all_chosen), choice.choices)
    return _finish_route(choice, [*gather, rows], [*gather, gates], load[None], [loads])


def _route_hierarchical(choice: _Assignment) -> TokenRoute:
    """Send each pair first within the node, to the neighbour with the index that the expert's rank
    has in its own node, and from there across nodes. This takes few large messages between
    nodes."""
    near, far = choice.parallel.within_node, choice.parallel.across_nodes
    axis = choice.parallel.axis
    # Experts in the order of their rank's index in its node, and then node after node.
    place_E = choice.owner_E % near.size
    order_E = (
        place_E * choice.experts + torch.arange(choice.experts, device=place_E.device)
    ).argsort()
    rank_E = order_E.argsort()
    chosen = choice.chosen_RK.flatten()
    # Sorted by the rank's index in its node first, pairs for one neighbour lie together.
    ranked = torch.where(chosen < 0, chosen, rank_E[chosen.clamp_min(0)])
    order_P, load = _sort_by_expert(ranked, choice.experts)
    # Back in the order of experts, as all ranks count them.
    loads_XE = all_gather(load[rank_E][None], axis).wait()
    loads = loads_XE.tolist()
    by_node = [loads[start : start + near.size] for start in range(0, axis.size, near.size)]
    own_load, neighbours = loads[axis.index], by_node[far.index]
    # For each node, the experts of its rank with this rank's index.
    relayed = [choice.spans[node * near.size + near.index] for node in range(far.size)]
    received = [[number for span in relayed for number in row[span]] for row in neighbours]
    spans_by_place = (choice.spans[place :: near.size] for place in range(near.size))
    within = AllToAllRows(
        near,
        [sum(sum(own_load[span]) for span in spans) for spans in spans_by_place],
        list(map(sum, received)),
    )
    # Pairs arrive neighbour by neighbour, and from each by expert, therefore node by node.
    grid = loads_XE.view(far.size, near.size, -1)  # loads by node and index in the node
    experts = tuple(expert for span in relayed for expert in range(span.start, span.stop))
    received_loads = grid[far.index].index_select(1, _to_device(experts, loads_XE.device))
    # From neighbour by neighbour to node by node, so that what goes to one node lies together.
    regroup = _transpose_order(received_loads, sum(map(sum, received)))
    own_rows_by_node = [[row[choice.own_experts] for row in rows] for rows in by_node]
    across = AllToAllRows(
        far,
        [sum(sum(row[span]) for row in neighbours) for span in relayed],
        [sum(map(sum, rows)) for rows in own_rows_by_node],
    )
    rows, gates = _make_first_steps(choice, _drop_unsent(order_P, own_load))
    steps = [
        *_list_if_divided(within),
        SelectRows(regroup, len(regroup)),
        *_list_if_divided(across),
    ]
    # Node after node, and of each, as regrouped there, expert after expert from all neighbours.
    arrivals = grid[:, :, choice.own_experts].sum(1)
    arriving = [[sum(column) for column in zip(*rows, strict=True)] for rows in own_rows_by_node]
    return _finish_route(choice, [rows, *steps], [gates, *steps], arrivals, arriving)


def _route_deduplicated(choice: _Assignment) -> TokenRoute:
    """Send each row once to every node that has one of its experts, to the rank there with this
    rank's index, and distribute its pairs within that node."""
    near, far = choice.parallel.within_node, choice.parallel.across_nodes
    chosen, device = choice.chosen_RK, choice.chosen_RK.device
    node_E = choice.owner_E // near.size
    # Dropped choices go to a node that does not exist, whose column is cut off below.
    node_RK = torch.where(chosen < 0, far.size, node_E[chosen.clamp_min(0)])
    goes_to_node = torch.zeros(choice.rows, far.size + 1, dtype=torch.bool, device=device)
    goes_to_node.scatter_(1, node_RK, True)
    node, row = goes_to_node[:, : far.size].t().nonzero(as_tuple=True)  # node after node
    matrix = all_gather(count_occurrences(node, far.size)[None], far).wait().tolist()
    across = AllToAllRows(far, matrix[far.index], [row[far.index] for row in matrix])
    first = SelectRows(row, choice.rows)
    # The choices travel along with the rows, because the pairs are made at the other end.
    arrived = across.forward(chosen.index_select(0, row)).wait()
    spans = choice.spans[far.index * near.size :][: near.size]  # of this node's ranks
    start, stop = spans[0].start, spans[-1].stop
    # Choices of experts on other nodes are dropped here: a copy of the row has gone there.
    local = torch.where(_is_within(arrived, slice(start, stop)), arrived - start, DROPPED)
    order_P, load = _sort_by_expert(local.flatten(), stop - start)
    loads_SL = all_gather(load[None], near).wait()
    loads = loads_SL.tolist()
    own_experts = slice(choice.own_experts.start - start, choice.own_experts.stop - start)
    own_load, arriving = loads[near.index], [row[own_experts] for row in loads]
    send_counts = [sum(own_load[span.start - start : span.stop - start]) for span in spans]
    within = AllToAllRows(near, send_counts, list(map(sum, arriving)))
    pairs_P = _drop_unsent(order_P, own_load)
    select_rows = SelectRows(pairs_P // choice.choices, len(arrived))
    select_gates = SelectGates(pairs_P, len(arrived), choice.choices)
    before, after = [first, *_list_if_divided(across)], _list_if_divided(within)
    rows, gates = [*before, select_rows, *after], [*before, select_gates, *after]
    return _finish_route(choice, rows, gates, loads_SL[:, own_experts], arriving)


_METHODS: Mapping[str, Callable[[_Assignment], TokenRoute]] = {
    "all_to_all": _route_all_to_all,
    "all_gather": _route_all_gather,
    "hierarchical": _route_hierarchical,
    "deduplicated": _route_deduplicated,
}


def _list_if_divided(step: AllToAllRows | AllGatherRows) -> list[RouteStep]:
    """Return the step as a list, empty if its group has one rank."""
    return [step] if step.communicates else []


def _make_first_steps(choice: _Assignment, pairs_P: Tensor) -> tuple[RouteStep, RouteStep]:
    """Return the first steps of rows and of gates, which select these pairs in this order."""
    return (
        SelectRows(pairs_P // choice.choices, choice.rows),
        SelectGates(pairs_P, choice.rows, choice.choices),
    )


def _finish_route(
    choice: _Assignment,
    rows: list[RouteStep],
    gates: list[RouteStep],
    arrivals_SL: Tensor,
    numbers: Sequence[Sequence[int]],
) -> TokenRoute:
    """Return the route with its last steps: to the ranks that divide an expert's matrices, and into
    the order expert after expert.

    Args:
        choice: What every row chose.
        rows: The steps of rows so far, after which rows lie source after source.
        gates: The steps of gates so far.
        arrivals_SL: How many rows arrive from each source for each expert.
        numbers: The same for the host.
    """
    tensor = choice.parallel.tensor
    if tensor.size > 1:
        sources = len(arrivals_SL)
        # Each of these ranks needs the rows of all, because it has a part of every matrix.
        arrivals_SL = all_gather(arrivals_SL, tensor).wait()
        numbers = arrivals_SL.tolist()
        parts = [numbers[start : start + sources] for start in range(0, len(numbers), sources)]
        gather = AllGatherRows(tensor, [sum(map(sum, part)) for part in parts])
        rows, gates = [*rows, gather], [*gates, gather]
    counts = [sum(column) for column in zip(*numbers, strict=True)]
    if len(numbers) > 1:
        order = _transpose_order(arrivals_SL, sum(counts))
        rows = [*rows, SelectRows(order, len(order))]
        gates = [*gates, SelectRows(order, len(order))]
    # The last step is local. The experts compute it slice by slice, next to their products.
    *rows, last = rows
    assert isinstance(last, SelectRows), "what comes from one source alone was selected here"
    ends_L = arrivals_SL.sum(0).cumsum(0, dtype=torch.int32)
    return TokenRoute(rows, last, gates, ExpertRows(ends_L, counts))


def _sort_by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the indices of all choices, first of those that are dropped and then expert after
    expert, and the number of choices of each expert."""
    # Stable, so that the rows of an expert keep their order and sums do not depend on the sort.
    return chosen.argsort(stable=True), count_occurrences(chosen + 1, experts + 1)[1:]


def _drop_unsent(order_P: Tensor, numbers: Sequence[int]) -> Tensor:
    """Return those choices of a sorted order that are sent, given how many each expert has."""
    # Dropped choices are numbered -1 and were sorted to the front.
    return order_P[len(order_P) - sum(numbers) :]


def _is_within(chosen: Tensor, span: slice) -> Tensor:
    return (chosen >= span.start) & (chosen < span.stop)


def _transpose_order(arrivals_SL: Tensor, rows: int) -> Tensor:
    """Return the order that takes `rows` rows from source after source, and label after label
    within each, to label after label."""
    labels = torch.arange(arrivals_SL.shape[1], device=arrivals_SL.device)
    labels = labels.repeat(len(arrivals_SL))
    # With `output_size` the host does not wait for the sum of the counts.
    label = labels.repeat_interleave(arrivals_SL.flatten(), output_size=rows)
    return label.argsort(stable=True)
