"""More families with LayerNorm and MLPs without gates: BLOOM, CodeGen, GPT-J, MPT, OPT and Phi."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import BIASES, LLAMA, MLP_BIASES
from megaframe.checkpoint.convert.huggingface.family import Family
from megaframe.checkpoint.convert.huggingface.gpt_families import (
    ACTIVATIONS,
    BIASED,
    GPT2,
    choose_norms,
)
from megaframe.checkpoint.convert.huggingface.key_pairs import Key, Keys, Pair, choose
from megaframe.checkpoint.convert.huggingface.key_types import Size
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeys, get_head_dim
from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable

PHI = LLAMA.derive(
    "phi",
    "PhiForCausalLM",
    Pair("layer_norm_eps", "norm_eps", default=1e-5),
    choose("hidden_act", "feed_forward.activation", ACTIVATIONS, default="gelu_new"),
    RotaryKeys(share=0.5),
    choose_norms("qk_layernorm", "layernorm"),
    without=("rms_norm_eps", "head_dim", "attention_bias", "mlp_bias"),
    own={**BIASED, "parallel": "one_norm", "head_bias": True},
    training=("resid_pdrop", "embd_pdrop"),
    ends={"model.norm": None, "model.final_layernorm": "head.norm"},
    block={
        **{name: None for name, own in LLAMA.block.items() if own.startswith("mlp")},
        **{"self_attn.o_proj": None, "self_attn.dense": "attention.output"},
        **{"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"},
        "self_attn.q_layernorm": "attention.query_norm",
        "self_attn.k_layernorm": "attention.key_norm",
    },
)


@dataclass(frozen=True)
class RotaryDim(Key):
    """The width of a head that is rotated."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The width."""
        return {"rotary_dim": Size}

    @property
    def required(self) -> tuple[str, ...]:
        """The width: without it, code rotates heads by as many angles as the stream is wide."""
        return ("rotary_dim",)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the share of a head."""
        width, head_dim = config["rotary_dim"], get_head_dim(facts)
        if width > head_dim or width % 2:
            raise UserError(f"rotary_dim={width} is no even part of heads of {head_dim}")
        facts.set("mixer.rotary_fraction", width / head_dim)

    def write(self, facts: Facts) -> Keys:
        """Return the width."""
        return {"rotary_dim": round(facts.get("mixer.rotary_fraction") * get_head_dim(facts))}


GPTJ = GPT2.derive(
    "gptj",
    "GPTJForCausalLM",
    Pair("tie_word_embeddings", "tie_embeddings", default=False),
    RotaryDim(),
    own={
        **{"position": None, "parallel": "one_norm", "head_bias": True},
        **{"mixer.bias": False, "mixer.qkv_bias": False},
        **{"mixer.rotary": True, "mixer.rotary_base": 1e4},
    },
    fixed={"rotary": True},
    neutral=("gradient_checkpointing",),
    ends={"transformer.wpe": None},
    block={
        **dict.fromkeys(GPT2.block),
        "ln_1": "attention_norm",
        **{f"attn.{name[0]}_proj": f"attention.{name}" for name in ("query", "key", "value")},
        "attn.out_proj": "attention.output",
        **{"mlp.fc_in": "mlp.up", "mlp.fc_out": "mlp.down"},
    },
    transposed=False,
    interleaved=True,
)


def _check_quarters(heads: int) -> int:
    if heads % 4:
        raise UserError(f"n_head={heads} is no multiple of 4, of which its code has blocks")
    return heads


CODEGEN = GPTJ.derive(
    "codegen",
    "CodeGenForCausalLM",
    Pair("n_head", "mixer.heads", "value", to_fact=_check_quarters),
    RotaryDim(),
    without=("rotary",),
    block={
        **{f"attn.{name[0]}_proj": None for name in ("query", "key", "value")},
        "attn.qkv_proj": "attention.quarters",
    },
    skipped=(".attn.causal_mask",),
)
BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    (
        Pair("vocab_size", "vocab", "value"),
        Pair("hidden_size", "hidden", "value"),
        Pair("n_layer", "layers", "value"),
        Pair("n_head", "mixer.heads", "value"),
        Pair("layer_norm_epsilon", "norm_eps", default=1e-5),
        Pair("initializer_range", "init_std"),
        Pair("tie_word_embeddings", "tie_embeddings", default=True),
    ),
    own={
        **{**BIASED, "embedding_norm": True, "mixer.alibi": 8.0},
        "feed_forward.activation": "gelu_tanh",
        "feed_forward.ffn": lambda facts: 4 * facts.get("hidden"),
    },
    fixed={
        **{"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
        **{"n_inner": None, "skip_bias_add_qkv": False},
    },
    training=("hidden_dropout", "attention_dropout"),
    neutral=(
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion"),
        *("offset_alibi", "skip_bias_add"),
    ),
    aliases={
        **{"n_embed": "hidden_size", "num_hidden_layers": "n_layer"},
        "num_attention_heads": "n_head",
    },
    positions="seq_length",
    ends={
        "transformer.word_embeddings": "embedding.tokens",
        "transformer.word_embeddings_layernorm": "embedding.norm",
        "transformer.ln_f": "head.norm",
        "lm_head": "head",
    },
    block={
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attention.query_key_value": "attention.qkv",
        "self_attention.dense": "attention.output",
        **{"mlp.dense_h_to_4h": "mlp.up", "mlp.dense_4h_to_h": "mlp.down"},
    },
    layer="transformer.h.{}.",
)


@dataclass(frozen=True)
class SameWidth(Key):
    """The width of embeddings, which must be that of the stream."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {"word_embed_proj_dim": Size}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Refuse another width."""
        width, hidden = config.get("word_embed_proj_dim"), facts.get("hidden")
        if width not in (None, hidden):
            raise UserError(
                f"word_embed_proj_dim={width} is not supported, only hidden_size={hidden}"
            )

    def write(self, facts: Facts) -> Keys:
        """Return the width of the stream."""
        return {"word_embed_proj_dim": facts.get("hidden")}


