"""The rules of a parameter server over a simulated clock: how far islands come from each other, how
long they wait, and what the shards make of what they push, whatever dies and comes back
(`megaframe/optim/parameter_server/rounds.py`, `coordinator.py`, `shard.py`)."""

import tempfile
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from bitwise import assert_bitwise_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from local_server import LocalServer
from simulated_islands import MODEL, SHAPES, Island, Simulation, make_difference

from megaframe.architecture.spec import Box, Constant, ParamSpec
from megaframe.config.sync import SyncConfig
from megaframe.distributed.collectives import ALONE
from megaframe.errors import LostRanks, UnreadableFile, UserError
from megaframe.optim.outer_step import SpanShape, take_outer_step
from megaframe.optim.parameter_server.coordinator import SyncedModel
from megaframe.optim.parameter_server.server_outer_step import ServerOuterStep
from megaframe.optim.parameter_server.shard import STATE_FILE

TIMEOUT = 3.0
times = st.floats(0.01, 8.0)
islands = st.builds(Island, seconds=st.lists(times, min_size=1, max_size=3), begins=st.floats(0, 2))
mortals = st.builds(
    Island,
    seconds=st.lists(times, min_size=1, max_size=3),
    begins=st.floats(0, 6),
    dies=st.none() | st.floats(0, 20),
    returns=st.none() | st.floats(0.1, 10),
)
few = settings(max_examples=min(12, settings().max_examples))
"""Each example has two simulations, or compares all tensors."""
FORMS = ["bulk_synchronous", "bounded_staleness", "asynchronous"]


def simulate(plans, consistency="bulk_synchronous", staleness=None, disturb=None, **keys):
    sync = SyncConfig(
        server="s",
        islands=len(plans),
        consistency=consistency,
        staleness=staleness,
        timeout=TIMEOUT,
        **keys,
    )
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)  # no test cuts the power
        simulation = Simulation(Path(folder), sync, plans, disturb=disturb)
        simulation.run()
        simulation.weights = simulation.read()
        return simulation


@given(st.lists(mortals, min_size=1, max_size=4), st.integers(0, 2))
def test_no_island_is_further_ahead_than_the_bound(plans, staleness):
    done = simulate(plans, "bounded_staleness", staleness)
    assert all(clock - least <= staleness for _, clock, least in done.starts)


@given(st.lists(mortals, min_size=1, max_size=4), st.sampled_from(FORMS))
def test_nobody_waits_for_the_dead(plans, consistency):
    """Nor for ever for anybody: the simulation ends, and all who live have trained all rounds."""
    staleness = 1 if consistency == "bounded_staleness" else None
    done = simulate(plans, consistency, staleness)
    for _, silent in done.waits:
        assert all(seconds <= TIMEOUT for seconds in silent.values())
    assert consistency != "asynchronous" or not any(silent for _, silent in done.waits)
    for island, plan in enumerate(plans):
        how, _ = done.ended[island]
        assert how == "done" or (how == "died" and plan.returns is None)


@few
@given(st.lists(islands, min_size=2, max_size=4), st.sampled_from(["sgd", "nesterov"]))
def test_bulk_synchronous_is_the_plain_average_whatever_comes_first(plans, optimizer):
    done = simulate(plans, optimizer=optimizer)
    sync, count = done.sync, len(plans)
    for name, shape in SHAPES.items():
        weights, momentum = torch.zeros(2, *shape, dtype=torch.float64)
        for clock in range(done.rounds):
            total = torch.full(shape, make_difference(0, clock), dtype=torch.float64)
            for island in range(1, count):
                total += make_difference(island, clock)
            moving = momentum if sync.outer_momentum else None
            take_outer_step(sync, weights, total / count, moving)
        assert_bitwise_equal(
            [done.weights[name]], [weights], because="islands are summed in their own order"
        )


@few
@given(islands, st.sampled_from(FORMS), st.sampled_from(["sgd", "nesterov"]))
def test_one_island_is_the_same_in_all_forms(plan, consistency, optimizer):
    """A stale difference is what others make it; with none, each form is the outer optimizer."""
    staleness = 0 if consistency == "bounded_staleness" else None
    done = simulate([plan], consistency, staleness, optimizer=optimizer, outer_momentum=0.7)
    plain = simulate([plan], optimizer=optimizer, outer_momentum=0.7)
    assert_bitwise_equal(
        done.weights.values(), plain.weights.values(), because="momentum moves with each push"
    )


