"""Architecture of the model: keys of `model`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from megaframe.config.adapters import AdaptersConfig
from megaframe.config.blocks import BlockConfig, QKNorm, RotaryScalingConfig
from megaframe.config.parts import Activation, ActivationPart, NormPart
from megaframe.config.registry import Extensible
from megaframe.config.section import NonNegative, Positive, Section


class LatentAttentionConfig(Section):
    """Multi-head latent attention (DeepSeek-V2, 2024)."""

    query_rank: Positive | None = None
    """Width of the query latent. Default: none; queries are computed directly from the residual
    stream."""
    kv_rank: Positive
    """Width of the latent from which keys and values of all heads are computed."""
    head_dim: Positive
    """Width of the part of a query or key head that is not rotated."""
    rotary_dim: Positive
    """Width of the rotated part; all heads share its key."""
    value_dim: Positive
    """Width of a value head."""
    norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the norms of the latents. Default: `model.norm_eps`."""


FROZEN_INDEXER, FROZEN_TABLES = "*.indexer.*", "*.router.table"
"""Patterns of the names of the parameters of indexers, and of the tables of routers."""


class IndexerConfig(Section):
    """Sparse attention: an indexer that chooses the keys of latent attention (DeepSeek-V3.2)."""

    heads: Positive
    """Number of query heads of the indexer."""
    head_dim: Positive
    """Width of a query head, and of the one key head; the first `model.latent.rotary_dim` dims are
    rotated."""
    top_k: Positive
    """Number of keys that a query attends to, those with the largest scores; of equal ones the
    first in the sample. In samples of up to so many tokens all are."""
    loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight, per token and layer, of the divergence of the indexer's softmax from the mean of the
    attention's heads over the keys that they see, which alone trains the indexer, and nothing else.
    Default: the indexer is frozen, as transformers treats it."""
    dense: bool = False
    """Let attention see all keys while the indexer is trained: the first stage of DeepSeek-V3.2,
    with `optim.frozen=['!*.indexer.*']`."""
    absorb: bool | Literal["auto"] = "auto"
    """Multiply queries by the keys' part of `kv` and outputs by the values' part, so that attention
    reads the latents of chosen keys alone, once for all heads (`kernels.sparse_attention`). false
    makes keys and values of all heads, and hides those that were not chosen. `auto` is true where
    that needs fewer multiplications, in samples many times as long as `top_k`. Not with `dense`,
    `train.fp8` or adapters of `kv`."""


class HyperConnectionsConfig(Section):
    """Several residual streams that each half of a block reads and writes."""

    kind: Literal["hyper_connections"] = "hyper_connections"
    """Manifold-constrained hyper-connections (DeepSeek-V4): a half reads a sum of the streams and
    adds to all of them, with weights that are computed from the streams of each token."""
    number: Annotated[int, Field(ge=2, le=64)] = 4
    """Number of streams. What passes between blocks is so many times as wide as `model.hidden`."""
    iterations: Annotated[int, Field(ge=1, le=1_000)] = 20
    """Iterations of Sinkhorn's algorithm, after which rows and columns of the weights with which
    streams mix each sum to 1."""
    eps: Annotated[float, Field(gt=0)] = 1e-6
    """Added to the weights of what is read, and to what they and their sums are divided by."""


class AltUpConfig(Section):
    """Several residual streams of which a block changes one."""

    kind: Literal["altup"]
    """Alternating updates (AltUp, Baykal et al. 2023), as in Gemma 3n: each block predicts all
    streams from all, computes with the first one, and corrects the others by what it changed."""
    number: Annotated[int, Field(ge=2, le=64)] = 4
    """Number of streams."""


def _expand_kind(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


def _get_kind(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind or "hyper_connections"


StreamsConfig = Annotated[
    Annotated[HyperConnectionsConfig, Tag("hyper_connections")]
    | Annotated[AltUpConfig, Tag("altup")],
    Discriminator(_get_kind),
    BeforeValidator(_expand_kind),
]


class EmulationConfig(Section):
    """Blocks that wait instead of compute."""

    forward: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the forward pass of one block waits per microbatch."""
    backward: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the input gradient of one block waits per microbatch."""
    weight: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the weight gradient of one block waits per microbatch."""


MOST_EXPERTS = 1 << 14
"""Experts have a matrix each, so their number is one of things to list; models have up to 2048."""


