"""Experts: many MLPs as one, each over its own rows.

Rows lie expert after expert, so each expert is one product over a piece of them. An expert without
rows is nothing but a gradient of zero. What a token's expert counts for it is multiplied in before
the second product: so what the experts give needs no more than to be summed, and is not kept.

Shape legend: N rows of all experts of this rank, I inputs, O outputs, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaframe.config import Model, Moe
from megaframe.nn.frame import Frame
from megaframe.nn.mlp import activate
from megaframe.parameter import Module, Parameter
from megaframe.product import product_into
from megaframe.spec import Normal, ParamSpec

Between = Callable[[Tensor, Tensor], Tensor]
"""What lies between the products: of rows and of the weight of each."""


class Experts(Module):
    """hidden -> width -> hidden in each expert, without biases."""

    def __init__(self, name: str, model: Model, moe: Moe, output_std: float) -> None:
        width = moe.ffn or model.ffn
        gated = model.activation == "swiglu"
        self._between = partial(_weighted, model.activation)
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
        up = _Grouped.apply(x_NH, gates_N, self.up, counts, frame, None)
        if frame.selective:
            return _Grouped.apply(up, gates_N, self.down, counts, frame, self._between)
        return _Grouped.apply(self._between(up, gates_N), gates_N, self.down, counts, frame, None)


def _weighted(activation: str, x_NO: Tensor, gates_N: Tensor) -> Tensor:
    return _Weighted.apply(x_NO, gates_N, activation)


class _Weighted(torch.autograd.Function):
    """activate(x) times a weight for each row. Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x, gates)
        ctx.activation = activation
        return activate(activation, x) * gates[:, None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, None]:
        (x, gates), dy = ctx.saved_tensors, gradients[0]
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            active = activate(ctx.activation, x)
        active.backward(dy * gates[:, None])
        return x.grad, torch.linalg.vecdot(dy, active.detach()), None


class _Grouped(torch.autograd.Function):
    """Each expert's rows times its matrix; with `between`, of that of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates: Tensor,
        weight: Parameter,
        counts: Sequence[int],
        frame: Frame,
        between: Between | None,
    ) -> Tensor:
        ctx.save_for_backward(x, gates)
        ctx.weight, ctx.counts, ctx.frame, ctx.between = weight, counts, frame, between
        return _products(x if between is None else between(x, gates), weight, counts, out=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, gates), dy = ctx.saved_tensors, gradients[0]
        weight, counts, between = ctx.weight, ctx.counts, ctx.between
        source, dgates = x, None
        if between is not None:
            x, gates = x.detach().requires_grad_(), gates.detach().requires_grad_()
            with torch.enable_grad():
                source = between(x, gates)
        dx: Tensor | None = _products(dy, weight, counts, out=False)
        rows = source.detach()
        ctx.frame.later.do(lambda: weight.add_products(dy, rows, counts))
        if between is not None:
            source.backward(dx)
            dx, dgates = x.grad, gates.grad
        return dx, dgates, None, None, None, None


def _products(x: Tensor, weight: Parameter, counts: Sequence[int], *, out: bool) -> Tensor:
    """[N, I] to [N, O], or with `out` false back, [N, O] to [N, I]."""
    inputs = weight.value.shape[-1]
    matrices_EOI = weight.value.view(len(counts), -1, inputs)
    y = x.new_empty(len(x), matrices_EOI.shape[1] if out else inputs)
    for expert, piece in spans(counts):
        matrix = matrices_EOI[expert]
        product_into(y[piece], x[piece], matrix.t() if out else matrix, add=False)
    return y


def spans(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and where they are."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
