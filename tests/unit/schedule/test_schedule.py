"""The text form of actions and of schedules.

Tests `megaframe.schedule.actions`.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.errors import UserError
from megaframe.schedule import Action, ActionKind, find_schedule_mistakes, generate, parse_action
from megaframe.schedule import schedule as text_form
from megaframe.schedule.schedule import parse_schedule, read_schedule


@given(st.sampled_from(ActionKind), st.integers(0, 999), st.integers(0, 999))
def test_text_form_round_trips(kind, stage, microbatch):
    action = Action(
        kind,
        None if kind is ActionKind.UPDATE else stage,
        microbatch if kind.per_microbatch else None,
    )
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "F0", "0G1", "0F-1", "0REDUCE1", "1UPDATE", "0F0 "]
)
def test_anything_else_is_refused(text):
    with pytest.raises(UserError, match="action"):
        parse_action(text)


def test_lanes_of_actions():
    lanes = [kind.lane for kind in ActionKind]
    assert lanes == [*["compute"] * 3, "send", "recv", "send", "recv", "grad", "compute"]


@settings(max_examples=20)
@given(st.sampled_from(["zb-v", "v-half"]), st.integers(1, 5), st.integers(0, 5))
def test_schedules_round_trip(name, ranks, additional):
    schedule = generate(name, ranks, 2, ranks + additional)
    assert parse_schedule(str(schedule)) == schedule


def test_comments_and_blank_lines_are_skipped_and_a_file_is_a_schedule(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("# two ranks\n\n0F0 0F1\t0B0 0B1  # rank 0\n  1F0 1B0 1F1 1B1\n")
    schedule = generate(f"file:{path}", 2, 1, 2)
    assert str(schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert read_schedule(path) == schedule


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# nothing", "no line of actions"),
        ("0F0 0B0\n1F0 1X0", r"own.txt, line 2, cell 2: '1X0' is not an action"),
        ("0F0 0SEND_F0", "line 1, cell 2: 0SEND_F0 is added by lowering"),
        ("0F0 9999999F0", "line 1, cell 2: stage 9999999 .* 1000000"),
        ("0F0 0F99999999", "microbatch 99999999 .* 1000000"),
    ],
)
def test_a_bad_file_is_refused_with_line_and_cell(tmp_path, content, message):
    path = tmp_path / "own.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_schedule(path)


def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "own.txt"
    path.write_bytes(b"\xff\xfe0F0")
    for bad in (path, tmp_path / "missing.txt", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_schedule(bad)
    path.write_text("0F0 0B0")
    monkeypatch.setattr(text_form, "MAX_BYTES", 6)
    with pytest.raises(UserError, match="larger than 6 bytes"):
        read_schedule(path)


def test_a_file_for_another_pipeline_or_with_a_cycle_is_refused(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(str(generate("1f1b", 4, 1, 6)))
    assert find_schedule_mistakes(f"file:{path}", 4, 1, 6) == []
    for size, key in (
        ((2, 1, 6), "parallel.pipeline"),
        ((4, 2, 6), "parallel.chunks"),
        ((4, 1, 5), "microbatches"),
    ):
        assert [key in mistake for mistake in find_schedule_mistakes(f"file:{path}", *size)] == [
            True
        ]
    with pytest.raises(UserError, match="group of 4 microbatches has no effect"):
        generate(f"file:{path}", 4, 1, 6, group=4)
    path.write_text("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    assert len(find_schedule_mistakes(f"file:{path}", 2, 1, 2)) == 1
    with pytest.raises(UserError, match=r"parallel\.schedule=file:"):
        generate(f"file:{path}", 2, 1, 2)
