"""The layers of a model one by one: keys of `model.blocks`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from megaframe.config.parts import Activation, ActivationPart, FeedForwardPart, MixerPart
from megaframe.config.registry import Extensible
from megaframe.config.section import Positive, Section

QKNorm = Annotated[
    bool | Literal["head", "whole", "layernorm", "layernorm_per_head", "l2"],
    BeforeValidator(lambda value: value == "head" or value),
]
"""Norms of queries and keys. `head` is stored as true, as which it was written before there was
another form."""


def get_qk_norm_form(value: bool | str) -> str:
    """Return `none` or the name of the norms for a value of `qk_norm`."""
    if isinstance(value, bool):
        return "head" if value else "none"
    return value


Factors = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(max_length=4096)]
"""One for each pair of dimensions of a head."""


class RotaryScalingConfig(Section):
    """How rotary wavelengths are stretched for samples longer than those of training."""

    kind: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"] = (
        "none"
    )
    """How to scale rotary frequencies to contexts longer than the model was trained on. linear:
    all are divided by the factor. dynamic: in samples of more than `original_length` tokens the
    base grows with their length, as in transformers. longrope (Phi-4-mini): each is divided by a
    factor of its own, which is another one in samples of more than `original_length` tokens.
    proportional (LFM3): the fastest ones alone are rotated, and divided by the factor."""
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Context length after scaling divided by `original_length`. longrope multiplies rotated
    queries and keys by sqrt(1 + ln(factor) / ln(original_length))."""
    original_length: Positive = 8192
    """dynamic, llama3, yarn, longrope: context length in tokens before scaling."""
    low_frequency: Annotated[float, Field(gt=0)] = 1.0
    """llama3: wavelengths above original_length / low_frequency are fully scaled. yarn: number of
    rotations up to which a frequency is fully scaled (beta_slow)."""
    high_frequency: Annotated[float, Field(gt=0)] = 4.0
    """llama3: wavelengths below original_length / high_frequency are unchanged. yarn: number of
    rotations from which a frequency is unchanged (beta_fast, usually 32)."""
    mscale: Annotated[float, Field(ge=0)] = 1.0
    """yarn: m in the factor 0.1 * m * ln(factor) + 1 on rotated queries and keys."""
    mscale_all_dim: Annotated[float, Field(ge=0)] = 0.0
    """yarn with `model.latent`: m of a similar factor on all dimensions of queries and keys, by
    which the factor on rotated dimensions is divided."""
    truncate: bool = True
    """yarn: round outwards to whole numbers the two pairs of dimensions between which frequencies
    are blended; gpt-oss does not."""
    proportion: Annotated[float, Field(gt=0, le=1)] = 1.0
    """proportional: share of the pairs of dimensions that are rotated, the fastest ones, with the
    wavelengths that they have among all."""
    short_factors: Factors = ()
    """longrope: factors of the pairs of dimensions in samples of up to `original_length` tokens."""
    long_factors: Factors = ()
    """longrope: those in longer samples."""


class QueryScaleConfig(Section):
    """A factor of queries that grows with their positions."""

    rate: Annotated[float, Field(gt=0)]
    """A query at position p is multiplied by 1 + rate * ln(1 + floor((p + first) / length)). The
    rate is 0.1 in Ministral 3, Mistral 4 and Llama 4."""
    length: Positive
    """Tokens after which the factor grows next; the first so many are not scaled."""
    first: Annotated[int, Field(ge=0, le=1)] = 0
    """Number of a sample's first position; 1 in Llama 4."""


