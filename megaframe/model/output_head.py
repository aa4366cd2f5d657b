"""The output head, and what else follows the last block (Megatron-LM's `post_process`): the
predictors of tokens beyond the next one.

One head computes all losses in the forward pass, each together with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megaframe.architecture.embedding import describe_head_bias, describe_head_weight
from megaframe.architecture.model_blocks import describe_norm
from megaframe.architecture.parametrisation import compute_output_multiplier
from megaframe.architecture.streams import describe_last_streams
from megaframe.config import ModelConfig, TrainConfig
from megaframe.config.parts import LossPart
from megaframe.data.microbatch import IGNORE, Microbatch, TokensAhead
from megaframe.model.embedding import Embedding, make_token_table
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.loss import HeadResult, LossOptions, compute_head_loss
from megaframe.model.multi_token_prediction import MultiTokenPredictor
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.model.streams import make_last_streams
from megaframe.ops.autograd import backward
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.embedding import EmbeddingTable

UnitDone = Callable[[Module], None]
"""Called with each unit when a microbatch adds nothing more to its gradients, in that order. It is
called with the head as soon as its loss is computed: only gradients of norms are missing then."""
UnitValues = Callable[[Module], AbstractContextManager[None]]
"""Returns a context in which the values of a unit are on this rank."""


class OutputHead(Module):
    """Final norm, projection to the vocabulary, and loss. Each depth of multi-token prediction has
    its own final norm and shares the projection."""

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        tokens: EmbeddingTable | None,
        setup: LayerSetup,
    ) -> None:
        """Declare the parameters.

        Args:
            model: The section `model`.
            train: The section `train`.
            tokens: The token table on the last stage, whose weight a tied head uses.
            setup: What the run fixes.
        """
        self.setup = setup
        norm = describe_norm(model)
        self.norm = Norm("head.norm", norm)
        streams = describe_last_streams(model)
        self.streams = None if streams is None else make_last_streams("head.streams", streams)
        self.norms_ahead = [
            Norm(f"predictors.{index}.norm", norm) for index in range(model.mtp_depth)
        ]
        if model.tie_embeddings:
            assert tokens is not None
            self.weight = tokens.weight
        else:
            self.weight = Parameter(describe_head_weight(model))
        bias = describe_head_bias(model)
        self.bias = None if bias is None else Parameter(bias)
        multiplier = compute_output_multiplier(model)
        self.evaluation_options = LossOptions(softcap=model.logit_softcap, multiplier=multiplier)
        loss = train.loss
        self.training_options = replace(
            self.evaluation_options,
            label_smoothing=train.label_smoothing,
            z_loss=train.z_loss,
            part=loss if isinstance(loss, LossPart) else None,
        )

    @property
    def norms(self) -> list[Norm]:
        """The final norm of the next token, then those of the tokens further ahead."""
        return [self.norm, *self.norms_ahead]

    def normalize(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Return the rows that logits are computed from, [rows, hidden].

        Args:
            x: The stream or streams after the last block, or the stream after a predictor.
            norm: The one of `norms` to use; None for that of the next token.
        """
        x = x if self.streams is None else self.streams(x)
        return (norm or self.norm)(x, self.setup.kernels)

    def compute_loss(
        self,
        y: Tensor,
        labels_BS: Tensor,
        weights_BS: Tensor | None,
        scale: Tensor | None,
        inputs: MicrobatchInputs,
    ) -> HeadResult:
        """Compute the loss sum, and with a scale its gradients; see `compute_head_loss`.

        Args:
            y: Normalised hidden states of this rank's rows, [rows, hidden].
            labels_BS: Labels of all tokens.
            weights_BS: Their weights; None for 1.
            scale: Factor of the gradients, fp64 scalar. Without it there are none, and the loss is
                cross-entropy alone.
            inputs: Of the microbatch.
        """
        labels = inputs.rows.pad(labels_BS.flatten(), IGNORE)
        weights = None if weights_BS is None else inputs.rows.pad(weights_BS.flatten(), 0)
        options = self.evaluation_options if scale is None else self.training_options
        tensor = self.setup.tensor
        # Detached: the head computes its own gradient, which `PostProcess.backward` passes on.
        return compute_head_loss(
            y.detach(),
            labels,
            self.weight,
            options,
            scale,
            tensor.group,
            tensor.kernels,
            bias=self.bias,
            label_weights_T=weights,
        )

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return logits, in at least fp32, of hidden states [..., hidden], or of all streams, for
        use without training."""
        x = x if self.streams is None else self.streams(x)
        logits = self.norm(x) @ self.weight.value.t()
        logits *= self.evaluation_options.multiplier
        if self.bias is not None:
            logits += self.bias.value
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        cap = self.evaluation_options.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


@dataclass
class PostProcessActivations:
    """What is kept of one microbatch between the forward and the backward of `PostProcess`.

    Attributes:
        microbatch: Its tokens and labels.
        inputs: What it brings to layers.
        state: Of its passes.
        leaves: The streams after the last block and after each predictor.
        outputs: The graph edge of each predictor's output, None if the predictor is recomputed.
        normed: Graph edges of the normalised streams that the head computed the losses from.
        d_normed: Gradients of the losses with respect to these streams.
    """

    microbatch: Microbatch
    inputs: MicrobatchInputs
    state: PassState
    leaves: list[Tensor] = field(default_factory=list)
    outputs: list[GradientEdge | None] = field(default_factory=list)
    normed: list[GradientEdge] = field(default_factory=list)
    d_normed: list[Tensor] = field(default_factory=list)


class PostProcess:
    """What follows the last block: the predictors and the head, which `units` lists in the order of
    the forward pass."""

    def __init__(
        self, model: ModelConfig, train: TrainConfig, embedding: Embedding | None, setup: LayerSetup
    ) -> None:
        """Build the units.

        Args:
            model: The section `model`.
            train: The section `train`.
            embedding: The model's embedding if it is on this rank, for a tied head and for
                predictors; without it they use a replica of its `tokens`.
            setup: What the run fixes.
        """
        self.tokens = get_output_token_table(model, embedding, setup)
        self.head = OutputHead(model, train, self.tokens, setup)
        self.predictors: list[MultiTokenPredictor] = []
        for index in range(model.mtp_depth):
            assert self.tokens is not None
            self.predictors.append(
                MultiTokenPredictor(model, index, self.tokens, self.head.norms[index], setup)
            )
        self.units: list[Module] = [*self.predictors, self.head]
        self._loss_weight = train.mtp_weight / max(1, model.mtp_depth)
        self._recompute = train.recompute == "full"
        self._loss_ahead: Tensor | None = None

    def forward(
        self,
        x: Tensor,
        microbatch: Microbatch,
        inputs: MicrobatchInputs,
        state: PassState,
        scale: Tensor,
        values: UnitValues,
    ) -> tuple[Tensor, PostProcessActivations]:
        """Compute all losses with their gradients.

        Args:
            x: The stream or streams after the last block.
            microbatch: Its tokens and labels.
            inputs: What it brings to layers.
            state: Of its passes.
            scale: Gradients are of scale * (the loss sum of the next token + the weighted loss sums
                of the tokens further ahead).
            values: Provides the values of units.

        Returns:
            The loss of the next token summed over valid tokens (fp64 scalar), and what the backward
            pass needs.
        """
        # A stream is used twice, by the head and by the next predictor. It is cut from its graph as
        # a leaf, in whose `grad` autograd adds up the gradients of both.
        activations = PostProcessActivations(
            microbatch, inputs, state, [x.detach().requires_grad_()]
        )
        for predictor, far in zip(self.predictors, microbatch.ahead, strict=True):
            with values(predictor), torch.set_grad_enabled(not self._recompute):
                x = predictor(activations.leaves[-1], far.tokens_BS, inputs, state)
            # A graph edge instead of the stream itself: only its graph is needed later.
            activations.outputs.append(None if self._recompute else get_gradient_edge(x))
            activations.leaves.append(x.detach().requires_grad_())
        with values(self.head):
            # All depths at once, so that the values of the head are brought to this rank once.
            loss, *ahead = self._compute_losses(activations, scale)
        if ahead:
            mean = torch.stack(ahead).mean()
            self._loss_ahead = mean if self._loss_ahead is None else self._loss_ahead + mean
        return loss, activations

    def _compute_losses(self, activations: PostProcessActivations, scale: Tensor) -> list[Tensor]:
        """Return the loss sum of each depth, beginning with the next token."""
        losses: list[Tensor] = []
        by_depth: list[Microbatch | TokensAhead] = [activations.microbatch]
        by_depth += activations.microbatch.ahead
        for norm, leaf, far in zip(self.head.norms, activations.leaves, by_depth, strict=True):
            normed = self.head.normalize(leaf, norm)
            # The first loss is that of the next token, whose weight is 1.
            depth_scale = scale * self._loss_weight if losses else scale
            result = self.head.compute_loss(
                normed, far.labels_BS, far.weights_BS, depth_scale, activations.inputs
            )
            assert result.d_hidden is not None
            activations.normed.append(get_gradient_edge(normed))
            activations.d_normed.append(result.d_hidden)
            losses.append(result.loss)
        return losses

    def backward(
        self, activations: PostProcessActivations, values: UnitValues, finish: UnitDone
    ) -> Tensor:
        """Backpropagate all losses of a microbatch.

        Args:
            activations: What `forward` returned; it is used up.
            values: Provides the values of units.
            finish: Called with each predictor, in reverse order.

        Returns:
            The gradient of the stream or streams after the last block.
        """
        for index, predictor in reversed([*enumerate(self.predictors)]):
            # In reverse order of depth. The leaf after this predictor has its whole gradient now:
            # the predictor that follows has already added its part.
            gradient = self._backward_of_loss(activations)
            output = activations.outputs.pop()
            with values(predictor):
                if output is None:
                    tokens = activations.microbatch.ahead[index].tokens_BS
                    # No name for the stream itself: only its graph is needed from here on.
                    output = get_gradient_edge(
                        predictor(
                            activations.leaves[-1], tokens, activations.inputs, activations.state
                        )
                    )
                backward(output, gradient)
            # The graph has been used up: do not keep it while the next losses are backpropagated.
            del output
            finish(predictor)
        return self._backward_of_loss(activations)

    def _backward_of_loss(self, activations: PostProcessActivations) -> Tensor:
        """Backpropagate the last loss, and return the gradient of its leaf. A predictor after the
        leaf has already added its part."""
        # Through the final norm only: the head has computed everything after it in the forward
        # pass.
        backward(activations.normed.pop(), activations.d_normed.pop())
        gradient = activations.leaves.pop().grad
        assert gradient is not None
        return gradient

    def take_loss_ahead(self) -> Tensor | None:
        """Return the loss of the tokens further ahead, and reset it: a sum over valid tokens and
        over all microbatches since the last call, a mean over depths (fp64 scalar). None if no such
        tokens are predicted."""
        loss, self._loss_ahead = self._loss_ahead, None
        return loss

    def evaluate(
        self, x: Tensor, microbatch: Microbatch, inputs: MicrobatchInputs, values: UnitValues
    ) -> Tensor:
        """Return the summed cross-entropy of the next token, without gradients.

        Args:
            x: The stream or streams after the last block.
            microbatch: The tokens and labels.
            inputs: What the microbatch fixes for layers.
            values: Provides the values of units.
        """
        with values(self.head):
            normed = self.head.normalize(x)
            labels_BS, weights_BS = microbatch.labels_BS, microbatch.weights_BS
            return self.head.compute_loss(normed, labels_BS, weights_BS, None, inputs).loss


def get_output_token_table(
    model: ModelConfig, embedding: Embedding | None, setup: LayerSetup
) -> EmbeddingTable | None:
    """Return the token table of the last stage: that of `embedding` if given, which is on the same
    rank, else a replica. None if the last stage needs no token table."""
    if not (model.tie_embeddings or model.mtp_depth):
        return None
    if embedding is not None:
        return embedding.tokens
    return make_token_table(model, setup, replica=True)
