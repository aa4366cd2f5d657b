"""Experts: many MLPs as one, each over its own rows.

Rows lie expert after expert, so each expert is a product over a piece of them; on a GPU all are
one. An expert without rows is nothing but a gradient of zero. What a token's expert counts for it
is multiplied in before the second product: so what the experts give needs no more than to be
summed, and is not kept.

Shape legend: N rows of all experts of this rank, I inputs, O outputs, F inner width.
"""

from __future__ import annotations

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
from megaframe.product import product, product_into
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
        self, x_NH: Tensor, gates_N: Tensor, counts: Sequence[int], frame: Frame
    ) -> Tensor:
        """x [N, hidden], counts[i] rows of expert i, times the gates, to the same shape."""
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
        counts: Sequence[int],
        frame: Frame,
    ) -> Tensor:
        up_EOH, down_EHF = _matrices(experts.up, counts), _matrices(experts.down, counts)
        pieces = _pieces(x_NH, up_EOH, down_EHF, counts)
        y_NH, ups = torch.empty_like(x_NH), []
        for piece in pieces:
            up = piece.product(x_NH[piece.rows], up_EOH[piece.experts].mT)
            inner = activate(experts.activation, up).mul_(gates_N[piece.rows, None])
            piece.product_into(y_NH[piece.rows], inner, down_EHF[piece.experts].mT)
            ups.append(up)
        ctx.save_for_backward(x_NH, gates_N, *ups)
        ctx.experts, ctx.counts, ctx.frame, ctx.pieces = experts, counts, frame, pieces
        return y_NH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_NH, gates_N, *ups), dy_NH = ctx.saved_tensors, gradients[0].contiguous()
        experts, counts, pieces = ctx.experts, ctx.counts, ctx.pieces
        up_EOH, down_EHF = _matrices(experts.up, counts), _matrices(experts.down, counts)
        dx_NH, dgates_N = torch.empty_like(x_NH), torch.empty_like(gates_N)
        inners, d_ups = [], []
        for piece, up in zip(pieces, ups, strict=True):
            rows = piece.rows
            d_inner = piece.product(dy_NH[rows], down_EHF[piece.experts])
            up = up.detach().requires_grad_()
            with torch.enable_grad():
                active = activate(experts.activation, up)
            gates_n1 = gates_N[rows, None]
            inners.append(active.detach() * gates_n1)
            torch.linalg.vecdot(d_inner, active.detach(), out=dgates_N[rows])
            (d_up,) = torch.autograd.grad(active, up, d_inner.mul_(gates_n1))
            piece.product_into(dx_NH[rows], d_up, up_EOH[piece.experts])
            d_ups.append(d_up)

        def weights() -> None:
            for parameter, lefts, rights in (
                (experts.up, d_ups, [x_NH[piece.rows] for piece in pieces]),
                (experts.down, [dy_NH[piece.rows] for piece in pieces], inners),
            ):
                if len(pieces) == 1 and (ends := pieces[0].ends) is not None:
                    parameter.add_grouped(lefts[0], rights[0], ends)
                else:
                    parameter.add_products(counts, lefts, rights)

        ctx.frame.later.do(weights)
        return dx_NH, dgates_N, None, None, None


def _matrices(weight: Parameter, counts: Sequence[int]) -> Tensor:
    """[experts, outputs, inputs]."""
    return weight.value.view(len(counts), -1, weight.value.shape[-1])


@dataclass(frozen=True)
class _Piece:
    """Rows that are multiplied at once: of one expert, or of all, where each one's `ends` [E]."""

    experts: int | slice
    rows: slice
    ends: Tensor | None = None

    def product(self, left_nK: Tensor, right: Tensor) -> Tensor:
        """Rows times the matrix [K, M] of their expert, or matrices [E, K, M]."""
        if self.ends is None:
            return product(left_nK, right)
        return F.grouped_mm(left_nK, right, offs=self.ends)

    def product_into(self, out_nM: Tensor, left_nK: Tensor, right: Tensor) -> None:
        """The same, to where it belongs."""
        if self.ends is None:
            product_into(out_nM, left_nK, right, add=False)
        else:
            out_nM.copy_(self.product(left_nK, right))


def _pieces(x_NH: Tensor, up: Tensor, down: Tensor, counts: Sequence[int]) -> list[_Piece]:
    if grouped(x_NH, up.shape[1], down.shape[2]):
        ends = torch.tensor(counts, device=x_NH.device).cumsum(0, dtype=torch.int32)
        return [_Piece(slice(None), slice(None), ends)]
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append(_Piece(expert, slice(start, start + count)))
        start += count
    return found


def grouped(x_NH: Tensor, *widths: int) -> bool:
    """Whether one product of all experts is possible, on rows of these widths beside their own, and
    the faster way: a GPU's is, where each row is a whole number of 16 bytes."""
    aligned = all(width * x_NH.element_size() % 16 == 0 for width in (x_NH.shape[1], *widths))
    return x_NH.is_cuda and aligned and x_NH.dtype is not torch.float64
