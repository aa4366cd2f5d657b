"""Calls that ranks compare before they start them: what differs is said with both calls, ranks and
lines, for collectives and for messages."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megaframe.distributed.collectives import (
    Ring,
    all_reduce,
    all_to_all_v,
    receive,
    send,
    shift_ring,
)
from megaframe.distributed.desync_check import DesyncCheck
from megaframe.distributed.fake_group import FakeGroup
from megaframe.distributed.group import Group
from megaframe.distributed.rank_progress import RankProgress
from megaframe.errors import CollectiveMismatch


class Named(FakeGroup):
    """A group of which each rank is here, with the name that it has on all of them."""

    group_name = "pair"


def make_groups(size):
    """Return a group on each of its ranks, which compare what they start."""
    store, ranks = dist.HashStore(), tuple(range(size))
    recorded_groups = []
    for rank in ranks:
        progress = RankProgress()
        order = DesyncCheck(store, rank, progress)
        handle = Named(rank, size)
        recorded_groups.append(
            Group(("pipeline",), ranks, rank, handle, progress=progress, desync_check=order)
        )
    return recorded_groups


def make_tensor(*shape, dtype=torch.float64):
    return torch.empty(shape, dtype=dtype, device="meta")


COLLECTIVE, MESSAGE = "all_reduce", "message"
LENGTHS = st.integers(1, 2)
CALLS = st.one_of(
    st.tuples(st.just(COLLECTIVE), LENGTHS),
    st.tuples(st.just(MESSAGE), LENGTHS, st.sampled_from([(0, 1), (1, 0)])),
)


def start(group, calls):
    for kind, length, *ends in calls:
        if kind == COLLECTIVE:
            all_reduce(make_tensor(length), group)
        elif ends[0][0] == group.index:
            send(make_tensor(length), group)
        else:
            receive(make_tensor(length), group)


def list_sequences(calls):
    """Return what must be the same on both ranks: the collectives, and in each direction the
    messages with their places between the collectives."""
    lengths_by_key, collectives = defaultdict(list), 0
    for kind, length, *ends in calls:
        lengths_by_key[(kind, *ends)].append((length, collectives if ends else None))
        collectives += kind == COLLECTIVE
    return lengths_by_key


def agree(first, other):
    """Return whether each sequence begins like that of the other rank, as far as both go."""
    return all(
        a == b
        for key in first.keys() & other.keys()
        for a, b in zip(first[key], other[key], strict=False)
    )


@given(st.lists(CALLS, max_size=6).flatmap(lambda c: st.tuples(st.just(c), st.permutations(c))))
def test_ranks_differ_where_the_order_of_a_group_or_of_a_direction_differs(calls):
    first, second = make_groups(2)
    start(first, calls[0])
    if agree(*map(list_sequences, calls)):
        start(second, calls[1])
    else:
        with pytest.raises(CollectiveMismatch):
            start(second, calls[1])


def describe_difference(first, second):
    """Return what is said if two ranks start these calls, without the numbers of lines."""
    one, other = make_groups(2)
    one.progress.begin_part("", "0F1")
    first(one)
    with pytest.raises(CollectiveMismatch) as raised:
        second(other)
    assert sorted(raised.value.ranks) == [0, 1]
    message = str(raised.value)
    lines = re.findall(r"at tests/unit/distributed/test_desync_check\.py:(\d+)", message)
    source = Path(__file__).read_text().splitlines()
    assert len(lines) == 2 and all("lambda group" in source[int(line) - 1] for line in lines)
    return re.sub(r"desync_check\.py:\d+", "", message).replace(
        " at tests/unit/distributed/test_", ""
    )


def test_both_calls_are_said_with_ranks_and_lines():
    message = describe_difference(
        lambda group: send(make_tensor(3, 4), group),
        lambda group: receive(make_tensor(4, 3), group),
    )
    assert message == (
        "the ranks over pipeline do not start the same thing: rank 1 starts receive of "
        "torch.float64 [4, 3] from rank 0, rank 0 started send of torch.float64 [3, 4] to rank 1 "
        "in action 0F1"
    )
    message = describe_difference(
        lambda group: all_reduce(make_tensor(2, dtype=torch.int64), group),
        lambda group: all_reduce(make_tensor(2), group),
    )
    assert "rank 1 starts all_reduce of torch.float64 [2], rank 0 started" in message
    assert "rank 0 started all_reduce of torch.int64 [2] in action 0F1" in message
    message = describe_difference(
        lambda group: [all_reduce(make_tensor(2), group), send(make_tensor(2), group)],
        lambda group: [receive(make_tensor(2), group), all_reduce(make_tensor(2), group)],
    )
    assert "receive of torch.float64 [2] from rank 0, rank 0 started" in message
    assert "send of torch.float64 [2] to rank 1 after collective 1 of the group" in message


def test_parts_of_another_size_than_their_receiver_expects_are_seen():
    first, second = make_groups(2)
    all_to_all_v(make_tensor(3, 4), [1, 2], [1, 5], first)
    all_to_all_v(make_tensor(9, 4), [5, 4], [2, 4], second)
    all_to_all_v(make_tensor(3, 4), [1, 2], [1, 5], first)
    with pytest.raises(
        CollectiveMismatch, match=r"receive of .* \[3, 4\] from rank 0 .* send of .* \[2, 4\]"
    ):
        all_to_all_v(make_tensor(9, 4), [5, 4], [3, 4], second)


def test_a_ring_that_turns_the_other_way_and_another_length_are_seen():
    def around(group, length, *, reverse=False):
        ring = Ring(group.index, group.size, group)
        shift_ring(make_tensor(length), make_tensor(length), ring, reverse=reverse)

    first, second, _ = make_groups(3)
    around(first, 2)
    with pytest.raises(
        CollectiveMismatch, match=r"starts shift_ring back of any shape .* started shift_ring of"
    ):
        around(second, 2, reverse=True)
    first, second, third = make_groups(3)
    around(first, 2)
    around(third, 2)
    with pytest.raises(CollectiveMismatch, match=r"send of torch.float64 \[5\] to rank 2"):
        around(second, 5)
