"""Models for texts and images, of which the model for texts alone is imported.

Their `config.json` has that model's keys in a section `text_config`, which may leave out what the
class of the section has by default, and the names of its tensors begin otherwise.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megaframe.checkpoint.convert.huggingface.read_files import TensorHeader
from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable

_TEXT = "text_config"


@dataclass(frozen=True)
class NestedModel:
    """A row for a model around a model for texts.

    Attributes:
        text: `model_type` of the model for texts.
        also: Others that its section may name.
        defaults: Keys of its section that may be missing, with the values of its class.
        outer: Keys outside of the section that are its, such as whether tables are tied.
        prefixes: What names of its tensors begin with, and what they begin with without the towers.
        towers: What the names of all others begin with.
    """

    text: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    outer: tuple[str, ...] = ("tie_word_embeddings", "dtype", "torch_dtype")
    prefixes: Mapping[str, str] = field(
        default_factory=lambda: {
            "language_model.model.": "model.",
            "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
        }
    )
    also: tuple[str, ...] = ()
    towers: tuple[str, ...] = tuple(
        start + tower
        for start in ("", "model.")
        for tower in ("vision_tower.", "multi_modal_projector.")
    )


_LINEAR_SIZES = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4},
}
NESTED_MODELS = {
    "gemma3": NestedModel(
        "gemma3_text",
        {
            **{"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4},
            **{"head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
            "query_pre_attn_scalar": 256,
        },
    ),
    "gemma3n": NestedModel(
        "gemma3n_text",
        {
            **{"vocab_size": 262400, "hidden_size": 2048, "num_hidden_layers": 35},
            **{"intermediate_size": [16384] * 35, "num_attention_heads": 8},
            **{"num_key_value_heads": 2, "head_dim": 256},
            **{"max_position_embeddings": 32768, "rms_norm_eps": 1e-6},
            **{"sliding_window": 512, "hidden_size_per_layer_input": 256},
            **{"num_kv_shared_layers": 15, "final_logit_softcapping": 30.0},
        },
        towers=tuple(
            f"model.{tower}."
            for tower in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
    ),
    "gemma4": NestedModel(
        "gemma4_text",
        {
            **{"vocab_size": 262144, "hidden_size": 2304, "num_hidden_layers": 30},
            **{"intermediate_size": 9216, "num_attention_heads": 8, "num_key_value_heads": 4},
            **{"head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6},
            **{"sliding_window": 512, "hidden_size_per_layer_input": 256},
        },
        towers=tuple(
            f"model.{tower}."
            for tower in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
    ),
    "llama4": NestedModel(
        "llama4_text",
        {
            **{"vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48},
            **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "head_dim": 128},
            **{"num_attention_heads": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
            **{"num_experts_per_tok": 1, "num_local_experts": 16},
            "max_position_embeddings": 131072,
        },
        towers=("vision_model.", "multi_modal_projector."),
    ),
    "qwen3_5": NestedModel(
        "qwen3_5_text",
        {
            **{"vocab_size": 248320, "hidden_size": 4096, "num_hidden_layers": 32},
            **{"intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4},
            **{"head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
            **_LINEAR_SIZES,
        },
        towers=("model.visual.",),
    ),
    "qwen3_5_moe": NestedModel(
        "qwen3_5_moe_text",
        {
            **{"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40},
            **{"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
            **{"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, **_LINEAR_SIZES},
            **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
            **{"num_experts_per_tok": 8, "num_experts": 256},
        },
        towers=("model.visual.",),
    ),
    "mistral3": NestedModel("mistral", also=("ministral3", "mistral4")),
}
"""By `model_type`."""


def unwrap_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the model for texts, which is the config itself where nothing is nested.

    Raises:
        UserError: If there is no section for it, or it is of another model.
    """
    row = _find_row(config)
    if row is None:
        return config
    section = config.get(_TEXT)
    if not isinstance(section, dict):
        text = make_printable(reprlib.repr(section))
        raise UserError(
            f"{config['model_type']}: {_TEXT}={text} is not the section of its model for texts"
        )
    name, known = section.get("model_type", row.text), (row.text, *row.also)
    if name not in known:
        text = make_printable(reprlib.repr(section["model_type"]))
        raise UserError(
            f"{config['model_type']}: {_TEXT}.model_type={text} is not supported, only "
            f"{' and '.join(map(repr, known))}"
        )
    outer = {key: config[key] for key in row.outer if key in config and key not in section}
    return {**row.defaults, **outer, **section, "model_type": name}


def unwrap_names(
    config: Mapping[str, Any], headers: Mapping[str, TensorHeader]
) -> tuple[Mapping[str, TensorHeader], Iterator[str]]:
    """Return the tensors of the model for texts, by the names that they have without towers, and a
    line about what is left out.

    Raises:
        UserError: If two tensors have the same name then.
    """
    row = _find_row(config)
    if row is None:
        return headers, iter(())
    found: dict[str, TensorHeader] = {}
    left_out = [name for name in headers if name.startswith(row.towers)]
    for name in headers.keys() - set(left_out):
        start = next((start for start in row.prefixes if name.startswith(start)), None)
        bare = name if start is None else row.prefixes[start] + name.removeprefix(start)
        if bare in found:
            raise UserError(f"{make_printable(name)}: two tensors would be {make_printable(bare)}")
        found[bare] = headers[name]
    note = f"{len(left_out)} tensors of towers for images are left out"
    return {name: found[name] for name in sorted(found)}, iter([note] if left_out else [])


def _find_row(config: Mapping[str, Any]) -> NestedModel | None:
    name = config.get("model_type")
    return NESTED_MODELS.get(name) if isinstance(name, str) else None
