"""Codecs: turn a flat span of gradients into a message of fewer bytes, and back.

A message is uint8, and its length does not depend on the values in the span, so it can travel
through any collective. What is not finite stays not finite, because that is how a bad gradient is
found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 1024
"""Elements that share a scale; scales are 0.4% of the bytes of int8."""


class GradientCodec(Protocol):
    """encode: turns [N] of any floating type into a message, uint8 [M]. decode: turns it back into
    [length] of type `dtype`. Both depend on nothing but their arguments, so all ranks agree."""

    def encode(self, x_N: Tensor) -> Tensor: ...

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class Bf16Codec:
    """Sends bf16: 2 bytes per element."""

    def encode(self, x_N: Tensor) -> Tensor:
        return x_N.to(torch.bfloat16).view(torch.uint8)

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return message.view(torch.bfloat16).to(dtype)


@dataclass(frozen=True)
class Int8Codec:
    """Rounds to the nearest of 255 even steps from -m to m, where m is the largest magnitude of a
    block. Takes 1 byte per element, and an fp32 scale, m / 127, per block."""

    def encode(self, x_N: Tensor) -> Tensor:
        length = len(x_N)
        x_BK = F.pad(x_N, (0, -length % _BLOCK)).view(-1, _BLOCK)
        # The maximum is NaN or infinite if an element is, and so is every decoded element of the
        # block.
        scale_B1 = (x_BK.abs().amax(1, keepdim=True) / 127).float()
        # Divides by the scale as sent, in fp32, so that sender and receivers agree on each step.
        step_B1 = torch.where(scale_B1 == 0, 1.0, scale_B1).to(x_BK.dtype)
        # The cast of NaN to int8 is undefined; the scale alone carries what is not finite.
        steps = (x_BK / step_B1).round_().clamp_(-127, 127).nan_to_num_().to(torch.int8)
        return torch.cat(
            [scale_B1.view(-1).view(torch.uint8), _view_bytes(steps.view(-1)[:length])]
        )

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        scales = 4 * math.ceil(length / _BLOCK)
        # A clone, because a view as fp32 needs an aligned start, which a slice of bytes may not
        # have.
        scale_B1 = message[:scales].clone().view(torch.float32)[:, None]
        steps = F.pad(message[scales:].view(torch.int8), (0, -length % _BLOCK)).view(-1, _BLOCK)
        return (steps.to(dtype) * scale_B1.to(dtype)).view(-1)[:length]


@dataclass(frozen=True)
class TopKCodec:
    """Sends the elements of largest magnitude: `share` of all, and at least one. Each takes 4 bytes
    for its place and the bytes of its type; the others count as 0."""

    share: float

    def count(self, length: int) -> int:
        """Return how many of `length` elements are sent."""
        return min(length, max(1, math.ceil(self.share * length)))

    def encode(self, x_N: Tensor) -> Tensor:
        place_K = x_N.abs().topk(self.count(len(x_N)), sorted=False).indices
        return torch.cat([_view_bytes(x_N[place_K]), _view_bytes(place_K.to(torch.int32))])

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        split = self.count(length) * dtype.itemsize
        # Copies for the same reason: a view as a wider type needs an aligned start.
        value_K = message[:split].clone().view(dtype)
        place_K = message[split:].clone().view(torch.int32)
        return torch.zeros(length, dtype=dtype, device=message.device).index_copy_(
            0, place_K.long(), value_K
        )


def _view_bytes(flat: Tensor) -> Tensor:
    return flat.contiguous().view(torch.uint8)
