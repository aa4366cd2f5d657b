"""Pairs of a forward and a backward: their inputs are available, and schedules run to the end."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.schedule import ActionKind, Schedule, generate, lower
from megaframe.schedule.check import check
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.overlap_pairs import find_overlap_pairs, place_pairs_together


def make_pairs(name, ranks, chunks, microbatches):
    schedule = generate(name, ranks, chunks, microbatches)
    return schedule, find_overlap_pairs(schedule, ActionCosts())


@pytest.mark.parametrize(("name", "share"), [("interleaved", 0.2), ("dualpipe-v", 0.4)])
def test_many_backwards_behind_a_forward_find_a_partner_in_long_steps(name, share):
    schedule, pairs = make_pairs(name, 2, 2, 32)
    behind = sum(
        (a.kind, b.kind) == (ActionKind.F, ActionKind.B)
        for rank in schedule.ranks
        for a, b in pairwise(rank)
    )
    assert share * behind < len(pairs) <= behind


def test_there_are_none_where_each_backward_waits_for_the_forward_before():
    assert make_pairs("1f1b", 4, 1, 16)[1] == {}


def test_the_steps_of_the_parity_tests_have_some():
    assert len(make_pairs("dualpipe-v", 2, 2, 4)[1]) >= 4


@given(
    st.sampled_from(["interleaved", "dualpipe-v", "zb-v", "1f1b", "zb-h1"]),
    st.integers(2, 4),
    st.integers(1, 4),
)
def test_a_schedule_of_pairs_runs_to_its_end(name, ranks, rounds):
    chunks = 1 if name in ("1f1b", "zb-h1") else 2
    schedule, pairs = make_pairs(name, ranks, chunks, 2 * ranks * rounds)
    lowered = lower(schedule)
    ordered = Schedule(tuple(place_pairs_together(rank, pairs) for rank in lowered.ranks))
    check(ordered)
    for before, after in zip(lowered.ranks, ordered.ranks, strict=True):
        assert sorted(map(str, before)) == sorted(map(str, after))
        for first, second in pairs.items():
            if first in after:
                at = after.index(first)
                assert after[at + 1] == second
    assert runs_to_its_end(ordered, pairs)


def runs_to_its_end(schedule, pairs):
    """Return whether all actions run if those of a pair start together, and results are sent in the
    order of the lists."""
    rank_of, last = schedule.rank_of, len(schedule.rank_of) - 1
    done, at = set(), [0] * len(schedule.ranks)

    def ready(action):
        if action.kind is ActionKind.F:
            return (
                action.stage == 0
                or (ActionKind.F, action.stage - 1, action.microbatch) in delivered
            )
        if action.kind is ActionKind.B:
            before = (ActionKind.B, action.stage + 1, action.microbatch)
            computed = (ActionKind.F, action.stage, action.microbatch) in done
            return computed and (action.stage == last or before in delivered)
        return True

    delivered, progressed = set(), True
    while progressed:
        progressed = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                both = [action, pairs[action]] if action in pairs else [action]
                if not all(map(ready, both)):
                    break
                for part in both:
                    key = (part.kind, part.stage, part.microbatch)
                    done.add(key)
                    step = {ActionKind.F: 1, ActionKind.B: -1}.get(part.kind)
                    if step is not None and rank_of[min(last, part.stage + step)] == rank:
                        delivered.add(key)
                    if part.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                        kind = ActionKind.F if part.kind is ActionKind.SEND_F else ActionKind.B
                        delivered.add((kind, part.stage, part.microbatch))
                at[rank] += len(both)
                progressed = True
    return all(at[rank] == len(actions) for rank, actions in enumerate(schedule.ranks))
