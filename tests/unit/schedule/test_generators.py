"""The named schedules: exact closed forms, validity at every size, refusals.

Tests `megaframe.schedule.limits`, `megaframe.schedule.looped`, `megaframe.schedule.named`,
`megaframe.schedule.named_schedule`, `megaframe.schedule.one_stage` and `megaframe.schedule.vee`.
"""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.errors import UserError
from megaframe.schedule import (
    NAMED_SCHEDULES,
    SCHEDULE_NAMES,
    Action,
    ActionKind,
    PipelineSizes,
    find_schedule_mistakes,
    generate,
)
from megaframe.schedule.check import check
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.simulate import simulate

RANKS = (2, 4, 8, 16)
TIMES = ((1, 1, 1), (3, 3, 2), (5, 7, 3), (Fraction(7, 3), 2, Fraction(1, 5)))
"""F, B and W of a rank's share. W takes no longer than F or B."""


def simulate_schedule(name, ranks, chunks, microbatches, times=(1, 1, 1), **options):
    forward, backward, weight = times
    schedule = generate(name, ranks, chunks, microbatches, **options)
    return simulate(schedule, ActionCosts(forward, backward, weight).divide_by_chunks(chunks))


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_of_1f1b_and_gpipe(ranks, times):
    for name in ("gpipe", "1f1b"):
        for microbatches in (1, ranks, 3 * ranks + 1):
            timeline = simulate_schedule(name, ranks, 1, microbatches, times)
            assert max(timeline.bubbles) == (ranks - 1) * sum(times)
            assert timeline.time == (microbatches + ranks - 1) * sum(times)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_of_schedules_in_chunks(ranks, times):
    for name in ("interleaved", "breadth-first"):
        for chunks in (2, 3, 4):
            for microbatches in (ranks, ranks + 1, 2 * ranks - 1, 3 * ranks, 4 * ranks + 1):
                timeline = simulate_schedule(name, ranks, chunks, microbatches, times)
                bubble = Fraction((ranks - 1) * sum(times)) / chunks
                assert max(timeline.bubbles) == bubble
                assert timeline.time == microbatches * sum(times) + bubble


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_where_weight_gradients_wait(ranks, times):
    forward, backward, weight = times
    for microbatches in (ranks, 2 * ranks, 3 * ranks + 1):
        timeline = simulate_schedule("zb-h1", ranks, 1, microbatches, times)
        bubble = (ranks - 1) * (forward + backward - weight)
        assert max(timeline.bubbles) == bubble
        assert timeline.time == microbatches * sum(times) + bubble
    for microbatches in (2 * ranks, 3 * ranks + 1):
        timeline = simulate_schedule("zb-h2", ranks, 1, microbatches, times)
        assert max(timeline.bubbles) == (ranks - 1) * (forward + backward - 2 * weight)
        if forward <= backward:
            timeline = simulate_schedule("zb-v", ranks, 2, microbatches, times)
            assert max(timeline.bubbles) == (ranks - 1) * (backward - weight)


@pytest.mark.parametrize("ranks", RANKS)
def test_bubble_of_schedules_in_a_v_with_equal_times(ranks):
    for microbatches in (2 * ranks - 1, 2 * ranks, 4 * ranks + 1):
        assert max(simulate_schedule("zb-v", ranks, 2, microbatches).bubbles) == 0
        assert max(simulate_schedule("dualpipe-v", ranks, 2, microbatches).bubbles) == Fraction(
            ranks, 2
        )
        bubble = max(simulate_schedule("v-half", ranks, 2, microbatches).bubbles)
        assert bubble == Fraction(7 * ranks - 4, 4) < 3 * (ranks - 1) + Fraction(1, 2)
        bubble = max(simulate_schedule("v-half", ranks + 1, 2, microbatches + 2).bubbles)
        assert bubble == Fraction(7 * ranks, 4)


@pytest.mark.parametrize("ranks", RANKS)
def test_live_activations(ranks):
    def live(name, chunks, microbatches, **options):
        return simulate_schedule(name, ranks, chunks, microbatches, **options).peak_activations

    for microbatches in (ranks, 2 * ranks, 3 * ranks + 1):
        assert live("gpipe", 1, microbatches) == (microbatches,) * ranks
        assert live("1f1b", 1, microbatches) == tuple(ranks - rank for rank in range(ranks))
        assert live("breadth-first", 3, microbatches) == (microbatches,) * ranks
        assert live("zb-h1", 1, microbatches) == (ranks,) * ranks
        assert live("zb-h2", 1, microbatches) == (min(microbatches, 2 * ranks - 1),) * ranks
        assert max(live("zb-v", 2, microbatches)) == ranks
        assert max(live("dualpipe-v", 2, microbatches)) == ranks
        assert max(live("v-half", 2, microbatches)) == (ranks + 2) // 2
    for chunks in (2, 4):
        most = max(live("interleaved", chunks, 3 * ranks))
        assert most == ranks + Fraction(ranks - 1, chunks)
        for microbatches, turn in (
            (3 * ranks + 1, ranks + 1),
            (4 * ranks, ranks),
            (4 * ranks + 2, ranks + (ranks > 2)),
        ):
            most = max(live("interleaved", chunks, microbatches))
            assert most == Fraction(2 * ranks - 1 + (chunks - 1) * turn, chunks)
        most = max(live("interleaved", chunks, 4 * ranks, group=2 * ranks))
        assert most == Fraction(2 * ranks - 1 + (chunks - 1) * 2 * ranks, chunks)


