"""Families with LayerNorm, biases and MLPs without gates: GPT-2 and its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from megaframe.checkpoint.convert.huggingface.dense_families import (
    BIASES,
    LLAMA,
    MLP_BIASES,
    NO_BIASES,
    QK_NORMS,
)
from megaframe.checkpoint.convert.huggingface.family import Family
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    Key,
    Keys,
    LayerTypes,
    Pair,
    UniformWindow,
    check_layer_types,
    choose,
    find_window,
    slide_except,
)
from megaframe.checkpoint.convert.huggingface.key_types import Flag, Size, Texts
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys
from megaframe.errors import UserError

ACTIVATIONS = {
    **{"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"},
    **{"gelu": "gelu", "relu": "relu", "relu2": "relu2"},
}
"""Our names of activations without a gate, by those of transformers."""
BIASED = {
    **{"norm": "layernorm", "norm_bias": True, "mixer.bias": True, "mixer.qkv_bias": True},
    **{"feed_forward.up_bias": True, "feed_forward.down_bias": True},
}
_GPT2_SIZES = (
    Pair("vocab_size", "vocab", "value"),
    Pair("n_embd", "hidden", "value"),
    Pair("n_layer", "layers", "value"),
    Pair("n_head", "mixer.heads", "value"),
    Pair("n_inner", "feed_forward.ffn"),
    Pair("n_positions", "positions", "value"),
    Pair("layer_norm_epsilon", "norm_eps"),
    Pair("initializer_range", "init_std"),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
)
GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        *_GPT2_SIZES,
        choose("activation_function", "feed_forward.activation", ACTIVATIONS, default="gelu_new"),
    ),
    own={**BIASED, "position": "learned"},
    fixed={
        **{"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        "reorder_and_upcast_attn": False,
    },
    training=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    neutral=(
        *("n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
        *("summary_type", "summary_use_proj"),
    ),
    aliases={
        **{"hidden_size": "n_embd", "num_hidden_layers": "n_layer"},
        **{"num_attention_heads": "n_head", "max_position_embeddings": "n_positions"},
    },
    positions="n_positions",
    ends={
        "transformer.wte": "embedding.tokens",
        "transformer.wpe": "embedding.positions",
        "transformer.ln_f": "head.norm",
        "lm_head": "head",
    },
    block={
        "ln_1": "attention_norm",
        "ln_2": "mlp_norm",
        "attn.c_attn": "attention.query attention.key attention.value",
        "attn.c_proj": "attention.output",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    },
    layer="transformer.h.{}.",
    transposed=True,
    skipped=(".attn.bias", ".attn.masked_bias"),
)


@dataclass(frozen=True)
class MultiQuery(Key):
    """Whether all query heads share one head of keys and values, or each has its own."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {"multi_query": Flag}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the number of heads of keys and values."""
        shares = config.get("multi_query", True)
        facts.set("mixer.kv_heads", 1 if shares else facts.get("mixer.heads"))

    def write(self, facts: Facts) -> Keys:
        """Return whether they do; an export refuses numbers in between."""
        return {"multi_query": facts.get("mixer.kv_heads") == 1}


GPT_BIGCODE = GPT2.derive(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    MultiQuery(),
    neutral=(
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner"),
        *("validate_runner_input", "pre_allocate_kv_cache", "max_sequence_length"),
        *("max_batch_size", "pad_key_length", "num_key_value_heads"),
    ),
    block={"attn.c_attn": "attention.qkv"},
    transposed=False,
)
_GLOBAL, _LOCAL = "global", "local"


