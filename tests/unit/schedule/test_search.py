"""The search: never worse than a named schedule within the same limits, and deterministic."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.errors import UserError
from megaframe.schedule import NAMED_SCHEDULES, find_schedule_mistakes, generate, lower
from megaframe.schedule.building_blocks import list_ranks_by_stage
from megaframe.schedule.check import check
from megaframe.schedule.costs import ActionCosts
from megaframe.schedule.event_simulation import encode_schedule
from megaframe.schedule.greedy import GreedyPolicy, SchedulingProblem, schedule_greedily
from megaframe.schedule.search import BUDGET, POLICIES, generate_named_candidates
from megaframe.schedule.simulate import simulate

seconds = st.integers(1, 12)


@st.composite
def draw_problem(draw):
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 12))
    stages = ranks * chunks
    several = st.lists(seconds, min_size=stages, max_size=stages).map(tuple)
    costs = ActionCosts(draw(several), draw(several), draw(several), draw(st.integers(0, 3)))
    limit = draw(st.none() | st.integers(chunks, 3 * stages).map(lambda n: Fraction(n, chunks)))
    return ranks, chunks, microbatches, costs, limit


@settings(max_examples=30)
@given(draw_problem(), st.sampled_from([None, "loop", "vee"]))
def test_never_worse_than_a_named_schedule_within_the_limits(problem, placement):
    ranks, chunks, microbatches, costs, limit = problem
    size = (ranks, chunks, microbatches)
    options = {"costs": costs, "memory_limit": limit, "placement": placement}
    schedule = generate("search", *size, **options)
    check(lower(schedule))
    assert schedule == generate("search", *size, **options)
    best = simulate(schedule, costs)
    most = ranks if limit is None else limit
    assert max(best.peak_activations) <= most
    assert schedule.microbatches == microbatches
    if placement is not None:
        assert schedule.rank_of == list_ranks_by_stage(ranks, chunks, placement)
    for name in NAMED_SCHEDULES:
        if find_schedule_mistakes(name, *size):
            continue
        other = generate(name, *size)
        timeline = simulate(other, costs)
        fits = max(timeline.peak_activations) <= most
        if fits and (placement is None or other.rank_of == schedule.rank_of):
            assert best.time <= timeline.time


@given(
    draw_problem(),
    st.sampled_from(["loop", "vee"]),
    st.builds(
        GreedyPolicy,
        st.none() | st.sampled_from([0.5, 1, 1.5, 2]),
        st.booleans(),
        st.sampled_from([0, 0.5, 1]),
    ),
)
def test_no_policy_stops_or_breaks_a_limit_however_tight(problem, placement, policy):
    ranks, chunks, microbatches, costs, limit = problem
    capacity = chunks if limit is None else int(limit * chunks)
    rank_of = list_ranks_by_stage(ranks, chunks, placement)
    encoded = schedule_greedily(
        SchedulingProblem.from_costs(rank_of, microbatches, costs, capacity), policy
    )
    timeline = simulate(encoded, costs)
    assert sum(map(len, encoded.steps)) == 3 * ranks * chunks * microbatches
    assert max(timeline.peak_activations) * chunks <= capacity


def test_every_named_schedule_that_fits_is_a_candidate():
    for chunks in (1, 2, 3):
        size = (4, chunks, 9)
        possible = [name for name in NAMED_SCHEDULES if not find_schedule_mistakes(name, *size)]
        steps = [encode_schedule(generate(name, *size)).steps for name in possible]
        assert [encoded.steps for encoded in generate_named_candidates(*size, 9)] == steps


def test_a_slow_head_costs_no_more_than_its_own_work_and_the_way_to_it():
    for ranks, microbatches in ((4, 16), (8, 32)):
        slow = (1,) * (ranks - 1) + (2,)
        timeline = simulate(
            generate("search", ranks, 1, microbatches, costs=ActionCosts(slow, slow, slow)),
            ActionCosts(slow, slow, slow),
        )
        assert timeline.time == 6 * microbatches + ranks - 1


def test_more_chunks_leave_only_the_way_to_the_last_rank_at_the_memory_of_1f1b():
    for chunks in (2, 4):
        costs = ActionCosts().divide_by_chunks(chunks)
        timeline = simulate(generate("search", 8, chunks, 16, costs=costs), costs)
        assert timeline.time == 3 * 16 + Fraction(7, chunks)
        assert max(timeline.peak_activations) <= 8


def test_large_sizes_try_the_policies_on_fewer_microbatches():
    costs = ActionCosts((0.5,) * 31 + (0.7,), 0.6, 0.4, 0.01)
    size = (16, 2, 256)
    rank_of = list_ranks_by_stage(16, 2, "loop")
    assert (
        SchedulingProblem.from_costs(rank_of, 256, costs, 32).actions * len(POLICIES["loop"])
        > BUDGET
    )
    schedule = generate("search", *size, costs=costs)
    best = simulate(schedule, costs)
    assert max(best.peak_activations) <= 16
    for name in ("zb-v", "v-half", "dualpipe-v", "interleaved"):
        assert best.time <= simulate(generate(name, *size), costs).time


def test_without_a_limit_memory_is_no_obstacle():
    costs = ActionCosts()
    timeline = simulate(generate("search", 4, 1, 12, costs=costs, memory_limit=float("inf")), costs)
    assert timeline.time == 3 * 12 + 3


def test_a_limit_below_one_activation_is_refused():
    for limit in (0, -1, 0.5, Fraction(1, 2), float("nan")):
        with pytest.raises(UserError, match="live activations"):
            generate("search", 2, 1, 4, memory_limit=limit)
