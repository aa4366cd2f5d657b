"""Dropout with masks that are a function of (seed, step, place, token, channel) and nothing else.

There is no random state, so no layout, microbatch size, order of execution or recompute can change
a mask. The random bits are a hash of a counter, as in counter-based generators (Salmon et al.
2011).
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from megaframe.distributed.device import copy_to_device
from megaframe.tensor_parallel.axis import RowPartition

_BITS = 31


class DropoutKeys:
    """The keys of the masks of the current step: one number for each place in the model. Each key
    is a tensor on the device that is overwritten in place, so a recorded CUDA graph draws the masks
    of whichever step has begun."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers: dict[str, Tensor] = {}
        self.begin(0)

    def begin(self, step: int) -> None:
        """Set all keys to those of optimizer step `step`."""
        self._key = _hash(f"{self._seed}/{step}")
        if self._numbers:
            old = [*self._numbers.values()]
            new = torch.tensor([self._compute_key(place) for place in self._numbers])
            # In place: a recorded graph reads these very tensors.
            torch._foreach_copy_(old, [*copy_to_device(new, old[0].device).unbind()])

    def get(self, place: str, device: torch.device) -> Tensor:
        """Return the key of a place in the model, an int64 scalar."""
        if place not in self._numbers:
            number = self._compute_key(place)
            self._numbers[place] = torch.full((), number, dtype=torch.int64, device=device)
        return self._numbers[place]

    def _compute_key(self, place: str) -> int:
        return _hash(f"{self._key}/{place}")


class Dropout:
    """The dropout masks of one microbatch."""

    def __init__(
        self, rate: float, keys: DropoutKeys, token_T: Tensor, first_channel: int = 0
    ) -> None:
        """Prepare the masks.

        Args:
            rate: Probability with which an element becomes 0.
            keys: Of the current step.
            token_T: Number of each row's token in the run, int64 [T].
            first_channel: Number of the first column, if rows are some of the columns.
        """
        self.rate, self._keys, self._first_channel = rate, keys, first_channel
        self._token_T1 = token_T[:, None]

    def __call__(self, x_TC: Tensor, place: str) -> Tensor:
        """Return x with elements set to 0 with probability `rate` and the rest scaled up.

        Args:
            x_TC: Rows of the residual stream, [T, C].
            place: Name of the position in the model, which the mask depends on.
        """
        return _Drop.apply(x_TC, self, place) if self.rate else x_TC

    def draw_jitter(self, like_TC: Tensor, place: str, width: float) -> Tensor:
        """Return random factors between 1 - width and 1 + width.

        Args:
            like_TC: A tensor of the shape, type and device of the factors.
            place: Where in the model they are used; gives the key of the draw.
            width: Largest distance of a factor from 1.
        """
        uniform = self._draw_bits(like_TC, place).to(like_TC.dtype) / (1 << _BITS)
        return 1.0 + width * (2.0 * uniform - 1.0)

    def draw_factors(self, like_TC: Tensor, place: str) -> Tensor:
        """Return the dropout factors, 0 or 1 / (1 - rate), for a tensor of the shape of `like`."""
        # Compared as integers, so the mask does not depend on the type of the activations.
        keep = self._draw_bits(like_TC, place) >= int(self.rate * (1 << _BITS))
        # Scaled up, so that the expected value stays the same.
        return keep.to(like_TC.dtype) / (1.0 - self.rate)

    def _draw_bits(self, like_TC: Tensor, place: str) -> Tensor:
        first, width = self._first_channel, like_TC.shape[-1]
        channel = torch.arange(first, first + width, device=like_TC.device)
        # The first hash is one per row, [T, 1]; the second one per element, [T, C].
        token = _mix(self._token_T1 ^ self._keys.get(place, like_TC.device))
        return _mix(token + channel) & ((1 << _BITS) - 1)


class AdapterDropout:
    """The dropout masks of the inputs of adapters in one microbatch (`InputDropout`)."""

    def __init__(self, rate: float, keys: DropoutKeys, rows: RowPartition, token_T: Tensor) -> None:
        """Prepare the masks.

        Args:
            rate: Probability with which an element becomes 0.
            keys: Of the current step.
            rows: Which rows this tensor rank has.
            token_T: Number of each token in the run, int64 [T].
        """
        self._rate, self._keys, self._rows, self._token_T = rate, keys, rows, token_T

    def __call__(self, x: Tensor, place: str, first: int, *, all_rows: bool) -> Tensor:
        """Return x with elements set to 0 with probability `rate` and the rest scaled up."""
        select = self._rows.pad if all_rows else self._rows.select
        token_T = select(self._token_T)
        return Dropout(self._rate, self._keys, token_T, first)(x, place)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, dropout: Dropout, place: str) -> Tensor:
        ctx.dropout, ctx.place = dropout, place
        return x_TC * dropout.draw_factors(x_TC, place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # The mask is computed again, so none is kept.
        return gradients[0] * ctx.dropout.draw_factors(gradients[0], ctx.place), None, None


def _hash(text: str) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    # The 64-bit finalizer of MurmurHash3. Its constants as signed integers, whose products wrap
    # around as those of unsigned ones do.
    for constant in (-49064778989728563, -4265267296055464877):
        x = (x ^ _shift(x)) * constant
    return x ^ _shift(x)


def _shift(x: Tensor) -> Tensor:
    """Shift a signed integer right by 33 bits, filling with zeros."""
    return (x >> 33) & ((1 << 31) - 1)