@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_one_rank_accumulates_gradients(microbatches):
    (actions,) = generate("1f1b", 1, 1, microbatches).ranks
    kinds = (ActionKind.F, ActionKind.B)
    assert actions == tuple(Action(k, 0, n) for n in range(microbatches) for k in kinds)


def test_orders_as_drawn_in_the_papers():
    assert str(generate("1f1b", 2, 1, 3)) == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    assert str(generate("zb-h1", 2, 1, 3)).splitlines() == [
        "0F0 0F1 0B0 0W0 0F2 0B1 0W1 0B2 0W2",
        "1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2",
    ]
    assert str(generate("zb-v", 2, 2, 3)).splitlines() == [
        "0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 3F2 3B2 3W2 0B1 0W1 0B2 0W2",
        "1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1B1 2B2 1B2 1W1 2W2 1W2",
    ]
    assert str(generate("interleaved", 2, 2, 2)).splitlines() == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


def test_stages_lie_in_loops_or_in_a_v():
    assert generate("interleaved", 3, 3, 3).rank_of == (0, 1, 2) * 3
    for name in ("zb-v", "v-half", "dualpipe-v"):
        assert generate(name, 3, 2, 3).rank_of == (0, 1, 2, 2, 1, 0)


@given(
    st.sampled_from(list(NAMED_SCHEDULES)), st.integers(1, 9), st.integers(1, 4), st.integers(0, 20)
)
def test_every_schedule_passes_the_checker(name, ranks, chunks, additional):
    named = NAMED_SCHEDULES[name]
    limits = named.limits
    chunks = limits.find_nearest_chunks(chunks)
    microbatches = additional + (ranks if limits.needs_full_pipeline else 1)
    assert find_schedule_mistakes(name, ranks, chunks, microbatches) == []
    schedule = generate(name, ranks, chunks, microbatches)
    check(schedule)
    peak = max(simulate(schedule, ActionCosts()).peak_activations)
    assert named.count_live(PipelineSizes(ranks, chunks, microbatches)) == peak * chunks
    assert named.build(PipelineSizes(ranks, chunks, microbatches)) == schedule
    assert schedule.microbatches == microbatches
    assert [len(schedule.list_stages(rank)) for rank in range(ranks)] == [chunks] * ranks


@given(st.integers(1, 6), st.integers(2, 4), st.integers(0, 20), st.integers(0, 12))
def test_interleaved_takes_any_group(ranks, chunks, additional, wider):
    schedule = generate("interleaved", ranks, chunks, ranks + additional, group=ranks + wider)
    check(schedule)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (("1f1b", 4, 2, 8), r"parallel.chunks=2; use parallel.chunks=1, .*interleaved"),
        (("interleaved", 4, 1, 8), r"parallel.chunks=1; use parallel.chunks=2, .*1f1b"),
        (("zb-v", 4, 3, 8), r"parallel.chunks=3; use parallel.chunks=2, .*interleaved"),
        (("zb-v", 4, 1, 8), r"parallel.chunks=1; use parallel.chunks=2"),
        (("interleaved", 4, 2, 3), r"3 microbatches, .*parallel.pipeline=4; .*global_batch"),
        (("zb-h1", 4, 1, 1), r"a step has 1 microbatch, .*parallel.pipeline=1, or .*gpipe, 1f1b"),
        (("1f1b", 4, 1, 0), r"0 microbatches, .*train.global_batch"),
        (("1f1b", 0, 1, 1), r"parallel.pipeline=0"),
        (("1f1b", 1, 0, 1), r"parallel.chunks=0"),
        (("1f1", 4, 1, 4), r"parallel.schedule=1f1 is not one of .*did you mean 1f1b"),
        (("zbv", 4, 2, 4), r"did you mean zb-v"),
        (("file:/nowhere/at/all", 4, 1, 4), r"parallel.schedule=file:.* cannot be read"),
    ],
)
def test_impossible_sizes_are_refused_with_the_nearest_valid_ones(size, message):
    assert len(find_schedule_mistakes(*size)) == 1
    with pytest.raises(UserError, match=message):
        generate(*size)


def test_groups_are_refused_where_they_would_stop_or_mean_nothing():
    with pytest.raises(UserError, match="use 4 or more"):
        generate("interleaved", 4, 2, 8, group=3)
    with pytest.raises(UserError, match="has no effect with 1f1b"):
        generate("1f1b", 4, 1, 8, group=4)


def test_every_name_is_of_one_entry():
    assert (*NAMED_SCHEDULES, "search") == SCHEDULE_NAMES
    assert all(name == schedule.name for name, schedule in NAMED_SCHEDULES.items())