class AttentionConfig(Section):
    """Attention over heads, as the mixer of a block."""

    kind: Literal["attention"] = "attention"
    """Attention with grouped key and value heads."""
    heads: Positive | None = None
    """Number of query heads. Default: `model.heads`."""
    kv_heads: Positive | None = None
    """Number of key and value heads. Default: `model.kv_heads`."""
    head_dim: Positive | None = None
    """Width of one head. Default: `model.head_dim`."""
    v_head_dim: Positive | None = None
    """Width of a value head, which is less than that of others in MiMo-V2-Flash. Default:
    `head_dim`."""
    window: Positive | None = None
    """Sliding window in tokens; null for all tokens before."""
    attention_chunk: Positive | None = None
    """Chunks of so many tokens in place of a window: a token sees those before it in its own chunk
    alone, as in Llama 4. They are counted from the beginning of a sample, or of a document with
    `data.reset_attention`."""
    rotary: bool | None = None
    """Whether queries and keys are rotated. Default: whether `model.position` is rotary."""
    rotary_base: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary wavelengths. Default: `model.rotary_base`."""
    rotary_scaling: RotaryScalingConfig | None = None
    """How they are stretched for longer samples. Default: `model.rotary_scaling`."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each head's width that is rotated. Default: `model.rotary_fraction`."""
    qk_norm: QKNorm | None = None
    """Norms of queries and keys. Default: `model.qk_norm`."""
    norm_after_rotation: bool = False
    """Normalise queries and keys after they are rotated, as in Hunyuan, rather than before."""
    value_norm: bool = False
    """Divide each value head by its root mean square, as in Gemma 4."""
    keys_as_values: bool = False
    """Let values be the keys as they are before norms and rotation, without a product of their own,
    as in layers of Gemma 4 that see all tokens."""
    shared_keys: bool = False
    """Attend to the keys and values of the nearest layer before that computes its own and has the
    same window, as the last layers of Gemma 3n and 4 do, and compute queries alone."""
    score_scale: Annotated[float, Field(gt=0)] | None = None
    """Factor of the scores. Default: 1 / sqrt(head_dim)."""
    query_scale: QueryScaleConfig | None = None
    """A factor of queries that grows with their positions. Default: none."""
    alibi: Annotated[float, Field(gt=0)] | None = None
    """ALiBi (Press et al. 2022), in place of other positions: a score falls with the distance of
    its key, by slopes from one head to the next down to 2 to the power of minus this number, which
    is usually 8. Not with `softcap`, `query_scale` or `sinks`. Default: none."""
    alibi_form: Literal["exact", "falcon"] = "exact"
    """What ALiBi adds to scores. falcon: as the code of Falcon-RW has it, places times slopes, both
    rounded to bfloat16, and so is their product; this is added before `score_scale` multiplies the
    scores. It needs as many key heads as query heads."""
    softcap: Annotated[float, Field(gt=0)] | None = None
    """Bound the scores smoothly: x becomes softcap * tanh(x / softcap), as in Gemma 2."""
    sinks: bool = False
    """Give each query head a learned logit that takes part in its softmax and has no value, as in
    gpt-oss."""
    qkv_bias: bool | None = None
    """Biases of queries, keys and values. Default: `model.qkv_bias`."""
    bias: bool | None = None
    """Bias of the output. Default: `model.bias`."""
    output_gate: Literal["none", "head", "element"] = "none"
    """Multiply the heads' outputs by sigmoids computed from the layer's input, one for each head or
    one for each element (Qiu et al. 2025)."""


class LatentMixerConfig(Section):
    """Latent attention, as the mixer of a block."""

    kind: Literal["latent"]
    """Multi-head latent attention, as `model.latent` describes it."""
    window: Positive | None = None
    """Sliding window in tokens; null for all tokens before."""
    shared_indexer: bool = False
    """Attend to the keys that were chosen by the indexer (`model.indexer`) of the nearest layer
    before that has its own and the same window, as most layers of GLM-5.2 do."""
    query_scale: QueryScaleConfig | None = None
    """A factor of queries that grows with their positions. Default: none."""


class CompressedIndexerConfig(Section):
    """An indexer that chooses compressed keys. It is frozen, as transformers treats it."""

    heads: Positive
    """Number of its query heads."""
    head_dim: Positive
    """Width of a query head, and of the one key head, which is compressed like keys."""
    top_k: Positive
    """Number of compressed keys that a query attends to, those with the largest scores; of equal
    ones the first in the sample."""


class CompressionConfig(Section):
    """Keys of several tokens each, which queries see of all tokens before them."""

    tokens: Positive
    """Tokens of which one key is made, as a mean for each element with learned weights. They are
    counted from the beginning of a sample, or of a document with `data.reset_attention`."""
    overlap: bool = False
    """Make each key of as many tokens before these, too, by products of their own."""
    indexer: CompressedIndexerConfig | None = None
    """Chooses the keys that a query sees. Default: none, it sees all."""


