"""Converts configs of Hugging Face models to `model` sections of a run config, and back.

A family is a `model_type` with its keys. A setting that has no counterpart on the other side is
refused by name, because a model that is only nearly the same computes different numbers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megaframe.architecture.attention import get_window
from megaframe.checkpoint.convert.huggingface.config_keys import Shape, check_keys, check_sizes
from megaframe.config import ModelConfig, RotaryScalingConfig
from megaframe.errors import UserError

Keys = dict[str, Any]

_COMMON = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
"""Keys of `model` and of the config, for all families except GPT-2."""
_GPT2 = {
    "layers": "n_layer",
    "hidden": "n_embd",
    "heads": "n_head",
    "ffn": "n_inner",
    "vocab": "vocab_size",
    "norm_eps": "layer_norm_epsilon",
    "init_std": "initializer_range",
}
_LIKE_LLAMA = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu"}
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
_METHODS = ("greedy", "group_limited_greedy")
"""DeepSeek-V2's ways to choose experts, without and with groups."""
_FIXED: dict[str, Keys] = {
    "gpt2": {
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    "llama": {"hidden_act": "silu", "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "ministral": {"hidden_act": "silu"},
    "qwen2": {"hidden_act": "silu"},
    "qwen3": {"hidden_act": "silu"},
    "qwen3_moe": {"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"hidden_act": "silu"},
    "deepseek_v3": {"hidden_act": "silu", "rope_interleave": True, "scoring_func": "sigmoid"},
    "deepseek_v2": {"hidden_act": "silu", "scoring_func": "softmax"},
}
"""Keys of each family that must have this value if they are present."""
_DEFAULT_ROTARY_BASES = {"mixtral": 1e6}
"""Rotary bases of families for which it is not 10000 unless the config gives another."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
"""The values of `layer_types`."""
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def read_model_config(
    config: Mapping[str, Any], shapes: Collection[Shape] | None = None
) -> ModelConfig:
    """Return the `model` section for a Hugging Face config.

    Args:
        shapes: Those of the model's tensors. No size may be more than they can hold.

    Raises:
        UserError: For anything that is not supported, or of a wrong type.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UserError(
            f"model_type {reprlib.repr(family)} is not one of {', '.join(ARCHITECTURES)}"
        )
    check_keys(config)
    if shapes is not None:
        check_sizes(config, shapes)
    for key, required in _FIXED[family].items():
        value = config.get(key, required)
        if value != required:
            shown = reprlib.repr(value)
            raise UserError(f"{family}: {key}={shown} is not supported, only {required!r}")
    keys = _FAMILIES[family].read(config)
    keys = {key: value for key, value in keys.items() if value is not None}
    try:
        return ModelConfig(**keys)
    except ValidationError as errors:
        error = errors.errors()[0]
        where = ".".join(("model", *map(str, error["loc"])))
        value = reprlib.repr(error["input"])
        raise UserError(f"{family}: {where}={value}: {error['msg']}") from None


def write_model_config(model: ModelConfig, positions: int) -> Keys:
    """Return the config of the Hugging Face model that computes the same.

    Args:
        positions: How many tokens of a text the model can see, or was trained to see.

    Raises:
        UserError: If there is none; the message names the differing keys.
    """
    family = find_family(model)
    config: Keys = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "tie_word_embeddings": model.tie_embeddings,
        "n_positions" if family == "gpt2" else "max_position_embeddings": positions,
        **_FIXED[family],
        **_FAMILIES[family].write(model),
    }
    reimported = read_model_config(config)
    ignored = {"dropout", "init_std", "mtp_depth", "positions"}
    model_keys, reimported_keys = model.model_dump(), reimported.model_dump()
    model_keys["window"], reimported_keys["window"] = (
        _find_shortest_pattern(_list_layer_windows(model)),
        reimported.window,
    )
    if model_keys.get("moe") and reimported_keys.get("moe"):
        for key in ("balance", "balance_rate", "balance_loss", "z_loss", "jitter"):
            model_keys["moe"][key] = reimported_keys["moe"][key] = None  # concern training only
    differing = [
        f"model.{key}={model_keys[key]!r} would become {reimported_keys[key]!r}"
        for key in model_keys
        if key not in ignored and model_keys[key] != reimported_keys[key]
    ]
    if differing:
        raise UserError(
            f"no Hugging Face model matches this config; as {family}:\n  " + "\n  ".join(differing)
        )
    return config


def find_family(model: ModelConfig) -> str:
    """Return the family that comes closest to a model."""
    if model.norm == "layernorm":
        return "gpt2"
    moe = model.moe
    if model.latent is not None:
        return "deepseek_v3" if moe is not None and moe.score == "sigmoid" else "deepseek_v2"
    if moe is not None:
        return "qwen3_moe" if model.qk_norm else "mixtral"
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias:
        return "qwen2"
    windows = set(_list_layer_windows(model))
    if len(windows) > 1:
        return "ministral"
    return "llama" if None in windows else "mistral"


@dataclass(frozen=True)
class _Family:
    read: Callable[[Mapping[str, Any]], Keys]
    write: Callable[[ModelConfig], Keys]


def _read_gpt2(config: Mapping[str, Any]) -> Keys:
    keys = {ours: config.get(theirs) for ours, theirs in _GPT2.items()}
    return {
        **{**keys, "norm": "layernorm", "position": "learned", "activation": "gelu_tanh"},
        "positions": config["n_positions"],
        **{"bias": True, "tie_embeddings": config.get("tie_word_embeddings", True)},
    }


def _write_gpt2(model: ModelConfig) -> Keys:
    return {theirs: getattr(model, ours) for ours, theirs in _GPT2.items()}


def _read_common(config: Mapping[str, Any]) -> Keys:
    keys: Keys = {ours: config.get(theirs) for ours, theirs in _COMMON.items()}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = rope.get("rope_theta") or config.get("rope_theta")
    keys["rotary_base"] = base or _DEFAULT_ROTARY_BASES.get(config["model_type"], 10000.0)
    keys["rotary_scaling"] = _read_rope_scaling({k: v for k, v in rope.items() if v is not None})
    keys["tie_embeddings"] = config.get("tie_word_embeddings", False)
    return {**keys, **_LIKE_LLAMA}


def _read_attention(config: Mapping[str, Any]) -> Keys:
    keys = _read_common(config)
    keys["kv_heads"] = config.get("num_key_value_heads")
    keys["head_dim"] = config.get("head_dim")
    if config.get("attention_bias"):
        raise UserError(
            "attention_bias=true has a bias of the output projection, which is not supported"
        )
    return keys


def _read_sliding(config: Mapping[str, Any]) -> Keys:
    """Read the config of a family whose code uses the same window in all layers."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds and window is not None and set(kinds) != {_SLIDING}:
        family = config["model_type"]
        raise UserError(
            f"{family}: layer_types has {_FULL} in {kinds.count(_FULL)} of {len(kinds)} layers, "
            f"and its code gives sliding_window={window} to all; ministral and qwen3 heed both"
        )
    return {**_read_attention(config), "window": window}


def _read_layer_types(config: Mapping[str, Any], window: int | None, num_full: int) -> Keys:
    """Read the config of a family whose layers can differ.

    Args:
        window: The window of layers that have one.
        num_full: Number of first layers without a window, used if the config has no `layer_types`.
    """
    layers, layer_types = config["num_hidden_layers"], config.get("layer_types")
    if layer_types is None:
        layer_types = [_FULL if window is None or n < num_full else _SLIDING for n in range(layers)]
    if len(layer_types) != layers:
        raise UserError(
            f"layer_types has {len(layer_types)} layers, and num_hidden_layers is {layers}"
        )
    for kind in layer_types:
        if kind not in (_FULL, _SLIDING):
            raise UserError(f"layer_types: {reprlib.repr(kind)} is none of {_FULL}, {_SLIDING}")
    if window is None and _SLIDING in layer_types:
        raise UserError(
            f"layer_types has {_SLIDING} layers, and there is no sliding_window for them"
        )
    windows = [window if kind == _SLIDING else None for kind in layer_types]
    return {**_read_attention(config), "window": _find_shortest_pattern(windows)}


def _read_ministral(config: Mapping[str, Any]) -> Keys:
    return _read_layer_types(config, config.get("sliding_window"), 0)


def _read_qwen(config: Mapping[str, Any]) -> Keys:
    full = config.get("max_window_layers", 28)
    theirs = "qkv_bias" if config["model_type"] == "qwen2" else "qk_norm"
    return {**_read_layer_types(config, _read_qwen_window(config), full), theirs: True}


def _read_qwen_window(config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") and "sliding_window" not in config:
        raise UserError(f"{config['model_type']}: sliding_window is missing")
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _write_common(model: ModelConfig) -> Keys:
    keys: Keys = {theirs: getattr(model, ours) for ours, theirs in _COMMON.items()}
    keys["rope_parameters"] = {
        "rope_theta": model.rotary_base,
        **_write_rope_scaling(model.rotary_scaling),
    }
    return keys


def _write_attention(model: ModelConfig) -> Keys:
    return {
        **_write_common(model),
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }


def _write_sliding(model: ModelConfig) -> Keys:
    return {**_write_attention(model), "sliding_window": _find_first_window(model)}


def _write_layer_types(model: ModelConfig) -> Keys:
    kinds = [_FULL if window is None else _SLIDING for window in _list_layer_windows(model)]
    return {**_write_sliding(model), "layer_types": kinds}


def _write_qwen(model: ModelConfig) -> Keys:
    keys = _write_layer_types(model)
    kinds = [*keys["layer_types"], _SLIDING]
    sliding = keys["sliding_window"] is not None
    return {**keys, "use_sliding_window": sliding, "max_window_layers": kinds.index(_SLIDING)}


def _list_layer_windows(model: ModelConfig) -> list[int | None]:
    return [get_window(model, layer) for layer in range(model.layers)]


def _find_shortest_pattern(windows: Sequence[int | None]) -> int | tuple[int | None, ...] | None:
    """Return the shortest `model.window` that gives the layers these windows."""
    size = next(
        size
        for size in range(1, len(windows) + 1)
        if all(windows[layer] == windows[layer % size] for layer in range(len(windows)))
    )
    return windows[0] if size == 1 else tuple(windows[:size])


def _find_first_window(model: ModelConfig) -> int | None:
    """Return the window of the first layer that has one. `write_model_config` refuses models whose
    layers have several different windows."""
    return next((window for window in _list_layer_windows(model) if window is not None), None)


def _read_rope_scaling(rope: Mapping[str, Any]) -> Keys:
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return {}
    if rope_type not in ("llama3", "yarn"):
        raise UserError(f"rope_type {reprlib.repr(rope_type)} is not one of default, llama3, yarn")
    required = ["factor", "original_max_position_embeddings"]
    required += ["low_freq_factor", "high_freq_factor"] if rope_type == "llama3" else []
    if missing := [key for key in required if key not in rope]:
        raise UserError(f"rope_type {rope_type!r} needs {', '.join(missing)}")
    shared = {"factor": rope["factor"], "original_length": rope["original_max_position_embeddings"]}
    if rope_type == "llama3":
        frequencies = {name: rope[f"{name}_freq_factor"] for name in ("low", "high")}
        renamed = {f"{name}_frequency": value for name, value in frequencies.items()}
        return {"kind": "llama3", **shared, **renamed}
    return {
        **{"kind": "yarn", **shared, "mscale": rope.get("mscale", 1.0)},
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
        "low_frequency": rope.get("beta_slow", 1),
        "high_frequency": rope.get("beta_fast", 32),
    }


def _write_rope_scaling(scaling: RotaryScalingConfig) -> Keys:
    if scaling.kind == "none":
        return {"rope_type": "default"}
    shared = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
    }
    low, high = scaling.low_frequency, scaling.high_frequency
    if scaling.kind == "llama3":
        return {**shared, "low_freq_factor": low, "high_freq_factor": high}
    strengths = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return {**shared, **strengths, "beta_slow": low, "beta_fast": high}


def _read_mixtral(config: Mapping[str, Any]) -> Keys:
    moe = {
        "experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "normalise": True,
        "score": "softmax",
        "balance": "sequence",
    }
    return {**_read_sliding(config), "moe": moe}


def _write_mixtral(model: ModelConfig) -> Keys:
    assert model.moe is not None
    return {
        **_write_sliding(model),
        "num_local_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "intermediate_size": model.moe.ffn or model.ffn,
    }


def _read_qwen3_moe(config: Mapping[str, Any]) -> Keys:
    moe = {
        "experts": config.get("num_experts") or config.get("num_local_experts"),
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
        "normalise": config.get("norm_topk_prob", False),
        "score": "softmax",
        "balance": "global",
    }
    if moe["experts"] is None:
        raise UserError("qwen3_moe: num_experts is missing")
    keys = _read_sliding({**config, "sliding_window": _read_qwen_window(config)})
    return {**keys, "qk_norm": True, "moe": moe}


def _write_qwen3_moe(model: ModelConfig) -> Keys:
    assert model.moe is not None
    return {
        **_write_sliding(model),
        "num_experts": model.moe.experts,
        "num_experts_per_tok": model.moe.top_k,
        "moe_intermediate_size": model.moe.ffn or model.ffn,
        "norm_topk_prob": model.moe.normalise,
        "use_sliding_window": _find_first_window(model) is not None,
    }


def _read_deepseek(config: Mapping[str, Any]) -> Keys:
    keys = _read_common(config)
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UserError(
            f"num_key_value_heads={kv_heads} is not num_attention_heads={heads}, and latent "
            f"attention has keys and values for every head"
        )
    keys["latent"] = {ours: config.get(theirs) for ours, theirs in _LATENT.items()}
    moe: Keys = {ours: config.get(theirs) for ours, theirs in _DEEPSEEK_MOE.items()}
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


def _write_deepseek(model: ModelConfig) -> Keys:
    assert model.latent is not None
    keys = {
        **_write_common(model),
        "num_key_value_heads": model.heads,
        **{theirs: getattr(model.latent, ours) for ours, theirs in _LATENT.items()},
    }
    moe = model.moe
    if moe is None:
        raise UserError("no Hugging Face model has latent attention without experts")
    keys |= {theirs: getattr(moe, ours) for ours, theirs in _DEEPSEEK_MOE.items()}
    keys["moe_intermediate_size"] = moe.ffn or model.ffn
    if moe.score == "softmax":
        keys["topk_method"] = _METHODS[moe.groups > 1]
    return keys


_FAMILIES = {
    "gpt2": _Family(_read_gpt2, _write_gpt2),
    "llama": _Family(_read_attention, _write_attention),
    "mistral": _Family(_read_sliding, _write_sliding),
    "ministral": _Family(_read_ministral, _write_layer_types),
    "qwen2": _Family(_read_qwen, _write_qwen),
    "qwen3": _Family(_read_qwen, _write_qwen),
    "qwen3_moe": _Family(_read_qwen3_moe, _write_qwen3_moe),
    "mixtral": _Family(_read_mixtral, _write_mixtral),
    "deepseek_v2": _Family(_read_deepseek, _write_deepseek),
    "deepseek_v3": _Family(_read_deepseek, _write_deepseek),
}
