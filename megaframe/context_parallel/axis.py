"""Context parallelism: the ranks that divide each sample, the two ways in which attention combines
their parts, and a third one for layers that pass a state on.

Groups of neighbouring ranks exchange heads for tokens (all-to-all, Jacobs et al. 2023), after which
each rank has some of the heads and all tokens of its group. The groups form a ring that passes keys
and values around. A group of one rank exchanges nothing and a ring of one passes nothing, so ring
attention, all-to-all and the nesting of both are one code path.

Each rank has two pieces of a sample, not next to each other (`microbatch.divide_zigzag`). A layer
that passes a state from token to token gathers what each piece does to it (`gather_pieces`,
`states.py`), whatever attention does with the same ranks.

Shape legend: B samples, S tokens of this rank, U ranks that exchange heads, N query heads, G
key/value heads, D width of a query or key head, V width of a value head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaframe.data.microbatch import divide_zigzag
from megaframe.distributed.collectives import ALONE, Group, Ring, all_gather
from megaframe.distributed.differentiable import exchange_differentiably, gather_differentiably


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that divide samples.

    Attributes:
        heads: The neighbours that exchange heads for tokens.
        ring: The ranks at the same index within their groups of neighbours.
    """

    heads: Group = ALONE
    ring: Ring = field(default_factory=Ring)

    @property
    def size(self) -> int:
        """Number of ranks that divide a sample."""
        return self.heads.size * self.ring.size

    @property
    def index(self) -> int:
        """Index of this rank among them."""
        return self.ring.index * self.heads.size + self.heads.index

    @property
    def own_pieces(self) -> tuple[int, ...]:
        """Numbers in the sample of this rank's pieces, which its tokens are in order: two of 2 *
        `size`, or the only one of whole samples."""
        return (0,) if self.size == 1 else (self.index, 2 * self.size - 1 - self.index)

    def gather_pieces(self, x_BP: Tensor) -> Tensor:
        """Gather from all ranks what belongs to each piece of a sample.

        Args:
            x_BP: Something of each of this rank's pieces, [B, pieces of this rank, ...].

        Returns:
            That of all pieces in sample order, [B, pieces of a sample, ...]. Gradients from all
            ranks are summed.
        """
        if self.size == 1:
            return x_BP
        # Neighbours first, then their groups, which is the order of ranks.
        x_RPB = x_BP.movedim(1, 0)[None]
        for group in (self.heads, self.ring.group):
            x_RPB = gather_differentiably(x_RPB, group)
        # By rank, first pieces ascend in the sample and second pieces descend.
        return torch.cat((x_RPB[:, 0], x_RPB[:, 1].flip(0))).movedim(0, 1)

    def compute_positions(self, length: int, device: torch.device) -> Tensor:
        """Return where in its sample each of this rank's `length` tokens is, int64 [length]."""
        return divide_zigzag(
            torch.arange(length * self.size, device=device), self.index, self.size, 0
        )

    def scatter_heads(
        self, query_BSND: Tensor, key_BSGD: Tensor, value_BSGV: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange heads for tokens.

        Args:
            query_BSND: Queries of this rank's tokens.
            key_BSGD: Their keys.
            value_BSGV: Their values, [B, S, G, V].

        Returns:
            Queries, keys and values of the U * S tokens of all neighbours, in sample order, for N /
            U query heads and for the key/value heads that these use: G / U of them, or one if there
            are fewer heads than ranks.
        """
        ranks = self.heads.size
        if ranks == 1:
            return query_BSND, key_BSGD, value_BSGV
        # With fewer key/value heads than ranks, several ranks get a copy of the same head.
        copies = max(1, ranks // key_BSGD.shape[2])
        heads = [
            query_BSND,
            key_BSGD.repeat_interleave(copies, 2),
            value_BSGV.repeat_interleave(copies, 2),
        ]
        # [B, S, U, heads of one rank * width] each, so that all three travel in one exchange.
        parts = [head.unflatten(2, (ranks, -1)).flatten(3) for head in heads]
        sizes = [part.shape[3] for part in parts]
        # To [U, B, S, ...]: by receiving rank before, by sending rank after.
        exchanged = exchange_differentiably(torch.cat(parts, 3).movedim(2, 0), self.heads)
        # By rank, first pieces ascend in the sample and second pieces descend.
        first, second = exchanged.chunk(2, 2)
        # [2U, B, S / 2, ...], piece after piece, and then [B, U * S, ...].
        ordered = torch.cat((first, second.flip(0))).movedim(0, 1).flatten(1, 2)
        query, key, value = (
            part.unflatten(2, (-1, head.shape[3]))
            for part, head in zip(ordered.split(sizes, 2), heads, strict=True)
        )
        return query, key, value

    def gather_neighbours(self, x_BS: Tensor) -> Tensor:
        """Return what belongs to each of the U * S tokens of all neighbours, in sample order.

        Args:
            x_BS: That of this rank's tokens, [B, S, ...]; it has no gradient.
        """
        if self.heads.size == 1:
            return x_BS
        first, second = all_gather(x_BS[None], self.heads).wait().chunk(2, 2)
        # The order of `scatter_heads`.
        return torch.cat((first, second.flip(0))).movedim(0, 1).flatten(1, 2)

    def gather_heads(self, out_BSND: Tensor) -> Tensor:
        """Undo the exchange of heads.

        Args:
            out_BSND: Outputs of this rank's N / U heads for the U * S tokens of all neighbours.

        Returns:
            Outputs of all heads for this rank's tokens, [B, S, N, V].
        """
        ranks = self.heads.size
        if ranks == 1:
            return out_BSND
        # The inverse of the order above: piece u and piece 2U - 1 - u go back to rank u.
        first, second = out_BSND.unflatten(1, (2 * ranks, -1)).movedim(1, 0).chunk(2)
        exchanged = exchange_differentiably(torch.cat((first, second.flip(0)), 2), self.heads)
        return exchanged.movedim(0, 2).flatten(2, 3)
