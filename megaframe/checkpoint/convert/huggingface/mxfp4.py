"""Weights in MXFP4 (Open Compute Project, Microscaling Formats 1.0), as folders of gpt-oss have
them: 4-bit numbers, of which 32 neighbouring inputs of a matrix share a power of 2.

A matrix NAME of experts is two tensors of bytes, NAME_blocks [E, O, G, 16] and NAME_scales [E, O,
G], with inputs 2i and 2i + 1 of a group in the low and the high half of byte i. It is read as if
the folder had NAME [E, I, O] in fp32, in which every number below 2^128 is exact.

Shape legend: E experts, O outputs, I inputs, G groups of 32 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

MXFP4 = "mxfp4"
"""The name of the format in a config."""
BLOCKS, SCALES = "_blocks", "_scales"
"""What the names of both tensors end with."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of two bits of exponent and one of mantissa; a third bit above is the sign."""
_BYTES = 16
_GROUP = 2 * _BYTES


def find_matrix_shape(
    blocks: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[int, int, int] | None:
    """Return the shape of the matrices that tensors of these shapes hold; None if none."""
    if len(scales) != 3 or blocks != (*scales, _BYTES):
        return None
    experts, outputs, groups = scales
    return experts, groups * _GROUP, outputs


def dequantize(blocks_EOGB: Tensor, scales_EOG: Tensor) -> Tensor:
    """Return matrices in fp32, [E, I, O]. A scale of 255 makes its group NaN."""
    both = (*_MAGNITUDES, *(-magnitude for magnitude in _MAGNITUDES))
    # Both numbers of a byte, low half first.
    pairs_2 = torch.tensor([(low, high) for high in both for low in both])
    factors = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    factors[255] = torch.nan
    experts, outputs, groups, _ = blocks_EOGB.shape
    matrices_EIO = torch.empty(experts, groups * _GROUP, outputs)
    # One expert at a time: the indices of all would be 16 times as large as the blocks.
    for blocks_OGB, scales_OG, out_IO in zip(blocks_EOGB, scales_EOG, matrices_EIO, strict=True):
        values_OGI = pairs_2[blocks_OGB.int()].flatten(2)
        out_IO.copy_((values_OGI * factors[scales_OG.int()][..., None]).flatten(1).t())
    return matrices_EIO
