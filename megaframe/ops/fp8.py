"""Products of 8-bit floats: forward, of input gradients and of weight gradients.

Both operands are rounded just before they are multiplied. Their scales are computed from the
numbers that this rank has: one for the tensor, one for each row along the summed dimension, or one
for each block of it. On a GPU the product is torch's scaled one; elsewhere the same rounding is
followed by an exact product, so that what a run on a GPU loses can be seen on a CPU. Products of
all experts at once, for which the host need not know how many rows each has, exist only as kernels;
without those, each expert is multiplied on its own. Shape legend: M rows, K summed over, N columns,
E experts, P rows of all experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.architecture.eight_bit_products import BLOCK, Scaling, get_width_step
from megaframe.config import TrainConfig
from megaframe.config.schema import KernelsConfig
from megaframe.errors import UserError
from megaframe.ops.kernel_dispatch import PLAIN_CODE, Kernels

_PROBE = 512
"""Dims of a product that is as easy to compute as any: no implementation refuses its shape."""
SCALINGS: tuple[Scaling, ...] = ("tensor", "row", "block")
Blocks = tuple[int, int] | None


@dataclass(frozen=True)
class Fp8Matmul:
    """Matrix products in 8 bits.

    Numbers are e4m3, but with one scale per tensor gradients are e5m2, because their range is wider
    (Micikevicius et al. 2022).

    Attributes:
        scaling: What shares a scale.
        kernels: The kernels of the run.
    """

    scaling: Scaling
    kernels: Kernels

    def explain_refusal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the reference would multiply in 8 bits on this device, whatever the shapes.

        Args:
            device: Where the operands are.
            dtype: Type of the operands before they are rounded.

        Returns:
            The reason, or None if a kernel takes such operands.
        """
        # Shapes only select an implementation here; nothing is multiplied.
        x, kind = (
            torch.empty(_PROBE, _PROBE, device=device, dtype=dtype),
            self._choose_dtype(gradient=True),
        )
        scales = []
        for block in (self._row_block, self._matrix_block):
            if reason := self.kernels.explain_refusal("quantise", x, kind, block):
                return reason
            rows, columns = block or (0, 0)
            shape = [_PROBE // size if size > 0 else 1 for size in (rows, columns)]
            scales.append(torch.empty(shape, device=device))
        eight = torch.empty(_PROBE, _PROBE, device=device, dtype=torch.float8_e4m3fn)
        return self.kernels.explain_refusal("scaled_product", eight, eight, *scales, dtype)

    def supports(self, *widths: int) -> bool:
        """Return whether a matrix of these dims is multiplied in 8 bits; if not, it is multiplied
        as without `train.fp8`."""
        return all(width % get_width_step(self.scaling) == 0 for width in widths)

    def can_group(self, rows_PK: Tensor, ends_E: Tensor) -> bool:
        """Return whether kernels multiply such rows of all experts at once. Only the kernel that
        quantises is asked, because those that multiply take whatever it takes."""
        return self.kernels.find("quantise_columns", rows_PK, ends_E) is not None

    def multiply(
        self, left_MK: Tensor, right_NK: Tensor, *, gradient: bool, matrix: bool
    ) -> Tensor:
        """Return left right^T, [M, N], in the type of `left`.

        Args:
            left_MK: Rows, [M, K].
            right_NK: The transposed right operand, [N, K].
            gradient: `left` is a gradient.
            matrix: `right` is a weight; otherwise it is rows of tokens.
        """
        # Both operands are rounded right before the product, with scales of their own.
        left, left_scales = self._quantise(left_MK, self._row_block, gradient)
        weight = self._matrix_block if matrix else self._row_block
        right, right_scales = self._quantise(right_NK, weight, False)
        # Gradients are summed in all bits that the matrix units have.
        arguments = left, right, left_scales, right_scales, left_MK.dtype, not gradient
        return self._find_kernel("scaled_product", *arguments)(*arguments)

    def compute_weight_gradient(self, dy_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Return dy^T x, [O, I], in the type of `dy`."""
        # Tokens are summed here, so scales are taken along them.
        return self.multiply(dy_TO.t(), x_TI.t(), gradient=True, matrix=False)

    def multiply_grouped(self, x_PI: Tensor, matrices_EOI: Tensor, ends_E: Tensor) -> Tensor:
        """Return each row times the transposed matrix of its expert, [P, O].

        For each expert the result is that of `multiply`, in the type of the rows.

        Args:
            x_PI: The rows, [P, I], sorted by expert.
            matrices_EOI: The matrix of each expert, [E, O, I].
            ends_E: Where each expert's rows end.
        """
        return self._multiply_grouped_rounded(
            x_PI, *self._quantise_matrices(matrices_EOI), ends_E, gradient=False
        )

    def compute_grouped_input_gradient(
        self, dy_PO: Tensor, matrices_EOI: Tensor, ends_E: Tensor
    ) -> Tensor:
        """Return each row times the matrix of its expert, [P, I].

        The summed dimension must be contiguous, so the 8-bit matrices are written transposed; the
        16-bit ones are not.

        Args:
            dy_PO: Gradient of the outputs, [P, O], sorted by expert.
            matrices_EOI: The matrix of each expert, [E, O, I].
            ends_E: Where each expert's rows end.
        """
        experts, outputs, inputs = matrices_EOI.shape
        if self.scaling == "block":  # the scales of square blocks are transposed too
            flat, scales = self._quantise_matrices(matrices_EOI)
            transposed = flat.view(torch.uint8).mT.contiguous().view(flat.dtype), scales.mT
            return self._multiply_grouped_rounded(dy_PO, *transposed, ends_E, gradient=True)
        arguments = (
            matrices_EOI.flatten(0, 1),
            _compute_ends(matrices_EOI),
            *self._get_column_options(gradient=False),
        )
        columns, scales = self._find_kernel("quantise_columns", *arguments)(*arguments)
        stride = -(-outputs // BLOCK) * BLOCK  # from the start of one expert to that of the next
        # A view: the columns of each expert start at a multiple of `BLOCK`.
        transposed = columns.as_strided((experts, inputs, outputs), (stride, columns.stride(0), 1))
        return self._multiply_grouped_rounded(
            dy_PO, transposed, scales[:, :, None], ends_E, gradient=True
        )

    def compute_grouped_gradient(
        self, dy_PO: Tensor, x_PI: Tensor, ends_E: Tensor, grads_E: Tensor, add: bool
    ) -> None:
        """Write each expert's dy^T x to its gradient, or with `add` add it.

        Args:
            dy_PO: Gradient of the outputs, [P, O], sorted by expert.
            x_PI: The inputs, [P, I], in the same order.
            ends_E: Where the rows of each expert end, [E].
            grads_E: [E, O, I], or any shape that can be viewed as that; changed.
            add: Add to the gradients instead of overwriting them.
        """
        arguments = dy_PO, ends_E, *self._get_column_options(gradient=True)
        left, left_scales = self._find_kernel("quantise_columns", *arguments)(*arguments)
        arguments = x_PI, ends_E, *self._get_column_options(gradient=False)
        right, right_scales = self._find_kernel("quantise_columns", *arguments)(*arguments)
        grads_EOI = grads_E.view(len(ends_E), dy_PO.shape[1], x_PI.shape[1])
        operands = left, right, left_scales, right_scales
        run = self._find_kernel("grouped_scaled_gradient", grads_EOI, *operands, ends_E, add)
        run(grads_EOI, *operands, ends_E, add)

    def _multiply_grouped_rounded(
        self,
        rows_PK: Tensor,
        right_ENK: Tensor,
        right_scales: Tensor,
        ends_E: Tensor,
        *,
        gradient: bool,
    ) -> Tensor:
        """Return each row times the transposed matrix of its expert. The matrices are already
        rounded; right_scales: their scales."""
        rows, scales = self._quantise(rows_PK, self._row_block, gradient, ends_E)
        arguments = rows, right_ENK, scales, right_scales, ends_E, rows_PK.dtype, not gradient
        return self._find_kernel("grouped_scaled_product", *arguments)(*arguments)

    def _quantise_matrices(self, matrices_EOI: Tensor) -> tuple[Tensor, Tensor]:
        flat_RI, ends_E = matrices_EOI.flatten(0, 1), _compute_ends(matrices_EOI)
        flat, scales = self._quantise(flat_RI, self._matrix_block, False, ends_E)
        return flat.view(matrices_EOI.shape), scales.view(len(ends_E), -1, scales.shape[1])

    def _get_column_options(self, *, gradient: bool) -> tuple[torch.dtype, str]:
        """Return the type of columns, and what shares a scale of them."""
        sharing = {"tensor": "expert", "row": "column", "block": "block"}[self.scaling]
        return self._choose_dtype(gradient=gradient), sharing

    @property
    def _row_block(self) -> Blocks:
        """The block of rows of tokens that shares a scale."""
        return {"tensor": None, "row": (1, 0), "block": (1, BLOCK)}[self.scaling]

    @property
    def _matrix_block(self) -> Blocks:
        """The block of a weight that shares a scale."""
        return (BLOCK, BLOCK) if self.scaling == "block" else self._row_block

    def _choose_dtype(self, *, gradient: bool) -> torch.dtype:
        # Narrower scales need less range, so gradients keep the precision of e4m3.
        wide = gradient and self.scaling == "tensor"
        return torch.float8_e5m2 if wide else torch.float8_e4m3fn

    def _quantise(
        self, x_RK: Tensor, block: Blocks, gradient: bool, ends_E: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return x in 8 bits, and its scales. Rows are padded with zeros to a length that a product
        takes. ends: of each expert's rows; instead of one scale per tensor there is then one per
        expert, and no padding."""
        kind = self._choose_dtype(gradient=gradient)
        if block is None and ends_E is not None:
            return self._find_kernel("quantise_experts", x_RK, ends_E, kind)(x_RK, ends_E, kind)
        # Zeros add nothing to a sum and cannot raise the largest magnitude of a block.
        if missing := -x_RK.shape[1] % get_width_step(self.scaling):
            x_RK = F.pad(x_RK, (0, missing))
        arguments = x_RK, kind, block
        return self._find_kernel("quantise", *arguments)(*arguments)

    def _find_kernel(self, name: str, *arguments: Any) -> Callable[..., Any]:
        """Return the function that computes this kernel of the library: the fastest implementation
        that takes the arguments, or the reference if there is none."""
        if run := self.kernels.find(name, *arguments):
            return run
        from megaframe_kernels.registry import KERNELS

        return KERNELS[name].reference


def _compute_ends(matrices_EOI: Tensor) -> Tensor:
    """Return where the rows of each matrix end, int32 [E]."""
    experts, rows, _ = matrices_EOI.shape
    return (rows * torch.arange(1, experts + 1, device=matrices_EOI.device)).int()


def check_fp8(
    train: TrainConfig,
    requested: KernelsConfig,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
) -> str | None:
    """Check how a run multiplies in 8 bits.

    Args:
        train: The section `train`.
        requested: The section `kernels`.
        device: What it runs on.
        dtype: Type of the operands before they are rounded.
        kernels: The kernels that it uses.

    Returns:
        A warning if the reference does, because the device is a CPU or the config asks for it; None
        if it does not, or if the run does not multiply in 8 bits.

    Raises:
        UserError: It would on a GPU, unasked, which is slower than 16 bits.
    """
    scaling = train.fp8
    if scaling == "none":
        return None
    setting = f"train.fp8={scaling}"
    if requested.fp8 == PLAIN_CODE:
        return (
            f"warning: {setting} runs as the reference, slower than without (kernels.fp8=reference)"
        )
    if device.type != "cuda":
        return (
            f"warning: {setting} is emulated on a {device.type}: it rounds as on a GPU, and is "
            "slower than without"
        )
    reason = Fp8Matmul(scaling, kernels).explain_refusal(device, dtype)
    if reason is None:
        return None
    alternatives = [
        f"train.fp8={other}"
        for other in SCALINGS
        if other != scaling and Fp8Matmul(other, kernels).explain_refusal(device, dtype) is None
    ]
    raise UserError(
        f"{setting} would run as the reference on this GPU, slower than without: {reason}; use "
        f"{' or '.join([*alternatives, 'train.fp8=none'])}, or kernels.fp8={PLAIN_CODE} to run it "
        "so"
    )
