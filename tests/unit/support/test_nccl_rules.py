"""The rules against closed forms: which orders of calls come to an end."""

import pytest
from fake_cuda.nccl_rules import (
    CallMismatch,
    CollectiveCall,
    CreateCommunicator,
    Deadlock,
    LaunchKernel,
    Message,
    MessageGroup,
    RecordEvent,
    Synchronize,
    WaitEvent,
    simulate,
)
from hypothesis import given
from hypothesis import strategies as st

COMPUTE = 0
RANKS = st.integers(2, 6)


def is_ended(programs, **options):
    try:
        simulate(programs, **options)
    except Deadlock:
        return False
    return True


def send(communicator, to, size="4", stream=1, where=""):
    return MessageGroup(communicator, stream, (Message("send", to, size),), where)


def receive(communicator, source, size="4", stream=1, where=""):
    return MessageGroup(communicator, stream, (Message("receive", source, size),), where)


def same(ranks, *calls):
    return [list(calls) for _ in range(ranks)]


def draw_permutations(ranks, count):
    """Draw an order of range(count) for each rank; often they are all equal."""
    permutation = st.permutations(range(count))
    return st.one_of(
        permutation.map(lambda order: [order] * ranks),
        st.lists(permutation, min_size=ranks, max_size=ranks),
    )


@given(st.lists(st.booleans(), min_size=2, max_size=6), st.booleans(), st.booleans())
def test_a_ring_of_single_messages_ends_unless_all_ranks_begin_alike(first, links, connected):
    """Over links that are connected, it always ends. first: whether a rank sends first."""
    size = len(first)
    programs = []
    for rank, sends_first in enumerate(first):
        after, before = (rank + 1) % size, (rank - 1) % size
        out, home = (f"link {rank}", f"link {before}") if links else ("ring", "ring")
        to, source = send(out, after, stream=1), receive(home, before, stream=2)
        calls = [CreateCommunicator("ring", tuple(range(size)))]
        calls += [
            CreateCommunicator(f"link {i}", tuple(sorted({i, (i + 1) % size}))) for i in range(size)
        ]
        if connected and links:
            links_by_peer = {rank: to, before: source}
            calls += [links_by_peer[link] for link in sorted(links_by_peer)]
        elif connected:
            calls.append(MessageGroup("ring", 1, (*to.transfers, *source.transfers)))
        programs.append([*calls, *((to, source) if sends_first else (source, to))])
    assert is_ended(programs) == (len({*first}) == 2 or (links and connected))


@given(RANKS)
def test_a_ring_of_groups_ends(size):
    programs = [
        [CreateCommunicator("ring", tuple(range(size)))]
        + 2
        * [
            MessageGroup(
                "ring", 1, tuple(Message(*message) for message in list_ring_transfers(rank, size))
            )
        ]
        for rank in range(size)
    ]
    assert is_ended(programs)


def list_ring_transfers(rank, size):
    return ("send", (rank + 1) % size, "4"), ("receive", (rank - 1) % size, "4")


@given(st.data(), RANKS, st.integers(1, 4), st.booleans())
def test_collectives_end_if_all_ranks_start_them_in_one_order(data, ranks, count, connected):
    """Also when no host waits any more."""
    orders = data.draw(draw_permutations(ranks, count))
    created = [CreateCommunicator(f"group {i}", tuple(range(ranks))) for i in range(count)]
    calls = [CollectiveCall(f"group {i}", i, "all_reduce 4") for i in range(count)]
    before = [*created, *(calls if connected else [])]
    programs = [[*before, *(calls[i] for i in order)] for order in orders]
    assert is_ended(programs) == (len({*map(tuple, orders)}) == 1)


@given(st.data(), RANKS, st.integers(1, 4))
def test_communicators_are_made_in_one_order(data, ranks, count):
    orders = data.draw(draw_permutations(ranks, count))
    programs = [
        [CreateCommunicator(f"group {i}", tuple(range(ranks))) for i in order] for order in orders
    ]
    if len({*map(tuple, orders)}) == 1:
        simulate(programs)
    else:
        with pytest.raises(CallMismatch, match=r"rank \d: making .*, rank \d: making"):
            simulate(programs)


