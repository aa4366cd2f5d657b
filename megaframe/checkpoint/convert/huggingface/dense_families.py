"""Families like Llama: RMSNorm, rotary positions, and MLPs with gates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megaframe.checkpoint.convert.huggingface.family import Family
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    FULL,
    SLIDING,
    LayerTypes,
    Pair,
    UniformWindow,
    slide_except,
)
from megaframe.checkpoint.convert.huggingface.key_types import Count
from megaframe.checkpoint.convert.huggingface.rotary_keys import (
    LongRotaryKeys,
    RotaryKeys,
    ScaledRotaryKeys,
)

BIASES = ("mixer.qkv_bias", "mixer.bias")
MLP_BIASES = ("feed_forward.up_bias", "feed_forward.down_bias")
SIZES = (
    Pair("vocab_size", "vocab", "value"),
    Pair("num_hidden_layers", "layers", "value"),
    Pair("hidden_size", "hidden", "value"),
    Pair("num_attention_heads", "mixer.heads", "value"),
    Pair("intermediate_size", "feed_forward.ffn", "value", otherwise="moe.ffn"),
    Pair("rms_norm_eps", "norm_eps", "value"),
    Pair("initializer_range", "init_std"),
    Pair("tie_word_embeddings", "tie_embeddings", default=False),
)
LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    (
        *SIZES,
        Pair("num_key_value_heads", "mixer.kv_heads"),
        Pair("head_dim", "mixer.head_dim"),
        Pair("attention_bias", BIASES, default=False),
        Pair("mlp_bias", MLP_BIASES, default=False),
        RotaryKeys(),
    ),
    own={"norm": "rmsnorm", "feed_forward.activation": "swiglu"},
    fixed={"hidden_act": "silu"},
    training=("attention_dropout",),
    ends={
        "model.embed_tokens": "embedding.tokens",
        "model.norm": "head.norm",
        "lm_head": "head",
    },
    block={
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.output",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    },
    skipped=(".rotary_emb.inv_freq",),
)
QK_NORMS = {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
MISTRAL = LLAMA.derive(
    "mistral",
    "MistralForCausalLM",
    UniformWindow("present"),
    Pair("num_key_value_heads", "mixer.kv_heads", "present"),
    fixed=NO_BIASES,
)
MINISTRAL = MISTRAL.derive("ministral", "MinistralForCausalLM", LayerTypes(need="present"))
MINISTRAL3 = MISTRAL.derive(
    "ministral3",
    "Ministral3ForCausalLM",
    UniformWindow(),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "value"),
    ScaledRotaryKeys(),
)


def list_qwen_types(config: Mapping[str, Any], window: int | None) -> Sequence[str]:
    """Return the types of layers of which the last ones slide."""
    full, layers = config.get("max_window_layers"), config["num_hidden_layers"]
    full = 28 if full is None else full
    return [FULL if window is None or n < full else SLIDING for n in range(layers)]


QWEN2 = MISTRAL.derive(
    "qwen2",
    "Qwen2ForCausalLM",
    LayerTypes(list_qwen_types, "use_sliding_window", more=(("max_window_layers", Count),)),
    own={"mixer.qkv_bias": True},
    fixed={"use_mrope": False},
)
QWEN3 = MISTRAL.derive(
    "qwen3",
    "Qwen3ForCausalLM",
    LayerTypes(list_qwen_types, "use_sliding_window", more=(("max_window_layers", Count),)),
    Pair("head_dim", "mixer.head_dim", "present"),
    Pair("attention_bias", BIASES, default=False),
    own={"mixer.qk_norm": "head"},
    block=QK_NORMS,
)
INTERNLM3 = LLAMA.derive(
    "internlm3",
    "LlamaForCausalLM",
    Pair("head_dim", "mixer.head_dim", "present"),
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
IQUEST_CODER = LLAMA.derive(
    "iquestcoder", "LlamaForCausalLM", Pair("head_dim", "mixer.head_dim", "present")
)
ARCEE = LLAMA.derive(
    "arcee",
    "ArceeForCausalLM",
    own={"feed_forward.activation": "relu2"},
    fixed={"hidden_act": "relu2"},
    block={"mlp.gate_proj": None},
)
HELIUM = LLAMA.derive(
    "helium",
    "HeliumForCausalLM",
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "value"),
    Pair("attention_bias", "mixer.qkv_bias", default=False),
    RotaryKeys(base=1e5),
    interleaved=True,
)
SEED_OSS = LLAMA.derive(
    "seed_oss",
    "SeedOssForCausalLM",
    Pair("attention_bias", "mixer.qkv_bias", default=True),
    Pair("attention_out_bias", "mixer.bias", default=False),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "value"),
    training=("residual_dropout",),
)
ERNIE4_5 = LLAMA.derive(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "present"),
    RotaryKeys(base=5e5),
    fixed={**NO_BIASES, "use_bias": False},
    interleaved=True,
)
_CWM_SCALING = {
    **{"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
CWM = LLAMA.derive(
    "cwm",
    "CwmForCausalLM",
    RotaryKeys(base=1e6, section=_CWM_SCALING),
    LayerTypes(slide_except("", 4, first=True), need="present"),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "present"),
    fixed={"attention_bias": False},
    numbers=("bos_token_id",),
)
PHI3 = LLAMA.derive(
    "phi3",
    "Phi3ForCausalLM",
    LongRotaryKeys(share=1.0),
    UniformWindow(),
    fixed=NO_BIASES,
    training=("embd_pdrop", "resid_pdrop"),
    block={
        **{f"self_attn.{name}_proj": None for name in "qkv"},
        "self_attn.qkv_proj": "attention.query attention.key attention.value",
        **{"mlp.gate_proj": None, "mlp.up_proj": None},
        "mlp.gate_up_proj": "mlp.gate mlp.up",
    },
    code={
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
)
GLM = LLAMA.derive(
    "glm",
    "GlmForCausalLM",
    Pair("attention_bias", "mixer.qkv_bias", default=True),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("head_dim", "mixer.head_dim", "present"),
    RotaryKeys(share=0.5),
    fixed={"mlp_bias": False},
    block={**{"mlp.gate_proj": None, "mlp.up_proj": None}, "mlp.gate_up_proj": "mlp.gate mlp.up"},
    interleaved=True,
)
GLM4 = GLM.derive(
    "glm4",
    "Glm4ForCausalLM",
    own={"norms": "both"},
    block={
        "post_self_attn_layernorm": "attention_post_norm",
        "post_mlp_layernorm": "mlp_post_norm",
    },
)
_APERTUS_ROPE = {
    **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
APERTUS = LLAMA.derive(
    "apertus",
    "ApertusForCausalLM",
    Pair("rms_norm_eps", "norm_eps", default=1e-5),
    RotaryKeys(base=1.2e7, section=_APERTUS_ROPE),
    without=("head_dim", "mlp_bias"),
    own={"mixer.qk_norm": "head", "feed_forward.activation": "xielu"},
    fixed={"hidden_act": "xielu", "qk_norm": True, "post_norm": False},
    block={
        **QK_NORMS,
        **{"input_layernorm": None, "attention_layernorm": "attention_norm"},
        **{"post_attention_layernorm": None, "feedforward_layernorm": "mlp_norm"},
        "mlp.gate_proj": None,
        "mlp.act_fn.alpha_p": "mlp.activation.positive",
        "mlp.act_fn.alpha_n": "mlp.activation.negative",
        "mlp.act_fn.beta": "constant 0.5",
        "mlp.act_fn.eps": "constant -1e-6",
    },
)
DENSE_FAMILIES = (
    *(LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, INTERNLM3, IQUEST_CODER, ARCEE, HELIUM),
    *(SEED_OSS, ERNIE4_5, CWM, PHI3, GLM, GLM4, APERTUS),
)
