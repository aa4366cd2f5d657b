"""Finding the rank that holds up the others from the statuses of all ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.distributed.mesh import Mesh
from megaframe.distributed.rank_progress import (
    DeviceTimer,
    DeviceTimes,
    RankProgress,
    RankStatus,
    blame_for_hang,
    describe_statuses,
)
from megaframe.layout import Layout

texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.builds(RankStatus, st.integers(0, 9), texts, texts, st.integers()))
def test_a_status_survives_its_text(status):
    assert RankStatus.decode(status.encode()) == status and "\n" not in status.encode()


def make_status(rank, waiting, parts_begun=0):
    return RankStatus(rank, "step 1", "waiting in x" if waiting else "", parts_begun)


@given(st.dictionaries(st.integers(0, 5), st.tuples(st.booleans(), st.integers(0, 3)), max_size=6))
def test_the_silent_are_to_blame_then_who_waits_for_nobody_then_the_last(described):
    statuses = {rank: make_status(rank, *description) for rank, description in described.items()}
    blamed = blame_for_hang(statuses, 6)
    assert blamed == tuple(sorted(blamed)) and blamed
    if len(statuses) < 6:
        assert set(blamed) == set(range(6)) - statuses.keys()
    elif any(not waiting for waiting, _ in described.values()):
        assert all(not described[rank][0] for rank in blamed)
    else:
        assert all(
            described[rank][1] == min(parts for _, parts in described.values()) for rank in blamed
        )


def test_time_without_waiting_is_counted_by_kind():
    progress = RankProgress()
    progress.begin_activity("step 1")
    progress.begin_part("", "0F0", "F")
    begun = progress.begin_wait(None)
    for _ in range(10**5):
        pass
    progress.end_wait(begun)
    progress.begin_part("", None)
    busy = progress.take_busy()
    assert 0 < busy["F"] < 1e-3 and progress.take_busy() == {}
    assert not progress.has_activity_exceeded(0) and not progress.has_activity_exceeded(100)
    assert progress.has_activity_exceeded(1e-9)
    progress.begin_activity("")
    assert not progress.has_activity_exceeded(1e-9)


def test_ranks_that_do_the_same_are_named_together():
    statuses = [make_status(0, True), make_status(1, False), make_status(2, True)]
    text = "ranks 0, 2: step 1, waiting in x; rank 1: step 1, waiting for no rank"
    assert describe_statuses(statuses) == text


def test_of_very_many_different_things_few_are_named():
    statuses = [RankStatus(rank, f"step {rank}", "", 0) for rank in range(4096)]
    text = describe_statuses(statuses)
    assert text.startswith("rank 0: step 0, waiting for no rank; rank 1: ")
    assert text.endswith("rank 7: step 7, waiting for no rank; 4088 ranks elsewhere")


class QueueEvent:
    """Stands for an event in a device's queue; a test sets whether the device has passed it."""

    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


class NamedTransfer:
    """Stands for a transfer that a rank waits for."""

    def __init__(self, words):
        self.describe_wait = lambda: words


def make_progress():
    """Return the progress of a rank whose host is far ahead of its device, and its events."""
    progress, events = RankProgress(), []

    def record_event():
        events.append(QueueEvent())
        return events[-1]

    progress.record_event = record_event
    progress.begin_activity("step 7")
    for action, waits in (("0F0", ["send"]), ("0F1", ["gather", "reduce", "gather"]), ("0B0", [])):
        progress.begin_part("", action, "F")
        for word in waits:
            progress.record_device_wait(NamedTransfer(word))
    progress.begin_part("", "UPDATE")
    return progress, events


def test_a_rank_is_where_its_device_is_and_waits_for_what_that_waits_for():
    progress, events = make_progress()
    observed = []
    for event in events:
        observed.append((str(progress.read_status(1)), progress.is_waiting))
        event.passed = True
    assert observed == [
        ("step 7, action 0F0 on its device, waiting in send", True),
        ("step 7, action 0F1 on its device, waiting in gather or reduce", True),
        ("step 7, action 0B0 on its device, waiting for no rank", False),
    ]
    assert str(progress.read_status(1)) == "step 7, action UPDATE, waiting for no rank"


def test_a_device_is_stalled_that_stays_where_it_waits():
    progress, events = make_progress()
    assert not progress.has_device_stalled(0.0)  # the first look only records
    assert progress.has_device_stalled(0.0) and not progress.has_device_stalled(100.0)
    events[0].passed = True
    assert not progress.has_device_stalled(0.0) and progress.has_device_stalled(0.0)
    events[1].passed = True
    # It is computing, not waiting.
    assert not progress.has_device_stalled(0.0) and not progress.has_device_stalled(0.0)


class TimedEvent:
    """Stands for an event with a time: a device has passed those before `now`, in milliseconds."""

    now = 0.0

    def __init__(self, at):
        self._at = at

    def query(self):
        return self._at <= TimedEvent.now

    def elapsed_time(self, end):
        assert self.query() and end.query(), "a time that the device has not come to yet"
        return end._at - self._at


def test_a_device_is_busy_between_its_marks_without_its_waits():
    timer = DeviceTimer()
    TimedEvent.now = 0.0
    timer.begin_action("F", TimedEvent(10.0))
    timer.record_wait(TimedEvent(12.0), TimedEvent(40.0))
    timer.begin_action(None, TimedEvent(50.0))
    timer.record_wait(TimedEvent(52.0), TimedEvent(60.0))
    timer.begin_action("B", TimedEvent(70.0))
    timer.begin_action(None, TimedEvent(75.0))
    assert timer.take_times() == DeviceTimes(), "it has not passed the last mark"
    TimedEvent.now = 80.0
    times = timer.take_times()
    assert times.steps == 2  # the second has no actions
    assert times.busy == {"F": 0.012, "B": 0.005}


@pytest.mark.parametrize("watched", [True, False])
def test_the_watchdog_sees_the_control_groups_that_training_waits_in(watched):
    mesh = Mesh(Layout(), device="cpu")
    seen = mesh.make_control_group(watched=watched).progress is mesh.progress
    mesh.finish()
    assert seen == watched
