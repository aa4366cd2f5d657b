"""Dropout whose masks are a function of (seed, step, place, token, channel) and nothing else.

No random state is drawn from, so no layout, microbatch size, order of execution or recompute can
change a mask. The random bits are a hash of a counter, as in counter-based generators (Salmon et
al. 2011); the hash is the 64-bit finalizer of MurmurHash3. Backward makes its mask anew: a step
keeps none.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from megaframe.device import brought

_BITS = 31


class Keys:
    """What the masks of the step under way are keyed by, a number for each place in the model. Each
    lies on the device and stays where it is: work that was recorded in one step draws the masks of
    whatever step has begun."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[str, Tensor] = {}
        self.begin(0)

    def begin(self, step: int) -> None:
        """From here on those of this optimizer step."""
        self._key = _hash(f"{self._seed}/{step}")
        if self._numbers:
            here = [*self._numbers.values()]
            made = torch.tensor([self._made(place) for place in self._numbers])
            torch._foreach_copy_(here, [*brought(made, here[0].device).unbind()])

    def of(self, place: str, device: torch.device) -> Tensor:
        """That of a place in the model, an int64 scalar."""
        if place not in self._numbers:
            number = self._made(place)
            self._numbers[place] = torch.full((), number, dtype=torch.int64, device=device)
        return self._numbers[place]

    def _made(self, place: str) -> int:
        return _hash(f"{self._key}/{place}")


class Dropout:
    """The masks of one microbatch. token_T: the number of each row's token in the whole run."""

    def __init__(self, rate: float, keys: Keys, token_T: Tensor) -> None:
        self.rate, self._keys = rate, keys
        self._token_T1 = token_T[:, None]

    def __call__(self, x_TC: Tensor, place: str) -> Tensor:
        """x with elements set to 0 with probability `rate`, the others scaled up. `place` names
        where in the model this is."""
        return _Drop.apply(x_TC, self, place) if self.rate else x_TC

    def spread(self, like_TC: Tensor, place: str, width: float) -> Tensor:
        """Factors from 1 - width to 1 + width for the elements of a tensor such as `like`."""
        uniform = self._bits(like_TC, place).to(like_TC.dtype) / (1 << _BITS)
        return 1.0 + width * (2.0 * uniform - 1.0)

    def factors(self, like_TC: Tensor, place: str) -> Tensor:
        """What the elements of a tensor such as `like` are multiplied by."""
        keep = self._bits(like_TC, place) >= int(self.rate * (1 << _BITS))
        return keep.to(like_TC.dtype) / (1.0 - self.rate)

    def _bits(self, like_TC: Tensor, place: str) -> Tensor:
        channel = torch.arange(like_TC.shape[-1], device=like_TC.device)
        token = _mix(self._token_T1 ^ self._keys.of(place, like_TC.device))
        return _mix(token + channel) & ((1 << _BITS) - 1)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, dropout: Dropout, place: str) -> Tensor:
        ctx.dropout, ctx.place = dropout, place
        return x_TC * dropout.factors(x_TC, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.dropout.factors(gradients[0], ctx.place), None, None


def _hash(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    for constant in (-49064778989728563, -4265267296055464877):
        x = (x ^ _shift(x)) * constant
    return x ^ _shift(x)


def _shift(x: Tensor) -> Tensor:
    """Logical right shift by 33 of a signed integer."""
    return (x >> 33) & ((1 << 31) - 1)
