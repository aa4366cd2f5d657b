"""Products of 8-bit floats: forward, of input gradients and of weight gradients.

Both operands are rounded just before they are multiplied, by scales of the numbers that are there:
one for the tensor, one for each row along what is summed over, or one for each block of it. On a
GPU the product is torch's scaled one; elsewhere the same rounding is followed by an exact product,
so that what a run on a GPU loses can be seen on a CPU. Shape legend: M rows, K summed over, N
columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.kernels import Kernels

BLOCK = 128
"""Elements along what is summed over that share a scale; those of as many rows of a weight do."""
_STEP = 16
"""Dims that torch's scaled product takes are multiples of this."""
Blocks = tuple[int, int] | None


@dataclass(frozen=True)
class EightBits:
    """scaling: what shares a scale. Numbers are e4m3; with one scale for a tensor, gradients, whose
    range is wider, are e5m2 (Micikevicius et al. 2022)."""

    scaling: Literal["tensor", "row", "block"]
    kernels: Kernels

    def takes(self, *widths: int) -> bool:
        """Whether a matrix of these dims is multiplied in 8 bits; else it is as without."""
        return all(width % (BLOCK if self.scaling == "block" else _STEP) == 0 for width in widths)

    def product(self, left_MK: Tensor, right_NK: Tensor, *, gradient: bool, matrix: bool) -> Tensor:
        """left right^T in the type of `left`. gradient: `left` is one. matrix: `right` is a weight,
        else rows of tokens."""
        left, left_scales = self._rounded(left_MK, self._rows, gradient)
        weight = (BLOCK, BLOCK) if self.scaling == "block" and matrix else self._rows
        right, right_scales = self._rounded(right_NK, weight, False)
        given = left, right, left_scales, right_scales, left_MK.dtype
        if run := self.kernels.find("scaled_product", *given):
            return run(*given)
        from megaframe_kernels.fp8 import reference_product

        return reference_product(*given)

    def weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> Tensor:
        """dy^T x, [O, I], in the type of `dy`."""
        return self.product(dy_TO.t(), x_TI.t(), gradient=True, matrix=False)

    @property
    def _rows(self) -> Blocks:
        """What shares a scale of rows of tokens."""
        return {"tensor": None, "row": (1, 0), "block": (1, BLOCK)}[self.scaling]

    def _rounded(self, x_RK: Tensor, block: Blocks, gradient: bool) -> tuple[Tensor, Tensor]:
        """In 8 bits with scales. Zeros behind each row make its length what a product takes."""
        wide = gradient and self.scaling == "tensor"
        kind = torch.float8_e5m2 if wide else torch.float8_e4m3fn
        step = BLOCK if self.scaling == "block" else _STEP
        if missing := -x_RK.shape[1] % step:
            x_RK = F.pad(x_RK, (0, missing))
        given = x_RK, kind, block
        if run := self.kernels.find("quantise", *given):
            return run(*given)
        from megaframe_kernels.fp8 import reference

        return reference(*given)
