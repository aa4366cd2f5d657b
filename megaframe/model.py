"""Block and Stage: the model, built only as far as this rank runs it.

A stage runs its blocks in an explicit loop. Each block's input is a leaf, and backward walks the
blocks in reverse, calling autograd on one block at a time; so recompute and the launch of a
gradient reduction are plain lines in that loop, and nothing depends on autograd hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megaframe.config import Model, RunConfig
from megaframe.microbatch import Microbatch
from megaframe.nn.attention import Attention
from megaframe.nn.dropout import dropout_key
from megaframe.nn.embedding import Table
from megaframe.nn.frame import Frame, make_frame, positions_of
from megaframe.nn.loss import HeadResult, LossOptions, head_loss
from megaframe.nn.mlp import MLP
from megaframe.nn.norm import Norm
from megaframe.parameter import PRECISIONS, Module, Parameter
from megaframe.spec import Normal, ParamSpec


class Embedding(Module):
    """Tokens, and learned positions where the model has them, to the residual stream."""

    def __init__(self, config: RunConfig) -> None:
        model = config.model
        self.position = model.position
        self.tokens = Table(
            "embedding.tokens", vocabulary(model), model.hidden, std=model.init_std, split=True
        )
        if model.position == "learned":
            self.positions = Table(
                "embedding.positions",
                model.positions or config.train.seq,
                model.hidden,
                std=model.init_std,
                split=False,
            )

    def __call__(self, microbatch: Microbatch, frame: Frame) -> Tensor:
        """[B, S] token ids to [B, S, hidden]."""
        x = self.tokens(microbatch.tokens_BS)
        if self.position == "learned":
            x = x + self.positions(positions_of(microbatch))
        return x if frame.dropout is None else frame.dropout(x, "embedding")


class Block(Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: Model, layer: int) -> None:
        self.name = f"blocks.{layer}"
        output_std = model.init_std / math.sqrt(2 * model.layers)
        self.attention_norm = _norm(f"{self.name}.attention_norm", model)
        self.attention = Attention(f"{self.name}.attention", model, output_std)
        self.mlp_norm = _norm(f"{self.name}.mlp_norm", model)
        self.mlp = MLP(f"{self.name}.mlp", model, output_std)

    def __call__(self, x: Tensor, frame: Frame) -> Tensor:
        """[B, S, hidden] to the same shape."""
        branch = self.attention(x, self.attention_norm, frame)
        if frame.dropout is not None:
            branch = frame.dropout(branch, f"{self.name}.attention")
        x = x + branch
        branch = self.mlp(x, self.mlp_norm, again=frame.selective)
        if frame.dropout is not None:
            branch = frame.dropout(branch, f"{self.name}.mlp")
        return x + branch


class Head(Module):
    """Final norm, projection to the vocabulary, loss. `tied` is the token embedding's weight."""

    def __init__(self, config: RunConfig, tied: Parameter | None) -> None:
        model = config.model
        self.norm = _norm("head.norm", model)
        self.weight = tied or Parameter(
            ParamSpec(
                "head.weight",
                (vocabulary(model), model.hidden),
                Normal(model.init_std),
                role="head",
                decay=True,
                axes={0: "tensor"},
            )
        )
        self.options = LossOptions(
            config.train.label_smoothing, config.train.z_loss, model.logit_softcap
        )

    def loss(self, y: Tensor, microbatch: Microbatch, scale: float | None) -> HeadResult:
        """Loss sum of normalised hidden states y [B, S, hidden]; see `head_loss`."""
        flat = y.detach().reshape(-1, y.shape[-1])
        return head_loss(flat, microbatch.labels_BS.reshape(-1), self.weight, self.options, scale)

    def logits(self, x: Tensor) -> Tensor:
        """Logits in fp32 of hidden states [..., hidden]; for sampling, not for training."""
        logits = (self.norm(x) @ self.weight.value.t()).float()
        cap = self.options.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


@dataclass
class Flight:
    """What a stage keeps of one microbatch between its forward and its backward.

    inputs: the leaf that each block, and last the head, started from. outputs: what came of each
    block's, none with recompute. embedded: the output of the embedding. normed: the head's
    normalised input, and d_normed the gradient of the loss with respect to it.
    """

    frame: Frame
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    embedded: Tensor | None = None
    normed: Tensor | None = None
    d_normed: Tensor | None = None


