"""Rotary positions (Su et al. 2021), with methods for longer contexts: positions that are divided
(Chen et al. 2023), that of Llama 3, YaRN, and LongRoPE.

The two halves of a head are rotated against each other (dim i with dim i + D/2), as in the Hugging
Face Llama weights. Shape legend: B samples, S positions, N heads, D rotated width of a head.
"""

from __future__ import annotations

import math
from copy import copy
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.rotary import RotaryDescription, compute_yarn_mscale
from megaframe.config import RotaryScalingConfig
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.tensor_parallel.axis import RowPartition


def compute_frequencies(description: RotaryDescription, length: int = 0) -> tuple[Tensor, float]:
    """Return the angle per position of each rotated pair, fp64 [D/2], and the factor on queries and
    keys.

    Args:
        description: Of the tables.
        length: Tokens of a sample, on which some kinds of scaling depend.
    """
    width, base, scaling = description.width, description.base, description.scaling
    # In fp64, because an angle is a large position times a small rate.
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    is_long = length > scaling.original_length
    if scaling.kind == "dynamic" and is_long:
        growth = scaling.factor * (length / scaling.original_length - 1.0) + 1.0
        return (base * growth ** (width / (width - 2))) ** -exponent, 1.0
    plain = base**-exponent
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "proportional":
        plain[int(scaling.proportion * width // 2) :] = 0.0
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _scale_as_llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        factor = compute_yarn_mscale(scaling, scaling.mscale) / compute_yarn_mscale(
            scaling, scaling.mscale_all_dim
        )
        return _scale_as_yarn(plain, scaling, base), factor
    if scaling.kind == "longrope":
        factors = scaling.long_factors if is_long else scaling.short_factors
        growth = math.log(scaling.factor) / math.log(scaling.original_length)
        return plain / torch.tensor(factors, dtype=torch.float64), math.sqrt(1.0 + growth)
    return plain, 1.0


@lru_cache(maxsize=8)
def _get_frequencies_on(
    description: RotaryDescription, length: int, device: torch.device
) -> tuple[Tensor, float]:
    """Return `frequencies` on a device. They are cached because the host waits for each copy to a
    GPU."""
    rate, factor = compute_frequencies(description, length)
    return rate.to(device), factor


def _scale_as_llama3(plain: Tensor, scaling: RotaryScalingConfig) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between (Llama 3.1)."""
    # Turns that a pair makes within the original context length.
    turns = scaling.original_length * plain / (2 * math.pi)
    span = scaling.high_frequency - scaling.low_frequency
    # 1 from `high_frequency` turns on, 0 below `low_frequency`, linear in between.
    keep = (turns - scaling.low_frequency) / span if span else turns >= scaling.low_frequency
    keep = keep.to(plain.dtype).clamp(0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


def _scale_as_yarn(plain: Tensor, scaling: RotaryScalingConfig, base: float) -> Tensor:
    """Keep fast pairs, divide slow ones by the factor, and blend in between (Peng et al. 2023, eq.
    23-25). The blend is linear in the pair's index, between the indices at the two rotation counts,
    which are rounded outwards with `truncate`."""
    pairs = len(plain)

    def find_pair(rotations: float) -> float:
        wavelength = scaling.original_length / (rotations * 2 * math.pi)
        return pairs * math.log(wavelength) / math.log(base)

    low, high = find_pair(scaling.high_frequency), find_pair(scaling.low_frequency)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    # 0 up to pair `low` and 1 from pair `high` on. The slope is finite if both are equal.
    ramp = (torch.arange(pairs, dtype=torch.float64) - low) / (high - low or 1e-3)
    keep = 1.0 - ramp.clamp(0.0, 1.0)
    return plain * (keep + (1.0 - keep) / scaling.factor)


class Rotary:
    """Cosine and sine of the rotation at each position, in the type of the activations."""

    def __init__(
        self,
        description: RotaryDescription,
        positions: Tensor,
        dtype: torch.dtype,
        kernels: Kernels = NO_KERNELS,
        length: int = 0,
    ) -> None:
        """Compute the tables.

        Args:
            description: Of the tables.
            positions: Position of each token, int64 [S] or [B, S].
            dtype: Type of the activations.
            kernels: The kernels of the run.
            length: Tokens of a whole sample, on which some kinds of scaling depend.
        """
        self._kernels = kernels
        scaling = description.scaling
        # One number for all lengths with the same frequencies, which are then cached.
        least = scaling.original_length + 1
        matters = scaling.kind in ("dynamic", "longrope") and length >= least
        length = (length if scaling.kind == "dynamic" else least) if matters else 0
        rate, factor = _get_frequencies_on(description, length, positions.device)
        if rate.is_meta and not positions.is_meta:
            # A meta step makes all new tensors meta ones, whatever device they are made on.
            _get_frequencies_on.cache_clear()
        # Angles, cosines and sines in fp64, rounded once to the type of the activations.
        angle = positions.to(torch.float64)[..., None] * rate
        # [..., S, 1, D/2]: the same for all heads.
        self._tables = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
        self.cos, self.sin = self._tables[0].unsqueeze(-2), self._tables[1].unsqueeze(-2)

    @cached_property
    def inverse(self) -> Rotary:
        """The rotation by the opposite angles, with the same factor."""
        other = copy(self)
        other._tables = self._tables[0], -self._tables[1]
        other.sin = other._tables[1].unsqueeze(-2)
        return other

    def __call__(self, x: Tensor) -> Tensor:
        """Return x with its leading dims rotated, [B, S, N, head_dim].

        Args:
            x: [B, S, N, head_dim].
        """
        if run := self._kernels.find("rotary", x, *self._tables):
            return run(x, *self._tables)
        return self._kernels.maybe_compile(_rotate, _rotate_for_compiler)(x, self.cos, self.sin)

    def select(self, rows: RowPartition, batch: int) -> Rotary:
        """Return the rotation of this tensor rank's rows of the stream, [rows, 1, N, head_dim].

        Args:
            rows: The partition.
            batch: Number of samples.
        """
        other = copy(self)
        # Copies, because views would keep the rows of all tensor ranks alive.
        cos, sin = (
            rows.select(table.expand(batch, *table.shape[-2:]).flatten(0, 1)).clone()[:, None]
            for table in self._tables
        )
        other._tables = cos, sin
        other.cos, other.sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        return other

    def divide(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, S, G R, head_dim], rotated keys and values [B, S, G, head_dim]
        of a joint product, each in memory of its own.

        Args:
            qkv: [B, S, G, R + 2, head_dim]: for each group R queries, a key and a value.
        """
        if run := self._kernels.find("qkv_rotary", qkv, *self._tables):
            return run(qkv, *self._tables)
        query, key, value = qkv.split((qkv.shape[3] - 2, 1, 1), 3)
        # The rotation is the only copy of the queries: it reads them between keys and values. The
        # values are copied because a view would keep the product alive.
        return self(query.flatten(2, 3)), self(key.squeeze(3)), value.squeeze(3).contiguous()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = 2 * cos.shape[-1]
    if width == x.shape[-1]:
        return _Rotate.apply(x, cos, sin)
    # Partial rotary: only the leading dims of a head depend on its position.
    rotated, unrotated = x.split((width, x.shape[-1] - width), -1)
    return torch.cat((_Rotate.apply(rotated, cos, sin), unrotated), -1)


def _rotate_for_compiler(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, unrotated = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, unrotated), -1)


class _Rotate(torch.autograd.Function):
    """(a, b) -> (a cos - b sin, b cos + a sin). The backward pass rotates by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _apply_rotation(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        # The transpose of a rotation is the rotation by the opposite angle. With a factor in both
        # tables, it is still their transpose.
        return _apply_rotation(gradients[0], cos, -sin), None, None


def _apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    # x may be a view of the joint product of queries, keys and values; the result has memory of its
    # own.
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = first.shape[-1]
    # Both halves are written in place, so no product of a half is allocated.
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out
