"""Keys of Hugging Face configs of families with experts: Mixtral, Qwen3-MoE and DeepSeek, of which
the last also has latent attention. `dense_families.py` has what they share with dense families.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import (
    Keys,
    find_first_window,
    read_common,
    read_qwen_window,
    read_sliding,
    write_common,
    write_sliding,
)
from megaframe.config import ModelConfig
from megaframe.errors import UserError

_LATENT = {
    "query_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "head_dim": "qk_nope_head_dim",
    "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
_DEEPSEEK_MOE = {
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "first": "first_k_dense_replace",
    "groups": "n_group",
    "top_groups": "topk_group",
    "scale": "routed_scaling_factor",
    "normalise": "norm_topk_prob",
}
_LATENT_NORM_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is."""
_METHODS = ("greedy", "group_limited_greedy")
"""DeepSeek-V2's ways to choose experts, without and with groups."""


def read_mixtral(config: Mapping[str, Any]) -> Keys:
    """Return the keys of `model` for a config of Mixtral."""
    moe = {
        "experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "normalise": True,
        "score": "softmax",
        "balance": "sequence",
    }
    return {**read_sliding(config), "moe": moe}


def write_mixtral(model: ModelConfig) -> Keys:
    """Return the keys of a config of Mixtral."""
    assert model.moe is not None
    return {
        **write_sliding(model),
        "num_local_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.ffn or model.ffn,
    }


def read_qwen3_moe(config: Mapping[str, Any]) -> Keys:
    """Return the keys of `model` for a config of Qwen3 with experts."""
    moe = {
        "experts": config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
        "normalise": config.get("norm_topk_prob", False),
        "score": "softmax",
        "balance": "global",
    }
    keys = read_sliding({**config, "sliding_window": read_qwen_window(config)})
    return {**keys, "qk_norm": True, "moe": moe}


def write_qwen3_moe(model: ModelConfig) -> Keys:
    """Return the keys of a config of Qwen3 with experts."""
    assert model.moe is not None
    return {
        **write_sliding(model),
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.ffn or model.ffn,
        "norm_topk_prob": model.moe.normalise,
        "use_sliding_window": find_first_window(model) is not None,
    }


def read_deepseek(config: Mapping[str, Any]) -> Keys:
    """Return the keys of `model` for a config of DeepSeek.

    Raises:
        UserError: For keys and values that do not belong to all heads, and for what has no key
            here.
    """
    keys = read_common(config)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UserError(
            f"num_key_value_heads={kv_heads} is not num_attention_heads={heads}, and latent "
            f"attention has keys and values for every head"
        )
    widths = [config["qk_rope_head_dim"], config["qk_nope_head_dim"]]
    for key, width in (("head_dim", widths[0]), ("qk_head_dim", sum(widths))):
        if config.get(key, width) != width:
            raise UserError(
                f"{key}={config[key]} is not the {width} that follows from qk_rope_head_dim="
                f"{widths[0]} and qk_nope_head_dim={widths[1]}; remove it from config.json"
            )
    keys["latent"] = {key: config.get(foreign_key) for key, foreign_key in _LATENT.items()}
    keys["latent"]["norm_eps"] = _LATENT_NORM_EPS
    moe: Keys = {key: config.get(foreign_key) for key, foreign_key in _DEEPSEEK_MOE.items()}
    if config["model_type"] == "deepseek_v3":
        moe |= {"score": "sigmoid", "group_best": 2, "balance": "bias"}
        if (moe["groups"] or 1) == 1:
            moe["group_best"] = 1
    else:
        moe |= {"score": "softmax", "balance": "sequence"}
        method = config.get("topk_method") or "greedy"
        if method not in _METHODS:
            raise UserError(f"topk_method {reprlib.repr(method)} is none of {', '.join(_METHODS)}")
        if method == "greedy":
            moe |= {"groups": 1, "top_groups": 1}
        if moe.get("normalise"):
            raise UserError("deepseek_v2: norm_topk_prob=true is not what its code computes")
        moe["normalise"] = False
    keys["moe"] = {key: value for key, value in moe.items() if value is not None}
    return keys


def write_deepseek(model: ModelConfig) -> Keys:
    """Return the keys of a config of DeepSeek.

    Raises:
        UserError: If the model has latent attention without experts.
    """
    assert model.latent is not None
    keys = {
        **write_common(model),
        "num_key_value_heads": model.heads,
        **{foreign_key: getattr(model.latent, key) for key, foreign_key in _LATENT.items()},
    }
    moe = model.moe
    if moe is None:
        raise UserError("no Hugging Face model has latent attention without experts")
    keys |= {foreign_key: getattr(moe, key) for key, foreign_key in _DEEPSEEK_MOE.items()}
    keys["moe_intermediate_size"] = moe.ffn or model.ffn
    if moe.score == "softmax":
        keys["topk_method"] = _METHODS[moe.groups > 1]
    return keys