class MoEConfig(Section):
    """Experts, their router, and how their load is balanced."""

    experts: Annotated[int, Field(ge=1, le=MOST_EXPERTS)]
    """Number of routed experts per layer."""
    top_k: Positive = 2
    """Number of experts that each token is routed to."""
    ffn: Positive | None = None
    """Inner width of one expert. Default: `model.ffn`."""
    shared: NonNegative = 0
    """Number of shared experts, which every token uses; they are one MLP of width `shared` times
    `ffn`."""
    shared_gate: bool = False
    """Multiply what the shared experts add by a sigmoid of each token (Qwen2-MoE, Qwen3-Next)."""
    first: NonNegative = 0
    """Number of dense layers before the first expert layer."""
    every: Positive = 1
    """After `first`, every n-th layer has experts; the others are dense."""
    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "sigmoid"
    """Function that turns a router's logits into scores, in fp32. sqrtsoftplus (DeepSeek-V4) is the
    root of log(1 + exp(x))."""
    normalise: bool = Field(default_factory=lambda values: values["top_k"] > 1)
    """Divide the scores of the chosen experts by their sum. Default: true if `top_k` is more than
    1."""
    normalise_eps: Annotated[float, Field(ge=0)] = 0.0
    """Added to that sum. It is 1e-6 in LFM2."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the output of the routed experts."""
    scale_inputs: bool = False
    """Multiply the inputs of the chosen experts by their scores, not their outputs (Llama 4)."""
    groups: Positive = 1
    """Number of groups of neighbouring experts; a token may use only `top_groups` of them."""
    top_groups: Positive = Field(default_factory=lambda values: values["groups"])
    """Number of groups whose experts a token may use. Default: all."""
    group_best: Positive = 1
    """A group's score is the sum of this many of its best scores."""
    balance: Literal["bias", "sequence", "global", "none"] = "bias"
    """How to balance the load of the experts. `bias` adds a number to each expert's score when
    experts are chosen and adjusts it after every step (Wang et al. 2024), with a small loss per
    sequence. `sequence` uses that loss alone. `global` uses a loss on the load of the previous
    step."""
    balance_rate: Annotated[float, Field(gt=0)] = 1e-3
    """bias: largest change of the bias in a step."""
    balance_loss: Annotated[float, Field(ge=0)] = Field(
        default_factory=lambda values: {"bias": 1e-4, "none": 0.0}.get(values["balance"], 1e-2)
    )
    """Weight of the balance loss per token. Default: 1e-4 for bias, 1e-2 for sequence and
    global."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared log-sum-exp of a router's logits per token (ST-MoE uses 1e-3)."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Multiply a router's inputs by random factors between 1 - jitter and 1 + jitter."""
    expert_bias: bool = False
    """Biases of both products of each expert (gpt-oss). Those of shared experts follow
    `model.bias`."""
    router_bias: bool = False
    """A bias of the router's logits (gpt-oss), which is trained like its weights."""
    expert_gain: bool = False
    """Multiply the output of each expert by a learned factor, which is 1 at first (Gemma 4)."""
    own_norms: bool = False
    """Let the router, the experts and the shared experts each normalise the stream by a norm of
    their own, in place of the one before all of them, and normalise what experts and what shared
    experts give before it is summed, as in Gemma 4 26B-A4B."""
    capacity: Annotated[float, Field(gt=0)] | None = None
    """In training, limit the tokens that each rank sends to an expert to this factor times the mean
    load of a microbatch, and drop those with the lowest scores. Results then depend on the layout.
    Evaluations and generation drop nothing. Default: no limit."""


