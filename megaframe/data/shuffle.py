"""The order in which a source's samples are visited: a keyed permutation, one for each epoch.

Nothing is shuffled and nothing is stored. Sample number k is mapped to an index by a Feistel
network over Z_a x Z_b, with a * b slightly larger than the size, which is applied again until the
result is below the size (cycle walking). So the order needs no memory, any sample can be computed
alone, and the order depends only on the source's key and size: not on ranks, the length of the
training or other sources. Sources that have both in common give their windows in the same order,
which are windows of different files.

All arithmetic is on 64-bit integers modulo 2**64, so it is the same on every platform. (The only
square root chooses a; IEEE 754 rounds it the same way everywhere.)
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Numbers = NDArray[np.int64]

ROUNDS = 10
_STEP = np.uint64(0x9E3779B97F4A7C15)
_ROUND_STEPS = np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None] * _STEP
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


def derive_source_key(seed: int, name: str) -> int:
    """Return the 64-bit key of a source's order. It differs between seeds and between names."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def sample_indices(numbers: Numbers, sizes: Numbers | int, keys: Words | int) -> Numbers:
    """Return the index of the sample that a source gives as its sample number `numbers`.

    Each epoch, a run of `sizes` consecutive numbers, visits every index once, in a different order.

    Args:
        numbers: int64[N], counted from 0 over all epochs of a source.
        sizes: Samples of the source, 1 to 2**40; one value for all, or int64[N].
        keys: `derive_source_key` of the source; one value for all, or uint64[N].

    Returns:
        int64[N], indices in [0, size).
    """
    sizes = np.atleast_1d(np.asarray(sizes, np.int64))
    epochs, numbers = np.divmod(np.atleast_1d(np.asarray(numbers, np.int64)), sizes)
    if epochs.size and epochs.min() == epochs.max():
        epochs = epochs[:1]
    keys = np.atleast_1d(np.asarray(keys, np.uint64))
    return permute(numbers, sizes, _mix(keys + (epochs.astype(np.uint64) + np.uint64(1)) * _STEP))


def permute(numbers: Numbers, sizes: Numbers, keys: Words) -> Numbers:
    """Apply a keyed bijection of [0, size) onto itself to each element.

    This is a modular Feistel network with cycle walking: Black and Rogaway, "Ciphers with arbitrary
    finite domains" (2002). Fewer than one value in sqrt(size) needs to be walked.

    Args:
        numbers: int64[N] in [0, size).
        sizes: int64[N] or [1].
        keys: uint64[N] or [1].

    Returns:
        int64[N].
    """
    bounds = sizes.astype(np.uint64)
    lefts = np.ceil(np.sqrt(bounds.astype(np.float64))).astype(np.uint64)
    rights = (bounds + lefts - np.uint64(1)) // lefts
    round_keys = _mix(keys + _ROUND_STEPS)
    values = _permute_feistel(numbers.astype(np.uint64), lefts, rights, round_keys)
    outside = np.flatnonzero(values >= bounds)
    while outside.size:
        values[outside] = _permute_feistel(
            values[outside],
            _list_rows(lefts, outside),
            _list_rows(rights, outside),
            round_keys if keys.size == 1 else round_keys[:, outside],
        )
        outside = outside[values[outside] >= _list_rows(bounds, outside)]
    return values.astype(np.int64)


def _permute_feistel(values: Words, lefts: Words, rights: Words, round_keys: Words) -> Words:
    """Permute [0, lefts * rights): in turn, add a keyed function of one half to the other half."""
    right, left = np.divmod(values, lefts)
    for number, key in enumerate(round_keys):
        if number % 2 == 0:
            left = (left + _draw_below(right ^ key, lefts)) % lefts
        else:
            right = (right + _draw_below(left ^ key, rights)) % rights
    return right * lefts + left


def _draw_below(words: Words, bounds: Words) -> Words:
    """Hash `words` to numbers in [0, bounds), for bounds under 2**32 (Lemire's multiplication)."""
    words = words * _MULTIPLY_1
    words = (words ^ (words >> _HALF)) * _MULTIPLY_2
    return ((words >> _HALF) * bounds) >> _HALF


def _mix(words: Words) -> Words:
    """Apply the finalizer of SplitMix64, a bijection of 64-bit words. A change of one input bit
    changes half of the output bits on average."""
    words = (words ^ (words >> np.uint64(30))) * _MULTIPLY_1
    words = (words ^ (words >> np.uint64(27))) * _MULTIPLY_2
    return words ^ (words >> np.uint64(31))


def _list_rows(values: Words, rows: NDArray[np.intp]) -> Words:
    """Select rows of an array that has a row for each number, or a single row for all."""
    return values if values.size == 1 else values[rows]
