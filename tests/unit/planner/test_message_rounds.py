"""All-reduces message by message: they sum, and take what the formulas say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.errors import UserError
from megaframe.planner.collective_times import ALGORITHMS, GroupLevel
from megaframe.planner.theory.message_rounds import (
    ROUNDS,
    list_halving_doubling_rounds,
    list_hierarchical_rounds,
    play_rounds,
)


def add_up(rounds, ranks):
    """Return the buffers of all ranks after the rounds, of whole numbers that differ."""
    buffers = np.arange(ranks * ranks).reshape(ranks, ranks) ** 2
    total = buffers.sum(0)
    for messages in rounds:
        before = buffers.copy()
        for message in messages:
            parts = slice(message.first, message.last)
            sent = before[message.source, parts]
            kept = before[message.destination, parts] if message.adds else 0
            buffers[message.destination, parts] = sent + kept
    return buffers, total


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_every_rank_has_the_sum(name, ranks):
    buffers, total = add_up(ROUNDS[name](ranks), ranks)
    assert (buffers == total).all()


@pytest.mark.parametrize(("ranks", "node"), [(6, 2), (8, 4), (12, 3)])
def test_every_rank_has_the_sum_of_all_nodes(ranks, node):
    buffers, total = add_up(list_hierarchical_rounds(ranks, node), ranks)
    assert (buffers == total).all()


@given(
    name=st.sampled_from(sorted(ROUNDS)),
    ranks=st.sampled_from([2, 4, 8, 32]),
    size=st.floats(1, 1e10),
    alpha=st.floats(1e-7, 1e-3),
    bandwidth=st.floats(1e7, 1e12),
    gamma=st.floats(0, 1e-8),
)
def test_the_rounds_take_what_the_formula_says(name, ranks, size, alpha, bandwidth, gamma):
    rounds = ROUNDS[name](ranks)
    played = play_rounds(rounds, ranks, size / ranks, lambda *_: (alpha, bandwidth), gamma)
    level = GroupLevel(float(ranks), alpha, bandwidth, gamma=gamma)
    assert played == pytest.approx(float(ALGORITHMS["all_reduce"][name](size, [level])), rel=1e-9)


@given(
    node=st.sampled_from([2, 4, 8]),
    nodes=st.sampled_from([2, 3, 4]),
    size=st.floats(1, 1e10),
    gamma=st.floats(0, 1e-8),
)
def test_a_hierarchy_of_rings_takes_what_the_formula_says(node, nodes, size, gamma):
    inner, outer = (3e-6, 4e11), (9e-6, 5e10)
    ranks = node * nodes

    def link(first, second):
        return inner if first // node == second // node else outer

    rounds = list_hierarchical_rounds(ranks, node)
    levels = [
        GroupLevel(float(count), *figures, gamma=gamma)
        for count, figures in ((node, inner), (nodes, outer))
    ]
    played = play_rounds(rounds, ranks, size / ranks, link, gamma)
    formula = float(ALGORITHMS["all_reduce"]["hierarchical"](size, levels))
    assert played == pytest.approx(formula, rel=1e-9)


def test_ranks_that_are_no_power_of_two_are_not_halved():
    with pytest.raises(UserError, match="6 ranks are not halved evenly; use 4 or 8"):
        list(list_halving_doubling_rounds(6))
