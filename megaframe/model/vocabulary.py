"""The vocabulary that tensor ranks divide, and losses from outside (`train.loss`) computed on it.

The loss of a token is computed by every tensor rank, from numbers that are whole (sums over all
words) and numbers that are of its own part of the words. Its author need not know which is which:
the gradient is taken of the mean of the ranks' equal losses, under which the gradient of a sum over
ranks is the sum of the gradients of all ranks, whatever is computed from it.

Shape legend: T tokens, V words of this rank's part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.output_head import FP32_PARTS, get_max_logits_per_chunk
from megaframe.config.parts import LossPart
from megaframe.data.microbatch import IGNORE
from megaframe.distributed.collectives import Group, all_reduce
from megaframe.errors import UserError
from megaframe.ops.autograd import backward


class Vocabulary:
    """This rank's part of the vocabulary, and sums over all of it. All tensor ranks call the same
    methods in the same order.

    Attributes:
        start: The first word of this rank's part.
        words: Number of words of this rank's part.
        size: Number of words of all ranks.
        group: The ranks that divide the words.
    """

    def __init__(self, start: int, words: int, size: int, group: Group) -> None:
        self.start, self.words, self.size, self.group = start, words, size, group

    @property
    def most_words(self) -> int:
        """The words of the largest part: what ranks must do alike is sized by it."""
        return -(-self.size // self.group.size)

    def sum(self, x_TV: Tensor) -> Tensor:
        """Return the sum over all words of what was computed from each logit, [T]."""
        return self._sum_over_ranks(x_TV.sum(-1))

    def pick(self, x_TV: Tensor, words_T: Tensor) -> Tensor:
        """Return what was computed from the logit of one word for each token, [T]."""
        local_T = words_T - self.start
        inside_T = (local_T >= 0) & (local_T < x_TV.shape[-1])
        own_T = x_TV.gather(-1, local_T.masked_fill(~inside_T, 0)[:, None])[:, 0]
        return self._sum_over_ranks(torch.where(inside_T, own_T, 0.0))

    def log_sum_exp(self, x_TV: Tensor) -> Tensor:
        """Return the logarithm of the sum of exp(x) over all words, [T]. That of the logits is the
        log-partition: the logarithm of a probability is a logit less it."""
        # The largest of all words is taken out, so that no exponential overflows, and a part whose
        # words are all excluded (-inf) adds nothing. It needs no gradient.
        top_T = all_reduce(x_TV.detach().amax(-1), self.group, "max").wait()
        return top_T + self.sum((x_TV - top_T[:, None]).exp()).log()

    def list_words(self, device: torch.device) -> Tensor:
        """Return the words of this rank's part, int64 [V] in the order of its logits."""
        return torch.arange(self.start, self.start + self.words, device=device)

    def _sum_over_ranks(self, x_T: Tensor) -> Tensor:
        if self.group.size == 1:
            return x_T
        total: Tensor = _SumOverRanks.apply(x_T, self.group)
        return total


class _SumOverRanks(torch.autograd.Function):
    """A sum over ranks, and the sum of the gradients that it has on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x.clone(), group).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return all_reduce(gradient.clone(), ctx.group).wait(), None


def compute_part_losses(
    part: LossPart,
    logits_TV: Tensor,
    labels_T: Tensor,
    vocabulary: Vocabulary,
    scale: Tensor,
    softcap: float | None,
) -> Tensor:
    """Compute the loss of each token with a loss from outside, and replace the logits by
    scale * d(loss)/d(logits), a few rows at a time.

    Args:
        part: The loss.
        logits_TV: Of this rank's part of the vocabulary; overwritten. They are zero afterwards for
            tokens whose label is IGNORE.
        labels_T: Words, or IGNORE.
        vocabulary: The part.
        scale: Factor of the gradients, a scalar or [T].
        softcap: Logits x become cap * tanh(x / cap) first.

    Returns:
        The losses in at least fp32, meaningless for tokens without a label.

    Raises:
        UserError: The part does not return a differentiable loss for each token.
    """
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    losses_T = torch.empty_like(labels_T, dtype=wide)
    scale_T = (scale / vocabulary.group.size).expand(len(labels_T))
    for rows in _iterate_rows(len(labels_T), vocabulary, logits_TV.device):
        ignored_T = labels_T[rows] == IGNORE
        # The rows themselves if they are wide already: the gradient is written when it is complete.
        leaf_TV = logits_TV[rows].detach().to(wide).requires_grad_()
        with torch.enable_grad():
            x_TV = leaf_TV if softcap is None else softcap * torch.tanh(leaf_TV / softcap)
            own_T = part.compute_losses(x_TV, labels_T[rows].clamp_min(0), vocabulary)
        _check_losses(part, own_T, len(ignored_T))
        # Of the mean of the losses of all ranks, which are equal.
        weight_T = torch.where(ignored_T, 0.0, scale_T[rows])
        backward(own_T, weight_T.to(own_T.dtype))
        gradient_TV = leaf_TV.grad
        assert gradient_TV is not None
        # What a token without a label has may be infinite, and infinity times zero is not zero.
        logits_TV[rows].copy_(gradient_TV.masked_fill_(ignored_T[:, None], 0.0))
        losses_T[rows].copy_(own_T.detach())
    return losses_T


def _iterate_rows(tokens: int, vocabulary: Vocabulary, device: torch.device) -> Iterator[slice]:
    """Yield the rows of a chunk that are in fp32 at a time, the same on all tensor ranks."""
    most = get_max_logits_per_chunk(host=device.type == "cpu") // FP32_PARTS
    step = max(1, most // vocabulary.most_words)
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def _check_losses(part: LossPart, losses: object, tokens: int) -> None:
    """Raise `UserError` if `losses` is not a differentiable tensor [tokens]."""
    what = f"train.loss={part.name}: compute_losses returns"
    if not isinstance(losses, Tensor) or losses.shape != (tokens,):
        actual = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UserError(f"{what} {actual}; return one loss for each token, [{tokens}]")
    if not losses.requires_grad:
        raise UserError(f"{what} numbers without a gradient; compute them from the logits by torch")
