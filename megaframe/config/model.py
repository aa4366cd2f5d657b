"""Architecture of the model: keys of `model`, except those of its experts (`moe.py`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.moe import Moe
from megaframe.config.section import NonNegative, Positive, Section


class RotaryScaling(Section):
    kind: Literal["none", "llama3", "yarn"] = "none"
    """How to scale rotary frequencies to contexts longer than the model was trained on."""
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Context length after scaling divided by `original_length`."""
    original_length: Positive = 8192
    """Context length in tokens before scaling."""
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


class Latent(Section):
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


class Emulate(Section):
    forward: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the forward pass of one block waits per microbatch."""
    backward: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the input gradient of one block waits per microbatch."""
    weight: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the weight gradient of one block waits per microbatch."""


class Model(Section):
    layers: Annotated[int, Field(gt=0, le=2_000)] = 12
    """Number of transformer blocks."""
    hidden: Positive = 768
    """Width of the residual stream."""
    heads: Positive = 12
    """Number of query heads."""
    kv_heads: Positive = Field(default_factory=lambda given: given["heads"])
    """Number of key and value heads; divides `heads`. Default: `heads` (no sharing)."""
    head_dim: Positive = Field(
        default_factory=lambda given: max(1, given["hidden"] // given["heads"])
    )
    """Width of one head. Default: hidden / heads."""
    ffn: Positive = Field(default_factory=lambda given: 4 * given["hidden"])
    """Inner width of the MLP. Default: 4 * hidden."""
    vocab: Positive | None = None
    """Vocabulary size. Default: that of `data.tokenizer`."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
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
    rotary_scaling: RotaryScaling = RotaryScaling()
    """Scaling of rotary frequencies to longer contexts."""
    activation: Literal["gelu", "gelu_tanh", "relu2", "swiglu"] = "gelu_tanh"
    """Activation of the MLP; `relu2` is squared ReLU, `swiglu` is gated with SiLU."""
    bias: bool = False
    """Biases in all linear layers and, with layernorm, in the norms."""
    qkv_bias: bool = Field(default_factory=lambda given: given["bias"])
    """Biases in the query, key and value projections only. Default: `bias`."""
    tie_embeddings: bool = False
    """Use the token embedding as the output head."""
    latent: Latent | None = None
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values of `heads` heads are
    computed from narrow latents. `kv_heads`, `head_dim` and `qk_norm` are then ignored."""
    qk_norm: bool = False
    """RMS-normalise each query and key head before rotation (one learned gain per element of a
    head)."""
    mtp_depth: NonNegative = 0
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
    moe: Moe | None = None
    """Mixture of experts in place of the MLP. Default: none."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights; output projections get init_std / sqrt(2 * layers)."""
    emulate: Emulate | None = None
    """Blocks wait instead of computing and have no weights, to measure schedules and communication
    of many ranks on few cores. Trains nothing."""