def test_momentum_moves_once_for_all_islands():
    """Delayed Nesterov by hand: the first of two pushes is applied without momentum, and the second
    with the momentum of both."""
    plans = [Island([1.0]), Island([1.5])]
    done = simulate(plans, "asynchronous", outer_lr=0.5, outer_momentum=0.9)
    weights, momentum, early = 0.0, 0.0, 0.0
    founding, *commits = done.server.commits
    for (island, clock), commit in zip(done.order, commits, strict=True):
        gradient = make_difference(island, clock) / commit.divisor
        early += gradient
        if commit.momentum:
            momentum, early = 0.9 * momentum + early, 0.0
            gradient += 0.9 * momentum
        weights -= 0.5 * gradient
    assert float(done.weights["b"][0]) == pytest.approx(weights, rel=1e-12)
    assert founding.kind == "weights"
    assert [(c.divisor, c.momentum) for c in commits[:4]] == [(2, False), (2, True)] * 2
    assert [(c.divisor, c.momentum) for c in commits[-1:]] == [(1, True)], "the other has left"


@few
@given(
    st.lists(mortals, min_size=1, max_size=3),
    st.sampled_from(FORMS),
    st.lists(st.integers(0, 5), min_size=1, max_size=20),
)
def test_a_shard_that_comes_back_continues_from_exactly_its_files(plans, consistency, pauses):
    staleness = 1 if consistency == "bounded_staleness" else None
    left = [*pauses]

    def disturb(simulation):
        if left and not left[-1]:
            left.pop()
            before = simulation.server.actors[0]
            simulation.server.restart_shard(0)
            after = simulation.server.actors[0]
            assert after.version == before.version
            for kind, tensors in before.tensors.items():
                assert after.tensors[kind].keys() == tensors.keys()
                assert_bitwise_equal(
                    map(after.tensors[kind].get, tensors),
                    tensors.values(),
                    because="it was saved before",
                )
        elif left:
            left[-1] -= 1

    done = simulate(plans, consistency, staleness, disturb)
    plain = simulate(plans, consistency, staleness)
    assert_bitwise_equal(
        done.weights.values(), plain.weights.values(), because="nothing that was pushed is lost"
    )


@few
@given(st.lists(islands, min_size=1, max_size=3), st.sampled_from(FORMS), st.integers(1, 9))
def test_a_coordinator_that_comes_back_continues_from_its_file(plans, consistency, every):
    staleness, calls = (1 if consistency == "bounded_staleness" else None), []

    def disturb(simulation):
        calls.append(0)
        if len(calls) % every == 0:
            simulation.server.restart_coordinator()

    done = simulate(plans, consistency, staleness, disturb)
    plain = simulate(plans, consistency, staleness)
    assert done.order == plain.order
    assert_bitwise_equal(
        done.weights.values(), plain.weights.values(), because="all answers were in the file"
    )


def make_server(folder, islands=2, shards=1, model=MODEL, now=None, **keys):
    sync = SyncConfig(server="s", islands=islands, timeout=TIMEOUT, **keys)
    return LocalServer(folder, model, sync, shards, clock=lambda: now[0] if now else 0.0)


def test_what_is_wrong_is_said_with_both_values(tmp_path):
    server = make_server(tmp_path)
    server.join(0, 0, MODEL)
    with pytest.raises(UserError, match=r"sync\.island=2 is none of the sync\.islands=2"):
        server.join(2, 0, MODEL)
    other = SyncedModel({**MODEL.shapes, "w": [5, 3, "float64"]}, {})
    with pytest.raises(
        UserError,
        match="island 1 does not train what server local synchronises: parameter w is float64 5 x "
        "3 here and float64 5 x 2 of the server",
    ):
        server.join(1, 0, other)
    with pytest.raises(UserError, match=r"server of 1 shards, and this one has 2; use --shards 1"):
        make_server(tmp_path, shards=2)
    keys = SyncedModel(MODEL.shapes, {"sync.every": 5})
    with pytest.raises(UserError, match=r"sync.every is 5 here and absent in .*; use the same"):
        make_server(tmp_path, model=keys)


