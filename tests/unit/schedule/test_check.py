"""The checker: it accepts what can be executed, refuses everything else, and marks the cell."""

import re
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_schedules import draw_schedules, is_executable, schedule_of

from megaframe.errors import UserError
from megaframe.schedule import ActionKind, Schedule, lower
from megaframe.schedule.check import check

forms = st.sampled_from((lambda schedule: schedule, lower))
few = settings(deadline=None, max_examples=80)


def find_marked(schedule):
    """Return the cell that the checker marks."""
    with pytest.raises(UserError) as error:
        check(schedule)
    cells = re.findall(r">(\S+)<", str(error.value))
    assert len(cells) == 1, error.value
    return cells[0]


def change_rank(schedule, rank, actions):
    return Schedule((*schedule.ranks[:rank], tuple(actions), *schedule.ranks[rank + 1 :]))


@st.composite
def draw_cell(draw, schedule):
    """Draw the (rank, position) of an action."""
    rank = draw(st.integers(0, len(schedule.ranks) - 1))
    return rank, draw(st.integers(0, len(schedule.ranks[rank]) - 1))


@given(draw_schedules(), forms)
@few
def test_every_executable_schedule_passes(schedule, form):
    check(form(schedule))


@given(st.data(), draw_schedules(), forms)
@few
def test_a_missing_action_is_shown_where_it_should_stand(data, schedule, form):
    schedule = form(schedule)
    rank, position = data.draw(draw_cell(schedule))
    actions = list(schedule.ranks[rank])
    missing = actions.pop(position)
    if missing.kind is ActionKind.W or not actions:
        return  # a backward without its W is not split; a rank without actions has its own message
    assert find_marked(change_rank(schedule, rank, actions)) == f"{missing}?"


@given(st.data(), draw_schedules(), forms)
@few
def test_a_repeated_action_is_marked(data, schedule, form):
    schedule = form(schedule)
    rank, position = data.draw(draw_cell(schedule))
    actions = list(schedule.ranks[rank])
    repeated = actions[position]
    actions.insert(data.draw(st.integers(0, len(actions))), repeated)
    assert find_marked(change_rank(schedule, rank, actions)) == str(repeated)


@given(st.data(), draw_schedules())
@few
def test_an_action_on_another_rank_is_marked(data, schedule):
    rank, position = data.draw(draw_cell(schedule))
    actions = list(schedule.ranks[rank])
    moved = actions.pop(position)
    to = data.draw(st.integers(0, len(schedule.ranks) - 1))
    if to == rank or sum(action.stage == moved.stage for action in actions) < 2:
        return
    row = list(schedule.ranks[to])
    row.insert(data.draw(st.integers(0, len(row))), moved)
    assert find_marked(change_rank(change_rank(schedule, rank, actions), to, row)) == str(moved)


@given(st.data(), draw_schedules())
def test_a_swap_is_refused_exactly_when_it_cannot_be_executed(data, schedule):
    rank, position = data.draw(draw_cell(schedule))
    other = data.draw(st.integers(0, len(schedule.ranks[rank]) - 1))
    actions = list(schedule.ranks[rank])
    actions[position], actions[other] = actions[other], actions[position]
    swapped = change_rank(schedule, rank, actions)
    if is_executable(swapped):
        check(swapped)
    else:
        with pytest.raises(UserError, match=r">.*<"):
            check(swapped)


STEPS = {ActionKind.SEND_F: 1, ActionKind.SEND_B: -1, ActionKind.RECV_F: -1, ActionKind.RECV_B: 1}
NEEDS = {ActionKind.F: ActionKind.RECV_F, ActionKind.B: ActionKind.RECV_B}
PAIRS = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}


def run_strictly(schedule):
    """Run as the strictest engine would: a transfer happens once both ends have posted it and the
    previous one on its edge is done. Return whether all lists run to their ends."""
    at = [0] * len(schedule.ranks)
    sent, expected_receives, arrived = defaultdict(list), defaultdict(list), set()

    def find_peer(kind, stage, rank):
        """Return the other rank of a transfer, or None."""
        other = stage + STEPS[kind]
        inside = 0 <= other < len(schedule.rank_of)
        return schedule.rank_of[other] if inside and schedule.rank_of[other] != rank else None

    def step(rank, action):
        """Execute an action if possible; return whether it was."""
        kind, stage, number = action.kind, action.stage, action.microbatch
        if kind in NEEDS and find_peer(NEEDS[kind], stage, rank) is not None:
            return (NEEDS[kind], stage, number) in arrived
        if kind in STEPS:
            other = find_peer(kind, stage, rank)
            if kind in PAIRS:
                sent[rank, other].append((PAIRS[kind], stage + STEPS[kind], number))
            else:
                expected_receives[other, rank].append((kind, stage, number))
            edge = (rank, other) if kind in PAIRS else (other, rank)
            for sending, receiving in zip(sent[edge], expected_receives[edge], strict=False):
                assert sending == receiving
                arrived.add(receiving)
        return True

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions) and step(rank, actions[at[rank]]):
                at[rank] += 1
                moved = True
    return at == [len(actions) for actions in schedule.ranks]


