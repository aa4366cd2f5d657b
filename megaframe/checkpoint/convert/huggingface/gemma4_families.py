"""Gemma 4 (Google 2026): wider heads where layers see all tokens, whose keys may be their values;
experts beside the MLP of each layer; last layers with the keys and values of earlier ones, and
inputs of each layer besides the stream.
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
from megaframe.checkpoint.convert.huggingface.key_types import Count, Flag, LayerSizes, Size, Text
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeysOfTypes
from megaframe.errors import UserError

_WIDTH, _HEADS = "mixer.head_dim", "mixer.kv_heads"
_WORDS = 262_144
"""Words of the table of inputs of layers, of a config without it."""
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
            names = _name_layer(number, facts)
            sizes = {**outer, **self._find_own_sizes(config, names, is_full)}
            layer[_WIDTH], layer[_HEADS] = sizes["head_dim"], sizes["num_key_value_heads"]
            layer["mixer.keys_as_values"] = shares and is_full
        known = {name for n in range(len(facts.layers)) for name in _name_layer(n, facts)}
        if unknown := {*(config.get("per_layer_config") or ())} - known:
            raise UserError(f"per_layer_config names no layer with {reprlib.repr(unknown.pop())}")

    def _find_own_sizes(
        self, config: Mapping[str, Any], names: Sequence[str], is_full: bool
    ) -> Keys:
        if "per_layer_config" in config:
            listed = config["per_layer_config"] or {}
            own: Keys = next((listed[name] for name in names if name in listed), {})
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


@dataclass(frozen=True)
class SharingLayers(Key):
    """How many last layers attend to the keys and values of earlier ones."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The number."""
        return {"num_kv_shared_layers": Count}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what these layers do not have, once all else of layers is known."""
        number = config.get("num_kv_shared_layers") or 0
        first = len(facts.layers) - number
        if number and first < 1:
            raise UserError(
                f"num_kv_shared_layers={number} leaves none of num_hidden_layers="
                f"{len(facts.layers)} with keys of its own"
            )
        for layer in facts.layers[first:] if number else ():
            layer["mixer.shared_keys"] = True
            layer["mixer.value_norm"] = layer["mixer.keys_as_values"] = False

    def write(self, facts: Facts) -> Keys:
        """Return the number of layers from the first that shares on."""
        shares = [bool(s) for s in facts.list_values("mixer.shared_keys")]
        return {"num_kv_shared_layers": len(shares) - [*shares, True].index(True)}


@dataclass(frozen=True)
class LayerEmbeddingWidth(Key):
    """The width of the inputs of layers besides the stream, and the words of their table."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The width and the words."""
        return {"hidden_size_per_layer_input": Count, "vocab_size_per_layer_input": Size}

    @property
    def required(self) -> Sequence[str]:
        """The width, which is not 0 by default."""
        return ("hidden_size_per_layer_input",)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the width."""
        width, words = config["hidden_size_per_layer_input"], config["vocab_size"]
        table = config.get("vocab_size_per_layer_input") or _WORDS
        if width and table != words:
            raise UserError(
                f"vocab_size_per_layer_input={table} is not supported beside vocab_size={words}, "
                "only the same number"
            )
        facts.set("layer_embeddings", width or None)

    def write(self, facts: Facts) -> Keys:
        """Return both."""
        words = {"vocab_size_per_layer_input": facts.get("vocab")}
        return {"hidden_size_per_layer_input": facts.get("layer_embeddings") or 0, **words}


@dataclass(frozen=True)
class ExpertsBesideMLP(Key):
    """Whether layers have experts, to which their MLP then is what shared experts are; and of
    others the width of the MLP. It is double where a layer shares keys, if so said."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The switches and the sizes."""
        sizes = ("intermediate_size", "num_experts", "top_k_experts", "moe_intermediate_size")
        switches = ("enable_moe_block", "use_double_wide_mlp")
        return {**dict.fromkeys(switches, Flag), **dict.fromkeys(sizes, Size)}

    @property
    def required(self) -> Sequence[str]:
        """The width of the MLP."""
        return ("intermediate_size",)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the MLP of each layer, and the experts."""
        width = config["intermediate_size"]
        doubles = bool(config.get("use_double_wide_mlp"))
        times = [1 + (doubles and bool(s)) for s in facts.list_values("mixer.shared_keys")]
        if not config.get("enable_moe_block"):
            facts.set_layers("feed_forward.ffn", [width * each for each in times])
            return
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if config.get(name) is None:
                raise UserError(f"{name} is missing, and enable_moe_block=true needs it")
        one = config["moe_intermediate_size"]
        if width % one:
            raise UserError(
                f"intermediate_size={width} is no multiple of moe_intermediate_size={one}, as "
                "which its MLP would be shared experts"
            )
        facts.set("feed_forward.kind", "moe")
        facts.set_layers("feed_forward.shared", [width // one * each for each in times])
        experts = {"experts": config["num_experts"], "top_k": config["top_k_experts"], "ffn": one}
        experts |= {"shared": width // one, "score": "softmax", "balance": "sequence"}
        experts |= {"normalise": True, "expert_gain": True, "own_norms": True}
        for name, value in experts.items():
            facts.set(f"moe.{name}", value)

    def write(self, facts: Facts) -> Keys:
        """Return the sizes."""
        one, experts = facts.get("moe.ffn"), facts.get("moe.experts")
        width = facts.get("feed_forward.ffn")
        widths = facts.list_values("feed_forward.shared" if experts else "feed_forward.ffn")
        return {
            "use_double_wide_mlp": widths[-1] != widths[0],
            "enable_moe_block": experts is not None,
            "intermediate_size": (facts.get("moe.shared") or 0) * one if experts else width,
            **{"num_experts": experts, "top_k_experts": facts.get("moe.top_k")},
            "moe_intermediate_size": one,
        }


def _name_layer(number: int, facts: Facts) -> tuple[str, str]:
    """Return the names of a layer, of which transformers writes the second one: all are as long."""
    return str(number), str(number).zfill(len(str(len(facts.layers) - 1)))


@dataclass(frozen=True)
class Limited(Key):
    """A key that changes nothing with some values, and is refused with others.

    Attributes:
        name: The key.
        type: Of its value.
        values: Those that change nothing, of which the first one is written.
    """

    name: str
    type: Any
    values: tuple[Any, ...]

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {self.name: self.type}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Raise `UserError` for other values."""
        value = config.get(self.name, self.values[0])
        if value not in self.values:
            known = " and ".join(map(repr, self.values))
            raise UserError(f"{self.name}={reprlib.repr(value)} is not supported, only {known}")

    def write(self, facts: Facts) -> Keys:
        """Return the first value."""
        return {self.name: self.values[0]}


