"""The schedule of one stage, and the text form of actions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.errors import UserError
from megaframe.schedule import Action, Kind, lower, one_stage, parse_action


def test_reduction_is_posted_before_the_last_backward_and_the_update_is_last():
    text = " ".join(map(str, lower(one_stage(3))))
    assert text == "0F0 0B0 0F1 0B1 0F2 0REDUCE 0B2 UPDATE"


@given(st.integers(1, 40))
def test_each_microbatch_runs_once_forward_before_backward(microbatches):
    actions = lower(one_stage(microbatches))
    for number in range(microbatches):
        forward, backward = (actions.index(Action(kind, 0, number)) for kind in (Kind.F, Kind.B))
        assert forward < backward
    assert len(actions) == 2 * microbatches + 2


@given(st.sampled_from(Kind), st.integers(0, 999), st.integers(0, 999))
def test_text_form_round_trips(kind, stage, microbatch):
    action = Action(
        kind,
        None if kind is Kind.UPDATE else stage,
        microbatch if kind.per_microbatch else None,
    )
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "F0", "0G1", "0F-1", "0REDUCE1", "1UPDATE", "0F0 "]
)
def test_anything_else_is_refused(text):
    with pytest.raises(UserError, match="action"):
        parse_action(text)


def test_lanes():
    lanes = [kind.lane for kind in Kind]
    assert lanes == [*["compute"] * 3, "send", "recv", "send", "recv", "grad", "compute"]
