"""Experts: many MLPs as one, each over its own rows.

Rows lie expert after expert, so each expert is a product over a piece of them; on a GPU all are
one. An expert without rows is nothing but a gradient of zero. What a token's expert counts for it
is multiplied in before the second product: so what the experts give needs no more than to be
summed, and is not kept.

Shape legend: N rows of all experts of this rank, I inputs, O outputs, F inner width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.config import Model, Moe
from megaframe.nn.frame import Frame
from megaframe.nn.mlp import activate
from megaframe.parameter import Module, Parameter
from megaframe.product import product_into
from megaframe.spec import Normal, ParamSpec


class Experts(Module):
    """hidden -> width -> hidden in each expert, without biases."""

    def __init__(self, name: str, model: Model, moe: Moe, output_std: float) -> None:
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
        self, x_NH: Tensor, gates_N: Tensor, counts: Sequence[int] | Tensor, frame: Frame
    ) -> Tensor:
        """x [N, hidden], counts[i] rows of expert i (or where they end, as `Route` has them), times
        the gates, to the same shape."""
        return _Experts.apply(x_NH, gates_N, self, counts, frame)


class _Experts(torch.autograd.Function):
    """Piece after piece, so that what lies between its products stays in cache. Keeps what comes of
    the first one only; the rest is made again from it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        gates_N: Tensor,
        experts: Experts,
        counts: Sequence[int] | Tensor,
        frame: Frame,
    ) -> Tensor:
        up_EOH, down_EHF = _matrices(experts.up), _matrices(experts.down)
        pieces = _pieces(x_NH, up_EOH, down_EHF, counts, frame)
        y_NH, ups = torch.empty_like(x_NH), []
        for piece in pieces:
            up = piece.product(x_NH[piece.rows], up_EOH[piece.experts])
            active = activate(experts.activation, up, frame.kernels)
            inner = active.mul_(gates_N[piece.rows, None])
            piece.product_into(y_NH[piece.rows], inner, down_EHF[piece.experts])
            ups.append(up)
        ctx.save_for_backward(x_NH, gates_N, *ups)
        ctx.experts, ctx.frame, ctx.pieces = experts, frame, pieces
        return y_NH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_NH, gates_N, *ups), dy_NH = ctx.saved_tensors, gradients[0].contiguous()
        experts, kernels, pieces = ctx.experts, ctx.frame.kernels, ctx.pieces
        up_EOH, down_EHF = _matrices(experts.up), _matrices(experts.down)
        dx_NH, dgates_N = torch.empty_like(x_NH), torch.empty_like(gates_N)
        inners, d_ups = [], []
        for piece, up in zip(pieces, ups, strict=True):
            rows = piece.rows
            d_inner = piece.back(dy_NH[rows], down_EHF[piece.experts])
            up = up.detach().requires_grad_()
            with torch.enable_grad():
                active = activate(experts.activation, up, kernels)
            gates_n1 = gates_N[rows, None]
            inners.append(active.detach() * gates_n1)
            torch.linalg.vecdot(d_inner, active.detach(), out=dgates_N[rows])
            (d_up,) = torch.autograd.grad(active, up, d_inner.mul_(gates_n1))
            piece.back_into(dx_NH[rows], d_up, up_EOH[piece.experts])
            d_ups.append(d_up)

        def weights() -> None:
            for parameter, lefts, rights in (
                (experts.up, d_ups, [x_NH[piece.rows] for piece in pieces]),
                (experts.down, [dy_NH[piece.rows] for piece in pieces], inners),
            ):
                if len(pieces) == 1 and (ends := pieces[0].ends) is not None:
                    parameter.add_grouped(lefts[0], rights[0], ends, kernels)
                else:
                    _add_products(parameter, pieces, lefts, rights, ctx.frame)

        ctx.frame.later.do(weights)
        return dx_NH, dgates_N, None, None, None


def _matrices(weight: Parameter) -> Tensor:
    """[experts, outputs, inputs]."""
    value = weight.value
    return value.view(value.shape[0], -1, value.shape[-1])


