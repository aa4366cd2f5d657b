"""Finding the rank that holds up the others from the places of all ranks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.distributed.device_time import DeviceBusy, DeviceTimes
from megaframe.distributed.rank_progress import Place, Sight, gathered, held_up_by

texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.builds(Sight, st.integers(0, 9), texts, texts, st.integers()))
def test_a_sight_survives_its_text(sight):
    assert Sight.decode(sight.encode()) == sight and "\n" not in sight.encode()


def seen(rank, waiting, beat=0):
    return Sight(rank, "step 1", "waiting in x" if waiting else "", beat)


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 5), st.tuples(st.booleans(), st.integers(0, 3)), max_size=6))
def test_the_silent_are_to_blame_then_who_waits_for_nobody_then_the_last(found):
    sights = {rank: seen(rank, *what) for rank, what in found.items()}
    blamed = held_up_by(sights, 6)
    assert blamed == tuple(sorted(blamed)) and blamed
    if len(sights) < 6:
        assert set(blamed) == set(range(6)) - sights.keys()
    elif any(not waiting for waiting, _ in found.values()):
        assert all(not found[rank][0] for rank in blamed)
    else:
        assert all(found[rank][1] == min(beat for _, beat in found.values()) for rank in blamed)


def test_time_without_waiting_is_counted_by_kind():
    place = Place()
    place.begin("step 1")
    place.act("", "0F0", "F")
    begun = place.wait(None)
    for _ in range(10**5):
        pass
    place.go_on(begun)
    place.act("", None)
    busy = place.take_busy()
    assert 0 < busy["F"] < 1e-3 and place.take_busy() == {}
    assert not place.overrun(0) and not place.overrun(100) and place.overrun(1e-9)
    place.begin("")
    assert not place.overrun(1e-9)


def test_ranks_that_do_the_same_are_told_together():
    sights = [seen(0, True), seen(1, False), seen(2, True)]
    text = "ranks 0, 2: step 1, waiting in x; rank 1: step 1, waiting for no rank"
    assert gathered(sights) == text


def test_of_very_many_different_things_few_are_told():
    sights = [Sight(rank, f"step {rank}", "", 0) for rank in range(4096)]
    text = gathered(sights)
    assert text.startswith("rank 0: step 0, waiting for no rank; rank 1: ")
    assert text.endswith("rank 7: step 7, waiting for no rank; 4088 ranks elsewhere")


class Passed:
    """Stands for a mark in a device's queue; a test sets whether the device has passed it."""

    def __init__(self):
        self.passed = False

    def query(self):
        return self.passed


class Transfer:
    """Stands for a transfer that a rank waits for."""

    def __init__(self, words):
        self.waits_for = lambda: words


def on_a_device():
    """Return a place whose host is far ahead of its device, and the marks that it left."""
    place, marks = Place(), []

    def mark():
        marks.append(Passed())
        return marks[-1]

    place.mark = mark
    place.begin("step 7")
    for action, waits in (("0F0", ["send"]), ("0F1", ["gather", "reduce", "gather"]), ("0B0", [])):
        place.act("", action, "F")
        for word in waits:
            place.left(Transfer(word))
    place.act("", "UPDATE")
    return place, marks


def test_a_rank_is_where_its_device_is_and_waits_for_what_that_waits_for():
    place, marks = on_a_device()
    found = []
    for mark in marks:
        found.append((str(place.seen(1)), place.waits))
        mark.passed = True
    assert found == [
        ("step 7, action 0F0 on its device, waiting in send", True),
        ("step 7, action 0F1 on its device, waiting in gather or reduce", True),
        ("step 7, action 0B0 on its device, waiting for no rank", False),
    ]
    assert str(place.seen(1)) == "step 7, action UPDATE, waiting for no rank"


def test_a_device_is_stalled_that_stays_where_it_waits():
    place, marks = on_a_device()
    assert not place.stalled(0.0)  # the first look only records
    assert place.stalled(0.0) and not place.stalled(100.0)
    marks[0].passed = True
    assert not place.stalled(0.0) and place.stalled(0.0)
    marks[1].passed = True
    assert not place.stalled(0.0) and not place.stalled(0.0)  # it is computing, not waiting


class Moment:
    """Stands for a mark with a time: a device has passed those before `now`, in milliseconds."""

    now = 0.0

    def __init__(self, at):
        self._at = at

    def query(self):
        return self._at <= Moment.now

    def elapsed_time(self, end):
        assert self.query() and end.query(), "a time that the device has not come to yet"
        return end._at - self._at


def test_a_device_is_busy_between_its_marks_without_its_waits():
    busy = DeviceBusy()
    Moment.now = 0.0
    busy.act("F", Moment(10.0))
    busy.wait(Moment(12.0), Moment(40.0))
    busy.act(None, Moment(50.0))
    busy.wait(Moment(52.0), Moment(60.0))
    busy.act("B", Moment(70.0))
    busy.act(None, Moment(75.0))
    assert busy.take() == DeviceTimes(), "it has not passed the last mark"
    Moment.now = 80.0
    times = busy.take()
    assert times.steps == 2  # the second has no actions
    assert times.busy == {"F": 0.012, "B": 0.005}
