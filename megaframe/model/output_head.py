"""End: what follows the last block: the predictors of tokens beyond the next one, and the head.

One head computes all losses in the forward pass, each together with its gradient. The stream that
leaves a block is therefore used twice, by the head and by the next predictor, and the gradients of
both are added up in one leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.model.block import Embedding, MultiTokenPredictor, OutputHead, output_token_table
from megaframe.model.forward_context import Frame
from megaframe.ops.autograd import backward
from megaframe.parameters.parameter import Module

UnitDone = Callable[[Module], None]
"""Called with each unit when a microbatch adds nothing more to its gradients, in that order. It is
called with the head as soon as its loss is computed: only gradients of norms are missing then."""
UnitValues = Callable[[Module], AbstractContextManager[None]]
"""Returns a context in which the values of a unit are on this rank."""


@dataclass
class PostProcessState:
    """What the end keeps of one microbatch between forward and backward.

    leaves: the streams after the last block and after each predictor.
    outputs: the graph edge of each predictor's output, None if the predictor is recomputed.
    normed: graph edges of the normalised streams that the head computed the losses from.
    d_normed: gradients of the losses with respect to these streams.
    """

    microbatch: Microbatch
    frame: Frame
    leaves: list[Tensor] = field(default_factory=list)
    outputs: list[GradientEdge | None] = field(default_factory=list)
    normed: list[GradientEdge] = field(default_factory=list)
    d_normed: list[Tensor] = field(default_factory=list)


class PostProcess:
    """The predictors and the head; `units` lists them in the order of the forward pass.

    embedding: the model's embedding if it is on this rank, for a tied head and for predictors.
    Without it they use a replica of its `tokens`.
    """

    def __init__(self, config: RunConfig, embedding: Embedding | None) -> None:
        model, train = config.model, config.train
        self.tokens = output_token_table(model, embedding)
        self.head = OutputHead(config, self.tokens)
        self.predictors: list[MultiTokenPredictor] = []
        for index in range(model.mtp_depth):
            assert self.tokens is not None
            self.predictors.append(
                MultiTokenPredictor(model, index, self.tokens, self.head.norms[index])
            )
        self.units: list[Module] = [*self.predictors, self.head]
        self._share = train.mtp_weight / max(1, model.mtp_depth)
        self._again = train.recompute == "full"
        self._ahead: Tensor | None = None

    def forward(
        self, x: Tensor, microbatch: Microbatch, frame: Frame, scale: Tensor, values: UnitValues
    ) -> tuple[Tensor, PostProcessState]:
        """Compute all losses with their gradients.

        Returns the loss of the next token summed over valid tokens (fp64 scalar), and what the
        backward pass needs. Gradients are of scale * (this sum + the weighted loss sums of the
        tokens further ahead).
        """
        kept = PostProcessState(microbatch, frame, [x.detach().requires_grad_()])
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

    def _losses(self, kept: PostProcessState, scale: Tensor) -> list[Tensor]:
        """Return the loss sum of each depth, beginning with the next token."""
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

    def backward(self, kept: PostProcessState, values: UnitValues, finish: UnitDone) -> Tensor:
        """Return the gradient of the stream after the last block. Calls `finish` with each
        predictor, in reverse order."""
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

    def _from_the_loss(self, kept: PostProcessState) -> Tensor:
        """Backpropagate the last loss, and return the gradient of its leaf. A predictor after the
        leaf has already added its part."""
        backward(kept.normed.pop(), kept.d_normed.pop())
        gradient = kept.leaves.pop().grad
        assert gradient is not None
        return gradient

    def take_ahead(self) -> Tensor | None:
        """Return the loss of the tokens further ahead, and reset it: a sum over valid tokens and
        over all microbatches since the last call, a mean over depths (fp64 scalar). None if no such
        tokens are predicted."""
        taken, self._ahead = self._ahead, None
        return taken

    def evaluate(
        self, x: Tensor, microbatch: Microbatch, frame: Frame, values: UnitValues
    ) -> Tensor:
        """Return the summed cross-entropy of the next token, without gradients."""
        with values(self.head):
            normed = self.head.norm(x, frame.kernels)
            return self.head.loss(normed, microbatch.labels_BS, None, frame).loss
