"""Replica check: that ranks that should have the same weights have the same bytes.

Every replica computes its update on its own from the same reduced gradients. So if two replicas
differ in a single bit, a device or its memory is faulty, which the loss would not show for a long
time. The majority is assumed to be right. Of only two replicas it is unknown which one is wrong,
because the wrong one has since contributed to the gradients of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.data_parallel.bucket import Bucket
from megaframe.distributed.collectives import Group, all_gather, all_reduce
from megaframe.distributed.mesh import Mesh

_WORDS = 1 << 16
"""64-bit words hashed at a time; few enough that they and their factors stay in the cache."""


def hash_bytes(flat: Tensor) -> int:
    """Return a 64-bit hash of the bytes of a flat tensor, whose size must be a multiple of 8 bytes.

    The hash is the sum modulo 2^64 of the 64-bit words times odd numbers (multilinear hashing), so
    a change of any single word changes it. It is computed on the tensor's device.
    """
    words = flat.detach().view(torch.int64)
    factors = _draw_factors(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(_WORDS)):
        # Multiply each part's sum by a different odd number, so that the order of parts counts.
        total += (part * factors[: len(part)]).sum() * (2 * number + 1)
    return int(total)


def _draw_factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2**31 - 1)
    drawn = torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator)
    return (2 * drawn + 1).to(device)


@dataclass(frozen=True)
class ReplicaMismatch:
    """The result of a comparison that found a difference.

    Attributes:
        ranks: Those that differ from the majority of their replicas or, without a majority, all
            that may be wrong.
        sure: Whether there was a majority in every case.
    """

    ranks: tuple[int, ...]
    sure: bool


class ReplicaCheck:
    """Compares this rank's weights with their replicas."""

    def __init__(
        self, mesh: Mesh, buckets: Sequence[Bucket], synchronize: Callable[[], None]
    ) -> None:
        """Prepare comparisons.

        Args:
            mesh: This rank's groups.
            buckets: All buckets of this rank.
            synchronize: Returns when the weights of all buckets are where they are stored.
        """
        self._mesh, self._buckets, self._synchronize = mesh, buckets, synchronize

    def compare(self) -> ReplicaMismatch | None:
        """Return which ranks differ from their replicas, or None if none does. Collective."""
        differs, sure = False, True
        self._synchronize()
        for flat, group in self._list_shared_weights():
            own_hash = hash_bytes(flat)
            hashes = all_gather(self._to_tensor(own_hash), group).wait().tolist()
            if len(set(hashes)) > 1:
                (majority, most), *minorities = Counter(hashes).most_common()
                clear = most > minorities[0][1]
                differs = differs or not clear or own_hash != majority
                sure = sure and clear
        ranks = self._gather_ranks_with(differs)
        unsure = int(all_reduce(self._to_tensor(int(not sure)), self._mesh.world, "max").wait())
        return ReplicaMismatch(ranks, not unsure) if ranks else None

    def _list_shared_weights(self) -> Iterator[tuple[Tensor, Group]]:
        """Yield the weights that this rank shares with others, and the group that has the same
        ones."""
        for bucket in self._buckets:
            sharding = bucket.sharding
            groups = [sharding.replicas, *([sharding.shard] if sharding.stage == 0 else [])]
            for group in groups:
                if group.size > 1:
                    yield bucket.stored, group

    def _gather_ranks_with(self, flag: bool) -> tuple[int, ...]:
        """Return the ranks that pass true. Collective."""
        flags = all_gather(self._to_tensor(int(flag)), self._mesh.world).wait().tolist()
        return tuple(
            rank for rank, is_set in zip(self._mesh.world.ranks, flags, strict=True) if is_set
        )

    def _to_tensor(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self._mesh.device)
