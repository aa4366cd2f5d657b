"""Codecs: turn a flat span of gradients into a message of fewer bytes, and back.

A message is uint8, and its length does not depend on the values in the span, so it can travel
through any collective. What is not finite stays not finite, because that is how a bad gradient is
found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

DEFAULT_SHARE = 0.01
"""Of the elements, that topk, randomk and threshold send by default."""
_MIXER = -0x61C8864680B583EB
"""An odd number that spreads bits (2^64 / golden ratio, as a signed number)."""


class GradientCodec(Protocol):
    """encode: turns [N] of any floating type into a message, uint8 [M]. decode: turns it back into
    [length] of type `dtype`. Both depend on nothing but their arguments, so all ranks agree."""

    def encode(self, x_N: Tensor) -> Tensor: ...

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True)
class PlainCodec:
    """Sends elements as they are."""

    def encode(self, x_N: Tensor) -> Tensor:
        return _view_bytes(x_N)

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return message.view(dtype)


@dataclass(frozen=True)
class Bf16Codec:
    """Sends bf16: 2 bytes per element."""

    def encode(self, x_N: Tensor) -> Tensor:
        return x_N.to(torch.bfloat16).view(torch.uint8)

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return message.view(torch.bfloat16).to(dtype)


@dataclass(frozen=True)
class ScaledCodec:
    """Divides each block by a scale, sent in fp32, that maps its largest magnitude to `levels`, and
    sends what a subclass packs of the quotients."""

    levels: ClassVar[int]
    block: ClassVar[int]
    """Elements that share a scale."""

    def pack(self, x_BK: Tensor) -> Tensor:
        """Turn finite or NaN quotients from -levels to levels into bytes, uint8 [...]."""
        raise NotImplementedError

    def unpack(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """Turn bytes back into quotients, [at least as many]."""
        raise NotImplementedError

    def count(self, length: int) -> int:
        """Return the bytes of `length` quotients."""
        raise NotImplementedError

    def encode(self, x_N: Tensor) -> Tensor:
        length = len(x_N)
        x_BK = F.pad(x_N, (0, -length % self.block)).view(-1, self.block)
        # The maximum is NaN or infinite if an element is, and so is every decoded element of the
        # block.
        scale_B1 = (x_BK.abs().amax(1, keepdim=True) / self.levels).float()
        # Divides by the scale as sent, in fp32, so that sender and receivers agree on each step.
        step_B1 = torch.where(scale_B1 == 0, 1.0, scale_B1).to(x_BK.dtype)
        packed = self.pack(x_BK / step_B1).view(-1)[: self.count(length)]
        return torch.cat([scale_B1.view(-1).view(torch.uint8), packed])

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        scales = 4 * math.ceil(length / self.block)
        # A clone, because a view as fp32 needs an aligned start, which a slice of bytes may not
        # have.
        scale_B1 = message[:scales].clone().view(torch.float32)[:, None]
        steps = self.unpack(message[scales:].clone(), dtype)[:length]
        x_BK = F.pad(steps, (0, -length % self.block)).view(-1, self.block)
        return (x_BK * scale_B1.to(dtype)).view(-1)[:length]


class Fp16Codec(ScaledCodec):
    """Sends fp16 of the quotients, which without a scale would overflow and vanish: 2 bytes per
    element, to 11 bits."""

    levels, block = 1, 1024

    def pack(self, x_BK: Tensor) -> Tensor:
        return _view_bytes(x_BK.half())

    def unpack(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return message.view(torch.float16).to(dtype)

    def count(self, length: int) -> int:
        return 2 * length


class Int8Codec(ScaledCodec):
    """Rounds to the nearest of 255 even steps: 1 byte per element. Scales are 0.4% of the bytes."""

    levels, block = 127, 1024

    def pack(self, x_BK: Tensor) -> Tensor:
        return _view_bytes(_round_to_int8(x_BK, self.levels))

    def unpack(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        return message.view(torch.int8).to(dtype)

    def count(self, length: int) -> int:
        return length


class Int4Codec(ScaledCodec):
    """Rounds to the nearest of 15 even steps: two elements per byte. Blocks are shorter, because a
    step is as wide as a seventh of the largest; scales are 6% of the bytes."""

    levels, block = 7, 128

    def pack(self, x_BK: Tensor) -> Tensor:
        steps = (_round_to_int8(x_BK, self.levels) + self.levels).view(torch.uint8)
        return steps[:, ::2] | steps[:, 1::2] << 4

    def unpack(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        steps = torch.stack([message & 15, message >> 4], 1).view(-1)
        return steps.to(dtype) - self.levels

    def count(self, length: int) -> int:
        return math.ceil(length / 2)


@dataclass(frozen=True)
class SparseCodec:
    """Sends some of the elements: `share` of all, and at least one. The others count as 0."""

    share: float

    def count(self, length: int) -> int:
        """Return how many of `length` elements are sent."""
        return min(length, max(1, math.ceil(self.share * length)))


class TopKCodec(SparseCodec):
    """Sends the elements of largest magnitude. Each takes 4 bytes for its place and the bytes of
    its type."""

    def encode(self, x_N: Tensor) -> Tensor:
        place_K = x_N.abs().topk(self.count(len(x_N)), sorted=False).indices
        return _join_places(x_N[place_K], place_K)

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return _place_elements(message, self.count(length), length, dtype)


class ThresholdCodec(SparseCodec):
    """Sends elements from a magnitude on that as many of normally distributed numbers exceed as are
    sent at most, in the order of their places. It takes one pass where topk sorts."""

    def encode(self, x_N: Tensor) -> Tensor:
        count, magnitude_N = self.count(len(x_N)), x_N.abs()
        least = math.sqrt(2) * _invert_erf(1 - count / len(x_N))
        largest = magnitude_N.amax()
        # Relative to the largest, because squares may overflow; not finite if that is not.
        smallest = torch.finfo(x_N.dtype).tiny
        rms = largest * (magnitude_N / largest.clamp_min(smallest)).square().mean().sqrt()
        # The largest is always sent: else numbers of one magnitude would wait for ever.
        bound = torch.minimum(least * rms, largest)
        # Negated, so that what is not a number counts as large.
        number_N = (~(magnitude_N < bound)).cumsum(0)
        # The place of the first, second, ... large element; `length` where there is none.
        order_K = torch.arange(1, count + 1, device=x_N.device)
        place_K = torch.searchsorted(number_N, order_K)
        value_K = F.pad(x_N, (0, 1))[place_K]
        return _join_places(_mark_nonfinite(value_K, rms), place_K)

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        return _place_elements(message, self.count(length), length, dtype)


class RandomKCodec(SparseCodec):
    """Sends one element of each of `count` equal pieces, at places that follow from a seed: each
    takes the bytes of its type, and all together 8 for the seed, a checksum of the elements."""

    def encode(self, x_N: Tensor) -> Tensor:
        # From the elements alone, so that a resumed run draws the same places.
        seed = _view_bytes(x_N).view(torch.int32).sum(dtype=torch.int64).view(1)
        value_K = x_N[choose_places(seed, len(x_N), self.count(len(x_N)))]
        value_K = _mark_nonfinite(value_K, x_N.abs().amax())
        return torch.cat([seed.view(torch.uint8), _view_bytes(value_K)])

    def decode(self, message: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        place_K = choose_places(message[:8].clone().view(torch.int64), length, self.count(length))
        zeros = torch.zeros(length, dtype=dtype, device=message.device)
        return zeros.index_copy_(0, place_K, message[8:].clone().view(dtype))


def choose_places(seed: Tensor, length: int, count: int) -> Tensor:
    """Return one place in each of `count` pieces of `length` elements, int64 [count].

    Args:
        seed: int64 [1]; the host need not know it.
        length: Number of elements.
        count: Number of pieces.
    """
    order = torch.arange(count + 1, device=seed.device)
    edges = order * length // count
    hashed = seed + order[:count] * _MIXER
    for _ in range(2):
        hashed = (hashed ^ (hashed >> 29)) * _MIXER
    size = edges[1:] - edges[:-1]
    return edges[:-1] + (hashed >> 33 & 0x3FFFFFFF) % size


def _invert_erf(value: float) -> float:
    return float(torch.erfinv(torch.tensor(value, dtype=torch.float64)))


def _round_to_int8(x: Tensor, levels: int) -> Tensor:
    # The cast of NaN to int8 is undefined; the scale alone carries what is not finite.
    return x.round().clamp_(-levels, levels).nan_to_num_().to(torch.int8)


def _mark_nonfinite(value_K: Tensor, largest: Tensor) -> Tensor:
    """Return what is sent, but not finite if elements that are not sent are not finite either."""
    return value_K + 0.0 * largest


def _join_places(value_K: Tensor, place_K: Tensor) -> Tensor:
    return torch.cat([_view_bytes(value_K), _view_bytes(place_K.to(torch.int32))])


def _place_elements(message: Tensor, count: int, length: int, dtype: torch.dtype) -> Tensor:
    """Return zeros [length] with the elements of a message at their places; `length` is no
    place."""
    split = count * dtype.itemsize
    # Copies, because a view as a wider type needs an aligned start.
    value_K = message[:split].clone().view(dtype)
    place_K = message[split:].clone().view(torch.int32)
    x = torch.zeros(length + 1, dtype=dtype, device=message.device)
    return x.index_copy_(0, place_K.long(), value_K)[:length]


def _view_bytes(flat: Tensor) -> Tensor:
    return flat.contiguous().view(torch.uint8)


def make_codec(name: str, share: float) -> GradientCodec:
    """Return the codec of a config's name.

    Args:
        name: A value of `sync.compress`, or one of `parallel.compress` that is a codec.
        share: Of the elements, for those that send some.
    """
    codecs: dict[str, GradientCodec] = {
        "bf16": Bf16Codec(),
        "fp16": Fp16Codec(),
        "int8": Int8Codec(),
        "int4": Int4Codec(),
        "topk": TopKCodec(share),
        "randomk": RandomKCodec(share),
        "threshold": ThresholdCodec(share),
    }
    return codecs[name]
