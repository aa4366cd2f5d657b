"""Cross-entropy that replaces the logits by their own gradient in place.

The head multiplies this gradient next, so no second buffer as large as a chunk of logits is needed.
With a part of a vocabulary, the numbers of all ranks are combined before the gradient is computed.
Shape legend: T tokens, V vocabulary (of this rank).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megaframe_kernels import cross_entropy
from megaframe_kernels.cross_entropy import IGNORE, Join
from megaframe_kernels.installed import missing_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_place, refuse_types


def reference(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    start: int = 0,
    vocab: int | None = None,
    join: Join | None = None,
    gradient: bool = True,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, [T] in at least fp32, and the logits. With `gradient`, these
    have been overwritten by the gradient of the sum of the losses, times the scalar `scale` if
    there is one. Tokens with negative labels have no loss. Options are as in
    `cross_entropy.reference`."""
    options: dict[str, Any] = {
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "softcap": softcap,
        "start": start,
        "vocab": vocab,
        "join": join,
    }
    labels_T = labels_T.masked_fill(labels_T < 0, IGNORE)
    with torch.enable_grad():
        leaf = logits_TV.detach().clone().requires_grad_()
        losses = cross_entropy.reference(leaf, labels_T, **options)
        if gradient:
            total = losses.sum() if scale is None else losses.sum() * scale
            (made,) = torch.autograd.grad(total, leaf)
            logits_TV.copy_(made)
    return losses.detach(), logits_TV


@torch.library.custom_op("megaframe::cross_entropy_gradient_", mutates_args=("logits_TV",))
def _gradient_op(
    d_partition_T: Tensor,
    d_label_T: Tensor,
    logits_TV: Tensor,
    labels_T: Tensor,
    partition_T: Tensor,
    start: int,
    vocab: int,
    label_smoothing: float,
    softcap: float | None,
) -> None:
    given = (d_partition_T, d_label_T, logits_TV, labels_T, partition_T, logits_TV)
    cross_entropy.launch_backward(*given, start, vocab, label_smoothing, softcap)


_parts_op = torch.ops.megaframe.cross_entropy_parts


@torch.no_grad()
def run_triton(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    start: int = 0,
    vocab: int | None = None,
    join: Join | None = None,
    gradient: bool = True,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the reference in Triton. The gradient is multiplied by the scale in fp32, before it
    is rounded."""
    rest = (start, vocab or logits_TV.shape[1], label_smoothing, softcap)
    own, own_label = _parts_op(logits_TV, labels_T, *rest)
    whole, label = (own, own_label) if join is None else join(own.clone(), own_label.clone())
    valid = (labels_T >= 0).to(own.dtype)
    if gradient:
        # exp(z - whole) is the probability over the whole vocabulary: no gradients to exchange.
        weight = valid if scale is None else valid * scale
        _gradient_op(
            weight * (1.0 + 2.0 * z_loss * whole), -weight, logits_TV, labels_T, whole, *rest
        )
    return (whole - label + z_loss * whole.square()) * valid, logits_TV


def _refuses(logits_TV: Tensor, labels_T: Tensor, **_: Any) -> str | None:
    if not logits_TV.shape[1]:
        return "a vocabulary of 0 words has no log-partition"
    if logits_TV.stride(1) != 1:
        return "the logits of a token are not contiguous"
    return refuse_types(logits_TV) or refuse_place(labels_T)


KERNEL = Kernel(
    "loss",
    reference,
    {"triton": Implementation("triton", run_triton, missing_nothing, _refuses)},
    constant=8.0,
)
