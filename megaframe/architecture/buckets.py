"""Buckets: how many blocks of a stage are reduced, updated and gathered together, and why.

A collective over p ranks takes L seconds whatever its size (a ring: (p - 1) alpha), and all bytes
of a rank take T seconds without that. In n equal buckets their exchange takes n L + T, of which the
last bucket, L + T / n, cannot be hidden, because nothing is computed beside it. The more buckets,
the shorter the last one; so there are as many as add a tenth to the transfer, n = T / (10 L). Where
T is less than 100 L, that would be so few that the last bucket is most of it; the sum of both costs
is then least for n = sqrt(T / L), when latencies add 1 / n to the transfer, and the last bucket is
1 / n of it. Megatron-LM's rule, max(40M, 1M p) elements (`distributed_data_parallel.py`), also
grows with p; PyTorch's DDP has 25 MiB whatever p is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Number = Any
"""A float, or a numpy array of them."""
SUMMED_AT_ONCE = 1 << 22
"""Elements of a gradient that are summed at once over the ranks of a data rank where its noise is
measured (`metrics.gradient_noise_every`), which takes memory beside the gradient."""
LATENCY_SHARE = 0.1
"""What latencies may add to a transfer for the sake of a shorter last bucket, as its share."""


def compute_bucket_count(transfer: Number, latency: Number) -> Number:
    """Return the number n of buckets for these seconds: T, of all bytes, and L, of each bucket.

    It may be below 1.
    """
    ratio = transfer / np.maximum(latency, 1e-12)
    return np.maximum(LATENCY_SHARE * ratio, np.sqrt(ratio))


@dataclass(frozen=True)
class BucketBlocks:
    """Blocks `start` to `stop` of a stage, whose matrices are in common buckets.

    Attributes:
        halves: Whether it is one block, of which the matrices of the second half are in buckets of
            their own.
    """

    start: int
    stop: int
    halves: bool


def group_blocks_into_buckets(sizes: Sequence[tuple[int, int]], least: int) -> list[BucketBlocks]:
    """Return which consecutive blocks of a stage share buckets, in order.

    From the last block on, as backward passes go, blocks are put together until they have at least
    `least` elements. A block of which one half has as many is not put together at all. What is left
    over are the first blocks, whose gradients are reduced last and beside nothing: the fewer the
    better.

    Args:
        sizes: elements of each block's matrices: those of its second half, and the others.
        least: `parallel.bucket_size`.
    """
    groups: list[BucketBlocks] = []
    stop, total = len(sizes), 0
    for start in reversed(range(len(sizes))):
        total += sum(sizes[start])
        has_both = min(sizes[start]) > 0  # a block with one half needs no other bucket
        halves = has_both and stop - start == 1 and max(sizes[start]) >= least
        if total >= least or halves or start == 0:
            groups.append(BucketBlocks(start, stop, halves))
            stop, total = start, 0
    return groups[::-1]