OPT = Family(
    "opt",
    "OPTForCausalLM",
    (
        Pair("vocab_size", "vocab", "value"),
        Pair("hidden_size", "hidden", "value"),
        Pair("num_hidden_layers", "layers", "value"),
        Pair("num_attention_heads", "mixer.heads", "value"),
        Pair("ffn_dim", "feed_forward.ffn", "value"),
        Pair("max_position_embeddings", "positions", "value"),
        Pair("init_std", "init_std"),
        Pair("tie_word_embeddings", "tie_embeddings", default=True),
        Pair("enable_bias", (*BIASES, *MLP_BIASES), default=True),
        choose("activation_function", "feed_forward.activation", ACTIVATIONS, default="relu"),
        SameWidth(),
    ),
    own={"norm": "layernorm", "norm_bias": True, "norm_eps": 1e-5, "position": "learned"},
    fixed={
        **{"do_layer_norm_before": True, "layer_norm_elementwise_affine": True},
        "_remove_final_layer_norm": False,
    },
    training=("dropout", "attention_dropout", "activation_dropout", "layerdrop"),
    ends={
        "model.decoder.embed_tokens": "embedding.tokens",
        "model.decoder.embed_positions": "embedding.positions",
        "model.decoder.final_layer_norm": "head.norm",
        "lm_head": "head",
    },
    block={
        "self_attn_layer_norm": "attention_norm",
        "final_layer_norm": "mlp_norm",
        **{f"self_attn.{name[0]}_proj": f"attention.{name}" for name in ("query", "key", "value")},
        "self_attn.out_proj": "attention.output",
        **{"fc1": "mlp.up", "fc2": "mlp.down"},
    },
    layer="model.decoder.layers.{}.",
    unread_positions=2,
)


