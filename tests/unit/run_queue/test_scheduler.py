"""Which runs of a queue start and leave: closed cases, and properties over a simulated clock on
which runs of random sizes arrive, take time to leave, and end."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.run_queue.scheduler import QueuedRun, decide


def queued(name, sizes, priority=0, ranks=0, is_leaving=False):
    return QueuedRun(name, sizes, priority, ranks, is_leaving)


@pytest.mark.parametrize(
    ("runs", "start", "leave"),
    [
        # As many as fit, in their order; what is left over goes to who can use it.
        ([queued("a", (1,)), queued("b", (2,)), queued("c", (1,))], {"a": 1, "b": 2, "c": 1}, {}),
        ([queued("a", (1, 2)), queued("b", (1, 2, 4))], {"a": 2, "b": 2}, {}),
        # A large run is not overtaken by a later one of its priority, but by a lower one.
        ([queued("a", (3,), ranks=3), queued("b", (4,)), queued("c", (1,))], {}, {}),
        ([queued("a", (3,), 1, 3), queued("b", (4,), 1), queued("c", (1,))], {"c": 1}, {}),
        # The lowest leaves, and who came last; nobody leaves in vain.
        ([queued("a", (2,), 0, 2), queued("b", (2,), 1, 2), queued("c", (1,), 2)], {}, {"a": "c"}),
        ([queued("a", (2,), 0, 2), queued("b", (2,), 0, 2), queued("c", (2,), 1)], {}, {"b": "c"}),
        ([queued("a", (1,), 0, 1), queued("b", (3,), 1, 3), queued("c", (3,), 2)], {}, {"b": "c"}),
        ([queued("a", (2,), 0, 2), queued("b", (2,), 1, 2), queued("c", (3,), 1)], {}, {}),
        # Room for it is kept while others leave.
        ([queued("a", (3,), 0, 3, True), queued("b", (4,), 1), queued("c", (1,))], {}, {}),
        ([queued("a", (2,), 0, 2, True), queued("b", (3,), 1), queued("c", (1,))], {"c": 1}, {}),
        # With fewer ranks rather than not at all, and with more again later.
        ([queued("a", (3,), 1, 3), queued("b", (1, 2, 4))], {"b": 1}, {}),
        ([queued("b", (1, 2, 4), ranks=1)], {}, {"b": "b"}),
        ([queued("b", (3, 4), ranks=3)], {}, {}),
        ([QueuedRun("b", (1, 4), ranks=1, may_grow=False)], {}, {}),
    ],
)
def test_decisions_on_four_devices(runs, start, leave):
    decision = decide(runs, 4)
    assert (decision.start, decision.leave) == (start, leave)


def test_a_cluster_that_has_lost_nodes_starts_nothing():
    decision = decide([queued("a", (4,), ranks=4), queued("b", (1,))], 2)
    assert (decision.start, decision.leave) == ({}, {})


@dataclass
class Simulated:
    """A run on the simulated clock; `work` is ranks times ticks, `exit` the ticks to leave in."""

    queued: QueuedRun
    arrival: int
    work: int
    exit: int
    leaving_for: int = 0


DEVICES = 6
SIZES = st.lists(st.integers(1, DEVICES), min_size=1, max_size=3, unique=True).map(
    lambda sizes: tuple(sorted(sizes))
)
ARRIVALS = st.lists(
    st.tuples(SIZES, st.integers(0, 2), st.integers(0, 12), st.integers(1, 20), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


def check(runs, decision):
    """Assert what must hold after every decision."""
    by_name = {run.name: run for run in runs}
    after = [replace(run, ranks=run.ranks or decision.start.get(run.name, 0),
        is_leaving=run.is_leaving or run.name in decision.leave) for run in runs]  # fmt: skip
    used = sum(run.ranks for run in after)
    assert used <= DEVICES
    for name, ranks in decision.start.items():
        assert ranks in by_name[name].sizes and not by_name[name].ranks
    for name, other in decision.leave.items():
        assert by_name[name].ranks and not by_name[name].is_leaving
        assert name == other or by_name[name].priority < by_name[other].priority
    waiting = [run for run in after if not run.ranks]
    for run in waiting:
        later = runs[runs.index(by_name[run.name]) + 1 :]
        assert not any(o.priority == run.priority and o.name in decision.start for o in later)
    # The first that waits has all that leaves and is free, or could not have enough.
    if waiting:
        first = max(waiting, key=lambda run: run.priority)
        kept = sum(r.ranks for r in after if r.priority >= first.priority and not r.is_leaving)
        free = DEVICES - used + sum(run.ranks for run in after if run.is_leaving)
        assert kept + first.sizes[0] > DEVICES or free >= first.sizes[0]


@given(ARRIVALS)
def test_every_run_ends_and_no_device_is_given_twice(arrivals):
    runs = [
        Simulated(queued(str(number), sizes, priority), arrival, work, leaving)
        for number, (sizes, priority, arrival, work, leaving) in enumerate(arrivals)
    ]
    for clock in range(12 + sum(20 + 4 * len(runs) for _ in runs)):
        here = [run for run in runs if run.arrival <= clock and run.work > 0]
        decision = decide([run.queued for run in here], DEVICES)
        check([run.queued for run in here], decision)
        for run in here:
            name = run.queued.name
            if name in decision.leave:
                run.queued, run.leaving_for = replace(run.queued, is_leaving=True), run.exit
            elif name in decision.start:
                run.queued = replace(run.queued, ranks=decision.start[name])
            elif run.queued.is_leaving:
                run.leaving_for -= 1
            run.work -= run.queued.ranks
            if run.work <= 0 or (run.queued.is_leaving and run.leaving_for <= 0):
                run.queued = replace(run.queued, ranks=0, is_leaving=False)
    assert all(run.work <= 0 for run in runs)


@given(st.integers(1, DEVICES), st.integers(1, 3), st.integers(1, 4))
def test_a_large_run_is_not_starved_by_a_stream_of_small_ones(large, small, length):
    """A small run of the same priority arrives in every tick, for ever."""
    runs = {f"s{number}": [queued(f"s{number}", (small,)), length] for number in range(3)}
    runs["large"] = [queued("large", (large,)), length]
    for clock in range(12 * length):
        runs[f"t{clock}"] = [queued(f"t{clock}", (small,)), length]
        for name, ranks in decide([run for run, _ in runs.values()], DEVICES).start.items():
            runs[name][0] = replace(runs[name][0], ranks=ranks)
        if runs["large"][0].ranks:
            return
        for name, (run, left) in [*runs.items()]:
            if run.ranks and left == 1:
                del runs[name]
            elif run.ranks:
                runs[name][1] -= 1
    pytest.fail("the large run was never started")
