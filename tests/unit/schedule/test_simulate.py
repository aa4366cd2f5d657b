"""Times, bubbles and memory, compared with timelines made by hand and a slow simulator."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_schedules import (
    B,
    F,
    compute_ends,
    draw_schedules,
    list_durations,
    schedule_of,
    seconds,
)

from megaframe.errors import UserError
from megaframe.schedule import lower
from megaframe.schedule.costs import ActionCosts, parse_costs
from megaframe.schedule.event_simulation import count_live_activations
from megaframe.schedule.simulate import simulate

ONE_F_ONE_B = "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"


def format_times(timeline):
    return [
        " ".join(f"{interval.action}:{interval.start}-{interval.end}" for interval in intervals)
        for intervals in timeline.compute
    ]


def test_1f1b_by_hand_with_the_fused_backward_billed_for_both():
    timeline = simulate(
        schedule_of(ONE_F_ONE_B), ActionCosts(forward=1, backward=2, weight=3, comm=1)
    )
    assert format_times(timeline) == [
        "0F0:0-1 0F1:1-2 0B0:9-14 0F2:14-15 0B1:15-20 0B2:23-28",
        "1F0:2-3 1B0:3-8 1F1:8-9 1B1:9-14 1F2:16-17 1B2:17-22",
    ]
    assert timeline.time == 28
    assert timeline.work == (18, 18) and timeline.idle == (10, 10)
    assert timeline.spans == (28, 20) and timeline.bubbles == (10, 2)
    assert timeline.bubble_time == 10 and timeline.bubble == Fraction(10, 28)
    assert timeline.peak_activations == (2, 1)


def test_a_split_backward_lets_the_gradient_go_before_its_weight_gradient():
    timeline = simulate(schedule_of("0F0 0B0 0W0\n1F0 1B0 1W0"), ActionCosts(1, 2, 3))
    assert format_times(timeline) == ["0F0:0-1 0B0:4-6 0W0:6-9", "1F0:1-2 1B0:2-4 1W0:4-7"]


def test_transfers_of_one_edge_follow_each_other():
    timeline = simulate(
        schedule_of("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"), ActionCosts(1, 1, 0, comm=4)
    )
    sent = [
        (transfer.producer, transfer.start, transfer.end)
        for transfer in timeline.transfers
        if transfer.target == 1
    ]
    assert [(str(a), start, end) for a, start, end in sent] == [("0F0", 1, 5), ("0F1", 5, 9)]
    assert timeline.compute[1][1].start == 9


def test_stages_of_one_rank_are_its_chunks_and_hand_over_without_a_transfer():
    timeline = simulate(schedule_of("0F0 1F0 1B0 0B0"), ActionCosts(1, 1, 0, comm=100))
    assert timeline.time == 4 and timeline.bubble == 0 and timeline.transfers == ()
    timeline = simulate(schedule_of("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"), ActionCosts())
    assert [[interval.chunk for interval in rank] for rank in timeline.compute] == [
        [0, 1, 1, 0]
    ] * 2


@pytest.mark.slow
@given(st.data(), draw_schedules(), st.booleans(), st.booleans())
def test_equals_the_longest_path(data, schedule, lowered, floats):
    stages = len(schedule.rank_of)
    pass_times = [tuple(data.draw(seconds()) for _ in range(stages)) for _ in range(3)]
    comm = data.draw(seconds())
    if floats:
        pass_times = [tuple(map(float, values)) for values in pass_times]
        comm = float(comm)
    durations = list_durations(schedule, *pass_times)
    expected = compute_ends(schedule, durations, comm)
    timeline = simulate(lower(schedule) if lowered else schedule, ActionCosts(*pass_times, comm))
    intervals_by_action = {
        interval.action: interval for intervals in timeline.compute for interval in intervals
    }
    same = pytest.approx if floats else lambda value: value
    assert {action: interval.end for action, interval in intervals_by_action.items()} == same(
        expected
    )
    assert {
        a: interval.end - interval.start for a, interval in intervals_by_action.items()
    } == same(durations)
    assert timeline.time == same(max(expected.values()))
    if timeline.time:
        work = sum(durations.values())
        ranks = len(schedule.ranks)
        assert timeline.bubble == same(1 - work / (timeline.time * ranks))
        assert timeline.bubble_time == same(timeline.time - work / ranks)


@given(draw_schedules())
def test_live_activations_equal_a_count(schedule):
    expected = []
    for rank, actions in enumerate(schedule.ranks):
        counts = [0]
        for action in actions:
            fused = (
                action.kind is B
                and (action.stage, action.microbatch) not in schedule.split_backwards
            )
            ends_here = fused or action.kind not in (F, B)
            counts.append(counts[-1] + (action.kind is F) - ends_here)
        assert counts[-1] == 0
        expected.append(Fraction(max(counts), len(schedule.list_stages(rank))))
    assert (
        count_live_activations(schedule)
        == count_live_activations(lower(schedule))
        == tuple(expected)
    )


def test_a_deadlock_is_found_in_the_same_pass():
    with pytest.raises(UserError, match="deadlock of 2 of 2 ranks"):
        simulate(schedule_of("0F0 0B0 0F1 0B1\n1F1 1F0 1B1 1B0"), ActionCosts())


def test_costs_of_nothing_take_no_time():
    timeline = simulate(schedule_of(ONE_F_ONE_B), ActionCosts(0, 0, 0))
    assert timeline.time == 0 and timeline.bubble == 0


def test_costs_are_read_exactly():
    assert parse_costs("F=0.1, B=2e-3,comm=5") == ActionCosts(
        Fraction(1, 10), Fraction(1, 500), 1, 5
    )
    assert ActionCosts(1, (1, 0.5), Fraction(1, 2), 7).divide_by_chunks(4) == ActionCosts(
        Fraction(1, 4), (Fraction(1, 4), 0.125), Fraction(1, 8), 7
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F=1,G=2", "'G=2'"),
        ("F", "'F'"),
        ("", "''"),
        ("F=1,F=2", "twice"),
        ("F=-1", "'-1'"),
        ("F=nan", "'nan'"),
        ("F=1e999999999", "1e999999999"),
    ],
)
def test_costs_that_are_none_are_refused(text, words):
    with pytest.raises(UserError, match=words):
        parse_costs(text)


def test_impossible_costs_are_refused():
    with pytest.raises(UserError, match="forward takes nan"):
        ActionCosts(float("nan"))
    with pytest.raises(UserError, match="weight takes -1"):
        ActionCosts(1, 1, (1, -1))
    with pytest.raises(UserError, match="backward is given for 3 stages of a schedule of 2"):
        simulate(schedule_of(ONE_F_ONE_B), ActionCosts(1, (1, 1, 1)))
