"""End: what stands behind the last block, predictors of tokens further ahead than the next, and the
head.

All losses are made by one head, in the forward pass, each with its gradient. The stream that leaves
a block is then used twice, by the head and by the next predictor, and what flows back from both
meets in its leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaframe.backward import backward
from megaframe.config import RunConfig
from megaframe.microbatch import Microbatch
from megaframe.model import Embedding, Head, Predictor, tokens_at_the_end
from megaframe.nn.frame import Frame
from megaframe.parameter import Module

Done = Callable[[Module], None]
"""Is told of each unit to whose gradients a microbatch adds no more, in the order in which it is
so; of a head as soon as its loss is made, which leaves but the norms'."""
Values = Callable[[Module], AbstractContextManager[None]]
"""A context in which the values of a unit are here."""


@dataclass
class Kept:
    """What is kept of one microbatch. leaves: the streams behind the last block and behind each
    predictor. outputs: what came of each predictor, None where it runs again. normed: what the head
    made losses of, d_normed: the gradients of these with respect to it."""

    microbatch: Microbatch
    frame: Frame
    leaves: list[Tensor] = field(default_factory=list)
    outputs: list[GradientEdge | None] = field(default_factory=list)
    normed: list[GradientEdge] = field(default_factory=list)
    d_normed: list[Tensor] = field(default_factory=list)


class End:
    """`units` in the order of the forward pass. embedding: that of the model, where this rank has
    it, for a tied head and for predictors; else they have a replica of its `tokens`."""

    def __init__(self, config: RunConfig, embedding: Embedding | None) -> None:
        model, train = config.model, config.train
        self.tokens = tokens_at_the_end(model, embedding)
        self.head = Head(config, self.tokens)
        self.predictors: list[Predictor] = []
        for index in range(model.mtp_depth):
            assert self.tokens is not None
            self.predictors.append(Predictor(model, index, self.tokens, self.head.norms[index]))
        self.units: list[Module] = [*self.predictors, self.head]
        self._share = train.mtp_weight / max(1, model.mtp_depth)
        self._again = train.recompute == "full"
        self._ahead: Tensor | None = None

    def forward(
        self, x: Tensor, microbatch: Microbatch, frame: Frame, scale: Tensor, values: Values
    ) -> tuple[Tensor, Kept]:
        """The loss sum of the next token over valid tokens, fp64 scalar; gradients are of scale *
        (that sum, and the weighted ones of the tokens further ahead)."""
        kept = Kept(microbatch, frame, [x.detach().requires_grad_()])
        for predictor, (tokens, _) in zip(self.predictors, microbatch.ahead, strict=True):
            with values(predictor), torch.set_grad_enabled(not self._again):
                x = predictor(kept.leaves[-1], tokens, frame)
            kept.outputs.append(None if self._again else get_gradient_edge(x))
            kept.leaves.append(x.detach().requires_grad_())
        with values(self.head):
            loss, *ahead = self._losses(kept, scale)
        if ahead:
            mean = torch.stack(ahead).mean()
            self._ahead = mean if self._ahead is None else self._ahead + mean
        return loss, kept

    def _losses(self, kept: Kept, scale: Tensor) -> list[Tensor]:
        """The loss sum of each depth, that of the next token first."""
        labels = [kept.microbatch.labels_BS, *(labels for _, labels in kept.microbatch.ahead)]
        losses: list[Tensor] = []
        for norm, leaf, wanted in zip(self.head.norms, kept.leaves, labels, strict=True):
            normed = norm(leaf, kept.frame.kernels)
            share = scale * self._share if losses else scale
            result = self.head.loss(normed, wanted, share, kept.frame)
            assert result.d_hidden is not None
            kept.normed.append(get_gradient_edge(normed))
            kept.d_normed.append(result.d_hidden)
            losses.append(result.loss)
        return losses

    def backward(self, kept: Kept, values: Values, finish: Done) -> Tensor:
        """The gradient of the stream behind the last block. `finish` is told of the predictors,
        the last one first."""
        for index, predictor in reversed([*enumerate(self.predictors)]):
            gradient = self._from_the_loss(kept)
            output = kept.outputs.pop()
            with values(predictor):
                if output is None:
                    tokens, _ = kept.microbatch.ahead[index]
                    output = get_gradient_edge(predictor(kept.leaves[-1], tokens, kept.frame))
                backward(output, gradient)
            del output
            finish(predictor)
        return self._from_the_loss(kept)

    def _from_the_loss(self, kept: Kept) -> Tensor:
        """What flows back to the last leaf, from its loss and all that came of it."""
        backward(kept.normed.pop(), kept.d_normed.pop())
        gradient = kept.leaves.pop().grad
        assert gradient is not None
        return gradient

    def take_ahead(self) -> Tensor | None:
        """Sums over valid tokens of the losses of tokens further ahead, their mean over the depths,
        of all microbatches since the last call, fp64 scalar; None where none are predicted."""
        taken, self._ahead = self._ahead, None
        return taken

    def evaluate(self, x: Tensor, microbatch: Microbatch, frame: Frame, values: Values) -> Tensor:
        """The cross-entropy of the next token, summed, without gradients."""
        with values(self.head):
            normed = self.head.norm(x, frame.kernels)
            return self.head.loss(normed, microbatch.labels_BS, None, frame).loss
