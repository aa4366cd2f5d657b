"""The units of a model: embedding, blocks, predictors and head."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.experts import has_experts
from megaframe.architecture.windows import window_of
from megaframe.config import EmulationConfig, ModelConfig, RunConfig
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.model.attention import Attention
from megaframe.model.forward_context import DeferredGradients, Frame, positions_of
from megaframe.model.loss import HeadResult, LossOptions, head_loss
from megaframe.model.mla import LatentAttention
from megaframe.model.mlp import MLP
from megaframe.model.moe.layer import MixtureOfExperts
from megaframe.model.norm import Norm
from megaframe.parameters.parameter import Module, Parameter
from megaframe.parameters.spec import Normal, ParamSpec
from megaframe.tensor_parallel.embedding import EmbeddingTable
from megaframe.tensor_parallel.linear import Linear, as_it_is


class Embedding(Module):
    """Token embedding, plus learned positions if the model has them."""

    def __init__(self, config: RunConfig) -> None:
        model = config.model
        self.position = model.position
        self.tokens = _token_table(model)
        if model.position == "learned":
            self.positions = EmbeddingTable(
                "embedding.positions",
                model.positions or config.train.seq,
                model.hidden,
                std=model.init_std,
                split=False,
            )

    def __call__(self, microbatch: Microbatch, frame: Frame) -> Tensor:
        """Return this rank's rows [rows, hidden] of the residual stream for token ids [B, S]."""
        tokens_BS = microbatch.tokens_BS
        x = self.tokens(tokens_BS.flatten(), frame)
        if self.position == "learned":
            positions = positions_of(microbatch).expand_as(tokens_BS)
            x = x + self.positions(positions.flatten(), frame)
        return x if frame.dropout is None else frame.dropout(x, "embedding")


class TransformerBlock(Module):
    """One pre-norm transformer layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        self.name = f"blocks.{layer}"
        output_std = model.init_std / math.sqrt(2 * model.layers)
        self.attention_norm = _norm(f"{self.name}.attention_norm", model)
        name, window = f"{self.name}.attention", window_of(model, layer)
        self.attention: Attention | LatentAttention = (
            Attention(name, model, output_std, window)
            if model.latent is None
            else LatentAttention(name, model, model.latent, output_std, window)
        )
        self.mlp_norm = _norm(f"{self.name}.mlp_norm", model)
        self.mlp: MLP | MixtureOfExperts
        if model.moe is not None and has_experts(model.moe, layer):
            self.mlp = MixtureOfExperts(f"{self.name}.moe", model, model.moe, output_std)
        else:
            self.mlp = MLP(f"{self.name}.mlp", model, output_std)

    @property
    def second_half(self) -> Module:
        """The MLP, or the experts in its place."""
        return self.mlp

    def __call__(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the residual stream after the block; x and the result are [rows, hidden]."""
        branch = self.attention(x, self.attention_norm, frame)
        if frame.dropout is not None:
            branch = frame.dropout(branch, f"{self.name}.attention")
        branch = frame.seam.cross(branch, self.mlp)
        if frame.kernels.fuses and not frame.selective:
            normed, x = self.mlp_norm.of_sum(x, branch, frame.kernels)
            branch = self.mlp(normed, as_it_is, frame)
        else:
            x = x + branch
            branch = self.mlp(x, self.mlp_norm, frame)
        if frame.dropout is not None:
            branch = frame.dropout(branch, f"{self.name}.mlp")
        return x + branch


_WAKING = 2e-4
"""Seconds before the end of a wait at which it stops sleeping and spins, because a thread that
sleeps wakes up late, by varying times."""


class EmulatedBlock(Module):
    """A block without weights that waits as long as a real one would compute
    (`model.emulate`)."""

    def __init__(self, times: EmulationConfig) -> None:
        self.times = times

    def __call__(self, x: Tensor, frame: Frame) -> Tensor:
        """Return a copy of x after the forward time."""
        return _Wait.apply(x, time.perf_counter(), self.times, frame.later)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, start: float, times: EmulationConfig, later: DeferredGradients
    ) -> Tensor:
        ctx.times, ctx.later = times, later
        y = x.clone()
        _wait_until(start + times.forward)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _wait(ctx.times.backward)
        ctx.later.do(partial(_wait, ctx.times.weight))
        return gradients[0], None, None, None


def _wait(seconds: float) -> None:
    _wait_until(time.perf_counter() + seconds)


def _wait_until(end: float) -> None:
    """Return when `time.perf_counter` reaches `end`. Sleeps first and then spins, because sleeping
    until `end` would return late."""
    rest = end - time.perf_counter() - _WAKING
    if rest > 0:
        time.sleep(rest)
    while time.perf_counter() < end:
        pass