@dataclass(frozen=True)
class MptAttention(Key):
    """The section of MPT's attention, which has ALiBi always."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The section."""
        return {"attn_config": dict[str, Any] | None}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the slopes, and the factor of the scores."""
        section = config.get("attn_config") or {}
        for key, value in section.items():
            if key in _MPT_FIXED and value != _MPT_FIXED[key]:
                raise UserError(
                    f"attn_config.{key}={make_printable(reprlib.repr(value))} is not supported, "
                    f"only {_MPT_FIXED[key]!r}"
                )
            if key not in (*_MPT_FIXED, *_MPT_READ, *_MPT_NEUTRAL):
                raise UserError(f"attn_config.{make_printable(key)} is not known here")
        scale = section.get("softmax_scale")
        number = 1.0 if scale is None else scale
        if not isinstance(number, int | float) or isinstance(number, bool) or not number > 0:
            raise UserError(
                f"attn_config.softmax_scale={reprlib.repr(scale)} is no positive number"
            )
        facts.set("mixer.alibi", float(_MPT_FIXED["alibi_bias_max"]))
        facts.set("mixer.score_scale", scale or get_head_dim(facts) ** -0.5)

    def write(self, facts: Facts) -> Keys:
        """Return the section."""
        return {"attn_config": {**_MPT_FIXED, "softmax_scale": facts.get("mixer.score_scale")}}


_MPT_FIXED: dict[str, Any] = {
    **{"alibi": True, "attn_type": "multihead_attention", "clip_qkv": None, "prefix_lm": False},
    **{"qk_ln": False, "attn_uses_sequence_id": False, "is_encoder_decoder": False},
    "alibi_bias_max": 8,  # transformers has these slopes whatever the value is
}
_MPT_READ = ("softmax_scale",)
_MPT_NEUTRAL = (
    *("attn_pdrop", "attn_impl", "_name_or_path", "architectures", "chunk_size_feed_forward"),
    *("dtype", "torch_dtype", "id2label", "label2id", "model_type", "output_attentions"),
    *("output_hidden_states", "problem_type", "return_dict", "transformers_version"),
)
MPT = Family(
    "mpt",
    "MptForCausalLM",
    (
        Pair("vocab_size", "vocab", "value"),
        Pair("d_model", "hidden", "value"),
        Pair("n_layers", "layers", "value"),
        Pair("n_heads", "mixer.heads", "value"),
        Pair("layer_norm_epsilon", "norm_eps", default=1e-5),
        Pair("initializer_range", "init_std"),
        Pair("tie_word_embeddings", "tie_embeddings", default=True),
        MptAttention(),
    ),
    own={
        **{"norm": "layernorm", "feed_forward.activation": "gelu"},
        "feed_forward.ffn": lambda facts: 4 * facts.get("hidden"),
    },
    fixed={
        **{"expansion_ratio": 4, "no_bias": True, "logit_scale": None, "learned_pos_emb": True},
        "norm_type": "low_precision_layernorm",
    },
    training=("emb_pdrop", "resid_pdrop"),
    neutral=("init_device", "init_config", "embedding_fraction", "verbose", "tokenizer_name"),
    aliases={
        **{"hidden_size": "d_model", "num_hidden_layers": "n_layers"},
        "num_attention_heads": "n_heads",
    },
    positions="max_seq_len",
    ends={
        "transformer.wte": "embedding.tokens",
        "transformer.norm_f": "head.norm",
        "lm_head": "head",
    },
    block={
        **{"norm_1": "attention_norm", "norm_2": "mlp_norm"},
        "attn.Wqkv": "attention.query attention.key attention.value",
        "attn.out_proj": "attention.output",
        **{"ffn.up_proj": "mlp.up", "ffn.down_proj": "mlp.down"},
    },
    layer="transformer.blocks.{}.",
    code={
        "AutoConfig": "configuration_mpt.MPTConfig",
        "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
    },
)
OLDER_FAMILIES = (PHI, GPTJ, CODEGEN, BLOOM, OPT, MPT)
