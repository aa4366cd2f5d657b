"""The output head and the loss, together, so that the logits of a microbatch never exist whole.

A chunk of tokens at a time, the logits are made, turned into probabilities in place and multiplied
back into the gradients of the hidden state and of the weight; then their buffer is used again. The
gradient is therefore ready when the forward pass is, and nothing is computed twice.

The gradient of the loss with respect to the logits of one token is probability minus target; the
constant in front of it (1 / valid tokens, times the loss scale) is applied to the small products
instead, which spares a pass over the chunk. Shape legend: T tokens of a chunk, V vocabulary, H
hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.microbatch import IGNORE
from megaframe.parameter import Parameter
from megaframe.plan.memory import LOSS_CHUNK
from megaframe.product import product_into


@dataclass(frozen=True)
class LossOptions:
    """label_smoothing: share of the target spread over the vocabulary. z_loss: weight of the
    squared log-partition. softcap: logits x become cap * tanh(x / cap)."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None


@dataclass(frozen=True)
class HeadResult:
    """loss: fp64 scalar, the sum over valid tokens. d_hidden: its gradient times the given scale,
    [tokens, H] in the type of the hidden state; None without a gradient."""

    loss: Tensor
    d_hidden: Tensor | None


def head_loss(
    hidden_TH: Tensor,
    labels_T: Tensor,
    weight: Parameter,
    options: LossOptions,
    scale: float | None,
) -> HeadResult:
    """Sum of the losses of all tokens whose label is not IGNORE.

    With a `scale`, also scale * d(loss sum)/d(hidden), and scale * d(loss sum)/d(weight) is added
    to the weight's gradient. Without one, nothing but the loss.
    """
    tokens, vocab = hidden_TH.shape[0], weight.value.shape[0]
    rows = min(tokens, max(1, LOSS_CHUNK // vocab))
    buffer = hidden_TH.new_empty(rows, vocab)
    loss = torch.zeros((), dtype=torch.float64, device=hidden_TH.device)
    d_hidden = None if scale is None else torch.empty_like(hidden_TH)
    for start in range(0, tokens, rows):
        piece = slice(start, min(start + rows, tokens))
        chunk_TH, chunk_labels = hidden_TH[piece], labels_T[piece]
        valid = chunk_labels != IGNORE
        logits_TV = buffer[: len(chunk_labels)]
        product_into(logits_TV, chunk_TH, weight.value.t(), add=False)
        targets = chunk_labels.clamp_min(0)
        losses = _losses(logits_TV, targets, options, scale is not None)
        loss += torch.where(valid, losses, 0.0).sum(dtype=torch.float64)
        if scale is not None and d_hidden is not None:
            product_into(d_hidden[piece], logits_TV, weight.value, scale=scale, add=False)
            d_hidden[piece].mul_(valid[:, None])
            weight.add_product(logits_TV, chunk_TH * valid[:, None], scale)
    return HeadResult(loss, d_hidden)


def _losses(logits_TV: Tensor, targets_T: Tensor, options: LossOptions, gradient: bool) -> Tensor:
    """Loss of each token in at least fp32; with `gradient`, the logits become d(loss)/d(logits)."""
    slope = None
    if options.softcap is not None:
        logits_TV.div_(options.softcap).tanh_()
        if gradient:
            slope = 1.0 - logits_TV.square()
        logits_TV.mul_(options.softcap)
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    smooth = options.label_smoothing
    at_target = torch.arange(len(targets_T), device=targets_T.device), targets_T
    top_T = logits_TV.amax(-1).to(wide)
    target_T = logits_TV[at_target].to(wide) * (1.0 - smooth)
    if smooth:
        target_T += smooth * logits_TV.mean(-1, dtype=wide)
    torch.softmax(logits_TV, -1, out=logits_TV)
    # The largest probability is exp(0) / sum, so its logarithm gives the sum with one cheap pass.
    partition_T = top_T - logits_TV.amax(-1).to(wide).log()
    losses = partition_T - target_T + options.z_loss * partition_T.square()
    if gradient:
        if options.z_loss:
            logits_TV.mul_((1.0 + 2.0 * options.z_loss * partition_T)[:, None])
        if smooth:
            logits_TV.sub_(smooth / logits_TV.shape[1])
        # Indexed assignment: scatter_ copies the whole chunk on a CPU in low precision.
        logits_TV[at_target] += smooth - 1.0
        if slope is not None:
            logits_TV.mul_(slope)
    return losses
