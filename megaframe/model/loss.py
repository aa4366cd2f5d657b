"""The output head and the loss, together, so that the logits of a microbatch never exist as a
whole.

For one chunk of tokens at a time, the logits are computed, turned into probabilities in place and
multiplied into the gradients of the hidden state and the weight; then their buffer is reused. The
gradient is therefore complete when the forward pass ends, and nothing is computed twice.

The gradient of the loss with respect to the logits of one token is probability minus target, times
a scale (1 / valid tokens, times the loss scale).

Shape legend: T tokens of a chunk, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.output_head import (
    FP32_PARTS,
    count_rows_per_chunk,
    get_max_logits_per_chunk,
)
from megaframe.config.parts import LossPart
from megaframe.data.microbatch import IGNORE
from megaframe.distributed.collectives import Group, all_gather, all_reduce, reduce_scatter
from megaframe.model.vocabulary import Vocabulary, compute_part_losses
from megaframe.ops.kernel_dispatch import NO_KERNELS, Kernels
from megaframe.ops.matmul import multiply_into
from megaframe.parameters.parameter import Parameter


@dataclass(frozen=True)
class LossOptions:
    """Options of the loss.

    Attributes:
        label_smoothing: Share of the target that is spread over the vocabulary.
        z_loss: Weight of the squared log-partition.
        softcap: Logits x become cap * tanh(x / cap).
        part: A loss from outside, in place of cross-entropy and of what changes that.
        multiplier: Factor of the product with the weight, before a bias is added.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    part: LossPart | None = None
    multiplier: float = 1.0


@dataclass(frozen=True)
class HeadResult:
    """The loss and its gradient.

    Attributes:
        loss: The sum over valid tokens, fp64 scalar; zero on all tensor ranks but the first.
        d_hidden: The gradient of the sum with respect to the hidden state, times the scale, [rows,
            H] in the type of the hidden state; None without a scale.
    """

    loss: Tensor
    d_hidden: Tensor | None


def compute_head_loss(
    hidden_TH: Tensor,
    labels_T: Tensor,
    weight: Parameter,
    options: LossOptions,
    scale: Tensor | None,
    tensor: Group,
    kernels: Kernels = NO_KERNELS,
    *,
    bias: Parameter | None = None,
    label_weights_T: Tensor | None = None,
) -> HeadResult:
    """Compute the sum of the losses of all tokens whose label is not IGNORE.

    With a scale, also compute scale * d(loss sum)/d(hidden), and add scale * d(loss sum)/d(weight)
    to the weight's gradient, and the same for the bias.

    Args:
        hidden_TH: This rank's rows of the normalised stream.
        labels_T: Labels of the rows of all tensor ranks.
        weight: This rank's part of the projection, [V, H].
        options: Of the loss.
        scale: Factor of the gradients, fp64 scalar on the same device. Without it only the loss is
            computed.
        tensor: The ranks that divide rows and vocabulary.
        kernels: The kernels of the run.
        bias: This rank's part of the bias of the logits, [V]; None without one.
        label_weights_T: Factor of the loss of each label; None for 1.

    Returns:
        The loss, and the gradient of this rank's rows if there is a scale.
    """
    # The ranks divide the vocabulary, so each computes its part of the logits for the rows of all.
    hidden_TH = all_gather(hidden_TH, tensor).wait()
    tokens, vocab = hidden_TH.shape[0], weight.value.shape[0]
    part = Vocabulary(weight.box.offset[0], vocab, weight.spec.shape[0], tensor)
    # Not by this rank's own part, which may be a word smaller than another's: all ranks must have
    # equally many chunks, because each chunk communicates.
    most_rows = count_rows_per_chunk(part.most_words, host=hidden_TH.device.type == "cpu")
    rows = min(tokens, most_rows)
    # Memory for the logits of one chunk; every chunk overwrites those of the chunk before.
    buffer = hidden_TH.new_empty(rows, vocab)
    loss = torch.zeros((), dtype=torch.float64, device=hidden_TH.device)
    d_hidden = None if scale is None else torch.empty_like(hidden_TH)
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    if scale is not None:
        # The scale stays a tensor: only a number that the device reads can change from one run of a
        # CUDA graph to the next.
        scale = scale.to(wide)
    # Of the logits' gradient: both products with it are then gradients without another factor.
    product_scale = None if scale is None else scale * options.multiplier
    if label_weights_T is not None:
        label_weights_T = label_weights_T.to(wide)  # a scalar in fp64 would not widen a product
    for start in range(0, tokens, rows):
        piece = slice(start, min(start + rows, tokens))
        chunk_TH, chunk_labels = hidden_TH[piece], labels_T[piece]
        logits_TV = buffer[: len(chunk_labels)]
        multiply_into(logits_TV, chunk_TH, weight.value.t())
        if options.multiplier != 1.0:
            logits_TV.mul_(options.multiplier)
        if bias is not None:
            logits_TV += bias.value
        # With a scale, the logits become their gradient in place.
        chunk_scale = product_scale
        if label_weights_T is not None and product_scale is not None:
            chunk_scale = product_scale * label_weights_T[piece]
        losses = _compute_losses(logits_TV, chunk_labels, part, options, chunk_scale, kernels)
        if label_weights_T is not None:
            losses = losses * label_weights_T[piece]
        # Summed in fp64, because many small terms are added to a large sum.
        loss += torch.where(chunk_labels == IGNORE, 0.0, losses).sum(dtype=torch.float64)
        if d_hidden is not None:
            # Both products read the gradient of the logits before the next chunk reuses its memory.
            multiply_into(d_hidden[piece], logits_TV, weight.value)
            weight.add_product(logits_TV, chunk_TH)
            if bias is not None:
                bias.add(logits_TV.sum(0, dtype=wide) / options.multiplier)
    if d_hidden is not None:
        # So far each rank has only what its part of the vocabulary adds to the gradient of all
        # rows.
        d_hidden = reduce_scatter(d_hidden, tensor).wait()
    # Every tensor rank has the same loss; it counts once in a sum over ranks.
    return HeadResult(loss if tensor.index == 0 else torch.zeros_like(loss), d_hidden)


