"""The transformer block, and the block of a multi-token predictor: what they are made of."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from megaframe.architecture.attention import AttentionDescription, window_of
from megaframe.architecture.layer import (
    FeedForwardDescription,
    HasParameters,
    MixerDescription,
    SavedActivations,
)
from megaframe.architecture.linear import LinearSpec, TensorTraffic
from megaframe.architecture.mla import LatentAttentionDescription
from megaframe.architecture.mlp import MLPDescription
from megaframe.architecture.moe import MoEDescription, has_experts
from megaframe.architecture.norm import NormDescription
from megaframe.architecture.rotary import compute_scores_factor, count_rotated_dims
from megaframe.architecture.spec import ParamSpec
from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig


@dataclass(frozen=True)
class BlockDescription:
    """x + mixer(norm(x)), then x + feed_forward(norm(x)). Equal for blocks of the same kind."""

    mixer: MixerDescription
    feed_forward: FeedForwardDescription
    norm: NormDescription

    @property
    def first_half(self) -> Mapping[str, HasParameters]:
        """What the block computes first."""
        return {"attention_norm": self.norm, self.mixer.name: self.mixer, "mlp_norm": self.norm}

    @property
    def second_half(self) -> Mapping[str, HasParameters]:
        """The part whose parameters are used last and whose gradients are complete first."""
        return {self.feed_forward.name: self.feed_forward}

    def parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters. name: the path of the block in the model."""
        for part_name, part in (*self.first_half.items(), *self.second_half.items()):
            yield from part.parameters(f"{name}.{part_name}")

    @cached_property
    def linears(self) -> list[LinearSpec]:
        """All products with weights, in order of use."""
        return [*self.mixer.linears, *self.feed_forward.linears]

    @cached_property
    def matrix_elements(self) -> int:
        """Elements of the matrices that one token is multiplied by."""
        return self.mixer.matrix_elements + self.feed_forward.matrix_elements

    @cached_property
    def matrices(self) -> Counter[tuple[int, int]]:
        """The matrices of a block: how many there are of each shape [outputs, inputs]. A fused
        weight is several matrices."""
        shapes: Counter[tuple[int, int]] = Counter()
        for spec in self.parameters(""):
            if spec.role == "matrix":
                for box in spec.matrices:
                    outputs = math.prod(box.shape[: -spec.inputs])
                    shapes[outputs, box.size // outputs] += 1
        return shapes

    def attention_flops(self, seq: int, *, causal: bool = True) -> float:
        """Return the forward FLOPs per token of the products of activations with activations.

        Args:
            seq: Tokens of a sample.
            causal: Whether what is masked is left out.
        """
        products = self.mixer.batched_products(seq)
        return sum(p.flops * (p.causal_share if causal else 1.0) for p in products) / seq

    def saved(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what a block keeps per token besides its input.

        It is what the mixer and the feed-forward keep, the stream between them, and the outputs of
        the norms with their statistics, unless they are recomputed.
        """
        kept = self.mixer.saved(parallel, recompute) + self.feed_forward.saved(parallel, recompute)
        kept = kept + SavedActivations(values=self.norm.width)
        if recompute != "selective":
            kept = kept + self.norm.saved
        if recompute != "selective" or self.feed_forward.keeps_normed_input:
            kept = kept + self.norm.saved
        return kept

    def saved_for_weights(self, parallel: ParallelConfig, recompute: str) -> SavedActivations:
        """Return what the backward pass of a block leaves for its weight pass, per token."""
        parts = (self.mixer, self.feed_forward)
        kept = (part.saved_for_weights(parallel, recompute) for part in parts)
        return sum(kept, SavedActivations())

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """What the rows of a token move over the tensor axis."""
        return self.mixer.tensor_traffic + self.feed_forward.tensor_traffic


@dataclass(frozen=True)
class PredictorDescription:
    """One depth of multi-token prediction (DeepSeek-V3, 2024, section 2.2): the stream and the
    embedding of a token ahead are normalised, joined by a matrix, and passed through a block. Its
    final norm belongs to the head."""

    block: BlockDescription
    join: LinearSpec

    @property
    def norm(self) -> NormDescription:
        """Of the stream and of the token."""
        return self.block.norm

    def parameters(self, name: str, block_name: str) -> Iterator[ParamSpec]:
        """Yield the specs of all parameters.

        Args:
            name: The path of the predictor in the model.
            block_name: That of its block, which is numbered after the last layer.
        """
        yield from self.norm.parameters(f"{name}.stream_norm")
        yield from self.norm.parameters(f"{name}.token_norm")
        yield from self.join.parameters(f"{name}.join")
        yield from self.block.parameters(block_name)


@lru_cache(maxsize=4096)
def describe_block(model: ModelConfig, layer: int) -> BlockDescription:
    """Return the block of a layer. Predictors' blocks are numbered after the last layer."""
    # GPT-2's initialisation: outputs into the stream shrink with the number of layers.
    output_std = model.init_std / math.sqrt(2 * model.layers)
    moe = model.moe
    feed_forward: FeedForwardDescription
    if moe is not None and has_experts(moe, layer):
        feed_forward = MoEDescription(
            hidden=model.hidden,
            width=moe.ffn or model.ffn,
            activation=model.activation,
            bias=model.bias,
            init_std=model.init_std,
            output_std=output_std,
            moe=moe,
        )
    else:
        feed_forward = MLPDescription(
            hidden=model.hidden,
            width=model.ffn,
            activation=model.activation,
            bias=model.bias,
            init_std=model.init_std,
            output_std=output_std,
        )
    return BlockDescription(
        _describe_attention(model, layer, output_std), feed_forward, describe_norm(model)
    )


def describe_predictor(model: ModelConfig, index: int) -> PredictorDescription:
    """Return predictor number `index`, from 0."""
    join = LinearSpec((2, model.hidden), (model.hidden,), model.init_std)
    return PredictorDescription(describe_block(model, model.layers + index), join)


def describe_norm(model: ModelConfig) -> NormDescription:
    """Return the norm of the residual stream."""
    return NormDescription(model.hidden, model.norm, model.norm_eps, model.bias)


def _describe_attention(model: ModelConfig, layer: int, output_std: float) -> MixerDescription:
    latent, window = model.latent, window_of(model, layer)
    width = model.head_dim if latent is None else latent.head_dim + latent.rotary_dim
    score_scale = compute_scores_factor(model) / math.sqrt(width)
    rotary_dim = count_rotated_dims(model)
    if latent is not None:
        return LatentAttentionDescription(
            hidden=model.hidden,
            heads=model.heads,
            window=window,
            bias=model.bias,
            norm_eps=model.norm_eps,
            score_scale=score_scale,
            rotary_dim=rotary_dim,
            init_std=model.init_std,
            output_std=output_std,
            query_rank=latent.query_rank,
            kv_rank=latent.kv_rank,
            head_dim=latent.head_dim,
            value_dim=latent.value_dim,
        )
    return AttentionDescription(
        hidden=model.hidden,
        heads=model.heads,
        window=window,
        bias=model.bias,
        norm_eps=model.norm_eps,
        score_scale=score_scale,
        rotary_dim=rotary_dim,
        init_std=model.init_std,
        output_std=output_std,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        qk_norm=model.qk_norm,
        qkv_bias=model.qkv_bias,
    )
