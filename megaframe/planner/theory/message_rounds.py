"""All-reduces as rounds of messages, to be played on links of given alpha, beta and gamma.

The formulas of `planner.collective_times` sum up what is listed here message by message: a test
plays the rounds and compares the times, and a network lab sends them
(`benchmarks/network/collective_algorithms.py`). A buffer has as many parts as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megaframe.errors import UserError


@dataclass(frozen=True)
class RoundMessage:
    """Parts `first` to `last` of a buffer, from one rank to another.

    Attributes:
        adds: Whether the receiver adds them to what it has; otherwise it replaces that.
    """

    source: int
    destination: int
    first: int
    last: int
    adds: bool

    @property
    def parts(self) -> int:
        """Number of parts."""
        return self.last - self.first


Round = tuple[RoundMessage, ...]
"""Messages that are sent at the same time."""
Span = tuple[int, int]


def list_naive_rounds(ranks: int) -> Iterator[Round]:
    """Yield the rounds in which all ranks send to the first one, and it sends the sum back."""
    for rank in range(1, ranks):
        yield (RoundMessage(rank, 0, 0, ranks, True),)
    for rank in range(1, ranks):
        yield (RoundMessage(0, rank, 0, ranks, False),)


def list_binomial_rounds(ranks: int) -> Iterator[Round]:
    """Yield the rounds in which half of the ranks send to the other half until one has the sum, and
    it comes back on the same way."""
    upwards: list[Round] = []
    distance = 1
    while distance < ranks:
        upwards.append(
            tuple(
                RoundMessage(rank + distance, rank, 0, ranks, True)
                for rank in range(0, ranks - distance, 2 * distance)
            )
        )
        distance *= 2
    yield from upwards
    for messages in reversed(upwards):
        yield tuple(
            RoundMessage(each.destination, each.source, 0, ranks, False) for each in messages
        )


def list_ring_rounds(ranks: int) -> Iterator[Round]:
    """Yield the rounds of a reduce-scatter and an all-gather on a ring."""
    ring, spans = range(ranks), [(part, part + 1) for part in range(ranks)]
    yield from _scatter_on_ring(ring, spans)
    yield from _gather_on_ring(ring, spans)


def _scatter_on_ring(ring: Sequence[int], spans: Sequence[Span]) -> Iterator[Round]:
    """Yield the rounds after which member i has the sum of span i + 1."""
    count = len(ring)
    for step in range(count - 1):
        yield tuple(
            RoundMessage(ring[i], ring[(i + 1) % count], *spans[(i - step) % count], True)
            for i in range(count)
        )


def _gather_on_ring(ring: Sequence[int], spans: Sequence[Span]) -> Iterator[Round]:
    """Yield the rounds after which all members have what member i had of span i + 1."""
    count = len(ring)
    for step in range(count - 1):
        yield tuple(
            RoundMessage(ring[i], ring[(i + 1) % count], *spans[(i + 1 - step) % count], False)
            for i in range(count)
        )


def list_halving_doubling_rounds(ranks: int) -> Iterator[Round]:
    """Yield the rounds of recursive halving and doubling (Rabenseifner 2004).

    Raises:
        UserError: The number of ranks is no power of two.
    """
    if ranks & (ranks - 1):
        below = 1 << (ranks.bit_length() - 1)
        raise UserError(f"{ranks} ranks are not halved evenly; use {below} or {2 * below}")
    spans: list[Span] = [(0, ranks)] * ranks
    halvings: list[Round] = []
    distance = ranks // 2
    while distance:
        messages, kept = [], list(spans)
        for rank, (first, last) in enumerate(spans):
            middle, upper = (first + last) // 2, bool(rank & distance)
            kept[rank] = (middle, last) if upper else (first, middle)
            sent = (first, middle) if upper else (middle, last)
            messages.append(RoundMessage(rank, rank ^ distance, *sent, True))
        spans, distance = kept, distance // 2
        halvings.append(tuple(messages))
        yield halvings[-1]
    # What a rank gave away comes back as a sum from the rank that it went to.
    for halving in reversed(halvings):
        yield tuple(
            RoundMessage(each.destination, each.source, each.first, each.last, False)
            for each in halving
        )


def list_hierarchical_rounds(ranks: int, node: int) -> Iterator[Round]:
    """Yield the rounds in which each node scatters the sum of its ranks on a ring, ranks of the
    same number in all nodes sum their parts, and each node gathers them.

    Args:
        ranks: Number of ranks.
        node: Ranks of a node; divides them.
    """
    nodes = ranks // node
    inner = [range(first, first + node) for first in range(0, ranks, node)]
    spans = [(part * nodes, (part + 1) * nodes) for part in range(node)]
    outer = [range(number, ranks, node) for number in range(node)]
    parts = [
        [(spans[(number + 1) % node][0] + part, spans[(number + 1) % node][0] + part + 1)
         for part in range(nodes)]
        for number in range(node)
    ]  # fmt: skip
    yield from _merge(_scatter_on_ring(ring, spans) for ring in inner)
    for phase in (_scatter_on_ring, _gather_on_ring):
        yield from _merge(phase(ring, own) for ring, own in zip(outer, parts, strict=True))
    yield from _merge(_gather_on_ring(ring, spans) for ring in inner)


def _merge(groups: Iterator[Iterator[Round]]) -> Iterator[Round]:
    """Yield the rounds of groups that send at the same time."""
    for rounds in zip(*groups, strict=True):
        yield tuple(message for messages in rounds for message in messages)


ROUNDS: Mapping[str, Callable[[int], Iterator[Round]]] = {
    "naive": list_naive_rounds,
    "binomial": list_binomial_rounds,
    "ring": list_ring_rounds,
    "halving_doubling": list_halving_doubling_rounds,
}
"""The rounds of an all-reduce on one tier, by the algorithm's name in `ALGORITHMS`."""


def play_rounds(
    rounds: Iterator[Round],
    ranks: int,
    part_bytes: float,
    link: Callable[[int, int], tuple[float, float]],
    gamma: float,
) -> float:
    """Return the seconds in which rounds of messages are sent. A message begins when both of its
    ranks are ready; links carry both directions at once.

    Args:
        rounds: The messages.
        ranks: Number of ranks.
        part_bytes: Bytes of a part.
        link: Returns alpha and the bytes/s between two ranks.
        gamma: Seconds in which a rank adds a byte.
    """
    ready = [0.0] * ranks
    for messages in rounds:
        ends = list(ready)
        for message in messages:
            alpha, bandwidth = link(message.source, message.destination)
            size = message.parts * part_bytes
            start = max(ready[message.source], ready[message.destination])
            arrived = start + alpha + size / bandwidth
            added = arrived + size * gamma * message.adds
            ends[message.source] = max(ends[message.source], arrived)
            ends[message.destination] = max(ends[message.destination], added)
        ready = ends
    return max(ready)