class CompressedAttentionConfig(Section):
    """Attention to one key for all heads and to compressed keys, as the mixer of a block."""

    kind: Literal["compressed_attention"]
    """Attention of DeepSeek-V4: all heads have one key, which is its value, too; they see those of
    a window, and compressed ones of all tokens before."""
    heads: Positive | None = None
    """Number of query heads. Default: `model.heads`."""
    head_dim: Positive | None = None
    """Width of a head. Default: `model.head_dim`."""
    query_rank: Positive
    """Width of the latent that queries are computed from."""
    window: Positive
    """Sliding window in tokens."""
    compression: CompressionConfig | None = None
    """Keys of several tokens each. Default: none, tokens see their window alone."""
    output_groups: Positive = 1
    """Groups of neighbouring heads, each with a product of its own before the output's. Tensor
    ranks divide them."""
    output_rank: Positive
    """Width of what is made of each group."""
    rotary_base: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary wavelengths. Default: `model.rotary_base`."""
    rotary_scaling: RotaryScalingConfig | None = None
    """How they are stretched for longer samples. Default: `model.rotary_scaling`."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each head's width that is rotated, and turned back in its output. Default:
    `model.rotary_fraction`."""


class GatedDeltaNetConfig(Section):
    """Gated delta net, as the mixer of a block."""

    kind: Literal["gated_delta_net"]
    """Linear attention whose state each token decays and corrects (Yang et al. 2024), with a
    causal convolution before it, and a norm and a gate after it, as in Qwen3-Next."""
    key_heads: Positive | None = None
    """Number of query and key heads. Default: `model.heads`."""
    value_heads: Positive | None = None
    """Number of value heads, a multiple of `key_heads`. Default: `key_heads`."""
    key_dim: Positive | None = None
    """Width of a query or key head. Default: `model.head_dim`."""
    value_dim: Positive | None = None
    """Width of a value head. Default: `key_dim`."""
    convolution: Annotated[int, Field(ge=1, le=64)] = 4
    """Tokens that the convolution of queries, keys and values sees, with the token itself."""
    decay_rank: Positive | None = None
    """Let each channel of a key decay by itself, as in Kimi delta attention (Kimi Linear 2025); the
    decays are computed from a latent of this width. Default: one decay for each value head."""
    gate_rank: Positive | None = None
    """Width of a latent that the gates of outputs are computed from. Default: none, they are
    computed from the stream."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """Function of the gates; sigmoid in Kimi Linear."""
    norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Added to the mean square of a value head's output before its root. Default:
    `model.norm_eps`."""
    negative_eigenvalues: bool = False
    """Let corrections be up to twice as strong, so that a token can turn over what the state has
    for its key (OLMo hybrid)."""
    chunk: Positive = 64
    """Tokens that see each other through products; changes the speed only."""


class GatedShortConvolutionConfig(Section):
    """Gated short convolution, as the mixer of a block."""

    kind: Literal["gated_short_convolution"]
    """A causal convolution of each channel over a few tokens, between two gates computed from the
    layer's input, as in LFM2 (Liquid AI 2025)."""
    convolution: Annotated[int, Field(ge=1, le=64)] = 3
    """Tokens that the convolution sees, with the token itself."""
    bias: bool | None = None
    """Biases of both products and of the convolution. Default: `model.bias`."""


class Mamba2Config(Section):
    """Mamba-2, as the mixer of a block."""

    kind: Literal["mamba2"]
    """A state space model whose state each token decays and adds to (Dao and Gu 2024), with a
    causal convolution before it and gates after it."""
    heads: Positive | None = None
    """Number of heads, each with a state; a multiple of `groups`. Default: `model.heads`."""
    head_dim: Positive | None = None
    """Width of a head's input. Default: `model.head_dim`."""
    groups: Positive = 1
    """Groups of heads that share keys and queries, as B and C are called elsewhere. Tensor ranks
    divide them; if there are fewer than ranks, neighbours divide the heads of one."""
    state_dim: Positive = 128
    """Width of a key or query, and so size of the state of each of a head's inputs."""
    convolution: Annotated[int, Field(ge=1, le=64)] = 4
    """Tokens that the convolution of inputs, keys and queries sees, with the token itself."""
    convolution_bias: bool = True
    """Biases of the convolution's channels."""
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    """Whether the outputs of each group are normalised after they are gated, before, or not."""
    step_min: Annotated[float, Field(ge=0)] = 0.0
    """Smallest step, by which a token's decay and its input are multiplied."""
    step_max: Annotated[float, Field(gt=0)] | None = None
    """Largest step. Default: none."""
    input_bias: bool | None = None
    """Bias of the first product. Default: `bias`."""
    bias: bool | None = None
    """Bias of the second product. Default: `model.bias`."""
    chunk: Positive = 64
    """Tokens that see each other through products; changes the speed only."""


