"""Experts: many MLPs as one module, each over its own rows.

Rows lie expert after expert, so each expert multiplies a slice of them; on a GPU all experts are
one grouped product. An expert without rows only gives a gradient of zero. Gates are multiplied in
before the second product. The outputs of experts then only have to be summed, and are not kept.

Shape legend: A rows as they arrive, N rows of all experts of this rank, n rows of a piece, I
inputs, O outputs, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.config import ModelConfig, MoEConfig
from megaframe.expert_parallel.paths import Dealt, Local
from megaframe.model.forward_context import Frame
from megaframe.model.fp8 import Fp8Matmul
from megaframe.model.mlp import activate, activate_again
from megaframe.ops.matmul import product_into
from megaframe.parameters.parameter import Module, Parameter
from megaframe.parameters.spec import Normal, ParamSpec


class Experts(Module):
    """hidden -> width -> hidden in each expert, without biases."""

    def __init__(self, name: str, model: ModelConfig, moe: MoEConfig, output_std: float) -> None:
        width = moe.ffn or model.ffn
        gated = model.activation == "swiglu"
        self.activation = model.activation
        used = Fraction(moe.top_k, moe.experts)
        every = {0: (1,) * moe.experts}
        self.up = Parameter(
            ParamSpec(
                f"{name}.up.weight",
                (moe.experts, *((2,) if gated else ()), width, model.hidden),
                Normal(model.init_std),
                role="matrix",
                decay=True,
                axes={0: "expert", 2 if gated else 1: "expert_tensor"},
                fused={**every, 1: (1, 1)} if gated else every,
                used=used,
            )
        )
        self.down = Parameter(
            ParamSpec(
                f"{name}.down.weight",
                (moe.experts, model.hidden, width),
                Normal(output_std),
                role="matrix",
                decay=True,
                axes={0: "expert", 2: "expert_tensor"},
                fused=every,
                used=used,
            )
        )

    def __call__(
        self,
        x_AH: Tensor,
        gates_N: Tensor,
        last: Local,
        dealt: Dealt,
        frame: Frame,
    ) -> Tensor:
        """Apply the experts to x [A, hidden] as it arrives, times the gates; the result has the
        same shape. last: brings the rows to the experts to which they are `dealt`, and sums them on
        the way back."""
        return _Experts.apply(x_AH, gates_N, self, last, dealt, frame)


class _Experts(torch.autograd.Function):
    """Computes piece by piece, from the rows of a piece to the gradients of its matrices, so that
    intermediate results stay in cache. Keeps only the results of the first product, from which the
    backward pass computes the rest again."""

    @staticmethod
    def forward(
        ctx: Any,
        x_AH: Tensor,
        gates_N: Tensor,
        experts: Experts,
        last: Local,
        dealt: Dealt,
        frame: Frame,
    ) -> Tensor:
        up_EOH, down_EHF = _matrices(experts.up), _matrices(experts.down)
        pieces = _pieces(x_AH, up_EOH, down_EHF, dealt, frame)
        y_NH, ups = frame.scratch.rows(len(gates_N), x_AH), []
        for piece in pieces:
            up = piece.product(last.some(x_AH, piece.rows), up_EOH[piece.experts])
            active = activate(experts.activation, up, frame.kernels)
            inner = active.mul_(gates_N[piece.rows, None])
            piece.product_into(y_NH[piece.rows], inner, down_EHF[piece.experts])
            ups.append(up)
        ctx.save_for_backward(x_AH, gates_N, *ups)
        ctx.experts, ctx.last, ctx.frame, ctx.pieces = experts, last, frame, pieces
        return last.back(y_NH).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_AH, gates_N, *ups), dy_AH = ctx.saved_tensors, gradients[0]
        experts, last, kernels = ctx.experts, ctx.last, ctx.frame.kernels
        up_EOH, down_EHF = _matrices(experts.up), _matrices(experts.down)
        dx_NH = ctx.frame.scratch.rows(len(gates_N), x_AH)
        dgates_N = torch.empty_like(gates_N)
        for piece, up in zip(ctx.pieces, ups, strict=True):
            rows = piece.rows
            dy_nH = last.some(dy_AH, rows)
            d_inner = piece.back(dy_nH, down_EHF[piece.experts])
            active, back = activate_again(experts.activation, up, kernels)
            torch.linalg.vecdot(d_inner, active, out=dgates_N[rows])
            gates_n1 = gates_N[rows, None]
            d_up = back(d_inner.mul_(gates_n1))
            inner = active.mul_(gates_n1)
            piece.back_into(dx_NH[rows], d_up, up_EOH[piece.experts])
            x_nH = last.some(x_AH, rows)
            ctx.frame.later.do(partial(piece.add_gradient, experts.up, d_up, x_nH))
            ctx.frame.later.do(partial(piece.add_gradient, experts.down, dy_nH, inner))
        return last.back(dx_NH).wait(), dgates_N, None, None, None, None


def _matrices(weight: Parameter) -> Tensor:
    """Return the value of the weight as [experts, outputs, inputs]."""
    value = weight.value
    return value.view(value.shape[0], -1, value.shape[-1])


@dataclass(frozen=True)
class _Piece:
    """Rows that are multiplied at once: those of one expert, or of all experts, each ending at
    `ends` [E]."""

    frame: Frame
    experts: Any
    rows: slice
    ends: Tensor | None = None

    def product(self, x_nI: Tensor, matrix: Tensor) -> Tensor:
        """Return rows times the transposed matrix [O, I] of their expert. For all experts, matrices
        are [E, O, I]."""
        if self.ends is None:
            return self.frame.forward_product(x_nI, matrix, None)
        if eight := self._eight(*matrix.shape[1:]):
            return eight.grouped_product(x_nI, matrix, self.ends)
        return self._grouped(x_nI, matrix)

    def product_into(self, out_nO: Tensor, x_nI: Tensor, matrix: Tensor) -> None:
        """Write `product` to `out_nO`."""
        if self.ends is None and self.frame.eight is None:
            product_into(out_nO, x_nI, matrix.t(), add=False)
        else:
            out_nO.copy_(self.product(x_nI, matrix))

    def back(self, dy_nO: Tensor, matrix: Tensor) -> Tensor:
        """Return rows times the matrix [O, I] of their expert. For all experts, matrices are [E, O,
        I]."""
        if self.ends is None:
            return self.frame.input_gradient(dy_nO, matrix)
        if eight := self._eight(*matrix.shape[1:]):
            return eight.grouped_input_gradient(dy_nO, matrix, self.ends)
        return self._grouped(dy_nO, matrix.mT)

    def back_into(self, out_nI: Tensor, dy_nO: Tensor, matrix: Tensor) -> None:
        """Write `back` to `out_nI`."""
        if self.ends is None and self.frame.eight is None:
            product_into(out_nI, dy_nO, matrix, add=False)
        else:
            out_nI.copy_(self.back(dy_nO, matrix))

    def add_gradient(self, weight: Parameter, left_nO: Tensor, right_nI: Tensor) -> None:
        """Add left^T right to the gradient of the expert's matrix, or of all experts' matrices."""
        if self.ends is None:
            self.frame.add_weight_gradient(weight, left_nO, right_nI, of=self.experts)
        elif eight := self._eight(left_nO.shape[1], right_nI.shape[1]):
            weight.add_by(partial(eight.grouped_gradient, left_nO, right_nI, self.ends))
        else:
            weight.add_grouped(left_nO, right_nI, self.ends, self.frame.kernels)

    def _eight(self, *widths: int) -> Fp8Matmul | None:
        """Return what multiplies by a matrix of these dims in 8 bits, or None."""
        eight = self.frame.eight
        return eight if eight is not None and eight.takes(*widths) else None

    def _grouped(self, rows: Tensor, matrices_ENK: Tensor) -> Tensor:
        given = rows, matrices_ENK, self.ends
        if run := self.frame.kernels.find("grouped_product", *given):
            return run(*given)
        return F.grouped_mm(rows, matrices_ENK.mT, offs=self.ends)


def _pieces(x_AH: Tensor, up: Tensor, down: Tensor, dealt: Dealt, frame: Frame) -> list[_Piece]:
    if all(_at_once(x_AH, matrices, dealt.ends_E, frame) for matrices in (up, down)):
        return [_Piece(frame, slice(None), slice(None), dealt.ends_E)]
    found, start = [], 0
    for expert, count in enumerate(dealt.numbers()):
        if count:
            found.append(_Piece(frame, expert, slice(start, start + count)))
        start += count
    return found


def _at_once(x: Tensor, matrices_EOI: Tensor, ends_E: Tensor, frame: Frame) -> bool:
    """Return whether rows like `x` can be multiplied by all these matrices in one product."""
    widths = matrices_EOI.shape[1:]
    if frame.eight is not None and frame.eight.takes(*widths):
        return frame.eight.groups(x, ends_E)
    given = x, matrices_EOI, ends_E
    return grouped(x, *widths) or frame.kernels.find("grouped_product", *given) is not None


def grouped(x: Tensor, *widths: int) -> bool:
    """Return whether torch can multiply all experts in one product on rows of these widths and of
    the type of `x`, faster than one by one. It can on a GPU if each row is a multiple of 16 bytes,
    except in fp64."""
    aligned = all(width * x.element_size() % 16 == 0 for width in widths)
    return x.is_cuda and aligned and x.dtype is not torch.float64
