"""Experts: many MLPs as one, each over its own rows.

Rows lie expert after expert, so each expert is one product over a piece of them. An expert without
rows is nothing but a gradient of zero. What a token's expert counts for it is multiplied in before
the second product: so what the experts give needs no more than to be summed, and is not kept.

Shape legend: N rows of all experts of this rank, I inputs, O outputs, F inner width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
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
    """Expert after expert, so that what lies between its products stays in cache. Keeps what comes
    of the first one only; the rest is made again from it."""

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
        y_NH, ups = torch.empty_like(x_NH), []
        for expert, rows in spans(counts):
            up = product(x_NH[rows], up_EOH[expert].t())
            inner = activate(experts.activation, up).mul_(gates_N[rows, None])
            product_into(y_NH[rows], inner, down_EHF[expert].t(), add=False)
            ups.append(up)
        ctx.save_for_backward(x_NH, gates_N, *ups)
        ctx.experts, ctx.counts, ctx.frame = experts, counts, frame
        return y_NH

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_NH, gates_N, *ups), dy_NH = ctx.saved_tensors, gradients[0].contiguous()
        experts, counts = ctx.experts, ctx.counts
        up_EOH, down_EHF = _matrices(experts.up, counts), _matrices(experts.down, counts)
        dx_NH, dgates_N = torch.empty_like(x_NH), torch.empty_like(gates_N)
        inners, d_ups = [], []
        for (expert, rows), up in zip(spans(counts), ups, strict=True):
            d_inner = product(dy_NH[rows], down_EHF[expert])
            up = up.detach().requires_grad_()
            with torch.enable_grad():
                active = activate(experts.activation, up)
            gates_n1 = gates_N[rows, None]
            inners.append(active.detach() * gates_n1)
            torch.linalg.vecdot(d_inner, active.detach(), out=dgates_N[rows])
            (d_up,) = torch.autograd.grad(active, up, d_inner.mul_(gates_n1))
            product_into(dx_NH[rows], d_up, up_EOH[expert], add=False)
            d_ups.append(d_up)

        def weights() -> None:
            pieces = [rows for _, rows in spans(counts)]
            experts.up.add_products(counts, d_ups, [x_NH[rows] for rows in pieces])
            experts.down.add_products(counts, [dy_NH[rows] for rows in pieces], inners)

        ctx.frame.later.do(weights)
        return dx_NH, dgates_N, None, None, None


def _matrices(weight: Parameter, counts: Sequence[int]) -> Tensor:
    """[experts, outputs, inputs]."""
    return weight.value.view(len(counts), -1, weight.value.shape[-1])


def spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and where they are."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
