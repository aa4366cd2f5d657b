"""Weights as codes of levels, with the largest magnitude (absmax) of each block of neighbours: the
4-bit NormalFloat of QLoRA (Dettmers et al. 2023) and 8-bit integers.

A code is the number of the level nearest to the value divided by its block's absmax. The largest
value of a block is always a level, so coding what was decoded changes nothing.
"""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from megaframe.architecture.quantised import BITS, DECODED_AT_ONCE, count_unit
from megaframe.config.adapters import QuantisationConfig
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels

_SCALE = torch.float32
_LARGEST_SHARE = 255
"""What the largest absmax of a group is kept as; the others are shares of it."""


@cache
def compute_levels(kind: str) -> tuple[float, ...]:
    """Return the levels of a type, ascending from -1 to 1.

    Those of nf4 are quantiles of the normal distribution at equally spaced probabilities, 8 from
    1/2 up and 8 from 1/2 down with the zero in common, divided by the largest (QLoRA, section 3 and
    appendix E). The outermost probability is the mean of those that 16 and 15 equal bins would
    leave half a bin outside of.
    """
    if kind == "int8":
        return tuple(level / 127 for level in range(-127, 128))
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    tails = [
        [NormalDist().inv_cdf(outermost + (0.5 - outermost) * n / count) for n in range(count)]
        for count in (7, 8)
    ]
    largest = tails[0][0]
    below, above = ([value / largest for value in tail] for tail in tails)
    return (*(-value for value in below), 0.0, *above[::-1])


class BlockCodec:
    """Stores flat spans of weights as bytes: fp32 scales, shares of them, and codes.

    Attributes:
        unit: Spans are multiples of so many elements, and of 8.
    """

    def __init__(self, config: QuantisationConfig) -> None:
        self._levels, self._block = compute_levels(config.type), config.block
        self.unit, self._shares = count_unit(config), config.absmax_block is not None
        self._per_byte = 8 // BITS[config.type]
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def count_bytes(self, length: int) -> int:
        """Return the bytes of so many elements: a multiple of 4, so that spans of several ranks
        follow each other."""
        return -(-sum(self._count_parts(length)) // 4) * 4

    def encode(self, values: Tensor, stored: Tensor) -> None:
        """Write codes of values.

        Args:
            values: [length], in at least fp32.
            stored: Receives them, [count_bytes(length)] of uint8, on any device.
        """
        scales, shares, codes = self._split(stored, len(values))
        middles = self._make_levels(values.dtype, values.device)
        middles = (middles[1:] + middles[:-1]) / 2
        for start in range(0, len(values), step := self._count_chunk()):
            chunk = values[start : start + step].view(-1, self._block)
            first, last = start // self._block, (start + step) // self._block
            absmax = chunk.abs().amax(1).to(_SCALE)
            # Where all are zero, so is the absmax, and any level does.
            whole = torch.where(absmax > 0, absmax, 1.0).to(values.dtype)
            levels = torch.bucketize(chunk / whole[:, None], middles, out_int32=True)
            levels = levels.clamp_(max=len(middles)).to(torch.uint8).view(-1, self._per_byte)
            packed = levels[:, 0] if self._per_byte == 1 else levels[:, 0] * 16 + levels[:, 1]
            codes[start // self._per_byte : (start + step) // self._per_byte].copy_(packed)
            if shares is None:
                scales[first:last].copy_(absmax)
                continue
            groups = absmax.view(-1, self.unit // self._block)
            largest = groups.amax(1)
            scales[start // self.unit : (start + step) // self.unit].copy_(largest)
            whole = torch.where(largest > 0, largest, 1.0)[:, None]
            # At least 1, so that no block of small values becomes zero.
            share = (groups / whole * _LARGEST_SHARE).round_().clamp_(1, _LARGEST_SHARE)
            shares[first:last].copy_((share * (groups > 0)).to(torch.uint8).view(-1))

    def decode(self, stored: Tensor, values: Tensor, kernels: Kernels = NO_KERNELS) -> None:
        """Write the values of codes: level times absmax, rounded once to the type of `values`.

        Args:
            stored: What `encode` wrote.
            values: Receives them, [length].
            kernels: Of the run.
        """
        scales, shares, codes = self._split(stored, len(values))
        dtype = torch.promote_types(values.dtype, _SCALE)
        levels = self._make_levels(dtype, values.device)
        operands = values, codes, levels, scales, shares
        if decode := kernels.find("decode_blocks", *operands, block=self._block):
            decode(*operands, block=self._block)
            return
        pairs = levels[:, None]
        if self._per_byte == 2:
            high, low = (each.reshape(-1) for each in torch.meshgrid(levels, levels, indexing="ij"))
            pairs = torch.stack((high, low), 1)
        if shares is not None:
            groups = shares.view(len(scales), -1).to(_SCALE) / _LARGEST_SHARE
            scales = (groups * scales[:, None]).view(-1)
        for start in range(0, len(values), step := self._count_chunk()):
            chunk = codes[start // self._per_byte : (start + step) // self._per_byte]
            looked_up = pairs.index_select(0, chunk.int()).view(-1, self._block)
            of_chunk = scales[start // self._block : (start + step) // self._block]
            into = values[start : start + step].view(-1, self._block)
            torch.mul(looked_up, of_chunk[:, None], out=into)

    def _count_parts(self, length: int) -> tuple[int, int, int]:
        """Return the bytes of scales, of shares and of codes."""
        blocks = length // self._block if self._shares else 0
        return 4 * (length // self.unit), blocks, length // self._per_byte

    def _split(self, stored: Tensor, length: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return views of the scales, of the shares of them, if there are any, and of the codes."""
        scales, shares, codes = stored[: sum(self._count_parts(length))].split(
            self._count_parts(length)
        )
        return scales.view(_SCALE), shares if self._shares else None, codes

    def _make_levels(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Kept: a copy to a GPU in each pass would make the host wait, and no graph could hold it.
        if (table := self._tables.get((dtype, device))) is None:
            table = torch.tensor(self._levels, dtype=dtype, device=device)
            self._tables[dtype, device] = table
        return table

    def _count_chunk(self) -> int:
        """Return how many elements are coded at once: whole units and bytes."""
        unit = math.lcm(self.unit, 8)
        return max(1, DECODED_AT_ONCE // unit) * unit


def round_to_codes(values: Tensor, config: QuantisationConfig) -> None:
    """Make values, whose last dim is whole rows, what they are after they were kept as codes.

    Args:
        values: In at least fp32, contiguous.
        config: How they are kept.
    """
    codec, flat = BlockCodec(config), values.view(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % math.lcm(codec.unit, 8)))
    stored = torch.empty(codec.count_bytes(len(padded)), dtype=torch.uint8, device=values.device)
    codec.encode(padded, stored)
    codec.decode(stored, padded)
    flat.copy_(padded[: len(flat)])
