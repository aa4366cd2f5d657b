"""Initial weights that are identical under every layout.

A full tensor is a sequence of row blocks, each drawn from a generator keyed by (seed, name, block).
A rank draws the blocks that overlap its piece and keeps only the piece. Memory stays bounded, and
no draw depends on what other ranks draw.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from megaframe.architecture.parametrisation import compute_initial_scale
from megaframe.architecture.spec import Box, Constant, DrawnByLayer, ParamSpec

_BLOCK_ELEMENTS = 1 << 20


def fill_initial_values(out: Tensor, spec: ParamSpec, box: Box, seed: int) -> None:
    """Write the initial values of a piece of a parameter.

    Values are drawn in fp32 whatever the type of `out`, so all precisions start from the same draw.

    Args:
        out: Receives the values; has the shape of `box`.
        spec: The parameter.
        box: The piece of the parameter.
        seed: Seed of the run; with the parameter's name it fixes the values.
    """
    if isinstance(spec.init, Constant):
        out.fill_(spec.init.value)
        return
    if isinstance(spec.init, DrawnByLayer):
        if not out.is_meta:
            out.copy_(torch.as_tensor(spec.init.draw(seed)[box.slices]))
        return
    width, std = math.prod(spec.shape[1:]), spec.init.std * compute_initial_scale(spec.growth)
    # Depends on the whole shape, not on the piece, so blocks are the same on all ranks.
    rows = max(1, _BLOCK_ELEMENTS // width)
    first, count = box.offset[0], box.shape[0]
    columns = box.slices[1:]
    for block in range(first // rows, -(-(first + count) // rows)):
        start, stop = block * rows, min((block + 1) * rows, spec.shape[0])
        # On the CPU and in fp32: a device or another type would draw other numbers.
        values = torch.empty(stop - start, *spec.shape[1:])
        values.normal_(0.0, std, generator=_make_generator(seed, spec.name, block))
        low, high = max(start, first), min(stop, first + count)
        piece = slice(low - start, high - start), *columns
        # The only rounding, to the type of the master weights.
        out[low - first : high - first].copy_(values[piece])


def _make_generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    generator = torch.Generator()
    # 63 bits, so that the seed fits a signed integer.
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return generator
