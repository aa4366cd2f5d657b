"""ALiBi (Press et al. 2022): scores fall with the distance of a key, in each head with a slope of
its own.

Subtracting slope * (query's place - key's place) from scores is the same as adding slope * (key's
place), as a softmax does not change with what all keys of a query have in common. That is a product
of two more dims of queries and keys, so whatever computes attention computes ALiBi, on any rank.
Falcon's code rounds that product to bfloat16, so that it is no product any more; there the key of
each head has it, in one more dim.

Shape legend: B samples, S positions, N query heads, G key heads, D width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.architecture.attention import AttentionDescription, compute_alibi_slopes
from megaframe.distributed.collectives import Group

_DIGIT = 256
"""A place is two digits of this base, each of which bf16 has exactly: 65,536 places."""


class Alibi:
    """The slopes of this tensor rank's heads."""

    def __init__(self, description: AttentionDescription, tensor: Group) -> None:
        """Compute them.

        Args:
            description: Of attention with ALiBi.
            tensor: The tensor ranks.
        """
        assert description.alibi is not None
        heads, own = description.heads, description.heads // tensor.size
        slopes = compute_alibi_slopes(heads, description.alibi)[own * tensor.index :][:own]
        self._factors_N = torch.tensor(slopes, dtype=torch.float64)
        self._rounds = description.alibi_form == "falcon"
        if not self._rounds:  # scores are multiplied afterwards
            self._factors_N /= description.score_scale

    def __call__(
        self, query_BSND: Tensor, key_BSGD: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys with one or two more dims.

        Args:
            query_BSND: The queries of this rank.
            key_BSGD: Its keys.
            positions: Place of each token, int64 [S] or [B, S].
        """
        if self._factors_N.device != query_BSND.device:
            self._factors_N = self._factors_N.to(query_BSND.device)
        if self._rounds:
            biases = positions.bfloat16()[..., None] * self._factors_N.bfloat16()
            biases_BSN1 = biases.to(key_BSGD.dtype)[..., None].expand(*key_BSGD.shape[:-1], 1)
            ones = query_BSND.new_ones(()).expand(*query_BSND.shape[:-1], 1)
            return torch.cat((query_BSND, ones), -1), torch.cat((key_BSGD, biases_BSN1), -1)
        low = positions % _DIGIT
        places = torch.stack((positions - low, low), -1).to(key_BSGD.dtype)
        factors = self._factors_N.to(query_BSND.dtype)[:, None]
        return (
            torch.cat((query_BSND, factors.expand(*query_BSND.shape[:-1], 2)), -1),
            torch.cat((key_BSGD, places.unsqueeze(-2).expand(*key_BSGD.shape[:-1], 2)), -1),
        )