class MLPConfig(Section):
    """A dense MLP, as the second half of a block."""

    kind: Literal["mlp"] = "mlp"
    """A dense MLP."""
    ffn: Positive | None = None
    """Inner width. Default: `model.ffn`."""
    activation: Annotated[Activation | ActivationPart | None, Extensible("activation")] = None
    """Activation. Default: `model.activation`."""
    bias: bool | None = None
    """Biases of both products. Default: `model.bias`."""
    up_bias: bool | None = None
    """Bias of the first product, which is gate and up of a gated activation. Default: `bias`."""
    down_bias: bool | None = None
    """Bias of the second product. Default: `bias`."""
    sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the gates of a token that are cut off, if they are distributed normally: they are
    replaced by what they have above this quantile of their row, or 0 (Gemma 3n)."""


class MoEMixtureConfig(Section):
    """A mixture of experts, as the second half of a block."""

    kind: Literal["moe"]
    """Experts, as `model.moe` describes them."""
    shared: Positive | None = None
    """Number of shared experts. Default: `model.moe.shared`."""
    router: Literal["scores", "hash"] = "scores"
    """How experts are chosen: those with the largest scores, or those that a table has for the
    token (Hash layers, Roller et al. 2021), which is drawn at first and never trained; scores are
    then the weights alone, and no load is balanced. hash is that of the first layers of
    DeepSeek-V4."""


class NoLayerConfig(Section):
    """A half that a block does not have."""

    kind: Literal["none"]
    """Nothing: the block has its other half only, as all have in Nemotron-H."""


def _expand_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _get_kind(value: Any) -> str | None:
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


def _get_mixer_kind(value: Any) -> str | None:
    return _get_kind(value) or "attention"


def _get_feed_forward_kind(value: Any) -> str | None:
    return _get_kind(value) or "mlp"


MixerConfig = Annotated[
    Annotated[AttentionConfig, Tag("attention")]
    | Annotated[LatentMixerConfig, Tag("latent")]
    | Annotated[CompressedAttentionConfig, Tag("compressed_attention")]
    | Annotated[GatedDeltaNetConfig, Tag("gated_delta_net")]
    | Annotated[GatedShortConvolutionConfig, Tag("gated_short_convolution")]
    | Annotated[Mamba2Config, Tag("mamba2")]
    | Annotated[NoLayerConfig, Tag("none")],
    Discriminator(_get_mixer_kind),
    BeforeValidator(_expand_kind),
]
FeedForwardConfig = Annotated[
    Annotated[MLPConfig, Tag("mlp")]
    | Annotated[MoEMixtureConfig, Tag("moe")]
    | Annotated[NoLayerConfig, Tag("none")],
    Discriminator(_get_feed_forward_kind),
    BeforeValidator(_expand_kind),
]


class BlockConfig(Section):
    """A transformer layer, or several alike: its mixer, what follows it, and its norms."""

    repeat: Annotated[int, Field(gt=0, le=2_000)] = 1
    """Number of consecutive layers like this one."""
    mixer: Annotated[MixerConfig | MixerPart, Extensible("mixer")] = AttentionConfig()
    """What mixes tokens: `attention`, `latent`, `compressed_attention`, `gated_delta_net`,
    `gated_short_convolution` or `mamba2`, and its keys; or `none`."""
    second_mixer: Annotated[MixerConfig | MixerPart, Extensible("mixer")] = NoLayerConfig(
        kind="none"
    )
    """A mixer of another kind that starts from the same rows as the first one, and whose output is
    added to its output, as in Falcon-H1. Default: none."""
    feed_forward: Annotated[FeedForwardConfig | FeedForwardPart, Extensible("feed_forward")] = (
        MLPConfig()
    )
    """What follows it: `mlp` or `moe`, and its keys; or `none`."""
    norms: Literal["before", "after", "both", "none"] = "before"
    """Where the stream's norms are: before each half of the block, after it (on what it adds to the
    stream), both, or nowhere."""
    parallel: Literal["none", "one_norm", "two_norms"] = "none"
    """Let both halves start from the same stream, with one norm for both or one for each."""
    residual_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor of what each half adds to the stream."""
    laurel_rank: Positive | None = None
    """Learned augmented residual (LAuReL, Menghani et al. 2024), as in Gemma 3n: beside the mixer
    its normalised input is added to the stream, with what a product of this rank makes of it, and
    the sum is divided by the root of 2. Default: none."""
    layer_scalar: bool = False
    """Multiply the stream after the block by a learned number, which is 1 at first. Gemma 4's code
    does not train it, as with `optim.frozen=[blocks.*.layer_scalar.gain]`."""
