"""Converts configs of Hugging Face models to `model` sections of a run config, and back.

A family is a `model_type` with its keys. A setting that has no counterpart on the other side is
refused by name, because a model that is only nearly the same computes different numbers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from megaframe.checkpoint.convert.huggingface.config_keys import Shape, check_keys, check_sizes
from megaframe.checkpoint.convert.huggingface.dense_families import (
    Keys,
    list_layer_windows,
    read_attention,
    read_gpt2,
    read_ministral,
    read_qwen,
    read_sliding,
    write_attention,
    write_gpt2,
    write_layer_types,
    write_qwen,
    write_sliding,
)
from megaframe.checkpoint.convert.huggingface.family_keys import (
    FAMILY_KEYS,
    check_family_keys,
)
from megaframe.checkpoint.convert.huggingface.moe_families import (
    read_deepseek,
    read_mixtral,
    read_qwen3_moe,
    write_deepseek,
    write_mixtral,
    write_qwen3_moe,
)
from megaframe.checkpoint.convert.huggingface.same_model import (
    find_model_differences,
    simplify_model,
)
from megaframe.config import ModelConfig
from megaframe.config.registry import list_parts
from megaframe.errors import UserError, join_or

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
        config: The content of its `config.json`.
        shapes: Those of the model's tensors. No size may be more than they can hold.

    Raises:
        UserError: For anything that is not supported, or of a wrong type.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise UserError(
            f"model_type {reprlib.repr(family)} is not one of {', '.join(ARCHITECTURES)}"
        )
    config = check_family_keys(family, config)
    check_keys(config)
    if shapes is not None:
        check_sizes(config, shapes)
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
        model: The `model` section of the config.
        positions: How many tokens of a text the model can see, or was trained to see.

    Raises:
        UserError: If there is none; the message names the differing keys.
    """
    if parts := [part.name for part in list_parts(model)]:
        raise UserError(
            f"no Hugging Face model has {join_or(dict.fromkeys(parts))}, which come from extensions"
        )
    simple = simplify_model(model)
    family = find_family(simple)
    config: Keys = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "tie_word_embeddings": simple.tie_embeddings,
        "n_positions" if family == "gpt2" else "max_position_embeddings": positions,
        **FAMILY_KEYS[family].fixed,
        **_FAMILIES[family].write(simple),
    }
    differing = find_model_differences(model, read_model_config(config))
    if differing:
        raise UserError(
            f"no Hugging Face model matches this config; as {family}:\n  " + "\n  ".join(differing)
        )
    return config


def find_family(model: ModelConfig) -> str:
    """Return the family that comes closest to a simplified model."""
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
    windows = set(list_layer_windows(model))
    if len(windows) > 1:
        return "ministral"
    return "llama" if None in windows else "mistral"


@dataclass(frozen=True)
class _Family:
    read: Callable[[Mapping[str, Any]], Keys]
    write: Callable[[ModelConfig], Keys]


_FAMILIES = {
    "gpt2": _Family(read_gpt2, write_gpt2),
    "llama": _Family(read_attention, write_attention),
    "mistral": _Family(read_sliding, write_sliding),
    "ministral": _Family(read_ministral, write_layer_types),
    "qwen2": _Family(read_qwen, write_qwen),
    "qwen3": _Family(read_qwen, write_qwen),
    "qwen3_moe": _Family(read_qwen3_moe, write_qwen3_moe),
    "mixtral": _Family(read_mixtral, write_mixtral),
    "deepseek_v2": _Family(read_deepseek, write_deepseek),
    "deepseek_v3": _Family(read_deepseek, write_deepseek),
}
