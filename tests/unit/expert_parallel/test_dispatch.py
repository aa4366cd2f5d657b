"""Every dispatch method brings every row to each expert that it chose, and back, whatever the
routing: an expert without tokens, one expert with all of them, a rank without any, dropped choices.
It moves the bytes of its closed form.
"""

from itertools import chain

import pytest
import torch
from patience import PATIENCE

from megaframe.architecture.spec import locate_shard
from megaframe.distributed.interleaving import InterleaveHook
from megaframe.distributed.mesh import Mesh
from megaframe.expert_parallel.dispatch import DROPPED, ExpertParallel, route_tokens
from megaframe.expert_parallel.transfer import combine_along, dispatch_along
from megaframe.layout import EXPERT_SETS, Layout
from megaframe.ops.operator_mode import OperatorMode

RANKS, NEAR, EXPERTS, ROWS, CHOICES, WIDTH = 4, 2, 6, 9, 2, 3
KINDS = ("all_to_all", "all_gather", "hierarchical", "deduplicated")
ROUTINGS = {
    "random": lambda order, rank: order,
    "all to one rank": lambda order, rank: torch.tensor([[4, 2]]).repeat(ROWS, 1),
    "one expert takes all": lambda order, rank: torch.tensor([[3, DROPPED]]).repeat(ROWS, 1),
    "experts without rows": lambda order, rank: torch.tensor([[0, 5]]).repeat(ROWS, 1),
    "some choices are dropped": lambda order, rank: order.masked_fill(order % 3 == 0, DROPPED),
    "nothing is sent": lambda order, rank: torch.full_like(order, DROPPED),
    "a rank without rows": lambda order, rank: order[: 0 if rank == 1 else ROWS],
}


def choose_experts(routing, rank):
    """Return the experts that the rows of a rank choose, int64 [rows, choices]."""
    generator = torch.Generator().manual_seed(rank)
    order = torch.rand(ROWS, EXPERTS, generator=generator).argsort(1)[:, :CHOICES]
    return ROUTINGS[routing](order, rank)


def make_rows(rank, count):
    number = 100.0 * rank + torch.arange(count, dtype=torch.float64)
    return torch.stack((number, number**2, -number), 1)


def send_rows(kind):
    """Send rows by every routing -> the rows of each own expert, their sums back on their ranks,
    the returned gates, and the bytes of the way out over the whole axis, near and far."""
    mesh = Mesh(Layout(data=RANKS, expert=RANKS), device="cpu", timeout=PATIENCE)
    mesh.add_groups(EXPERT_SETS)
    near_group, far = mesh.divide_experts(NEAR)
    parallel = ExpertParallel(
        mesh.group("expert"), near_group, far, mesh.group("expert_tensor"), method=kind
    )
    groups, turn, results = (parallel.axis, near_group, far), InterleaveHook(), {}
    for routing in ROUTINGS:
        chosen = choose_experts(routing, mesh.rank)
        x = make_rows(mesh.rank, len(chosen))
        route = route_tokens(chosen, EXPERTS, parallel)
        for group in groups:
            group.traffic.take()
        arrived = dispatch_along([*route.rows, route.last], turn).run(x)
        bytes_sent = [group.traffic.take()[0] for group in groups]
        gates = dispatch_along(route.gates, turn).run(
            torch.ones(len(chosen), CHOICES, dtype=x.dtype)
        )
        home = combine_along([*route.rows, route.last], turn).run(arrived * gates[:, None])
        combined = combine_along(route.gates, turn).run(gates)
        results[routing] = (arrived.split(route.expert_rows.counts), home, combined, bytes_sent)
    mesh.finish()
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_rows_reach_their_experts_and_come_home(kind, pool):
    of_ranks = pool.run(RANKS, send_rows, kind)
    owner = [rank for rank in range(RANKS) for _ in range(locate_shard(EXPERTS, rank, RANKS)[1])]
    for routing in ROUTINGS:
        chosen = [choose_experts(routing, rank) for rank in range(RANKS)]
        for rank, result in enumerate(of_ranks):
            by_expert, home, gates, bytes_sent = result[routing]
            assert len(by_expert) == owner.count(rank)
            for expert, arrived in enumerate(by_expert, owner.index(rank)):
                expected = [
                    make_rows(source, len(of_one))[(of_one == expert).any(1)]
                    for source, of_one in enumerate(chosen)
                ]
                assert sorted(arrived.tolist()) == sorted(torch.cat(expected).tolist())
            valid = chosen[rank] != DROPPED
            expected_home = make_rows(rank, len(valid)) * valid.sum(1, keepdim=True)
            assert home.tolist() == expected_home.tolist()
            assert gates.tolist() == valid.double().tolist()
            assert bytes_sent == predict_bytes(kind, rank, chosen, owner), routing


def predict_bytes(kind, rank, chosen, owner):
    """Return the bytes that a rank sends on the way out, over the whole axis, near and far."""
    row = 8 * WIDTH
    node, place = divmod(rank, NEAR)
    own_node = range(node * NEAR, node * NEAR + NEAR)
    ranks = [[[owner[e] for e in row if e >= 0] for row in routing.tolist()] for routing in chosen]
    destinations = [*chain.from_iterable(ranks[rank])]
    if kind == "all_to_all":
        return [row * sum(to != rank for to in destinations), 0, 0]
    if kind == "all_gather":
        return [row * (RANKS - 1) * len(chosen[rank]), 0, 0]
    if kind == "hierarchical":
        near_rows = sum(to % NEAR != place for to in destinations)
        passing = [
            to
            for other in own_node
            for to in chain.from_iterable(ranks[other])
            if to % NEAR == place
        ]
        return [0, row * near_rows, row * sum(to // NEAR != node for to in passing)]
    far = sum(len({to // NEAR for to in choices} - {node}) for choices in ranks[rank])
    arrived = [
        to for source in range(place, RANKS, NEAR) for to in chain.from_iterable(ranks[source])
    ]
    near_rows = sum(to // NEAR == node and to % NEAR != place for to in arrived)
    return [0, row * near_rows, row * far]


def count_waits(kind):
    """Return how often the host waits for the device to make a second route: it reads lists, and
    results whose size it cannot know."""
    mesh = Mesh(Layout(data=RANKS, expert=RANKS), device="cpu", timeout=PATIENCE)
    mesh.add_groups(EXPERT_SETS)
    near_group, far = mesh.divide_experts(NEAR)
    parallel = ExpertParallel(
        mesh.group("expert"), near_group, far, mesh.group("expert_tensor"), method=kind
    )
    chosen, reads = choose_experts("random", mesh.rank), []

    class Unknown(OperatorMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.__name__.split(".")[0] in ("nonzero", "_local_scalar_dense"):
                reads.append(function)
            return function(*args, **(kwargs or {}))

    tolist = torch.Tensor.tolist
    route_tokens(chosen, EXPERTS, parallel)
    with pytest.MonkeyPatch.context() as patch, Unknown():
        patch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or tolist(tensor))
        route_tokens(chosen, EXPERTS, parallel)
    mesh.finish()
    return len(reads)


@pytest.mark.parametrize(
    ("kind", "times"),
    [("all_to_all", 1), ("all_gather", 2), ("hierarchical", 1), ("deduplicated", 3)],
)
def test_the_host_waits_for_few_numbers(kind, times, pool):
    assert pool.run(RANKS, count_waits, kind) == [times] * RANKS
