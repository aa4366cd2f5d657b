"""Layout: every rank has one place in each view, groups divide the world into equal parts, and
exchanges in steps connect every pair of ranks."""

import math
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.config import ParallelConfig
from megaframe.errors import UserError, list_divisors
from megaframe.layout import (
    DENSE_VIEW,
    EXPERT_VIEW,
    Layout,
    count_ranks_per_node,
    exchange_groups,
    exchange_steps,
)

sizes = st.sampled_from([1, 1, 2, 3, 4])


@st.composite
def draw_layout(draw):
    tensor, context, data, pipeline = (draw(sizes) for _ in range(4))
    islands = draw(st.sampled_from(list_divisors(data)))
    replicate = draw(st.sampled_from(list_divisors(data // islands)))
    copy = tensor * context * data // islands // replicate
    expert = draw(st.sampled_from(list_divisors(copy)))
    return Layout(
        tensor,
        context,
        data,
        pipeline,
        expert=expert,
        expert_tensor=draw(st.sampled_from(list_divisors(copy // expert))),
        data_replicate=replicate,
        islands=islands,
    )


SPLIT_DENSE_VIEW = ("tensor", "context", "data_shard", "data_replicate", "pipeline", "islands")


def list_subsets(axes):
    return chain.from_iterable(combinations(axes, n) for n in range(len(axes) + 1))


@given(draw_layout())
def test_each_view_numbers_the_ranks_one_to_one(layout):
    ranks = range(layout.world)
    assert [layout.rank(**layout.get_coordinate(rank)) for rank in ranks] == list(ranks)
    assert [layout.rank(**layout.get_expert_coordinate(rank)) for rank in ranks] == list(ranks)
    dense = {tuple(layout.get_coordinate(rank).values()) for rank in ranks}
    expert = {tuple(layout.get_expert_coordinate(rank).values()) for rank in ranks}
    assert len(dense) == len(expert) == layout.world
    for rank in ranks:
        for axis, index in {
            **layout.get_coordinate(rank),
            **layout.get_expert_coordinate(rank),
        }.items():
            assert 0 <= index < layout.sizes[axis]


@settings(max_examples=30)
@given(draw_layout())
def test_groups_partition_the_world_into_equal_sizes(layout):
    for view in (DENSE_VIEW, SPLIT_DENSE_VIEW, EXPERT_VIEW):
        for axes in list_subsets(view):
            groups = layout.list_groups(*axes)
            assert sorted(chain(*groups)) == list(range(layout.world))
            assert {len(group) for group in groups} == {math.prod(layout.sizes[a] for a in axes)}
            assert all(list(group) == sorted(group) for group in groups)


@settings(max_examples=30)
@given(draw_layout(), st.data())
def test_members_differ_on_the_given_axes_only(layout, data):
    rank = data.draw(st.integers(0, layout.world - 1))
    for view, place in (
        (DENSE_VIEW, layout.get_coordinate),
        (EXPERT_VIEW, layout.get_expert_coordinate),
    ):
        for axes in list_subsets(view):
            own_place, others = place(rank), [axis for axis in view if axis not in axes]
            expected = tuple(
                other
                for other in range(layout.world)
                if all(place(other)[axis] == own_place[axis] for axis in others)
            )
            assert layout.list_members(rank, *axes) == expected
            assert expected in layout.list_groups(*axes)


@settings(max_examples=30)
@given(draw_layout())
def test_both_views_cover_the_same_ranks_of_a_stage(layout):
    dense = layout.list_groups("tensor", "context", "data")
    assert dense == layout.list_groups("expert_tensor", "expert", "expert_data")
    assert len(dense) == layout.pipeline
    parts = layout.list_groups("data_shard", "data_replicate", "islands")
    assert layout.list_groups("data") == parts
    # Tensor is the fastest axis, then pipeline and islands the slowest: the ranks of a stage of an
    # island, and those of an island, are consecutive.
    assert layout.list_groups("tensor")[0] == tuple(range(layout.tensor))
    in_island = layout.list_groups("tensor", "context", "data_shard", "data_replicate")
    stage = layout.world // (layout.pipeline * layout.islands)
    assert in_island == tuple(
        tuple(range(p * stage, (p + 1) * stage)) for p in range(layout.pipeline * layout.islands)
    )
    island = layout.world // layout.islands
    for rank in range(layout.world):
        place = layout.get_coordinate(rank)["data"]
        assert place // layout.island_data == rank // island


def test_order_of_the_axes_is_the_documented_one():
    layout = Layout(tensor=2, context=1, data=4, pipeline=2, expert=4, data_replicate=2)
    assert layout.get_coordinate(11) == {"tensor": 1, "context": 0, "data": 1, "pipeline": 1}
    assert layout.get_expert_coordinate(11) == {
        "expert_tensor": 0,
        "expert": 3,
        "expert_data": 0,
        "pipeline": 1,
    }
    assert layout.list_members(11, "data") == (9, 11, 13, 15)
    assert layout.list_members(11, "data_shard") == (9, 11)
    assert layout.list_members(11, "data_replicate") == (11, 15)
    assert layout.list_members(11, "expert_data") == (11, 15)
    assert layout.rank(tensor=1, pipeline=1) == 9
    assert layout.rank(data_replicate=1, data_shard=1) == layout.rank(data=3)


@given(world=st.integers(1, 64), tensor=sizes, context=sizes, pipeline=sizes)
def test_data_is_what_remains_of_the_world(world, tensor, context, pipeline):
    parallel = ParallelConfig(tensor=tensor, context=context, pipeline=pipeline)
    if world % (tensor * context * pipeline):
        with pytest.raises(UserError, match=rf"world of {world} ranks"):
            Layout.from_parallel(parallel, world)
    else:
        layout = Layout.from_parallel(parallel, world)
        assert layout.world == world
        assert layout.data == world // (tensor * context * pipeline)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": 8, "data_replicate": 3}, "data_replicate=3 .* parallel.data=8; use 2 or 4"),
        ({"data": 8, "expert": 5}, "expert=5 .* the 8 ranks .* use parallel.expert=4 or 8"),
        ({"data": 6, "expert_tensor": 4}, "expert_tensor=4 .* the 6 ranks .* use 3 or 6"),
        ({"tensor": 0}, "parallel.tensor=0 must be a whole number >= 1"),
        ({"pipeline": -2}, "parallel.pipeline=-2"),
        ({"data": 2.0}, "parallel.data=2.0"),
        ({"data": True}, "parallel.data=True"),
    ],
)
def test_an_impossible_layout_cannot_be_constructed(sizes, message):
    with pytest.raises(UserError, match=message):
        Layout(**sizes)


def test_sizes_that_do_not_make_the_world_are_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"= 6 is not the world of 8 ranks; use parallel.data=4"):
        Layout.from_parallel(ParallelConfig(tensor=2, data=3), 8)
    with pytest.raises(UserError, match=r"= 3 does not divide the world of 8 .* 6 or 9 .* 2 or 4"):
        Layout.from_parallel(ParallelConfig(tensor=3), 8)


@pytest.mark.parametrize(
    "ask",
    [
        lambda layout: layout.get_coordinate(8),
        lambda layout: layout.list_members(-1, "data"),
        lambda layout: layout.list_members(0, "tensor", "expert"),
        lambda layout: layout.list_groups("data", "data_shard"),
        lambda layout: layout.list_groups("tenser"),
        lambda layout: layout.rank(data=4),
        lambda layout: layout.rank(tensor=0, expert=0),
    ],
)
def test_questions_without_an_answer_raise(ask):
    with pytest.raises(ValueError, match=r"outside of|of one view|already holds"):
        ask(Layout(tensor=2, data=4, expert=2))


def test_layout_as_text():
    assert str(Layout()) == "1 rank"
    assert str(Layout(tensor=2, data=4)) == "8 ranks = tensor 2 \N{MULTIPLICATION SIGN} data 4"
    assert str(Layout(data=4, expert=2, data_replicate=2)) == (
        "4 ranks = data 4 (data = shard 2 \N{MULTIPLICATION SIGN} replicate 2); experts: "
        "expert_tensor 1 \N{MULTIPLICATION SIGN} expert 2 \N{MULTIPLICATION SIGN} expert_data 2 "
        "per stage"
    )


def test_a_layout_of_many_ranks_answers_at_once():
    layout = Layout(tensor=8, context=2, data=128, pipeline=16, expert=64, data_replicate=4)
    assert layout.world == 32768
    assert len(layout.list_groups("data")) == 256
    assert len(layout.list_groups("pipeline", "tensor")[5]) == 128


def count_messages(steps):
    """Messages that a rank sends in an exchange in these steps."""
    return sum(ranks - 1 for ranks in steps)


@given(ranks=st.integers(1, 5000), inside=st.integers(1, 72))
def test_steps_divide_a_group_and_save_messages(ranks, inside):
    steps = exchange_steps(ranks, inside)
    assert math.prod(steps) == ranks
    assert count_messages(steps) <= ranks - 1
    node, near_ranks, far = steps
    assert node in (1, inside)
    assert far == 1 or 2 * (near_ranks + far - 2) <= near_ranks * far - 1


@pytest.mark.parametrize(
    ("ranks", "inside", "steps", "sent"),
    [
        (4, 1, (1, 4, 1), 3),  # two steps would save one message of three
        (8, 8, (1, 8, 1), 7),
        (16, 1, (1, 4, 4), 6),
        (16, 8, (8, 2, 1), 8),
        (31, 1, (1, 31, 1), 30),  # a prime
        (2048, 1, (1, 32, 64), 94),
        (4096, 8, (8, 16, 32), 53),
        (16384, 8, (8, 32, 64), 101),
    ],
)
def test_messages_of_a_rank(ranks, inside, steps, sent):
    assert exchange_steps(ranks, inside) == steps
    assert count_messages(steps) == sent


@pytest.mark.parametrize(("ranks", "sizes"), [(24, (2, 3, 4)), (8, (2, 4)), (6, (6,))])
def test_every_pair_of_ranks_is_connected_by_one_path(ranks, sizes):
    """What rank r has for rank q goes to the rank that has q's places in the steps so far."""
    numbers = [10 + rank for rank in range(ranks)]
    steps = exchange_groups(numbers, sizes)
    for groups in steps:
        assert sorted(rank for group in groups for rank in group) == numbers
    for source in numbers:
        for target in numbers:
            position, stride = source - 10, 1
            for size, groups in zip(sizes, steps, strict=True):
                (group,) = [group for group in groups if position + 10 in group]
                place = (target - 10) // stride % size
                position, stride = group[place] - 10, stride * size
            assert position + 10 == target


def test_neighbours_of_a_node_are_the_same_in_every_group():
    assert count_ranks_per_node([(0, 1, 2, 3), (4, 5, 6, 7)], 2) == 2
    assert count_ranks_per_node([(0, 2, 4, 6), (1, 3, 5, 7)], 4) == 2
    assert count_ranks_per_node([(0, 8, 16)], 8) == 1
    assert count_ranks_per_node([(0, 1, 2)], 2) == 1
    assert count_ranks_per_node([(0, 1), (2, 3)], 8) == 2
