"""Gemma 4 (Google 2026): wider heads where layers see all tokens, whose keys may be their values.

Its models with embeddings per layer, keys and values that layers share, or experts beside an MLP
are refused.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaframe.checkpoint.convert.huggingface.dense_families import LLAMA, QK_NORMS
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    FULL,
    Key,
    Keys,
    LayerTypes,
    Pair,
    choose,
    slide_except,
)
from megaframe.checkpoint.convert.huggingface.key_types import Flag, LayerSizes, Size, Text
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeysOfTypes
from megaframe.errors import UserError

_WIDTH, _HEADS = "mixer.head_dim", "mixer.kv_heads"
_WIDTH_OF_FULL = 512
"""Width of the heads of layers that see all tokens, of a config without it."""


class LastFullTypes(LayerTypes):
    """Layers that slide or not, of which the last one does not, whatever the types say."""

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the window of each layer."""
        kinds = config.get("layer_types") or slide_except("", 6)(config, None)
        super().read({**config, "layer_types": [*kinds[:-1], FULL]}, facts)


@dataclass(frozen=True)
class HeadsOfTypes(Key):
    """Widths of heads, and key and value heads, which are others in layers that see all tokens.
    Those layers are known before."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The sizes for each type of layers, and what transformers saves of single layers."""
        return {
            **{"head_dim": Size, "global_head_dim": Size, "attention_k_eq_v": Flag},
            **{"num_key_value_heads": Size, "num_global_key_value_heads": Size},
            "per_layer_config": dict[str, LayerSizes] | None,
        }

    @property
    def required(self) -> Sequence[str]:
        """The sizes of layers that slide."""
        return ("head_dim", "num_key_value_heads")

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the sizes of each layer, and whether its keys are its values."""
        shares = bool(config.get("attention_k_eq_v"))
        outer = {name: config[name] for name in self.required}
        for number, layer in enumerate(facts.layers):
            is_full = layer["mixer.window"] is None
            sizes = {**outer, **self._find_own_sizes(config, number, is_full)}
            layer[_WIDTH], layer[_HEADS] = sizes["head_dim"], sizes["num_key_value_heads"]
            layer["mixer.keys_as_values"] = shares and is_full
        if unknown := {*(config.get("per_layer_config") or ())} - set(_name_layers(facts)):
            raise UserError(f"per_layer_config names no layer with {reprlib.repr(unknown.pop())}")

    def _find_own_sizes(self, config: Mapping[str, Any], number: int, is_full: bool) -> Keys:
        if "per_layer_config" in config:
            own = (config["per_layer_config"] or {}).get(str(number), {})
        elif is_full:
            own = {"head_dim": config.get("global_head_dim") or _WIDTH_OF_FULL}
            if config.get("attention_k_eq_v"):
                own["num_key_value_heads"] = config.get("num_global_key_value_heads")
        else:
            own = {}
        return {name: value for name, value in own.items() if value is not None}

    def write(self, facts: Facts) -> Keys:
        """Return the sizes of the first layer of each type."""
        full = [layer for layer in facts.layers if layer.get("mixer.window") is None]
        sliding = [layer for layer in facts.layers if layer.get("mixer.window") is not None]
        first, other = (sliding or full)[0], (full or sliding)[0]
        shares = bool(other.get("mixer.keys_as_values"))
        return {
            **{"head_dim": first.get(_WIDTH), "num_key_value_heads": first.get(_HEADS)},
            **{"global_head_dim": other.get(_WIDTH), "attention_k_eq_v": shares},
            "num_global_key_value_heads": other.get(_HEADS) if shares else None,
        }


def _name_layers(facts: Facts) -> list[str]:
    return [str(number) for number in range(len(facts.layers))]


@dataclass(frozen=True)
class Limited(Key):
    """A key that changes nothing with some values, and is refused with others.

    Attributes:
        name: The key.
        type: Of its value.
        values: Those that change nothing, of which the first one is written.
        is_needed: Whether it must be there, because code has another value by default.
    """

    name: str
    type: Any
    values: tuple[Any, ...]
    is_needed: bool = False

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {self.name: self.type}

    @property
    def required(self) -> Sequence[str]:
        """The key, if it is needed."""
        return (self.name,) * self.is_needed

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Raise `UserError` for other values."""
        value = config.get(self.name, self.values[0])
        if value not in self.values:
            known = " and ".join(map(repr, self.values))
            raise UserError(f"{self.name}={reprlib.repr(value)} is not supported, only {known}")

    def write(self, facts: Facts) -> Keys:
        """Return the first value."""
        return {self.name: self.values[0]}


_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        **{"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
GEMMA4 = LLAMA.derive(
    "gemma4_text",
    "Gemma4ForCausalLM",
    choose(
        "hidden_activation",
        "feed_forward.activation",
        {"gelu_pytorch_tanh": "geglu"},
        default="gelu_pytorch_tanh",
    ),
    Pair("rms_norm_eps", "norm_eps", default=1e-6),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    Pair("final_logit_softcapping", "logit_softcap"),
    LastFullTypes(need="present"),
    HeadsOfTypes(),
    Limited("hidden_size_per_layer_input", int, (0,), is_needed=True),
    # Images alone see what is ahead with the second value.
    Limited("use_bidirectional_attention", Text, (None, "vision")),
    RotaryKeysOfTypes(1e6, 1e4, reads_outside=False, proportional=True, sections=_ROPE),
    without=("rope_theta", "rope_scaling", "mlp_bias"),
    own={
        **{"norms": "both", "mixer.qk_norm": "head", "mixer.value_norm": True},
        **{"mixer.score_scale": 1.0, "layer_scalar": True},
        "embedding_scale": lambda facts: facts.get("hidden") ** 0.5,
    },
    fixed={"hidden_act": None, "num_kv_shared_layers": 0, "enable_moe_block": False},
    # Of the parts that are refused.
    neutral=(
        *("vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts"),
        "moe_intermediate_size",
    ),
    block={
        **QK_NORMS,
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
        "layer_scalar": "layer_scalar",
    },
)
GEMMA4_FAMILIES = (GEMMA4,)