def _add_products(
    weight: Parameter,
    pieces: Sequence[_Piece],
    lefts_nO: Sequence[Tensor],
    rights_nI: Sequence[Tensor],
    frame: Frame,
) -> None:
    """Add each expert's part of the gradient of a weight."""
    experts, eight = weight.value.shape[0], frame.eight
    counts = [0] * experts
    for piece in pieces:
        counts[piece.experts] = piece.rows.stop - piece.rows.start
    widths = math.prod(weight.value.shape[1:-1]), weight.value.shape[-1]
    if eight is None or not eight.takes(*widths):
        weight.add_products(counts, lefts_nO, rights_nI)
    elif not weight.frozen:
        made = weight.value.new_zeros((experts, *widths))
        for piece, left, right in zip(pieces, lefts_nO, rights_nI, strict=True):
            made[piece.experts] = eight.weight_gradient(left, right)
        weight.add(made.view(weight.box.shape))


@dataclass(frozen=True)
class _Piece:
    """Rows that are multiplied at once: of one expert, or of all, where each one's `ends` [E]."""

    frame: Frame
    experts: Any
    rows: slice
    ends: Tensor | None = None

    def product(self, x_nI: Tensor, matrix: Tensor) -> Tensor:
        """Rows times the transposed matrix [O, I] of their expert, or matrices [E, O, I]."""
        if self.ends is None:
            return self.frame.forward_product(x_nI, matrix, None)
        return self._grouped(x_nI, matrix)

    def product_into(self, out_nO: Tensor, x_nI: Tensor, matrix: Tensor) -> None:
        """The same, to where it belongs."""
        if self.ends is None and self.frame.eight is None:
            product_into(out_nO, x_nI, matrix.t(), add=False)
        else:
            out_nO.copy_(self.product(x_nI, matrix))

    def back(self, dy_nO: Tensor, matrix: Tensor) -> Tensor:
        """Rows times the matrix [O, I] of their expert, or matrices [E, O, I]."""
        if self.ends is None:
            return self.frame.input_gradient(dy_nO, matrix)
        return self._grouped(dy_nO, matrix.mT)

    def back_into(self, out_nI: Tensor, dy_nO: Tensor, matrix: Tensor) -> None:
        """The same, to where it belongs."""
        if self.ends is None and self.frame.eight is None:
            product_into(out_nI, dy_nO, matrix, add=False)
        else:
            out_nI.copy_(self.back(dy_nO, matrix))

    def _grouped(self, rows: Tensor, matrices_ENK: Tensor) -> Tensor:
        given = rows, matrices_ENK, self.ends
        if run := self.frame.kernels.find("grouped_product", *given):
            return run(*given)
        return F.grouped_mm(rows, matrices_ENK.mT, offs=self.ends)


def _pieces(
    x_NH: Tensor, up: Tensor, down: Tensor, counts: Sequence[int] | Tensor, frame: Frame
) -> list[_Piece]:
    by_torch = grouped(x_NH, up.shape[1], down.shape[2])
    if frame.eight is None and (by_torch or frame.kernels.has("grouped_product")):
        ends = _ends(x_NH, counts)
        if by_torch or frame.kernels.find("grouped_product", x_NH, up, ends):
            return [_Piece(frame, slice(None), slice(None), ends)]
    if isinstance(counts, Tensor):
        counts = counts.diff(prepend=counts.new_zeros(1)).tolist()
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append(_Piece(frame, expert, slice(start, start + count)))
        start += count
    return found


def _ends(x_NH: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """Where the rows of each expert end, int32 [E]."""
    if isinstance(counts, Tensor):
        return counts
    return torch.tensor(counts, device=x_NH.device).cumsum(0, dtype=torch.int32)


def grouped(x_NH: Tensor, *widths: int) -> bool:
    """Whether one product of all experts is possible, on rows of these widths beside their own, and
    the faster way: a GPU's is, where each row is a whole number of 16 bytes."""
    aligned = all(width * x_NH.element_size() % 16 == 0 for width in (x_NH.shape[1], *widths))
    return x_NH.is_cuda and aligned and x_NH.dtype is not torch.float64
