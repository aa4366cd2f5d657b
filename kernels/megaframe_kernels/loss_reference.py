"""Cross-entropy in plain torch: what the kernel of `loss.py` computes, differentiable.

Two numbers per token carry everything: the log-partition and the smoothed logit of the label. Those
of the parts of a vocabulary are combined into those of the whole by one log-sum-exp and one sum.
Shape legend: T tokens, V vocabulary (of this rank).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

IGNORE = -100
"""The label of tokens that have no loss."""

Join: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Combines this rank's log-partitions and label logits [T] with those of the other ranks, by
log-sum-exp and by sum."""


def run_reference_parts(
    logits_TV: Tensor,
    labels_T: Tensor,
    start: int,
    vocab: int,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-partition and the smoothed label logit of each token.

    partition = log(sum(exp(z))); label = (1 - s) z[label] + s / vocab sum(z).

    Args:
        logits_TV: Logits of the words from `start` on.
        labels_T: Numbers of words in the whole vocabulary; a label that is not among these words
            adds 0.
        start: Number of the first word.
        vocab: Size of the whole vocabulary.
        label_smoothing: s.
        softcap: Logits x become cap tanh(x / cap).

    Returns:
        The two numbers of each token, [T] in at least fp32.
    """
    z = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    # Numbers of the labels among this rank's words; outside of 0 .. V - 1 for other ranks' words.
    local_labels = labels_T - start
    inside = (local_labels >= 0) & (local_labels < z.shape[1])
    # gather needs a valid index even where the result is replaced by 0.
    at = local_labels.masked_fill(~inside, 0)[:, None]
    label = torch.where(inside, z.gather(1, at)[:, 0], 0.0) if z.shape[1] else z.sum(1)
    if label_smoothing:  # without smoothing, a logit of -inf would give 0 * -inf = NaN
        label = (1.0 - label_smoothing) * label + label_smoothing / vocab * z.sum(1)
    return z.logsumexp(1), label


def compute_token_losses(
    partition_T: Tensor, label_T: Tensor, labels_T: Tensor, z_loss: float
) -> Tensor:
    """Return the loss of each token, given its numbers over the whole vocabulary.

    Args:
        partition_T: Log-partitions.
        label_T: Smoothed logits of the labels.
        labels_T: The labels; IGNORE gives a loss of 0.
        z_loss: Factor of partition^2.
    """
    loss = partition_T - label_T + z_loss * partition_T.square()
    return torch.where(labels_T == IGNORE, 0.0, loss)


def cross_entropy(
    logits_TV: Tensor,
    labels_T: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    start: int = 0,
    vocab: int | None = None,
    join: Join | None = None,
) -> Tensor:
    """lse(z) - (1 - s) z[label] - s mean(z) + z_loss lse(z)^2 of each token; 0 where the label is
    IGNORE.

    Szegedy et al. 2016; de Brebisson and Vincent 2016.

    Args:
        logits_TV: Logits of the words from `start` on.
        labels_T: Numbers of words in the whole vocabulary, or IGNORE.
        label_smoothing: s.
        z_loss: Factor of lse(z)^2.
        softcap: Logits x become cap tanh(x / cap).
        start: Number of the first word.
        vocab: Size of the whole vocabulary, by default V.
        join: Combines the numbers of all parts of the vocabulary.

    Returns:
        The losses, [T] in at least fp32.
    """
    whole = vocab or logits_TV.shape[1]
    parts = run_reference_parts(logits_TV, labels_T, start, whole, label_smoothing, softcap)
    if join is not None:
        parts = join_parts(*parts, join)
    return compute_token_losses(*parts, labels_T, z_loss)


class _JoinedParts(torch.autograd.Function):
    """Calls `join`. All ranks have the same losses and the same gradient of them, so the backward
    pass needs no communication."""

    @staticmethod
    def forward(ctx: Any, partition: Tensor, label: Tensor, join: Join) -> tuple[Tensor, Tensor]:
        # Copies, because `join` may work in place and the backward pass needs this rank's own.
        whole, whole_label = join(partition.clone(), label.clone())
        ctx.save_for_backward(partition, whole)
        return whole, whole_label

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        partition, whole = ctx.saved_tensors
        # d lse(whole) / d lse(own) = exp(own - whole), the share of this rank's words. Label logits
        # are only added up.
        return gradients[0] * (partition - whole).exp(), gradients[1], None


def join_parts(partition_T: Tensor, label_T: Tensor, join: Join) -> tuple[Tensor, Tensor]:
    """Apply `join` to this rank's numbers, with gradients.

    Args:
        partition_T: Log-sum-exp over this rank's logits.
        label_T: The label's logit, if this rank has it.
        join: Makes them those of the whole vocabulary.
    """
    return _JoinedParts.apply(partition_T, label_T, join)


def run_reference(
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
    """Return the loss of each token and the logits, or the gradient in their place.

    Args:
        logits_TV: Logits of the words from `start` on.
        labels_T: Numbers of words in the whole vocabulary; tokens with negative ones have no loss.
        label_smoothing: As in `cross_entropy`.
        z_loss: As in `cross_entropy`.
        softcap: As in `cross_entropy`.
        start: Number of the first word.
        vocab: Size of the whole vocabulary, by default V.
        join: Combines the numbers of all parts of the vocabulary.
        gradient: Overwrite the logits by the gradient of the sum of the losses.
        scale: Factor of that gradient, a scalar, or [T] for each token; None for 1.

    Returns:
        The losses, [T] in at least fp32, and `logits_TV`.
    """
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
        losses = cross_entropy(leaf, labels_T, **options)
        if gradient:
            total = losses.sum() if scale is None else (losses * scale).sum()
            (d_logits,) = torch.autograd.grad(total, leaf)
            # Over the logits, as the kernel does it: a second buffer of this size is not needed.
            logits_TV.copy_(d_logits)
    return losses.detach(), logits_TV