def test_a_communicator_takes_ranks_that_are_not_in_it():
    world, other = CreateCommunicator("world", (0, 1, 2)), CreateCommunicator("other", (0, 1))
    first = CollectiveCall("world", 1, "all_reduce")
    assert is_ended([[world, other, first], [world, other, first], [world, other, first]])
    assert not is_ended([[world, other, first], [world, other, first], [world, first, other]])


@given(st.integers(0, 12), st.integers(1, 12))
def test_receives_posted_ahead_need_a_queue_each_and_one_for_the_rest(posted, queues):
    """Rank 1 sends what rank 0 awaits only after it has got what rank 0 computes next."""
    links = [CreateCommunicator(f"link {i}", (0, 1)) for i in range(posted + 1)]
    connect = [
        [send(f"link {i}", 1, stream=i + 1), receive(f"link {i}", 0, stream=i + 1)]
        for i in range(posted + 1)
    ]
    opposite = [
        [receive(f"link {i}", 1, stream=i + 1), send(f"link {i}", 0, stream=i + 1)]
        for i in range(posted + 1)
    ]
    last, event = f"link {posted}", 1
    awaited = [receive(f"link {i}", 1, stream=i + 1) for i in range(posted)]
    sent = [send(f"link {i}", 0, stream=i + 1) for i in range(posted)]
    computed = [LaunchKernel(COMPUTE), RecordEvent(COMPUTE, event), WaitEvent(posted + 1, event)]
    rank0 = [LaunchKernel(COMPUTE), *awaited, *computed, send(last, 1, stream=posted + 1)]
    rank1 = [LaunchKernel(COMPUTE), receive(last, 0, stream=posted + 1), Synchronize(None), *sent]
    programs = [[*links, LaunchKernel(COMPUTE)], [*links, LaunchKernel(COMPUTE)]]
    for first, second in zip(connect, opposite, strict=True):
        programs[0] += [first[0], second[0]]
        programs[1] += [first[1], second[1]]
    assert is_ended([programs[0] + rank0, programs[1] + rank1], queues=queues) == (posted < queues)


@st.composite
def draw_serial_programs(draw):
    """Draw programs whose calls follow one order of operations of all ranks."""
    ranks = draw(st.integers(2, 5))
    pairs = [(a, b) for a in range(ranks) for b in range(a)]
    members = [tuple(range(ranks)), *draw(st.lists(st.sampled_from(pairs), max_size=4))]
    programs = same(ranks, *(CreateCommunicator(f"group {i}", of) for i, of in enumerate(members)))
    for number in range(draw(st.integers(0, 12))):
        name = draw(st.integers(0, len(members) - 1))
        ends, stream = draw(st.permutations(members[name]))[:2], draw(st.integers(1, 9))
        kind = draw(st.sampled_from(["collective", "message", "both ways", "kernel", "wait"]))
        for rank in range(ranks) if kind in ("kernel", "wait") else members[name]:
            programs[rank] += {
                "collective": [CollectiveCall(f"group {name}", name, f"all_reduce {number % 2}")],
                "message": _message(rank, ends, f"group {name}", name),
                "both ways": _both_ways(rank, ends, f"group {name}", name),
                "kernel": [
                    LaunchKernel(stream),
                    RecordEvent(stream, number),
                    WaitEvent(name, number),
                ],
                "wait": [RecordEvent(name, number), WaitEvent(stream, number), Synchronize(number)],
            }[kind]
    return programs


def _message(rank, ends, name, stream):
    source, target = ends
    if rank == source:
        return [send(name, target, stream=stream)]
    return [receive(name, source, stream=stream)] if rank == target else []


def _both_ways(rank, ends, name, stream):
    if rank not in ends:
        return []
    (peer,) = {*ends} - {rank}
    return [MessageGroup(name, stream, (Message("send", peer, "4"), Message("receive", peer, "4")))]


@given(draw_serial_programs(), st.integers(1, 4))
def test_programs_that_follow_one_order_end_with_any_number_of_queues(programs, queues):
    assert is_ended(programs, queues=queues)