def _compute_losses(
    logits_TV: Tensor,
    labels_T: Tensor,
    part: Vocabulary,
    options: LossOptions,
    scale: Tensor | None,
    kernels: Kernels,
) -> Tensor:
    """Return the loss of each token in at least fp32, meaningless for tokens without a label. With
    a `scale`, a scalar or [T], replace the logits by scale * d(loss)/d(logits), which is zero for
    those tokens."""
    if options.part is not None:
        assert scale is not None, "evaluations are cross-entropy"
        return compute_part_losses(options.part, logits_TV, labels_T, part, scale, options.softcap)
    join = None
    if part.group.size > 1:

        def join(partition_T: Tensor, label_T: Tensor) -> tuple[Tensor, Tensor]:
            return _reduce_over_vocabulary(partition_T, label_T, part.group)

    arguments = {
        "label_smoothing": options.label_smoothing,
        "z_loss": options.z_loss,
        "softcap": options.softcap,
        "start": part.start,
        "vocab": part.size,
        "join": join,
        "gradient": scale is not None,
        "scale": scale,
    }
    if run := kernels.find("loss", logits_TV, labels_T, **arguments):
        return run(logits_TV, labels_T, **arguments)[0]
    return _compute_plain_losses(logits_TV, labels_T, part, options, scale)