class Stage:
    """All blocks, with the embedding in front and the head behind.

    `units` are the parts whose parameters are reduced, updated and gathered together, in the order
    of the forward pass.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.precision = PRECISIONS[config.train.precision]
        self.embedding = Embedding(config)
        self.blocks = [Block(config.model, layer) for layer in range(config.model.layers)]
        tied = self.embedding.tokens.weight if config.model.tie_embeddings else None
        self.head = Head(config, tied)
        self.units: list[Module] = [self.embedding, *self.blocks, self.head]
        self._flights: dict[int, Flight] = {}

    def parameters(self) -> list[Parameter]:
        """All parameters, in order, once each though units may share them."""
        return list({p: None for unit in self.units for p in unit.parameters()})

    def forward(self, number: int, microbatch: Microbatch, step: int, scale: float) -> Tensor:
        """Run microbatch `number` and keep what its backward needs.

        Gradients are of scale * (loss sum). Returns the loss sum over valid tokens, fp64 scalar.
        """
        flight = Flight(self._frame(microbatch, dropout_key(self.config.run.seed, step)))
        self._flights[number] = flight
        flight.embedded = self.embedding(microbatch, flight.frame)
        x = flight.embedded
        for block in self.blocks:
            flight.inputs.append(x.detach().requires_grad_())
            if self.config.train.recompute == "full":
                with torch.no_grad():
                    x = block(flight.inputs[-1], flight.frame)
            else:
                x = block(flight.inputs[-1], flight.frame)
                flight.outputs.append(x)
        flight.inputs.append(x.detach().requires_grad_())
        flight.normed = self.head.norm(flight.inputs[-1])
        result = self.head.loss(flight.normed, microbatch, scale)
        flight.d_normed = result.d_hidden
        return result.loss

    def backward(self, number: int, done: Callable[[Module], None] | None = None) -> None:
        """Backward of microbatch `number`. `done` is told of each unit whose gradients this call
        completes, in the order in which they do."""
        flight = self._flights.pop(number)
        assert flight.normed is not None and flight.d_normed is not None
        leaf = flight.inputs.pop()
        flight.normed.backward(flight.d_normed.view_as(flight.normed))
        flight.normed = flight.d_normed = None
        if done:
            done(self.head)
        for block in reversed(self.blocks):
            gradient, leaf = leaf.grad, flight.inputs.pop()
            output = flight.outputs.pop() if flight.outputs else block(leaf, flight.frame)
            output.backward(gradient)
            del output
            if done:
                done(block)
        assert flight.embedded is not None
        flight.embedded.backward(leaf.grad)
        if done:
            done(self.embedding)

    @torch.no_grad()
    def evaluate(self, microbatch: Microbatch) -> Tensor:
        """Loss sum over valid tokens, fp64 scalar, without dropout and without gradients."""
        x = self.hidden(microbatch)
        return self.head.loss(self.head.norm(x), microbatch, None).loss

    @torch.no_grad()
    def hidden(self, microbatch: Microbatch) -> Tensor:
        """The residual stream [B, S, hidden] after the last block, without dropout."""
        frame = self._frame(microbatch, None)
        x = self.embedding(microbatch, frame)
        for block in self.blocks:
            x = block(x, frame)
        return x

    def _frame(self, microbatch: Microbatch, key: int | None) -> Frame:
        selective = self.config.train.recompute == "selective"
        dtype = self.precision.compute
        return make_frame(self.config.model, microbatch, dtype, key, selective=selective)


def model_specs(config: RunConfig) -> list[ParamSpec]:
    """Specs of all parameters of the whole model, in order; allocates nothing."""
    return [parameter.spec for parameter in Stage(config).parameters()]


def vocabulary(model: Model) -> int:
    """Rows of the embedding; a config without `model.vocab` is resolved before a model is built."""
    if model.vocab is None:
        raise ValueError("model.vocab is not set: resolve the config with its tokenizer first")
    return model.vocab


def _norm(name: str, model: Model) -> Norm:
    return Norm(name, model.hidden, kind=model.norm, eps=model.norm_eps, bias=model.bias)