@given(draw_serial_programs(), st.data(), st.integers(2, 9))
def test_what_ends_with_one_queue_ends_with_more(programs, data, queues):
    """Whatever order the calls of a rank have."""
    calls = data.draw(st.sampled_from(programs))
    creations = sum(isinstance(call, CreateCommunicator) for call in calls)
    calls[creations:] = data.draw(st.permutations(calls[creations:]))
    try:
        if is_ended(programs, queues=1):
            assert is_ended(programs, queues=queues)
    except CallMismatch:
        with pytest.raises(CallMismatch):
            simulate(programs, queues)


def test_a_group_connects_near_ranks_first():
    """Rank 0 does not get to rank 2, on whom rank 1 depends, before rank 1 has come."""
    everyone = CreateCommunicator("world", (0, 1, 2))
    far_first = MessageGroup("world", 1, (Message("send", 2), Message("send", 1)))
    rank2 = [everyone, receive("world", 0, ""), send("world", 1, "")]
    rank1 = [everyone, receive("world", 2, ""), receive("world", 0, "")]
    assert not is_ended([[everyone, far_first], rank1, rank2])
    assert is_ended([[everyone, far_first], [rank1[0], *rank1[:0:-1]], rank2])


def test_an_uneven_collective_may_connect_in_any_call():
    """So ranks that start it before and after another connection are a deadlock."""
    for uneven in (False, True):
        exchange = CollectiveCall("group", 1, "all_to_all", uneven)
        programs = same(
            2, CreateCommunicator("group", (0, 1)), CreateCommunicator("link", (0, 1)), exchange
        )
        programs[0] += [exchange, send("link", 1, stream=2)]
        programs[1] += [receive("link", 0, stream=2), exchange]
        assert is_ended(programs) != uneven


WAITS = {
    "nothing": [],
    "the host": [RecordEvent(1, 9), Synchronize(9)],
    "the host, for its device": [Synchronize(None)],
    "the stream": [RecordEvent(1, 9), WaitEvent(2, 9)],
}


@pytest.mark.parametrize("who", WAITS)
def test_what_waits_for_a_receive_starts_nothing(who):
    """Rank 1 sends when it has got what rank 0 sends behind a receive."""
    links = [CreateCommunicator("home", (0, 1)), CreateCommunicator("out", (0, 1))]
    rank0 = [receive("home", 1), send("out", 1, stream=2)]
    rank1 = [receive("out", 0, stream=2), *WAITS["the host, for its device"], send("home", 0)]
    first = [*links, *rank0], [*links, rank1[-1], rank1[0]]
    assert is_ended([[*first[0], rank0[0], *WAITS[who], rank0[1]], [*first[1], *rank1]]) == (
        who == "nothing"
    )


def test_what_differs_between_ranks_is_named_with_both_lines():
    group = CreateCommunicator("data", (0, 1))
    calls = [
        CollectiveCall("data", 1, f"all_reduce {size}", where=f"a.py:{size}") for size in (4, 8)
    ]
    with pytest.raises(CallMismatch) as raised:
        simulate([[group, calls[0]], [group, calls[1]]])
    assert str(raised.value) == (
        "ranks do not call the same: rank 0: all_reduce 4 over data [a.py:4], "
        "rank 1: all_reduce 8 over data [a.py:8]"
    )
    with pytest.raises(
        CallMismatch, match=r"rank 0: send 4 to rank 1 .*rank 1: receive 8 from rank 0"
    ):
        simulate([[group, send("data", 1, "4")], [group, receive("data", 0, "8")]])


def test_ranks_that_wait_for_each_other_are_named_with_their_lines():
    link = CreateCommunicator("link", (0, 1))
    with pytest.raises(Deadlock) as raised:
        simulate([[link, send("link", 1 - rank, where=f"ring.py:{rank}")] for rank in (0, 1)])
    assert raised.value.ranks == (0, 1)
    assert str(raised.value) == (
        "each waits for the next, and the last for the first:\n"
        "  rank 0, host: send 4 to rank 1 over link [ring.py:0]\n"
        "  rank 1, host: send 4 to rank 0 over link [ring.py:1]"
    )


def test_a_call_that_a_rank_never_makes_is_named():
    programs = same(
        3, CreateCommunicator("world", (0, 1, 2)), CollectiveCall("world", 1, "all_reduce")
    )
    programs[1].pop()
    with pytest.raises(Deadlock, match=r"never comes:\n .*all_reduce.*\n  rank 1, host: has"):
        simulate(programs)
