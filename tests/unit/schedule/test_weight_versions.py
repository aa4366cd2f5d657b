"""Pipelines without flushes: `weight_versions.py` against closed forms and played updates."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.errors import UserError
from megaframe.schedule import generate
from megaframe.schedule.weight_versions import count_weight_versions, find_largest_stable_rate


@given(st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_1f1b_has_the_versions_of_pipedream(ranks, every):
    stages = count_weight_versions(generate("1f1b", ranks, 1, every * 3 * ranks), every)
    under_way = [ranks - stage for stage in range(ranks)]
    assert [stage.staleness for stage in stages] == [-(-(n - 1) // every) for n in under_way]
    assert [stage.kept for stage in stages] == [1 - (-(n - 1) // every) for n in under_way]


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_a_stage_is_followed_action_by_action(name, chunks):
    schedule, every = generate(name, 4, chunks, 24), 3
    for stage, found in enumerate(count_weight_versions(schedule, every)):
        actions = [a for a in schedule.ranks[schedule.rank_of[stage]] if a.stage == stage]
        last = "W" if any(a.kind.value == "W" for a in actions) else "B"
        gradients, late, stash, most = 0, 0, {}, 1
        for action in actions:
            if action.kind.value == "F":
                stash[action.microbatch] = gradients // every
                assert found.used[action.microbatch] == gradients // every
            elif action.kind.value == last:
                late = max(late, gradients // every - stash.pop(action.microbatch))
                gradients += 1
            most = max(most, len({*stash.values(), gradients // every}))
        assert (found.staleness, found.kept) == (late, most)


def test_with_a_flush_nothing_is_late():
    for stage in count_weight_versions(generate("1f1b", 4, 1, 12), 12):
        assert (stage.staleness, set(stage.used.values())) == (0, {0})


@pytest.mark.parametrize("staleness", range(6))
def test_the_largest_rate_parts_what_converges_from_what_does_not(staleness):
    bound = find_largest_stable_rate(staleness)
    ends = []
    for rate in (0.98 * bound, 1.02 * bound):
        weights = [1.0] * (staleness + 1)
        for _ in range(4000):
            weights.append(weights[-1] - rate * weights[-1 - staleness])
        ends.append(np.abs(weights[-50:]).max())
    assert ends[0] < 1e-2 and ends[1] > 1e2


def test_updates_that_do_not_divide_the_microbatches_are_refused():
    for every, nearest in ((7, 8), (0, 1), (100, 32)):
        with pytest.raises(UserError, match=f"32 .* multiple of {every} .*: {nearest}$"):
            count_weight_versions(generate("1f1b", 4, 1, 32), every)