@dataclass(frozen=True)
class AttentionTypes(Key):
    """Types of layers in groups that repeat, `[[[TYPE, ...], NUMBER], ...]`, and the window of
    those that are local."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The groups, and the window; `attention_layers` is what transformers makes of the
        groups."""
        group = Annotated[list[list[str] | Annotated[int, Field(ge=1)]], Field(max_length=2)]
        return {
            "attention_types": list[group] | None,
            "attention_layers": Texts,
            "window_size": Size,
        }

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the window of each layer."""
        layers, kinds = len(facts.layers), []
        for group in config.get("attention_types") or [[[_GLOBAL, _LOCAL], (layers + 1) // 2]]:
            if len(group) != 2 or not isinstance(group[0], list) or not isinstance(group[1], int):
                raise UserError("attention_types has no groups [[TYPE, ...], NUMBER]")
            kinds += group[0] * min(group[1], layers)
        kinds = kinds if config.get("attention_types") else kinds[:layers]
        check_layer_types("attention_types", kinds, layers, (_GLOBAL, _LOCAL))
        if config.get("attention_layers") not in (None, kinds):
            raise UserError("attention_layers is not what attention_types says; remove it")
        window = config.get("window_size") or 256
        facts.set_layers("mixer.window", [window if kind == _LOCAL else None for kind in kinds])

    def write(self, facts: Facts) -> Keys:
        """Return one group with all layers."""
        kinds = [_GLOBAL if w is None else _LOCAL for w in facts.list_values("mixer.window")]
        return {"attention_types": [[kinds, 1]], "window_size": find_window(facts) or 256}


GPT_NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    (
        Pair("vocab_size", "vocab", "value"),
        Pair("hidden_size", "hidden", "value"),
        Pair("num_layers", "layers", "value"),
        Pair("num_heads", "mixer.heads", "value"),
        Pair("intermediate_size", "feed_forward.ffn"),
        Pair("max_position_embeddings", "positions", "value"),
        Pair("layer_norm_epsilon", "norm_eps"),
        Pair("initializer_range", "init_std"),
        Pair("tie_word_embeddings", "tie_embeddings", default=True),
        choose("activation_function", "feed_forward.activation", ACTIVATIONS, default="gelu_new"),
        AttentionTypes(),
    ),
    own={**BIASED, "position": "learned", "mixer.qkv_bias": False, "mixer.score_scale": 1.0},
    training=("embed_dropout", "attention_dropout", "resid_dropout"),
    neutral=("classifier_dropout",),
    aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    ends=GPT2.ends,
    block={
        **{name: own for name, own in GPT2.block.items() if not name.startswith("attn.")},
        **{
            f"attn.attention.{name[0]}_proj": f"attention.{name}"
            for name in ("query", "key", "value")
        },
        "attn.attention.out_proj": "attention.output",
    },
    layer=GPT2.layer,
    skipped=(".attn.attention.bias", ".attn.attention.masked_bias"),
)


def choose_norms(name: str, form: str) -> Pair:
    values = {False: False, True: form}
    return choose(name, "mixer.qk_norm", values, default=False, type=Flag)


NEOX_BLOCK = {
    "input_layernorm": "attention_norm",
    "attention.query_key_value": "attention.qkv",
    "attention.dense": "attention.output",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
GPT_NEOX = LLAMA.derive(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    Pair("layer_norm_eps", "norm_eps", default=1e-5),
    Pair("attention_bias", BIASES, default=True),
    choose("hidden_act", "feed_forward.activation", ACTIVATIONS, default="gelu"),
    choose(
        "use_parallel_residual",
        "parallel",
        {True: "two_norms", False: "none"},
        default=True,
        type=Flag,
    ),
    RotaryKeys(share=0.25, share_name="rotary_pct", base_name="rotary_emb_base"),
    without=("rms_norm_eps", "num_key_value_heads", "head_dim"),
    own=BIASED,
    fixed={"mlp_bias": False},
    training=("hidden_dropout",),
    neutral=("classifier_dropout",),
    ends={
        **dict.fromkeys(LLAMA.ends),
        "gpt_neox.embed_in": "embedding.tokens",
        "gpt_neox.final_layer_norm": "head.norm",
        "embed_out": "head",
    },
    block={
        **dict.fromkeys(LLAMA.block),
        **NEOX_BLOCK,
        "post_attention_layernorm": "mlp_norm",
    },
    layer="gpt_neox.layers.{}.",
    skipped=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)


STARCODER2 = LLAMA.derive(
    "starcoder2",
    "Starcoder2ForCausalLM",
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("norm_epsilon", "norm_eps", default=1e-5),
    Pair("use_bias", (*BIASES, *MLP_BIASES), default=True),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    choose("hidden_act", "feed_forward.activation", ACTIVATIONS, default="gelu_pytorch_tanh"),
    UniformWindow(),
    without=("rms_norm_eps",),
    own={"norm": "layernorm", "norm_bias": True},
    fixed=NO_BIASES,
    training=("residual_dropout", "embedding_dropout"),
    neutral=("mlp_type", "norm_type"),
    block={
        **{f"mlp.{name}_proj": None for name in ("gate", "up", "down")},
        **{"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
    },
)
STABLELM = LLAMA.derive(
    "stablelm",
    "StableLmForCausalLM",
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    Pair("layer_norm_eps", "norm_eps", default=1e-5),
    Pair("use_qkv_bias", "mixer.qkv_bias", default=False),
    choose(
        "use_parallel_residual",
        "parallel",
        {False: "none", True: "one_norm"},
        default=False,
        type=Flag,
    ),
    RotaryKeys(share=0.25),
    choose_norms("qk_layernorm", "layernorm_per_head"),
    without=("rms_norm_eps", "head_dim"),
    own={"norm": "layernorm", "norm_bias": True},
    fixed=NO_BIASES,
    training=("hidden_dropout",),
    block={
        f"self_attn.{name[0]}_layernorm.norms.{{head}}": f"attention.{name}_norm"
        for name in ("query", "key")
    },
)
NEMOTRON = LLAMA.derive(
    "nemotron",
    "NemotronForCausalLM",
    Pair("norm_eps", "norm_eps", default=1e-5),
    RotaryKeys(share=0.5),
    without=("rms_norm_eps",),
    own={"norm": "layernorm", "norm_bias": True, "feed_forward.activation": "relu2"},
    fixed={"hidden_act": "relu2"},
    block={"mlp.gate_proj": None},
    norm_offset=1.0,
)
JAIS2 = LLAMA.derive(
    "jais2",
    "Jais2ForCausalLM",
    Pair("layer_norm_eps", "norm_eps", default=1e-5),
    Pair("attention_bias", BIASES, default=True),
    Pair("mlp_bias", MLP_BIASES, default=True),
    without=("rms_norm_eps",),
    own={"norm": "layernorm", "norm_bias": True, "feed_forward.activation": "relu2"},
    fixed={"hidden_act": "relu2"},
    block={"mlp.gate_proj": None},
)
COHERE = LLAMA.derive(
    "cohere",
    "CohereForCausalLM",
    Pair("layer_norm_eps", "norm_eps", default=1e-5),
    Pair("logit_scale", "head_scale", default=0.0625, absent=1.0),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    RotaryKeys(base=5e5),
    choose_norms("use_qk_norm", "layernorm_per_head"),
    without=("rms_norm_eps", "head_dim"),
    own={"norm": "layernorm", "parallel": "one_norm"},
    fixed={"mlp_bias": False},
    block={**QK_NORMS, "post_attention_layernorm": None},
    interleaved=True,
    scales={"head.norm": "head_scale"},
)
COHERE2 = COHERE.derive(
    "cohere2",
    "Cohere2ForCausalLM",
    Pair("head_dim", "mixer.head_dim"),
    RotaryKeys(),
    LayerTypes(
        slide_except("sliding_window_pattern", 4),
        full=(("mixer.rotary", False),),
        need="present",
        more=(("sliding_window_pattern", Size),),
    ),
    without=("use_qk_norm",),
    fixed={"use_qk_norm": False},
    neutral=("cache_implementation", "order_of_interleaved_layers", "rotary_pct"),
)
OLMO = LLAMA.derive(
    "olmo",
    "OlmoForCausalLM",
    without=("rms_norm_eps", "head_dim"),
    own={"norm": "layernorm", "norm_eps": 1e-5},
    fixed={"mlp_bias": False, "clip_qkv": None},
    ends={"model.norm": None},
    block={"input_layernorm": None, "post_attention_layernorm": None},
    constant=("attention_norm", "mlp_norm", "head.norm"),
)
GPT_FAMILIES = (
    *(GPT2, GPT_BIGCODE, GPT_NEO, GPT_NEOX, STARCODER2, STABLELM, NEMOTRON, JAIS2),
    *(COHERE, COHERE2, OLMO),
)
