"""Context: the ranks that divide each sample, and the two ways in which attention brings its parts
together.

Of the ranks, groups of neighbours exchange heads for tokens (all-to-all, Jacobs et al. 2023): then
each has some heads of the tokens of its group. The groups form a ring that passes keys and values
round. A group of one rank exchanges nothing and a ring of one passes nothing, so that ring
attention, all-to-all and both nested are one path. Shape legend: B samples, S tokens of this rank,
U ranks that exchange, N query heads, G key/value heads, D width of a query or key
head, V of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megaframe.comm import ALONE, Group, Ring, all_to_all
from megaframe.microbatch import zigzag


@dataclass(frozen=True)
class Context:
    """heads: neighbours that exchange heads for tokens. ring: those with the same place among their
    neighbours."""

    heads: Group = ALONE
    ring: Ring = field(default_factory=Ring)

    @property
    def size(self) -> int:
        """Ranks that divide a sample."""
        return self.heads.size * self.ring.size

    @property
    def index(self) -> int:
        """Which of them this is."""
        return self.ring.index * self.heads.size + self.heads.index

    def places(self, length: int, device: torch.device) -> Tensor:
        """Where in its sample each of this rank's `length` tokens is, int64 [length]."""
        return zigzag(torch.arange(length * self.size, device=device), self.index, self.size, 0)

    def share_heads(
        self, query_BSND: Tensor, key_BSGD: Tensor, value_BSGV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of all neighbours in their order in the sample, of N / U query heads and of
        the G / U, or the one, key/value heads that belong to them."""
        ranks = self.heads.size
        if ranks == 1:
            return query_BSND, key_BSGD, value_BSGV
        copies = max(1, ranks // key_BSGD.shape[2])
        heads = [
            query_BSND,
            key_BSGD.repeat_interleave(copies, 2),
            value_BSGV.repeat_interleave(copies, 2),
        ]
        parts = [head.unflatten(2, (ranks, -1)).flatten(3) for head in heads]
        sizes = [part.shape[3] for part in parts]
        exchanged = _AllToAll.apply(torch.cat(parts, 3).movedim(2, 0), self.heads)
        # Of each rank's two pieces the first ones ascend in the sample and the second ones descend.
        first, second = exchanged.chunk(2, 2)
        ordered = torch.cat((first, second.flip(0))).movedim(0, 1).flatten(1, 2)
        query, key, value = (
            part.unflatten(2, (-1, head.shape[3]))
            for part, head in zip(ordered.split(sizes, 2), heads, strict=True)
        )
        return query, key, value

    def return_heads(self, out_BSND: Tensor) -> Tensor:
        """All heads of this rank's tokens, from some heads of the tokens of all neighbours."""
        ranks = self.heads.size
        if ranks == 1:
            return out_BSND
        first, second = out_BSND.unflatten(1, (2 * ranks, -1)).movedim(1, 0).chunk(2)
        exchanged = _AllToAll.apply(torch.cat((first, second.flip(0)), 2), self.heads)
        return exchanged.movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Part i of [U, ...] goes to rank i; backward brings the gradients back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_to_all(x, group).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_to_all(gradients[0], ctx.group).wait(), None