@pytest.mark.slow
@given(st.data(), draw_schedules())
def test_what_passes_runs_to_its_end_even_if_sends_wait_for_their_receives(data, schedule):
    lowered = lower(schedule)
    assert run_strictly(lowered)
    rank, position = data.draw(draw_cell(lowered))
    actions = list(lowered.ranks[rank])
    moved = actions.pop(position)
    actions.insert(max(0, position + data.draw(st.integers(-4, 4))), moved)
    mutated = change_rank(lowered, rank, actions)
    try:
        check(mutated)
    except UserError:
        return
    assert run_strictly(mutated)


def test_a_deadlock_names_its_circle():
    with pytest.raises(UserError) as error:
        check(schedule_of("0F0 0B0 0F1 0B1\n1F1 1F0 1B1 1B0\n2F0 2B0 2F1 2B1"))
    text = str(error.value)
    assert "rank 1 waits with 1F1 for 0F1" in text
    assert "rank 0 waits with 0B0 for 1B0" in text
    assert "rank 2 waits" not in text
    assert ">0B0<" in text and ">1F1<" in text


def test_a_send_after_what_waits_for_its_answer_is_a_deadlock():
    with pytest.raises(UserError, match="rank 1 waits with 1F0 for 0SEND_F0"):
        check(
            schedule_of(
                "0F0 0RECV_B0 0REDUCE 0B0 0SEND_F0 UPDATE\n1RECV_F0 1F0 1REDUCE 1B0 1SEND_B0 UPDATE"
            )
        )


@pytest.mark.parametrize(
    ("text", "cell", "words"),
    [
        ("0F0 0B0 2F0 2B0", "2F0", "stage 1 has no action"),
        ("0F0 0B0 0F7", "0F1?", "2 F for 8 microbatches"),
        ("0F0 0F999999999", "0B0?", "0 B for 1000000000"),
        ("0F0 0W0 0B0", "0W0", "before 0B0"),
        ("0F0 0W0", "0B0?", "missing"),
        ("0B0 0F0", "0B0", "before 0F0"),
        ("0REDUCE 0F0 0B0 0F1 0B1 UPDATE", "0REDUCE", "before 2 of the stage's 2 gradients"),
        ("0F0 0B0 0REDUCE UPDATE", "0REDUCE", "before 0 of the stage's 1 gradients"),
        ("0F0 0REDUCE 0B0 0W0 0F1 0B1 UPDATE", "0REDUCE", "the last one, 0B1"),
        ("0F0 UPDATE 0REDUCE 0B0", "UPDATE", "before 2 other actions"),
        ("0F0 0SEND_F0 0REDUCE 0B0 UPDATE", "0SEND_F0", "no other rank"),
        ("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", "0SEND_F0", "stage 1 is on rank 0 too"),
        (
            "0F0 0SEND_F0 0RECV_B0 0REDUCE 0B0 UPDATE\n1RECV_F0 1F0 1SEND_B0 1REDUCE 1B0 UPDATE",
            "1SEND_B0",
            "before 1B0",
        ),
        (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0REDUCE 0B1 UPDATE\n"
            "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1REDUCE 1B1 1SEND_B1 UPDATE",
            "1RECV_F1",
            "takes tensor 0 from rank 0 to rank 1, but that is of 0SEND_F0",
        ),
    ],
)
def test_checker_refuses_and_marks_the_cell(text, cell, words):
    schedule = schedule_of(text)
    assert find_marked(schedule) == cell
    with pytest.raises(UserError, match=re.escape(words)):
        check(schedule)


@pytest.mark.parametrize("ranks", [(), ((),), (schedule_of("0F0 0B0").ranks[0], ())])
def test_ranks_without_stages_are_refused(ranks):
    with pytest.raises(UserError, match=r"0 ranks|has no stage"):
        check(Schedule(ranks))


def test_the_grid_of_a_large_schedule_is_a_window():
    line = " ".join(f"0F{n} 0B{n}" for n in range(500)).replace("0B250 ", "")
    with pytest.raises(UserError) as error:
        check(schedule_of(line))
    assert ">0B250?<" in str(error.value) and len(str(error.value)) < 300
