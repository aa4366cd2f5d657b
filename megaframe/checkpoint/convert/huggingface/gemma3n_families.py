"""Gemma 3n (Google 2025): several streams of which layers change one (AltUp), a branch of low rank
beside attention (LAuReL), gates that are cut off, and what Gemma 4 has of it, too: last layers with
the keys and values of earlier ones, and inputs of each layer besides the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from megaframe.checkpoint.convert.huggingface.gemma4_families import GEMMA4, Limited
from megaframe.checkpoint.convert.huggingface.key_pairs import (
    Key,
    Keys,
    LayerTypes,
    Pair,
    slide_except,
)
from megaframe.checkpoint.convert.huggingface.key_types import Count, Flag, NonNegative, Size
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.checkpoint.convert.huggingface.rotary_keys import RotaryKeysOfTypes
from megaframe.errors import UserError

_WIDTH = Annotated[int, Field(ge=1)]
_SHARES = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(max_length=2_000)] | None
_CUT_LAYERS, _CUT_SHARE = 10, 0.95
"""First layers whose gates are cut off, and how many of them, of a config of more layers that does
not say it."""
_WORDS = 262_144
"""Words of the table of inputs of layers, of a config without it."""


@dataclass(frozen=True)
class ListedByLayer(Key):
    """A key that has a value for each layer, or one for all.

    Attributes:
        name: The key.
        path: Of the fact.
        type: Of its value.
    """

    name: str
    path: str
    type: Any

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {self.name: self.type}

    @property
    def required(self) -> Sequence[str]:
        """The key."""
        return (self.name,)

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the fact of each layer."""
        value = config[self.name]
        values = value if isinstance(value, list) else [value] * len(facts.layers)
        check_length(self.name, values, facts)
        facts.set_layers(self.path, values)

    def write(self, facts: Facts) -> Keys:
        """Return the values of all layers."""
        return {self.name: facts.list_values(self.path)}


@dataclass(frozen=True)
class GateShares(Key):
    """The share of gates that each layer cuts off."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The shares."""
        return {"activation_sparsity_pattern": _SHARES}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set that of each layer."""
        layers = len(facts.layers)
        values = config.get("activation_sparsity_pattern")
        if values is None:
            cut = _CUT_LAYERS if layers > _CUT_LAYERS else 0
            values = [_CUT_SHARE] * cut + [0.0] * (layers - cut)
        check_length("activation_sparsity_pattern", values, facts)
        facts.set_layers("feed_forward.sparsity", values)

    def write(self, facts: Facts) -> Keys:
        """Return the shares of all layers."""
        shares = facts.list_values("feed_forward.sparsity")
        return {"activation_sparsity_pattern": [share or 0.0 for share in shares]}


@dataclass(frozen=True)
class ShortLayerTable(Key):
    """The words of the table of inputs of layers. Others have the input of the first word."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The words."""
        return {"vocab_size_per_layer_input": Size}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the words, if they are not those of the model."""
        words = config.get("vocab_size_per_layer_input") or _WORDS
        facts.set("layer_vocab", None if words == config["vocab_size"] else words)

    def write(self, facts: Facts) -> Keys:
        """Return the words."""
        return {"vocab_size_per_layer_input": facts.get("layer_vocab") or facts.get("vocab")}


def check_length(name: str, values: Sequence[Any], facts: Facts) -> None:
    """Raise `UserError` unless there is a value for each layer."""
    if len(values) != len(facts.layers):
        raise UserError(
            f"{name} has {len(values)} layers, and num_hidden_layers is {len(facts.layers)}"
        )


GEMMA3N = GEMMA4.derive(
    "gemma3n_text",
    "Gemma3nForCausalLM",
    LayerTypes(slide_except("", 5), need="present"),
    Pair("head_dim", "mixer.head_dim", "value"),
    Pair("num_key_value_heads", "mixer.kv_heads", "value"),
    ListedByLayer("intermediate_size", "feed_forward.ffn", _WIDTH | list[_WIDTH]),
    GateShares(),
    Pair("hidden_size_per_layer_input", "layer_embeddings", "value", type=Size),
    ShortLayerTable(),
    # Code has a bound if the key is missing.
    Pair("final_logit_softcapping", "logit_softcap", "present"),
    Pair("altup_num_inputs", "streams.number", default=4, type=Size),
    Limited("altup_active_idx", Count, (0,)),
    Limited("altup_correct_scale", Flag, (True,)),
    # Bounds matrices in training alone.
    Limited("altup_coef_clip", NonNegative, (120.0, None)),
    Pair("laurel_rank", "laurel_rank", default=64, type=Size),
    RotaryKeysOfTypes(1e6, 1e4, "rope_local_base_freq"),
    without=("use_bidirectional_attention",),
    own={"layer_scalar": None, "router_scale": None, "streams.kind": "altup"},
    neutral=("altup_lr_multiplier",),
    scales={"moe.router": None},
    ends={
        "model.altup_projections.{stream}": "embedding.streams",
        "model.altup_unembed_projections.{stream}": "head.streams",
    },
    block={
        **{name: None for name, own in GEMMA4.block.items() if "moe." in own.split()[0]},
        "layer_scalar": None,
        "pre_feedforward_layernorm": "mlp_norm",
        **{f"mlp.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")},
        "laurel.linear_left": "laurel.left",
        "laurel.linear_right": "laurel.right",
        "laurel.post_laurel_norm": "laurel.post_norm",
        "altup.router_norm": "streams.norm",
        "altup.modality_router": "streams.router",
        "altup.prediction_coefs": "streams.predict",
        "altup.correction_coefs": "streams.correct",
        "altup.correct_output_scale": "streams.scale",
    },
    # Published folders have these of layers that attend to the keys of others, too.
    skipped=(
        *GEMMA4.skipped,
        *(f".self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm", "v_norm")),
    ),
)
GEMMA3N_FAMILIES = (GEMMA3N,)
