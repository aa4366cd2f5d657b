"""Keys of Hugging Face configs of dense families, and the parts of them that families with experts
share: sizes, and windows of attention by layer.

Each `read` function turns a config into keys of `model`, each `write` function does the opposite.
What is particular to one family is in its own function; `families.py` has the table.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from megaframe.architecture.window import get_window
from megaframe.checkpoint.convert.huggingface.rotary_keys import Keys, read_rotary, write_rotary
from megaframe.checkpoint.convert.huggingface.same_model import find_shortest_pattern
from megaframe.config import ModelConfig
from megaframe.errors import UserError

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
_FULL, _SLIDING = "full_attention", "sliding_attention"
"""The values of `layer_types`."""


def read_gpt2(config: Mapping[str, Any]) -> Keys:
    """Return the keys of `model` for a config of GPT-2."""
    keys = {key: config.get(foreign_key) for key, foreign_key in _GPT2.items()}
    return {
        **{**keys, "norm": "layernorm", "position": "learned", "activation": "gelu_tanh"},
        "positions": config["n_positions"],
        **{"bias": True, "tie_embeddings": config.get("tie_word_embeddings", True)},
    }


def write_gpt2(model: ModelConfig) -> Keys:
    """Return the keys of a config of GPT-2."""
    return {foreign_key: getattr(model, key) for key, foreign_key in _GPT2.items()}


def read_common(config: Mapping[str, Any]) -> Keys:
    """Return the keys of `model` that all families like Llama share."""
    keys: Keys = {key: config.get(foreign_key) for key, foreign_key in _COMMON.items()}
    keys["tie_embeddings"] = config.get("tie_word_embeddings", False)
    return {**keys, **read_rotary(config, latent="kv_lora_rank" in config), **_LIKE_LLAMA}


def read_attention(config: Mapping[str, Any]) -> Keys:
    """Return these and the keys of grouped-query attention."""
    keys = read_common(config)
    keys["kv_heads"] = config.get("num_key_value_heads")
    keys["head_dim"] = config.get("head_dim")
    return keys


def read_sliding(config: Mapping[str, Any]) -> Keys:
    """Read the config of a family whose code uses the same window in all layers.

    Raises:
        UserError: If layers have different windows.
    """
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds and window is not None and set(kinds) != {_SLIDING}:
        family = config["model_type"]
        raise UserError(
            f"{family}: layer_types has {_FULL} in {kinds.count(_FULL)} of {len(kinds)} layers, "
            f"and its code gives sliding_window={window} to all; ministral and qwen3 heed both"
        )
    return {**read_attention(config), "window": window}


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
    return {**read_attention(config), "window": find_shortest_pattern(windows)}


def read_ministral(config: Mapping[str, Any]) -> Keys:
    """Return the keys of `model` for a config of Ministral."""
    return _read_layer_types(config, config.get("sliding_window"), 0)


def read_qwen(config: Mapping[str, Any]) -> Keys:
    """Return the keys of `model` for a config of Qwen2 or Qwen3."""
    full = config.get("max_window_layers", 28)
    variant = "qkv_bias" if config["model_type"] == "qwen2" else "qk_norm"
    return {**_read_layer_types(config, read_qwen_window(config), full), variant: True}


def read_qwen_window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window in tokens; None if it is not used.

    Raises:
        UserError: If it is used and missing.
    """
    if config.get("use_sliding_window") and "sliding_window" not in config:
        raise UserError(f"{config['model_type']}: sliding_window is missing")
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def write_common(model: ModelConfig) -> Keys:
    """Return the keys of a config that all families like Llama share."""
    keys: Keys = {foreign_key: getattr(model, key) for key, foreign_key in _COMMON.items()}
    return {**keys, "rope_parameters": write_rotary(model)}


def write_attention(model: ModelConfig) -> Keys:
    """Return these and the keys of grouped-query attention."""
    return {
        **write_common(model),
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }


def write_sliding(model: ModelConfig) -> Keys:
    """Return these and the sliding window."""
    return {**write_attention(model), "sliding_window": find_first_window(model)}


def write_layer_types(model: ModelConfig) -> Keys:
    """Return these and the kind of attention of each layer."""
    kinds = [_FULL if window is None else _SLIDING for window in list_layer_windows(model)]
    return {**write_sliding(model), "layer_types": kinds}


def write_qwen(model: ModelConfig) -> Keys:
    """Return the keys of a config of Qwen2 or Qwen3."""
    keys = write_layer_types(model)
    kinds = [*keys["layer_types"], _SLIDING]
    sliding = keys["sliding_window"] is not None
    return {**keys, "use_sliding_window": sliding, "max_window_layers": kinds.index(_SLIDING)}


def list_layer_windows(model: ModelConfig) -> list[int | None]:
    """Return the sliding window of each layer, in tokens; None: full attention."""
    return [get_window(model, layer) for layer in range(model.layers)]


def find_first_window(model: ModelConfig) -> int | None:
    """Return the window of the first layer that has one. `write_model_config` refuses models whose
    layers have several different windows."""
    return next((window for window in list_layer_windows(model) if window is not None), None)