class ModelConfig(Section):
    """The model: its sizes, and what all of its layers have in common."""

    layers: Annotated[int, Field(gt=0, le=2_000)] = 12
    """Number of transformer blocks."""
    blocks: Annotated[tuple[BlockConfig, ...] | None, Field(max_length=2_000)] = None
    """A pattern of blocks that repeats over the layers, as with `window`. Each says what mixes
    tokens, what follows, and where norms are. Default: all blocks follow the other keys."""
    hidden: Positive = 768
    """Width of the residual stream."""
    heads: Positive = 12
    """Number of query heads."""
    kv_heads: Positive = Field(default_factory=lambda values: values["heads"])
    """Number of key and value heads; divides `heads`. Default: `heads` (no sharing)."""
    head_dim: Positive = Field(
        default_factory=lambda values: max(1, values["hidden"] // values["heads"])
    )
    """Width of one head. Default: hidden / heads."""
    ffn: Positive = Field(
        default_factory=lambda values: 4 * values["hidden"], validate_default=True
    )
    """Inner width of the MLP. Default: 4 * hidden."""
    vocab: Positive | None = None
    """Vocabulary size. Default: that of `data.tokenizer`."""
    norm: Annotated[Literal["layernorm", "rmsnorm"] | NormPart, Extensible("norm")] = "layernorm"
    """Normalisation before attention, before the MLP and before the head."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Epsilon of the normalisation."""
    position: Literal["learned", "rotary", "none"] = "rotary"
    """Position encoding: a learned table, rotated queries and keys, or none."""
    positions: Positive | None = None
    """Rows of the learned position table. Default: train.seq."""
    rotary_base: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary wavelengths."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head's width that is rotated."""
    rotary_scaling: RotaryScalingConfig = RotaryScalingConfig()
    """Scaling of rotary frequencies to longer contexts."""
    activation: Annotated[Activation | ActivationPart, Extensible("activation")] = "gelu_tanh"
    """Activation of the MLP and of experts; `relu` is ReLU, and `relu2` its square. `xielu`
    (Apertus) has two trained slopes for each MLP, and is not for experts. Gated are `swiglu` with
    SiLU, `geglu` with `gelu_tanh` (Gemma), and `swiglu_clamped` (gpt-oss): (up + 1) * gate *
    sigmoid(1.702 gate), with gate at most 7 and up within -7 and 7."""
    activation_limit: Annotated[float, Field(gt=0)] | None = None
    """swiglu: most that a gate may be, and most that the size of up may be; all beyond is cut off
    (DeepSeek-V4: 10). Default: no limit."""
    bias: bool = False
    """Biases in all linear layers but those of experts (`model.moe.expert_bias`) and routers and,
    with layernorm, in the norms."""
    qkv_bias: bool = Field(default_factory=lambda values: values["bias"])
    """Biases in the query, key and value projections only. Default: `bias`."""
    embedding_scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the embeddings."""
    tie_embeddings: bool = False
    """Use the token embedding as the output head."""
    embedding_norm: bool = False
    """Normalise embeddings before the first block (BLOOM)."""
    head_bias: bool = False
    """A bias of the logits, one for each word (Phi-2, GPT-J)."""
    layer_embeddings: Positive | None = None
    """Per-layer embeddings (Gemma 3n and 4): width of an input that each layer has for each token
    besides the stream. The first stage makes those of all layers, from a table and from a
    projection of the embeddings. Default: none."""
    layer_vocab: Positive | None = None
    """Rows of the table of per-layer embeddings; tokens from there on have those of token 0.
    Default: `vocab`."""
    streams: StreamsConfig | None = None
    """Several residual streams: `hyper_connections` or `altup`, and its keys. Default: one stream,
    to which the halves of blocks add."""
    latent: LatentAttentionConfig | None = None
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values of `heads` heads are
    computed from narrow latents. `kv_heads`, `head_dim` and `qk_norm` are then ignored."""
    indexer: IndexerConfig | None = None
    """Sparse attention (DeepSeek-V3.2) in all layers with latent attention whose queries have a
    latent. Default: none, queries see all keys."""
    qk_norm: QKNorm = False
    """RMS-normalise queries and keys before rotation: each `head` (or true), with one learned gain
    per element of a head (Qwen3), or the `whole` of a token's queries and that of its keys, with
    one per element (OLMo 2). With `layernorm` each head has a LayerNorm, with one gain and bias per
    element of a head (Phi), and with `layernorm_per_head` one without biases whose gains are the
    head's own (Command R+). With `l2` each head is RMS-normalised without gains (Llama 4)."""
    mtp_depth: Annotated[int, Field(ge=0, le=2_000)] = 0
    """Multi-token prediction (DeepSeek-V3): number of tokens beyond the next one to predict in
    training, each with one extra block after the last layer. Not used in evaluation."""
    window: Positive | tuple[Positive | None, ...] | None = None
    """Sliding-window attention: a token sees itself and the `window` - 1 tokens before it; with
    null, all tokens before it. A list, such as [1024, null], has one entry per layer and repeats;
    the blocks of `mtp_depth` continue the count after the last layer."""
    logit_softcap: Annotated[float, Field(gt=0)] | None = None
    """Replace logits x by cap * tanh(x / cap)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on embeddings and on each residual branch; the mask depends only on seed, step, layer
    and token, never on the layout."""
    moe: MoEConfig | None = None
    """Mixture of experts in place of the MLP. Default: none."""
    adapters: AdaptersConfig | None = None
    """Low-rank adapters, which are trained in place of all other parameters. Default: none."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights; output projections get init_std / sqrt(2 * layers)."""
    parametrisation: Literal["standard", "mup"] = "standard"
    """How initial values and learning rates follow from the width. `mup`, the maximal update
    parametrisation (Yang et al. 2022), keeps the best learning rate the same over widths;
    `optim.lr` and `init_std` are then those of the base model."""
    mup_base_hidden: Positive | None = None
    """mup: `hidden` of the base model, at which both parametrisations are the same. Numbers of
    heads and inner widths are taken to grow in proportion to `hidden`."""
    mup_base_head_dim: Positive | None = None
    """mup: width of a query or key head of the base model; beyond it the scale of scores falls as
    1 / width. A `score_scale` of a block stays. Default: that of this model."""
    family: str | None = None
    """The model_type of Hugging Face transformers as which an export writes the model. An import
    sets it, and `export-hf --family` names another one."""
    emulate: EmulationConfig | None = None
    """Blocks wait instead of computing and have no weights, to measure schedules and communication
    of many ranks on few cores. Trains nothing."""

    @property
    def untrained(self) -> tuple[str, ...]:
        """Patterns of the names of parameters that nothing trains: of indexers without a loss, and
        of routers' tables."""
        blocks = self.blocks or ()
        mixers = (mixer for block in blocks for mixer in (block.mixer, block.second_mixer))
        compressed = [getattr(mixer, "compression", None) for mixer in mixers]
        indexed = any(keys is not None and keys.indexer is not None for keys in compressed)
        if self.indexer is not None:
            indexed = not self.indexer.loss
        routers = [getattr(block.feed_forward, "router", None) for block in blocks]
        return (FROZEN_INDEXER,) * indexed + (FROZEN_TABLES,) * ("hash" in routers)

    @property
    def stream_width(self) -> int:
        """Elements of a token between blocks: `hidden` for each stream."""
        return self.hidden * (1 if self.streams is None else self.streams.number)
