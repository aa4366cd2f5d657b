"""The output head and its cross-entropy together, so that the logits never exist as a whole.

For one chunk of tokens at a time, the logits are computed, replaced by their gradient in place, and
multiplied into the gradients of the hidden state and the weight. These gradients are therefore
complete when the forward pass ends; the backward pass only multiplies them by the gradient of the
loss. Shape legend: T tokens, V vocabulary (of this rank), H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaframe_kernels import cross_entropy
from megaframe_kernels.cross_entropy import IGNORE, Join, refuses_parts
from megaframe_kernels.installed import missing_liger, missing_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_place, refuse_types
from megaframe_kernels.loss import run_triton as loss_of

CHUNK = 2**28
"""Number of logits that exist at a time: enough rows that the division into chunks does not slow
down the products."""
_TILE = 128
"""Rows of a product's tile. Chunks of more rows are multiples of it, except the last one."""


def reference(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    start: int = 0,
    vocab: int | None = None,
    join: Join | None = None,
) -> Tensor:
    """Return the sum of the losses of all tokens, a scalar in at least fp32. Options are as in
    `cross_entropy.reference`.

    With `join`, the gradient of the hidden state is this rank's share; the sum of the shares over
    the ranks is the gradient.
    """
    logits = hidden_TH @ weight_VH.t()
    return cross_entropy.reference(
        logits,
        labels_T,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        start=start,
        vocab=vocab,
        join=join,
    ).sum()


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        labels_T: Tensor,
        z_loss: float,
        join: Join | None,
        chunk: int,
        options: dict[str, Any],
    ) -> Tensor:
        tokens, words = hidden_TH.shape[0], weight_VH.shape[0]
        rows = max(1, min(tokens, chunk // max(words, 1)))
        if _TILE < rows < tokens:
            rows -= rows % _TILE
        logits_TV = hidden_TH.new_empty(rows, words)
        loss = hidden_TH.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden_TH) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        for first in range(0, tokens, rows):
            piece = slice(first, min(first + rows, tokens))
            z, hidden, labels = logits_TV[: piece.stop - first], hidden_TH[piece], labels_T[piece]
            torch.mm(hidden, weight_VH.t(), out=z)
            losses, _ = loss_of(z, labels, z_loss=z_loss, join=join, **options)
            loss += losses.sum()
            if d_hidden is not None:
                torch.mm(z, weight_VH, out=d_hidden[piece])
            if d_weight is not None:
                d_weight.addmm_(z.t(), hidden)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        products = [None if d is None else d * gradients[0].to(d.dtype) for d in ctx.saved_tensors]
        return (*products, *([None] * 5))


def run_triton(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    start: int = 0,
    vocab: int | None = None,
    join: Join | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Compute the reference in Triton. chunk: number of logits that exist at a time."""
    options = {
        "start": start,
        "vocab": vocab or weight_VH.shape[0],
        "label_smoothing": label_smoothing,
        "softcap": softcap,
    }
    return _Fused.apply(hidden_TH, weight_VH, labels_T, z_loss, join, chunk, options)


def run_liger(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    labels_T: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute the reference by Liger-Kernel."""
    from liger_kernel.transformers import functional

    return functional.liger_fused_linear_cross_entropy(
        hidden_TH,
        weight_VH,
        labels_T,
        ignore_index=IGNORE,
        lse_square_scale=z_loss,
        label_smoothing=label_smoothing,
        reduction="sum",
        softcap=softcap,
    )


def _refuses(hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, **_: Any) -> str | None:
    if not weight_VH.shape[0]:
        return "a vocabulary of 0 words has no log-partition"
    if hidden_TH.dtype != weight_VH.dtype:
        return f"hidden state in {hidden_TH.dtype} and weight in {weight_VH.dtype}"
    return refuse_types(hidden_TH, weight_VH) or refuse_place(labels_T)


def _liger_refuses(
    hidden_TH: Tensor, weight_VH: Tensor, labels_T: Tensor, **options: Any
) -> str | None:
    return refuses_parts(**options) or (None if hidden_TH.is_cuda else "tensors are not on a GPU")


KERNEL = Kernel(
    "linear_cross_entropy",
    reference,
    {
        "triton": Implementation("triton", run_triton, missing_nothing, _refuses),
        "liger": Implementation("liger", run_liger, missing_liger, _liger_refuses),
    },
    constant=8.0,
)
