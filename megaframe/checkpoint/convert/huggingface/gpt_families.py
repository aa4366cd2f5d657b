"""Families with LayerNorm, biases and MLPs without gates: GPT-2 and its kind."""

from __future__ import annotations

from megaframe.checkpoint.convert.huggingface.family import Family
from megaframe.checkpoint.convert.huggingface.keys import Pair, choose

ACTIVATIONS = {
    **{"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"},
    **{"gelu": "gelu", "relu2": "relu2"},
}
"""Our names of activations without a gate, by those of transformers."""
_BIASED = {
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
    (*_GPT2_SIZES, choose("activation_function", "feed_forward.activation", ACTIVATIONS)),
    own={**_BIASED, "position": "learned"},
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
GPT_FAMILIES = (GPT2,)
