"""ALiBi (Press et al. 2022): scores fall with the distance of a key, in each head with a slope of
its own.

Subtracting slope * (query's place - key's place) from scores is the same as adding slope * (key's
place), as a softmax does not change with what all keys of a query have in common. That is a product
of two more dims of queries and keys, so whatever computes attention computes ALiBi, on any rank.

Shape legend: B samples, S positions, N query heads, G key heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.architecture.attention import compute_alibi_slopes
from megaframe.distributed.collectives import Group

_DIGIT = 256
"""A place is two digits of this base, each of which bf16 has exactly: 65,536 places."""


class Alibi:
    """The slopes of this tensor rank's heads."""

    def __init__(self, heads: int, largest: float, scale: float, tensor: Group) -> None:
        """Compute them.

        Args:
            heads: Query heads of all tensor ranks.
            largest: Negative binary logarithm of the smallest slope.
            scale: Factor of the scores, by which slopes are divided.
            tensor: The tensor ranks.
        """
        own = heads // tensor.size
        slopes = compute_alibi_slopes(heads, largest)[own * tensor.index :][:own]
        self._factors_N = torch.tensor(slopes, dtype=torch.float64) / scale

    def __call__(
        self, query_BSND: Tensor, key_BSGD: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys with two more dims.

        Args:
            query_BSND: The queries of this rank.
            key_BSGD: Its keys.
            positions: Place of each token, int64 [S] or [B, S].
        """
        if self._factors_N.device != query_BSND.device:
            self._factors_N = self._factors_N.to(query_BSND.device)
        low = positions % _DIGIT
        places = torch.stack((positions - low, low), -1).to(key_BSGD.dtype)
        factors = self._factors_N.to(query_BSND.dtype)[:, None]
        return (
            torch.cat((query_BSND, factors.expand(*query_BSND.shape[:-1], 2)), -1),
            torch.cat((key_BSGD, places.unsqueeze(-2).expand(*key_BSGD.shape[:-1], 2)), -1),
        )