def _compute_plain_losses(
    logits_TV: Tensor,
    labels_T: Tensor,
    part: Vocabulary,
    options: LossOptions,
    scale: Tensor | None,
) -> Tensor:
    """Compute `_compute_losses` in plain code, in at least fp32 and a few rows at a time."""
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    cap, smooth = options.softcap, options.label_smoothing
    # IGNORE is negative and becomes word 0: its loss is meaningless, and its weight below is 0.
    local_T = labels_T.clamp_min(0) - part.start
    inside_T = (local_T >= 0) & (local_T < logits_TV.shape[1])
    # Labels in another rank's part read the first logit here, and are masked out with `inside_T`.
    local_T = local_T.masked_fill(~inside_T, 0)
    own_T, label_T, hit_T = (torch.empty_like(labels_T, dtype=wide) for _ in range(3))
    weight_T = None if scale is None else torch.where(labels_T == IGNORE, 0.0, scale)
    # The derivative of the softcap, 1 - tanh^2, for the last step of the chain rule.
    slope_TV = None if weight_T is None or cap is None else torch.empty_like(logits_TV)
    for rows, x in _iterate_wide(logits_TV, wide):
        if cap is not None:
            x.div_(cap).tanh_()
            if slope_TV is not None:
                slope_TV[rows] = 1.0 - x.square()
            x.mul_(cap)
        at_target = torch.arange(len(x), device=x.device), local_T[rows]
        # Logit times target, before the softmax overwrites x. The target is 1 - smooth at the label
        # plus smooth / vocab at every word.
        label_T[rows] = x[at_target] * inside_T[rows] * (1.0 - smooth)
        if smooth:
            label_T[rows] += smooth / part.size * x.sum(-1)
        top = x.amax(-1)
        # Over this rank's part only; `factor_T` below turns it into the softmax over all parts.
        torch.softmax(x, -1, out=x)
        # The largest probability is exp(0) / sum, so its logarithm gives the sum.
        own_T[rows] = top - x.amax(-1).log()
        # Kept before it is rounded; see the last lines of this function.
        hit_T[rows] = x[at_target]
        if weight_T is not None:
            # Scaled before it is rounded, so scaling costs no precision as long as the type has the
            # range (which the loss scale ensures in fp16). The weight is 0 for tokens without a
            # label. In fp32 and fp64 x is these very rows.
            logits_TV[rows].copy_(x.mul_(weight_T[rows, None]))
    partition_T, label_T = _reduce_over_vocabulary(own_T, label_T, part.group)
    # -log softmax(x)[label] = log-sum-exp(x) - x[label], plus the z-loss.
    losses = partition_T - label_T + options.z_loss * partition_T.square()
    if weight_T is None:
        return losses
    spread_T = smooth / part.size * weight_T
    # exp(own - whole) makes the part's softmax the whole one. The derivative of z p^2 with respect
    # to a logit is 2 z p times its probability, where p is the log-partition.
    factor_T = (own_T - partition_T).exp() * (1.0 + 2.0 * options.z_loss * partition_T)
    # Otherwise the factor is 1 and nothing is subtracted: the rows are final already.
    if part.group.size > 1 or options.z_loss or smooth or slope_TV is not None:
        for rows, x in _iterate_wide(logits_TV, wide):
            x.mul_(factor_T[rows, None]).sub_(spread_T[rows, None])
            logits_TV[rows].copy_(x if slope_TV is None else x.mul_(slope_TV[rows]))
    # If a target's probability is near 1, rounding it would lose its loss and its gradient. So the
    # gradient of the target's logit is computed from unrounded numbers, and rounded once.
    hit_T = (hit_T * factor_T - smooth / part.size - (1.0 - smooth)) * weight_T
    at_target = torch.arange(len(local_T), device=local_T.device), local_T
    if slope_TV is not None:
        hit_T *= slope_TV[at_target]
    # Indexed assignment: scatter_ copies the whole chunk on a CPU in low precision.
    logits_TV[at_target] = torch.where(inside_T, hit_T.to(logits_TV.dtype), logits_TV[at_target])
    return losses


def _iterate_wide(logits_TV: Tensor, wide: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few rows of a chunk at a time in the type `wide`: the chunk's own rows if they have
    that type, otherwise a copy in a buffer that is reused. On a CPU the rows fit in the cache, and
    the buffer is small compared with a chunk."""
    tokens, vocab = logits_TV.shape
    most = get_max_logits_per_chunk(host=logits_TV.device.type == "cpu")
    step = min(tokens, max(1, most // FP32_PARTS // vocab))
    buffer = logits_TV.new_empty(step, vocab, dtype=wide) if wide != logits_TV.dtype else None
    for start in range(0, tokens, step):
        rows = slice(start, min(start + step, tokens))
        chunk_rows = logits_TV[rows]
        yield rows, chunk_rows if buffer is None else buffer[: len(chunk_rows)].copy_(chunk_rows)


def _reduce_over_vocabulary(
    partition_T: Tensor, target_T: Tensor, tensor: Group
) -> tuple[Tensor, Tensor]:
    """Return the log-partition and target logit over the whole vocabulary, given those of this
    rank's part, in two collectives."""
    if tensor.size == 1:
        return partition_T, target_T
    # log-sum-exp of the parts, with the largest taken out so that no exponential overflows. The
    # clone is needed because `all_reduce` works in place.
    top_T = all_reduce(partition_T.clone(), tensor, "max").wait()
    # Both sums in one collective.
    sums = all_reduce(torch.stack(((partition_T - top_T).exp(), target_T)), tensor).wait()
    return top_T + sums[0].log(), sums[1]