def test_an_island_that_is_left_out_or_replaced_is_told_why(tmp_path):
    now = [0.0]
    server = make_server(tmp_path, now=now)
    first = server.join(0, 0, MODEL)
    server.finish_push(0, first.session, -1, "weights")
    late = server.join(1, 0, MODEL)
    now[0] = TIMEOUT + 1
    server.hear(0, first.session)
    server.poll(0, first.session)
    with pytest.raises(LostRanks, match=r"island 1 was not heard for more than sync.timeout=3 sec"):
        server.poll(1, late.session)
    again = server.join(0, 0, MODEL)
    with pytest.raises(UserError, match="another run has joined as island 0"):
        server.hear(0, first.session)
    server.hear(0, again.session)
    assert server.coordinator.take_notes()[-2:] == [
        "island 1 was not heard for 4.0 s (sync.timeout=3) and is left out after round 0",
        "island 0 joins at round 0",
    ]


def test_an_island_of_another_server_is_refused(tmp_path):
    """Its checkpoint is of a later round than the server."""

    def join(clock):
        sync = SyncConfig(server="s", islands=1)
        server = make_server(tmp_path, islands=1)
        outer = ServerOuterStep(sync, server, ALONE, ALONE, [], MODEL)
        return outer.join(clock, {}, fresh=False)

    assert join(2) == join(2) == join(1) == 2
    with pytest.raises(UserError, match="has trained 3 rounds and server s has 2 of it"):
        join(3)


class NotedServer(LocalServer):
    """Notes the calls of an exchange. arrives: None, or what says when a push has arrived."""

    arrives = None

    def start_push(self, *arguments):
        done = super().start_push(*arguments)
        return self.arrives or done

    def __getattribute__(self, name):
        if name in ("start_push", "finish_push", "poll", "start_pull"):
            self.called.append(name)
        return super().__getattribute__(name)


def test_an_exchange_goes_on_between_steps(tmp_path):
    """All that an island waits for at the end of `sync.delay` is what it has not received by then:
    the steps before push, ask for others, and start to receive."""
    sync, spec = SyncConfig(server="s", islands=2), ParamSpec("b", (3,), Constant(0.0), role="gain")
    span = SpanShape(3, torch.float64, False, ((spec, Box((0,), (3,))),))
    model = SyncedModel({"b": [3, "float64"]}, {})
    server = NotedServer(tmp_path, model, sync, 1)
    server.called = []
    outer, other = (
        ServerOuterStep(
            sync.model_copy(update={"island": each}), server, ALONE, ALONE, [span], model
        )
        for each in range(2)
    )
    synced = torch.ones(3, dtype=torch.float64)
    for each in outer, other:
        each.join(0, {0: synced}, fresh=True)

    def step(which):
        server.called.clear()
        which.end_step()
        return [*server.called]

    server.arrives = Future()
    outer.push({0: torch.full_like(synced, 0.5)})
    assert step(outer) == step(outer) == []
    server.arrives.set_result(None)
    assert step(outer) == ["finish_push", "poll"]
    assert step(outer) == ["poll"], "the other island has not pushed"
    other.push({0: torch.zeros_like(synced)})
    assert step(other) == ["finish_push", "start_pull"]
    assert step(outer) == ["poll"], "the last answer was of before"
    assert step(outer) == ["start_pull"]
    assert step(outer) == step(other) == []
    for each in outer, other:
        flat = synced.clone()
        each.pull({0: flat})
        assert torch.equal(flat, synced - 0.25 * sync.outer_lr * (1 + sync.outer_momentum))
    assert not server.called


@pytest.mark.parametrize("name", ["coordinator.json", f"shard-0/{STATE_FILE}"])
def test_a_damaged_file_is_refused(name, tmp_path):
    server = make_server(tmp_path)
    first = server.join(0, 0, MODEL)
    server.finish_push(0, first.session, -1, "weights")
    server.start_pull(0, 1, [])
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnreadableFile, match="is damaged"):
        make_server(tmp_path)
