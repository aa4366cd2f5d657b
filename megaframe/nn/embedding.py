"""Token and learned position embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.parameter import Module, Parameter
from megaframe.spec import Normal, ParamSpec


class Table(Module):
    """Rows looked up by number. The backward adds rows straight into the gradient bucket."""

    def __init__(self, name: str, rows: int, width: int, *, std: float, split: bool) -> None:
        axes = {0: "tensor"} if split else {}
        spec = ParamSpec(
            f"{name}.weight", (rows, width), Normal(std), role="embedding", decay=True, axes=axes
        )
        self.weight = Parameter(spec)

    def __call__(self, index: Tensor) -> Tensor:
        """index [...] int64 to [..., width]."""
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        return _Lookup.apply(anchor, index, self.weight)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, index: Tensor, weight: Parameter) -> Tensor:
        # `anchor` is an empty tensor that requires a gradient: without one autograd would not call
        # backward, because neither the index nor the weight is tracked.
        ctx.save_for_backward(index)
        ctx.weight = weight
        return F.embedding(index, weight.value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (index,) = ctx.saved_tensors
        ctx.weight.add_rows(index.reshape(-1), gradients[0].reshape(-1, gradients[0].shape[-1]))
        return None, None, None
