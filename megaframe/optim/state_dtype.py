"""StateCodec: the types in which running averages are stored, from the master type down to 8 bits.

With few bits, a value is rounded up or down by chance, so that its expectation is exact. With
rounding to nearest, an average that moves by less than half a step of its type would never move.
What is drawn is a function of element and step, so that two runs are equal whatever their layouts.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Elements that share a scale."""
_SIGNED_FLOOR, _SQUARE_FLOOR = 1e-6, 1e-10
"""Smallest magnitude that can be stored, relative to the largest one of its block."""
_MIXERS = 0x9E3779B1, 0xB7E15163
"""About 2^32 / golden ratio, and 2^32 (e - 2): multiples of either fill [0, 2^32) evenly."""


class StateCodec(Protocol):
    """Stores flat spans of values as one or several flat tensors.

    Attributes:
        exact: Values are stored unchanged.
        block_size: This many neighbours, counted from the start, share something.
    """

    exact: bool
    block_size: int

    def make(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """Return memory for values, all zero.

        Args:
            length: Number of values.
            dtype: Their master type.
            device: Where the memory is.
        """
        ...

    def select_span(self, stored: tuple[Tensor, ...], span: slice) -> tuple[Tensor, ...]:
        """Return views of the parts of `stored` that hold the values of `span`, which starts at a
        multiple of `BLOCK`."""
        ...

    def decode(self, stored: tuple[Tensor, ...], length: int, dtype: torch.dtype) -> Tensor:
        """Return the values; for an exact codec the stored tensor itself.

        Args:
            stored: What `encode` has written.
            length: Number of values.
            dtype: Their master type.
        """
        ...

    def encode(self, values: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
        """Return the values as they are stored.

        Args:
            values: In master precision.
            draws: One for each value, in [0, 1); decides between rounding up and down so that the
                expectation is exact. 0.5 rounds to nearest.
        """
        ...


class MasterCodec:
    """Stores values unchanged."""

    exact, block_size = True, 1

    def make(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(length, dtype=dtype, device=device),)

    def select_span(self, stored: tuple[Tensor, ...], span: slice) -> tuple[Tensor, ...]:
        return (stored[0][span],)

    def decode(self, stored: tuple[Tensor, ...], length: int, dtype: torch.dtype) -> Tensor:
        return stored[0]

    def encode(self, values: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
        return (values,)


class Bfloat16Codec:
    """Stores the upper 16 bits of fp32."""

    exact, block_size = False, 1

    def make(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        return (torch.zeros(length, dtype=torch.bfloat16, device=device),)

    def select_span(self, stored: tuple[Tensor, ...], span: slice) -> tuple[Tensor, ...]:
        return (stored[0][span],)

    def decode(self, stored: tuple[Tensor, ...], length: int, dtype: torch.dtype) -> Tensor:
        return stored[0].to(dtype)

    def encode(self, values: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
        # The larger the value of the bits that are cut off, the more often they carry upwards.
        carry = (draws * 0x10000).to(torch.int32)
        bits = values.float().view(torch.int32) + carry
        # The low half is zero now, so the conversion to bf16 does not round again.
        return (bits.bitwise_and_(-0x10000).view(torch.float32).bfloat16(),)


class BlockwiseCodec:
    """Stores blocks of values as 8-bit indices into a table, with the block's largest magnitude in
    fp32 (Dettmers et al. 2022).

    The table is geometric, so that every magnitude, also a small one, has the same relative error.
    square: for averages of squares, which are never negative and whose root is a divisor: only 0
    becomes 0.
    """

    exact, block_size = False, BLOCK

    def __init__(self, *, square: bool) -> None:
        self._square = square
        count, floor = (255, _SQUARE_FLOOR) if square else (127, _SIGNED_FLOOR)
        # Geometric from `floor` to 1, computed in fp64 and rounded once.
        sizes = floor ** torch.linspace(1.0, 0.0, count, dtype=torch.float64)
        below = sizes[:0] if square else -sizes.flip(0)
        self._table = torch.cat((below, torch.zeros(1), sizes)).float()
        self._zero = len(below)

    def make(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        blocks = -(-length // BLOCK)
        # Index `_zero` with a scale of 0: an average starts from exact zeros.
        rows = torch.full((blocks * BLOCK,), self._zero, dtype=torch.uint8, device=device)
        return rows, torch.zeros(blocks, device=device)

    def select_span(self, stored: tuple[Tensor, ...], span: slice) -> tuple[Tensor, ...]:
        first, last = span.start // BLOCK, -(-span.stop // BLOCK)
        return stored[0][first * BLOCK : last * BLOCK], stored[1][first:last]

    def decode(self, stored: tuple[Tensor, ...], length: int, dtype: torch.dtype) -> Tensor:
        rows, scales = stored
        values = self._move_table(rows)[rows.int()].view(-1, BLOCK).mul_(scales[:, None])
        return values.view(-1)[:length].to(dtype)

    def encode(self, values: Tensor, draws: Tensor) -> tuple[Tensor, ...]:
        short = -len(values) % BLOCK
        # The last block is padded with zeros, which cannot raise its largest magnitude.
        blocks = F.pad(values.float(), (0, short)).view(-1, BLOCK)
        scales = blocks.abs().amax(1)
        # A block of zeros would divide by 0.
        within = (blocks / scales.masked_fill(scales == 0, 1.0)[:, None]).view(-1)
        table = self._move_table(values)
        if self._square:
            # A square that is not zero never becomes 0, because its root is a divisor.
            within = torch.where(within > 0, within.clamp_min(_SQUARE_FLOOR), within)
        # The two neighbours in the table; the draw picks the upper one by the distance to the
        # lower.
        above = torch.bucketize(within, table).clamp_(1, len(table) - 1)
        low, high = table[above - 1], table[above]
        up = F.pad(draws, (0, short)) < (within - low) / (high - low)
        return (above - 1 + up).to(torch.uint8), scales

    def _move_table(self, other: Tensor) -> Tensor:
        self._table = self._table.to(other.device)
        return self._table


def compute_rounding_draws(elements: Tensor, number: int) -> Tensor:
    """Return the draws of the elements with these ids for rounding number `number`, fp32 in [0, 1).
    They are fractional parts of multiples of irrational numbers, which are spread as evenly as
    possible over elements and over roundings."""
    element, draw = _MIXERS
    # Multiples in int64, cut to 32 bits: the fractional part of a multiple of an irrational number.
    mixed = elements.mul(element).add_(number * draw)
    # The upper 24 bits are exact in fp32, and so the draw is below 1.
    return mixed.bitwise_and_(0xFFFFFFFF).bitwise_right_shift_(8).float().mul_(2.0**-24)


def make_state_codecs(dtype: str) -> tuple[StateCodec, StateCodec]:
    """Return the codecs for `optim.state`: for averages of values, and for those of squares."""
    if dtype == "int8":
        return BlockwiseCodec(square=False), BlockwiseCodec(square=True)
    return (Bfloat16Codec(), Bfloat16Codec()) if dtype == "bf16" else (MasterCodec(), MasterCodec())
