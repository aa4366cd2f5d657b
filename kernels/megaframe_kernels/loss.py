"""Cross-entropy with label smoothing and z-loss, of whole logits or of one rank's part of them.

It replaces the logits by their own gradient in place.

The head multiplies this gradient next, so no second buffer as large as a chunk of logits is needed.
Two numbers per token carry everything: the log-partition and the smoothed logit of the label. Those
of the parts of a vocabulary are combined into those of the whole by one log-sum-exp and one sum, so
a rank that has a part runs the same two kernels. Shape legend: T tokens, V vocabulary (of this
rank).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch, next_power_of_2
from megaframe_kernels.device_math import LOG2_E, LOG_2, tanh
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_place, refuse_types
from megaframe_kernels.loss_reference import Join, run_reference

_BLOCK = 8192
_GRADIENT_BLOCK = 2048


@triton.jit
def _forward(
    logits: tl.tensor,
    labels: tl.tensor,
    partitions: tl.tensor,
    targets: tl.tensor,
    stride: tl.tensor,
    words: tl.tensor,
    start: tl.tensor,
    smoothing: tl.tensor,
    spread: tl.tensor,
    cap: tl.tensor,
    SMOOTH: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute one row per program, with running maxima and sums of exponentials (Milakov and
    Gimelshein 2018): partition = log(sum(exp(z))), target = z[label], smoothed."""
    row = tl.program_id(0).to(tl.int64)
    # Every 8 neighbouring columns of a block have a maximum of their own until the row ends, so
    # threads need not synchronise in the loop.
    place = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    at = logits + row * stride
    total = tl.zeros([BLOCK // 8], tl.float32)
    top, plain = total - 1e38, total  # not -inf, because -inf - (-inf) is NaN
    # The next block is loaded before the current one is used.
    following = tl.load(at + place, mask=place < words, other=-float("inf"))
    for first in range(0, words, BLOCK):
        inside = first + place < words
        z = following.to(tl.float32)
        beyond = first + BLOCK + place
        following = tl.load(at + beyond, mask=beyond < words, other=-float("inf"))
        if CAP:
            # -inf again, because the softcap made it -cap.
            z = tl.where(inside, cap * tanh(z / cap), -float("inf"))
        # In units of log 2, because the hardware computes exponentials of 2. The running maximum is
        # subtracted, so no power exceeds 1.
        highest = tl.maximum(top, tl.max(z, 1) * LOG2_E)
        powers = tl.exp2(z * LOG2_E - highest[:, None])
        # What was summed below the old maximum shrinks to the new one.
        total = total * tl.exp2(top - highest) + tl.sum(powers, 1)
        top = highest
        if SMOOTH:
            plain += tl.sum(tl.where(inside, z, 0.0), 1)
    # Only here, once per row, do the threads combine their sums.
    highest = tl.max(top, 0)
    partition = (highest + tl.log2(tl.sum(total * tl.exp2(top - highest), 0))) * LOG_2
    tl.store(partitions + row, partition)
    local_label = tl.load(labels + row) - start
    inside = (local_label >= 0) & (local_label < words)
    # 0 if another rank has the label, so that the sum over ranks has it once.
    label = tl.load(logits + row * stride + local_label, mask=inside, other=0.0).to(tl.float32)
    if CAP:
        label = cap * tanh(label / cap)
    if SMOOTH:
        # spread = s / V of the whole vocabulary, so the parts of ranks add up.
        label = (1.0 - smoothing) * label + spread * tl.sum(plain, 0)
    tl.store(targets + row, label)


@triton.jit
def _backward(
    d_partitions: tl.tensor,
    d_targets: tl.tensor,
    logits: tl.tensor,
    labels: tl.tensor,
    partitions: tl.tensor,
    d_logits: tl.tensor,
    stride: tl.tensor,
    d_stride: tl.tensor,
    words: tl.tensor,
    start: tl.tensor,
    smoothing: tl.tensor,
    spread: tl.tensor,
    cap: tl.tensor,
    SMOOTH: tl.constexpr,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute d_partition exp(z - partition) + d_target (label's share), times the slope of the
    softcap."""
    across = tl.cdiv(words, BLOCK)
    # 64-bit: tokens times words may exceed 32 bits.
    row = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * stride + column, mask=column < words, other=0.0).to(tl.float32)
    if CAP:
        # The slope of the softcap is 1 - tanh^2.
        bent = tanh(z / cap)
        z = cap * bent
    d_target = tl.load(d_targets + row)
    # exp(z - partition) is the softmax; with the partition of all ranks, over the whole vocabulary.
    result = tl.load(d_partitions + row) * tl.exp2((z - tl.load(partitions + row)) * LOG2_E)
    share = tl.where(column == tl.load(labels + row) - start, 1.0, 0.0)
    if SMOOTH:
        share = (1.0 - smoothing) * share + spread
    result += d_target * share
    if CAP:
        result *= 1.0 - bent * bent
    # d_logits may be the logits. Each program has read its elements by now, and no other program
    # reads them. The fp32 gradient is rounded once.
    at = d_logits + row * d_stride + column
    tl.store(at, result.to(d_logits.dtype.element_ty), mask=column < words)


def launch_forward(
    logits_TV: Tensor,
    labels_T: Tensor,
    start: int,
    vocab: int,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `run_reference_parts` in Triton.

    Args:
        logits_TV: Logits of the words from `start` on.
        labels_T: Numbers of words in the whole vocabulary.
        start: Number of the first word.
        vocab: Size of the whole vocabulary.
        label_smoothing: s.
        softcap: Logits x become cap tanh(x / cap).

    Returns:
        The log-partition and the smoothed label logit of each token, fp32 [T].
    """
    flat = logits_TV if logits_TV.stride(1) == 1 else logits_TV.contiguous()
    rows, words = flat.shape
    partition = flat.new_empty(rows, dtype=torch.float32)
    label = torch.empty_like(partition)
    launch(
        _forward,
        (rows,),
        flat,
        labels_T.contiguous(),
        partition,
        label,
        flat.stride(0),
        words,
        start,
        label_smoothing,
        label_smoothing / vocab,
        softcap or 1.0,
        SMOOTH=label_smoothing != 0.0,
        CAP=softcap is not None,
        # Narrow vocabularies take one block.
        BLOCK=min(_BLOCK, next_power_of_2(max(words, 16))),
        warps=8,
    )
    return partition, label


def launch_backward(
    d_partition_T: Tensor,
    d_label_T: Tensor,
    logits_TV: Tensor,
    labels_T: Tensor,
    partition_T: Tensor,
    d_logits_TV: Tensor,
    start: int,
    vocab: int,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> None:
    """Write the gradient of the logits.

    Args:
        d_partition_T: Gradient of the log-partitions.
        d_label_T: Gradient of the label logits.
        logits_TV: Logits of the words from `start` on.
        labels_T: Numbers of words in the whole vocabulary.
        partition_T: Log-partitions; over the whole vocabulary if the gradient is to be that of all
            parts.
        d_logits_TV: Receives the gradient; may be the logits themselves.
        start: Number of the first word.
        vocab: Size of the whole vocabulary.
        label_smoothing: As in the forward pass.
        softcap: As in the forward pass.
    """
    rows, words = logits_TV.shape
    block = min(_GRADIENT_BLOCK, next_power_of_2(max(words, 16)))
    launch(
        _backward,
        (rows * ceil_div(words, block),),
        d_partition_T.contiguous(),
        d_label_T.contiguous(),
        logits_TV,
        labels_T.contiguous(),
        partition_T,
        d_logits_TV,
        logits_TV.stride(0),
        d_logits_TV.stride(0),
        words,
        start,
        label_smoothing,
        label_smoothing / vocab,
        softcap or 1.0,
        SMOOTH=label_smoothing != 0.0,
        CAP=softcap is not None,
        BLOCK=block,
    )


_parts_op = torch.library.custom_op(
    "megaframe::cross_entropy_parts", launch_forward, mutates_args=()
)


@_parts_op.register_fake
def _(
    logits_TV: Tensor,
    labels_T: Tensor,
    start: int,
    vocab: int,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    shape = logits_TV.shape[:1]
    return tuple(logits_TV.new_empty(shape, dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


_direct_parts = bypass_dispatcher(_parts_op, launch_forward)


def _compute_gradient(
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
    arguments = (d_partition_T, d_label_T, logits_TV, labels_T, partition_T, logits_TV)
    launch_backward(*arguments, start, vocab, label_smoothing, softcap)


_gradient_op = torch.library.custom_op(
    "megaframe::cross_entropy_gradient_", _compute_gradient, mutates_args=("logits_TV",)
)
_direct_gradient = bypass_dispatcher(_gradient_op, _compute_gradient)


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
    settings = (start, vocab or logits_TV.shape[1], label_smoothing, softcap)
    own_partition, own_label = _direct_parts(logits_TV, labels_T, *settings)
    # Copies: `join` may work in place.
    joined, label = (
        (own_partition, own_label)
        if join is None
        else join(own_partition.clone(), own_label.clone())
    )
    # A factor, not a selection, for whose length the host would have to wait.
    valid = (labels_T >= 0).to(own_partition.dtype)
    if gradient:
        # The loss lse + z_loss lse^2 - label has the slopes 1 + 2 z_loss lse and -1. The logits are
        # overwritten by their gradient, in place.
        # exp(z - whole) is the probability over the whole vocabulary: no gradients to exchange.
        weight = valid if scale is None else valid * scale.to(valid.dtype)
        _direct_gradient(
            weight * (1.0 + 2.0 * z_loss * joined), -weight, logits_TV, labels_T, joined, *settings
        )
    return (joined - label + z_loss * joined.square()) * valid, logits_TV


def _refuse_inputs(logits_TV: Tensor, labels_T: Tensor, **_: Any) -> str | None:
    if not logits_TV.shape[1]:
        return "a vocabulary of 0 words has no log-partition"
    if logits_TV.stride(1) != 1:
        return "the logits of a token are not contiguous"
    return refuse_types(logits_TV) or refuse_place(labels_T)


KERNEL = Kernel(
    "loss",
    run_reference,
    {"triton": Implementation("triton", run_triton, require_nothing, _refuse_inputs)},
    constant=8.0,
)