class OutputHead(Module):
    """Final norm, projection to the vocabulary, and loss. Each depth of multi-token prediction has
    its own final norm and shares the projection.

    tokens: the token table on the last stage, whose weight a tied head uses.
    """

    def __init__(self, config: RunConfig, tokens: EmbeddingTable | None) -> None:
        model = config.model
        self.norm = _norm("head.norm", model)
        self.norms_ahead = [
            _norm(f"predictors.{index}.norm", model) for index in range(model.mtp_depth)
        ]
        if model.tie_embeddings:
            assert tokens is not None
            self.weight = tokens.weight
        else:
            spec = ParamSpec(
                "head.weight",
                (vocab_size(model), model.hidden),
                Normal(model.init_std),
                role="head",
                decay=True,
                axes={0: "tensor"},
            )
            self.weight = Parameter(spec)
        self.plain = LossOptions(softcap=model.logit_softcap)
        self.options = replace(
            self.plain, label_smoothing=config.train.label_smoothing, z_loss=config.train.z_loss
        )

    @property
    def norms(self) -> list[Norm]:
        """The final norm of the next token, then those of the tokens further ahead."""
        return [self.norm, *self.norms_ahead]

    def loss(self, y: Tensor, labels_BS: Tensor, scale: Tensor | None, frame: Frame) -> HeadResult:
        """Return the loss sum of normalised hidden states y [rows, hidden], with gradients times
        `scale`; see `head_loss`. Without a scale there are no gradients, and the loss is
        cross-entropy alone."""
        labels = frame.fill(labels_BS.flatten(), IGNORE)
        options = self.plain if scale is None else self.options
        given = (y.detach(), labels, self.weight, options, scale, frame.tensor)
        return head_loss(*given, frame.kernels)

    def logits(self, x: Tensor) -> Tensor:
        """Return fp32 logits of hidden states [..., hidden], for use without training."""
        logits = (self.norm(x) @ self.weight.value.t()).float()
        cap = self.plain.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class MultiTokenPredictor(Module):
    """One depth of multi-token prediction (DeepSeek-V3, 2024, section 2.2): the stream of a token
    and the embedding of a token further ahead are normalised, joined, and passed through one more
    block, which is numbered after the last layer.

    tokens: the table of the embedding.
    before: the final norm of the previous depth. It is applied to the stream first, because the
    predictor takes the stream as the head saw it, as in the released code.
    """

    def __init__(
        self, model: ModelConfig, index: int, tokens: EmbeddingTable, before: Norm
    ) -> None:
        self.name = f"predictors.{index}"
        self.tokens, self.before = tokens, before
        self.stream_norm = _norm(f"{self.name}.stream_norm", model)
        self.token_norm = _norm(f"{self.name}.token_norm", model)
        self.join = Linear(
            f"{self.name}.join",
            (2, model.hidden),
            (model.hidden,),
            std=model.init_std,
            split=None,
            bias=False,
        )
        self.block = TransformerBlock(model, model.layers + index)

    @property
    def second_half(self) -> Module:
        """The second half of the block."""
        return self.block.second_half

    def __call__(self, x: Tensor, ahead_BS: Tensor, frame: Frame) -> Tensor:
        """Return the next stream from x, the stream [rows, hidden] of the previous depth, and the
        tokens ahead."""
        ahead = self.tokens(ahead_BS.flatten(), frame)
        if frame.dropout is not None:
            ahead = frame.dropout(ahead, self.name)
        kernels = frame.kernels
        stream = self.stream_norm(self.before(x, kernels), kernels)
        both = torch.cat((stream, self.token_norm(ahead, kernels)), 1)
        return self.block(self.join.plain(both, frame), frame)


def output_token_table(model: ModelConfig, embedding: Embedding | None) -> EmbeddingTable | None:
    """Return the token table of the last stage: that of `embedding` if given, which is on the same
    rank, else a replica. None if the last stage needs no token table."""
    if not (model.tie_embeddings or model.mtp_depth):
        return None
    if embedding is not None:
        return embedding.tokens
    table = _token_table(model)
    table.weight = Parameter(table.weight.spec, replica=True)
    return table


def vocab_size(model: ModelConfig) -> int:
    """Return the rows of the embedding. Raises `ValueError` if `model.vocab` is not set: the config
    must be resolved before a model is built."""
    if model.vocab is None:
        raise ValueError("model.vocab is not set: resolve the config with its tokenizer first")
    return model.vocab


def _token_table(model: ModelConfig) -> EmbeddingTable:
    return EmbeddingTable(
        "embedding.tokens", vocab_size(model), model.hidden, std=model.init_std, split=True
    )


def _norm(name: str, model: ModelConfig) -> Norm:
    return Norm(name, model.hidden, kind=model.norm, eps=model.norm_eps, bias=model.bias)
