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

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from megaframe.comm import Group, all_gather, all_reduce, reduce_scatter
from megaframe.kernels import NO_KERNELS, Kernels
from megaframe.microbatch import IGNORE
from megaframe.parameter import Parameter
from megaframe.plan.memory import most_logits
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
    """loss: fp64 scalar, the sum over valid tokens; on a tensor axis all of it on the first rank.
    d_hidden: its gradient times the given scale, [rows, H] in the type of the hidden state; None
    without a gradient."""

    loss: Tensor
    d_hidden: Tensor | None


def head_loss(
    hidden_TH: Tensor,
    labels_T: Tensor,
    weight: Parameter,
    options: LossOptions,
    scale: float | None,
    tensor: Group,
    kernels: Kernels = NO_KERNELS,
) -> HeadResult:
    """Sum of the losses of all tokens whose label is not IGNORE.

    hidden: this rank's rows. labels: of the rows of all tensor ranks. With a `scale`, also
    scale * d(loss sum)/d(hidden), and scale * d(loss sum)/d(weight) is added to the weight's
    gradient. Without one, nothing but the loss.
    """
    hidden_TH = all_gather(hidden_TH, tensor).wait()
    tokens, vocab = hidden_TH.shape[0], weight.value.shape[0]
    most = most_logits(host=hidden_TH.device.type == "cpu")
    rows = min(tokens, max(1, most // vocab))
    buffer = hidden_TH.new_empty(rows, vocab)
    loss = torch.zeros((), dtype=torch.float64, device=hidden_TH.device)
    d_hidden = None if scale is None else torch.empty_like(hidden_TH)
    part = _Part(weight.box.offset[0], weight.spec.shape[0], tensor)
    for start in range(0, tokens, rows):
        piece = slice(start, min(start + rows, tokens))
        chunk_TH, chunk_labels = hidden_TH[piece], labels_T[piece]
        valid = chunk_labels != IGNORE
        logits_TV = buffer[: len(chunk_labels)]
        product_into(logits_TV, chunk_TH, weight.value.t(), add=False)
        losses = _losses(logits_TV, chunk_labels, part, options, scale is not None, kernels)
        loss += torch.where(valid, losses, 0.0).sum(dtype=torch.float64)
        if scale is not None and d_hidden is not None:
            product_into(d_hidden[piece], logits_TV, weight.value, scale=scale, add=False)
            d_hidden[piece].mul_(valid[:, None])
            weight.add_product(logits_TV, chunk_TH * valid[:, None], scale)
    if d_hidden is not None:
        d_hidden = reduce_scatter(d_hidden, tensor).wait()
    return HeadResult(loss if tensor.index == 0 else torch.zeros_like(loss), d_hidden)


@dataclass(frozen=True)
class _Part:
    """Where a rank's logits lie in the vocabulary: from `start` on, of `vocab` in all."""

    start: int
    vocab: int
    tensor: Group


def _losses(
    logits_TV: Tensor,
    labels_T: Tensor,
    part: _Part,
    options: LossOptions,
    gradient: bool,
    kernels: Kernels,
) -> Tensor:
    """Loss of each token in at least fp32; with `gradient`, the logits become d(loss)/d(logits). Of
    tokens without a label both mean nothing."""
    join = None
    if part.tensor.size > 1:

        def join(partition_T: Tensor, label_T: Tensor) -> tuple[Tensor, Tensor]:
            return _over_the_vocabulary(partition_T, label_T, part.tensor)

    how = {**asdict(options), "start": part.start, "vocab": part.vocab, "join": join}
    if run := kernels.find("loss", logits_TV, labels_T, **how, gradient=gradient):
        return run(logits_TV, labels_T, **how, gradient=gradient)[0]
    return _plain_losses(logits_TV, labels_T.clamp_min(0), part, options, gradient)


def _plain_losses(
    logits_TV: Tensor, targets_T: Tensor, part: _Part, options: LossOptions, gradient: bool
) -> Tensor:
    slope = None
    if options.softcap is not None:
        logits_TV.div_(options.softcap).tanh_()
        if gradient:
            slope = 1.0 - logits_TV.square()
        logits_TV.mul_(options.softcap)
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    smooth = options.label_smoothing
    here_T = targets_T - part.start
    inside_T = (here_T >= 0) & (here_T < logits_TV.shape[1])
    here_T = here_T.masked_fill(~inside_T, 0)
    at_target = torch.arange(len(targets_T), device=targets_T.device), here_T
    top_T = logits_TV.amax(-1).to(wide)
    target_T = logits_TV[at_target].to(wide) * inside_T * (1.0 - smooth)
    if smooth:
        target_T += smooth / part.vocab * logits_TV.sum(-1, dtype=wide)
    torch.softmax(logits_TV, -1, out=logits_TV)
    # The largest probability is exp(0) / sum, so its logarithm gives the sum with one cheap pass.
    own_T = top_T - logits_TV.amax(-1).to(wide).log()
    partition_T, target_T = _over_the_vocabulary(own_T, target_T, part.tensor)
    losses = partition_T - target_T + options.z_loss * partition_T.square()
    if gradient:
        if part.tensor.size > 1 or options.z_loss:
            share_T = (own_T - partition_T).exp()
            _scale_rows(logits_TV, share_T * (1.0 + 2.0 * options.z_loss * partition_T))
        if smooth:
            logits_TV.sub_(smooth / part.vocab)
        # Indexed assignment: scatter_ copies the whole chunk on a CPU in low precision.
        logits_TV[at_target] += inside_T.to(logits_TV.dtype) * (smooth - 1.0)
        if slope is not None:
            logits_TV.mul_(slope)
    return losses


def _scale_rows(x_TV: Tensor, factor_T: Tensor) -> None:
    """Multiply each row by its factor, which may be of higher precision, in place.

    On a CPU a tensor of factors would copy the whole chunk into their type and back. A number is
    multiplied in at least fp32 as well, and copies nothing.
    """
    if x_TV.device.type == "cpu" and x_TV.dtype != factor_T.dtype:
        for row, factor in zip(x_TV, factor_T.tolist(), strict=True):
            row.mul_(factor)
    else:
        x_TV.mul_(factor_T[:, None])


def _over_the_vocabulary(
    partition_T: Tensor, target_T: Tensor, tensor: Group
) -> tuple[Tensor, Tensor]:
    """Log-partition and target logit of the whole vocabulary from those of its parts, in two
    collectives."""
    if tensor.size == 1:
        return partition_T, target_T
    top_T = all_reduce(partition_T.clone(), tensor, "max").wait()
    sums = all_reduce(torch.stack(((partition_T - top_T).exp(), target_T)), tensor).wait()
    return top_T + sums[0].log(), sums[1]
