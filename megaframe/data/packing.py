"""Best-fit packing: which pieces of documents share a sample.

Documents longer than a sample are cut first, and then every piece is put, the longest first, where
it leaves the least room: best-fit decreasing, as in "Fewer truncations improve language modeling"
(Ding et al. 2024). No document that fits into a sample is cut, and what stays empty is padding.

Pieces of equal length are placed together, and samples are known by the room that they have left,
so the work grows with the number of different lengths, and with that of pieces only to sort them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def cut_documents(bounds: Numbers, room: int) -> tuple[Numbers, Numbers]:
    """Cut documents into pieces of at most `room` tokens.

    Pieces of one document overlap by a token, which is the label of the first and an input of the
    second, so every token but the first of a document is predicted once. Documents of a single
    token, in which nothing is predicted, are left out.

    Args:
        bounds: Where documents begin and the last one ends, ascending.
        room: Most tokens of a piece, 2 or more.

    Returns:
        Where each piece begins, and its tokens.
    """
    starts, lengths = bounds[:-1], np.diff(bounds)
    counts = -(-(lengths - 1) // (room - 1))
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = numbers * (room - 1)
    sizes = np.minimum(np.repeat(lengths, counts) - offsets, room)
    return np.repeat(starts, counts) + offsets, sizes


def pack_best_fit(sizes: Numbers, room: int) -> tuple[Numbers, int]:
    """Put pieces into as few samples as best-fit decreasing needs.

    Args:
        sizes: Tokens of each piece, 1 to `room`.
        room: Tokens of a sample.

    Returns:
        The sample of each piece, and the number of samples.
    """
    order = np.argsort(-sizes, kind="stable")
    counts = np.bincount(sizes)
    lengths = np.flatnonzero(counts)[::-1]
    samples, begin, opened = np.empty(sizes.size, np.int64), 0, 0
    rooms = _SamplesByRoom(room)
    for length, count in zip(lengths.tolist(), counts[lengths].tolist(), strict=True):
        end = begin + count
        while begin < end:
            left = rooms.find_tightest(length)
            if left is None:
                left, needed = room, -(-(end - begin) // (room // length))
                rooms.add(room, np.arange(opened, opened + needed))
                opened += needed
            each = min(left // length, end - begin)
            chosen = rooms.take(left, (end - begin) // each)
            rooms.add(left - each * length, chosen)
            samples[order[begin : begin + each * chosen.size]] = np.repeat(chosen, each)
            begin += each * chosen.size
    return samples, opened


class _SamplesByRoom:
    """Samples by how many tokens still fit into them. room: of an empty sample."""

    def __init__(self, room: int) -> None:
        self._samples: list[list[Numbers]] = [[] for _ in range(room + 1)]
        self._nonempty = 0  # bit r: some sample has room for r more tokens

    def find_tightest(self, length: int) -> int | None:
        """Return the least room of `length` or more that a sample has; None if none has."""
        fitting = self._nonempty >> length
        return length + (fitting & -fitting).bit_length() - 1 if fitting else None

    def take(self, room: int, most: int) -> Numbers:
        """Take at most so many of the samples with this room, and at least one."""
        samples = self._samples[room].pop()
        if samples.size > most:
            self._samples[room].append(samples[most:])
        if not self._samples[room]:
            self._nonempty &= ~(1 << room)
        return samples[:most]

    def add(self, room: int, samples: Numbers) -> None:
        """Add samples with this room. Full ones are not kept."""
        if room:
            self._samples[room].append(samples)
            self._nonempty |= 1 << room
