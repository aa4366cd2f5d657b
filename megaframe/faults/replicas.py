"""Replicas: do the ranks that should hold the same weights hold the same bytes?

Updates are computed by every replica on its own from the same sums, so replicas that differ in one
bit are a fault of a device or of its memory, which no loss would show for long. Most replicas are
taken to be right. Which of two is wrong cannot be told: what is wrong on one has been in the sums
of both since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.comm import Group, all_gather, all_reduce
from megaframe.mesh import Mesh
from megaframe.optim.bucket import Bucket

_WORDS = 1 << 16
"""64-bit words that are hashed at a time; they and their factors stay in cache."""


def hashed(flat: Tensor) -> int:
    """A 64-bit hash of the bytes of a flat tensor whose size is a multiple of 8 bytes: any one word
    that changes changes it, for it is a sum of words times odd numbers (multilinear hashing,
    modulo 2^64). Computed where the tensor is."""
    words = flat.detach().view(torch.int64)
    factors = _factors(words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(_WORDS)):
        # The place of a part counts as well: its sum is turned by an odd number of its own.
        total += (part * factors[: len(part)]).sum() * (2 * number + 1)
    return int(total)


def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2**31 - 1)
    drawn = torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator)
    return (2 * drawn + 1).to(device)


@dataclass(frozen=True)
class Finding:
    """Of one comparison. ranks: those that differ from most of their replicas, or all that might
    be wrong. sure: whether it is known to be them."""

    ranks: tuple[int, ...]
    sure: bool


class Replicas:
    """Compares what this rank holds with its replicas. All ranks call it together."""

    def __init__(self, mesh: Mesh, buckets: Sequence[Bucket]) -> None:
        self._mesh, self._buckets = mesh, buckets

    def compare(self) -> Finding | None:
        """Which ranks hold something else than their replicas; None where none does."""
        odd, sure = False, True
        for flat, group in self._held():
            mine = hashed(flat)
            theirs = all_gather(self._number(mine), group).wait().tolist()
            if len(set(theirs)) > 1:
                (usual, most), *rest = Counter(theirs).most_common()
                clear = most > rest[0][1]
                odd, sure = odd or not clear or mine != usual, sure and clear
        found = self._ranks(odd)
        unsure = int(all_reduce(self._number(int(not sure)), self._mesh.world, "max").wait())
        return Finding(found, not unsure) if found else None

    def _held(self) -> Iterator[tuple[Tensor, Group]]:
        """What this rank holds that others hold too, wherever it lies, and who does."""
        for bucket in self._buckets:
            sharing = bucket.sharing
            groups = [sharing.replicas, *([sharing.shard] if sharing.stage == 0 else [])]
            bucket.settle()
            for group in groups:
                if group.size > 1:
                    yield bucket.weights, group

    def _ranks(self, here: bool) -> tuple[int, ...]:
        """The ranks for which it is so."""
        flags = all_gather(self._number(int(here)), self._mesh.world).wait().tolist()
        return tuple(rank for rank, flag in zip(self._mesh.world.ranks, flags, strict=True) if flag)

    def _number(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self._mesh.device)
