"""Hierarchy: in how many steps the ranks of a group exchange their parts of a sum.

Without it, each of N ranks sends a message to each other one: N - 1 messages, whose latencies add
up, and as many connections. In steps over groups of a, then b, ... ranks, with N = a b ..., the
bytes are the same and the messages are (a - 1) + (b - 1) + ...; but every step rounds once more
what it sends. The runtime and the planner both ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import isqrt


@cache
def exchange_steps(ranks: int, inside: int) -> tuple[int, int, int]:
    """Return the ranks that exchange in each of three steps, whose product is `ranks`; 1 where
    there is no such step.

    The first is within a node, so that slow links carry only what the ranks of a node have summed.
    The ranks that are left are divided in two, by the divisor nearest to the root, where this saves
    at least half of their messages; fewer would not be worth a rounding.

    Args:
        ranks: ranks of the group.
        inside: neighbours of the group in one node, the same in every node; 1 if they differ.
    """
    node = inside if 1 < inside < ranks and ranks % inside == 0 else 1
    left = ranks // node
    near = next(divisor for divisor in range(isqrt(left), 0, -1) if left % divisor == 0)
    far = left // near
    if 2 * (near - 1 + far - 1) > left - 1:
        near, far = left, 1
    return node, near, far


def messages(steps: Iterable[int]) -> int:
    """Return how many messages a rank sends in an exchange in these steps."""
    return sum(ranks - 1 for ranks in steps)


def neighbours(groups: Iterable[Sequence[int]], node_size: int) -> int:
    """Return how many neighbours of a group are in one node, if that is the same for every node and
    every one of `groups`, and otherwise 1. node_size: ranks per node."""
    found: set[int] = set()
    for ranks in groups:
        nodes = [rank // node_size for rank in ranks]
        found |= {nodes.count(node) for node in set(nodes)}
    return found.pop() if len(found) == 1 else 1


def divided(ranks: Sequence[int], steps: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return for each step the groups in which ranks exchange: in the first one neighbours, in a
    later one the ranks with the same places in the groups of all steps before."""
    found, stride = [], 1
    for size in steps:
        block = stride * size
        found.append(
            [
                tuple(ranks[start + place : start + block : stride])
                for start in range(0, len(ranks), block)
                for place in range(stride)
            ]
        )
        stride = block
    return found