_MLP = ("gate", "up", "down")
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
        otherwise="moe.activation",
    ),
    Pair("rms_norm_eps", "norm_eps", default=1e-6),
    Pair("tie_word_embeddings", "tie_embeddings", default=True),
    Pair("final_logit_softcapping", "logit_softcap"),
    LastFullTypes(need="present"),
    HeadsOfTypes(),
    SharingLayers(),
    ExpertsBesideMLP(),
    LayerEmbeddingWidth(),
    # Images alone see what is ahead with the second value.
    Limited("use_bidirectional_attention", Text, (None, "vision")),
    RotaryKeysOfTypes(1e6, 1e4, reads_outside=False, proportional=True, sections=_ROPE),
    without=("rope_theta", "rope_scaling", "mlp_bias"),
    own={
        **{"norms": "both", "mixer.qk_norm": "head", "mixer.value_norm": True},
        **{"mixer.score_scale": 1.0, "layer_scalar": True},
        "embedding_scale": lambda facts: facts.get("hidden") ** 0.5,
        "router_scale": lambda facts: facts.get("hidden") ** -0.5,
    },
    fixed={"hidden_act": None},
    scales={"moe.router": "router_scale"},
    ends={
        "model.embed_tokens_per_layer": "embedding.layer_tokens",
        "model.per_layer_model_projection": "embedding.layer_projection",
        "model.per_layer_projection_norm": "embedding.layer_norm",
    },
    block={
        **QK_NORMS,
        "per_layer_input_gate": "layer_embedding.gate",
        "per_layer_projection": "layer_embedding.output",
        "post_per_layer_input_norm": "layer_embedding.post_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm or moe.shared_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
        "post_feedforward_layernorm_1": "moe.shared_post_norm",
        "pre_feedforward_layernorm_2": "moe.experts_norm",
        "post_feedforward_layernorm_2": "moe.experts_post_norm",
        **{f"mlp.{part}_proj": f"mlp.{part} or moe.shared.{part}" for part in _MLP},
        "router.proj": "moe.router",
        "router.scale": "moe.router_norm",
        "router.per_expert_scale": "moe.expert_gain",
        "experts.gate_up_proj": "moe.all_experts.gate moe.all_experts.up",
        "experts.down_proj": "moe.all_experts.down",
        "layer_scalar": "layer_scalar",
    },
)
GEMMA4_FAMILIES = (GEMMA4,)
