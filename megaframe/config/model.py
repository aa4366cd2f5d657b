"""What is trained: keys of `model`, but for those of its experts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megaframe.config.moe import Moe
from megaframe.config.section import NonNegative, Positive, Section


class RotaryScaling(Section):
    kind: Literal["none", "llama3", "yarn"] = "none"
    """How rotary frequencies are stretched to contexts longer than the model was trained on."""
    factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Context length after stretching divided by `original_length`."""
    original_length: Positive = 8192
    """Context length in tokens before stretching."""
    low_frequency: Annotated[float, Field(gt=0)] = 1.0
    """llama3: wavelengths above original_length / low_frequency are stretched in full.
    yarn: rotations at and under which a frequency is stretched in full (its beta_slow)."""
    high_frequency: Annotated[float, Field(gt=0)] = 4.0
    """llama3: wavelengths below original_length / high_frequency are kept as they are.
    yarn: rotations at and above which a frequency is kept (its beta_fast, usually 32)."""
    mscale: Annotated[float, Field(ge=0)] = 1.0
    """yarn: strength m of the factor 0.1 * m * ln(factor) + 1 on rotated queries and keys."""
    mscale_all_dim: Annotated[float, Field(ge=0)] = 0.0
    """yarn with `model.latent`: strength of a like factor on all dims of queries and keys, which
    the one on rotated dims is divided by."""


class Latent(Section):
    query_rank: Positive | None = None
    """Width of the latent that queries are made of. Default: none, they are made of the stream."""
    kv_rank: Positive
    """Width of the latent that keys and values of all heads are made of."""
    head_dim: Positive
    """Width of the part of a query or key head that is not rotated."""
    rotary_dim: Positive
    """Width of the rotated part; its key is one for all heads."""
    value_dim: Positive
    """Width of a value head."""


class Emulate(Section):
    forward: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that the forward of one block waits for each microbatch."""
    backward: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that its input gradient waits."""
    weight: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that its weight gradient waits."""


class Model(Section):
    layers: Positive = 12
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
    """How a token knows its position: a learned table, or rotated queries and keys."""
    positions: Positive | None = None
    """Rows of the learned position table. Default: train.seq."""
    rotary_base: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary wavelengths."""
    rotary_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head's width that is rotated."""
    rotary_scaling: RotaryScaling = RotaryScaling()
    """Stretching of rotary frequencies to longer contexts."""
    activation: Literal["gelu", "gelu_tanh", "relu2", "swiglu"] = "gelu_tanh"
    """Activation of the MLP; `relu2` is squared ReLU, `swiglu` is gated with SiLU."""
    bias: bool = False
    """Biases in all linears and, with layernorm, in the norms."""
    qkv_bias: bool = Field(default_factory=lambda given: given["bias"])
    """Biases in the query, key and value projections only. Default: `bias`."""
    tie_embeddings: bool = False
    """Use the token embedding as the output head."""
    latent: Latent | None = None
    """Multi-head latent attention (DeepSeek-V2): queries, keys and values of `heads` heads come
    from narrow latents. `kv_heads`, `head_dim` and `qk_norm` then mean nothing."""
    qk_norm: bool = False
    """RMS-normalise each query and key head before rotation (one learned gain per head width)."""
    mtp_depth: NonNegative = 0
    """Multi-token prediction (DeepSeek-V3): how many tokens beyond the next one are predicted in
    training, each from one more block behind the last layer. Evaluation does without."""
    window: Positive | None = None
    """Sliding-window attention: a token sees itself and the `window` - 1 tokens before it."""
    logit_softcap: Annotated[float, Field(gt=0)] | None = None
    """Replace logits x by cap * tanh(x / cap)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on embeddings and on each residual branch; the mask depends on seed, step, layer and
    token only, never on the layout."""
    moe: Moe | None = None
    """Mixture of experts in the place of the MLP. Default: none."""
    init_std: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of initial weights; output projections get init_std / sqrt(2 * layers)."""
    emulate: Emulate | None = None
    """Blocks wait instead of computing, and have no weights: to measure schedules and communication
    of many ranks on few cores. Trains nothing."""
