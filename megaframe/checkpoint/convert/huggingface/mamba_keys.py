"""Keys of families with Mamba-2: sizes, layers, and what follows mixers."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megaframe.checkpoint.convert.huggingface.key_pairs import (
    Key,
    Keys,
    Pair,
    check_layer_types,
)
from megaframe.checkpoint.convert.huggingface.key_types import (
    Count,
    Counts,
    Factor,
    Flag,
    Heads,
    Range,
    Size,
    Text,
    Texts,
    make_factors,
)
from megaframe.checkpoint.convert.huggingface.model_facts import MAMBA2, MAMBA2_INPUTS, Facts
from megaframe.checkpoint.convert.huggingface.moe_families import SharedWidth
from megaframe.errors import UserError

MAMBA_FACTS = "mixer.mamba2"
"""Where the paths of its facts begin."""
_BIASES = (f"{MAMBA_FACTS}.input_bias", f"{MAMBA_FACTS}.bias")


@dataclass(frozen=True)
class InnerWidth(Key):
    """The width of all heads, which several keys say: so many times the stream's, and heads of one
    width.

    Attributes:
        heads: The key of the number of heads.
        width: That of their width, which may be `auto`.
        expand: That of the factor.
        inner: That of the width of all heads, by which the factor has no effect; empty if there is
            none.
    """

    heads: str = "mamba_n_heads"
    width: str = "mamba_d_head"
    expand: str = "mamba_expand"
    inner: str = ""

    @property
    def types(self) -> Mapping[str, Any]:
        """The keys."""
        inner = {self.inner: Size} if self.inner else {}
        return {self.heads: Heads, self.width: Size | Literal["auto"], self.expand: Size, **inner}

    @property
    def required(self) -> Sequence[str]:
        """The number of heads."""
        return (self.heads,)

    @property
    def present(self) -> Sequence[str]:
        """The width of all heads."""
        return (self.inner,) if self.inner else ()

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the heads and their width."""
        heads, width, expand = config[self.heads], config.get(self.width), config.get(self.expand)
        inner = config.get(self.inner)
        said = f"{self.inner}={inner}"
        if inner is None:
            inner = (2 if expand is None else expand) * facts.get("hidden")
            said = f"{self.expand}={expand} times the width {facts.get('hidden')} of the stream"
        if width in (None, "auto"):
            width = inner // heads
        if heads * width != inner:
            raise UserError(f"{self.heads}={heads} times {self.width}={width} is not {said}")
        facts.set(f"{MAMBA_FACTS}.heads", heads)
        facts.set(f"{MAMBA_FACTS}.head_dim", width)

    def write(self, facts: Facts) -> Keys:
        """Return the keys."""
        heads, width = (facts.get(f"{MAMBA_FACTS}.{name}") for name in ("heads", "head_dim"))
        if heads is None:
            raise UserError("no layer has Mamba-2, without which the family's code has no model")
        expand = max(1, heads * width // facts.get("hidden"))
        inner = {self.inner: heads * width} if self.inner else {}
        return {self.heads: heads, self.width: width, self.expand: expand, **inner}


@dataclass(frozen=True)
class StepRange(Key):
    """Between which numbers steps are."""

    name: str = "time_step_limit"

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {self.name: Range}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the smallest and the largest step."""
        smallest, largest = config.get(self.name) or (0.0, math.inf)
        facts.set(f"{MAMBA_FACTS}.step_min", smallest)
        facts.set(f"{MAMBA_FACTS}.step_max", None if largest == math.inf else largest)

    def write(self, facts: Facts) -> Keys:
        """Return the range, unless it is all numbers, for which JSON has no name."""
        smallest, largest = (
            facts.get(f"{MAMBA_FACTS}.{name}") for name in ("step_min", "step_max")
        )
        if largest is None:
            return {self.name: [smallest, {"__float__": "Infinity"}]} if smallest else {}
        return {self.name: [smallest, largest]}


@dataclass(frozen=True)
class AttentionIndices(Key):
    """The numbers of the layers with attention; all others have Mamba-2."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The key."""
        return {"attn_layer_indices": Counts}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the mixer of each layer."""
        full = {*(config.get("attn_layer_indices") or ())}
        layers = range(len(facts.layers))
        mixers = ["attention" if layer in full else MAMBA2 for layer in layers]
        facts.set_layers("mixer.kind", mixers)

    def write(self, facts: Facts) -> Keys:
        """Return the numbers."""
        mixers = enumerate(facts.list_values("mixer.kind"))
        return {"attn_layer_indices": [layer for layer, kind in mixers if kind == "attention"]}


@dataclass(frozen=True)
class NormPlace(Key):
    """Whether outputs are normalised, and whether before or after they are gated."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The keys."""
        return {"mamba_rms_norm": Flag, "mamba_norm_before_gate": Flag}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the place of the norm."""
        before = config.get("mamba_norm_before_gate", True)
        place = "before_gate" if before else "after_gate"
        facts.set(f"{MAMBA_FACTS}.norm", place if config.get("mamba_rms_norm") else "none")

    def write(self, facts: Facts) -> Keys:
        """Return both keys."""
        place = facts.get(f"{MAMBA_FACTS}.norm")
        has_norm = {"mamba_rms_norm": place != "none"}
        return {**has_norm, "mamba_norm_before_gate": place == "before_gate"}


_MULTIPLIERS: dict[str, tuple[str, ...]] = {
    "attention_in_multiplier": tuple(f"attention.{name}" for name in ("query", "key", "value")),
    "key_multiplier": ("attention.key",),
    "attention_out_multiplier": ("attention.output",),
    "ssm_in_multiplier": tuple(f"mamba2.{name}" for name in MAMBA2_INPUTS),
    "ssm_out_multiplier": ("mamba2.output",),
}
_LISTED_MULTIPLIERS: dict[str, tuple[str, ...]] = {
    "ssm_multipliers": tuple(f"mamba2.{name}" for name in MAMBA2_INPUTS),
    "mlp_multipliers": ("mlp.gate", "mlp.down"),
}
MULTIPLIED = {
    module: f"multiplier.{module}"
    for modules in (*_MULTIPLIERS.values(), *_LISTED_MULTIPLIERS.values())
    for module in modules
}
"""Modules of ours that have multipliers, and the paths of the facts that have their products."""


@dataclass(frozen=True)
class Multipliers(Key):
    """Factors of products in each layer (muP), which our weights have."""

    @property
    def types(self) -> Mapping[str, Any]:
        """One factor, or one for each of several modules."""
        lists = {name: make_factors(len(own)) for name, own in _LISTED_MULTIPLIERS.items()}
        return {**dict.fromkeys(_MULTIPLIERS, Factor), **lists}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the product of the factors of each module."""
        products = dict.fromkeys(MULTIPLIED, 1.0)
        for name, modules in _MULTIPLIERS.items():
            for module in modules:
                products[module] *= config.get(name, 1.0)
        for name, modules in _LISTED_MULTIPLIERS.items():
            factors = config.get(name) or [1.0] * len(modules)
            for module, factor in zip(modules, factors, strict=True):
                products[module] *= factor
        for module, product in products.items():
            facts.set(MULTIPLIED[module], product)

    def write(self, facts: Facts) -> Keys:
        """Return factors of 1, as the weights have them."""
        lists = {name: [1.0] * len(own) for name, own in _LISTED_MULTIPLIERS.items()}
        return {**dict.fromkeys(_MULTIPLIERS, 1.0), **lists}


_TYPES = {
    **{"mamba": MAMBA2, "linear_attention": MAMBA2},
    **{"attention": "attention", "full_attention": "attention"},
}
"""Names of mixers, each with those that transformers has given them since."""


@dataclass(frozen=True)
class MambaLayers(Key):
    """Which layers have Mamba-2 and which attention; by default all have Mamba-2."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The types of layers."""
        return {"layer_types": Texts}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the mixer of each layer."""
        layers = len(facts.layers)
        kinds = config.get("layer_types")
        kinds = ["mamba"] * layers if kinds is None else kinds
        check_layer_types("layer_types", kinds, layers, [*_TYPES])
        facts.set_layers("mixer.kind", [_TYPES[kind] for kind in kinds])

    def write(self, facts: Facts) -> Keys:
        """Return the types, by the names that all versions read."""
        mixers = facts.list_values("mixer.kind")
        return {"layer_types": ["mamba" if mixer == MAMBA2 else "attention" for mixer in mixers]}


def make_mamba_keys(*names: str) -> tuple[Key, ...]:
    """Return the keys of Mamba-2.

    Args:
        names: Of the groups, the size of states, the taps of the convolution, its biases and those
            of the products, if they have some.
    """
    groups, state, taps, convolution_bias, *biases = names
    return (
        Pair(groups, f"{MAMBA_FACTS}.groups", "value", type=Heads),
        Pair(state, f"{MAMBA_FACTS}.state_dim", "value", type=Size),
        Pair(taps, f"{MAMBA_FACTS}.convolution", default=4, type=Size),
        Pair(convolution_bias, f"{MAMBA_FACTS}.convolution_bias", default=True, type=bool),
        *(Pair(bias, _BIASES, default=False, type=bool) for bias in biases),
    )


def name_mamba(module: str) -> dict[str, str]:
    """Return the names of the modules of a mixer, and those of ours that are stacked in each."""
    parts = " ".join(f"mamba2.{part}" for part in MAMBA2_INPUTS)
    return {
        f"{module}.in_proj": parts,
        f"{module}.conv1d": "mamba2.convolution",
        f"{module}.A_log": "mamba2.rate",
        f"{module}.dt_bias": "mamba2.step",
        f"{module}.D": "mamba2.skip",
        f"{module}.norm": "mamba2.norm",
        f"{module}.out_proj": "mamba2.output",
    }


@dataclass(frozen=True)
class HybridExperts(Key):
    """Experts beside shared ones, or an MLP as wide as these if there are none."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The widths, and the numbers of experts."""
        return {
            **{"intermediate_size": Size, "shared_intermediate_size": Size},
            **{"num_local_experts": Count, "num_experts_per_tok": Count},
        }

    @property
    def required(self) -> Sequence[str]:
        """All of them."""
        return [*self.types]

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what follows the mixers."""
        experts, width = config["num_local_experts"], config["intermediate_size"]
        facts.set("feed_forward.kind", "moe" if experts else "mlp")
        facts.set("feed_forward.ffn", config["shared_intermediate_size"])
        if experts:
            SharedWidth(is_needed=True).read(config, facts)
            facts.set("moe.experts", experts)
            facts.set("moe.top_k", config["num_experts_per_tok"])
            facts.set("moe.ffn", width)

    def write(self, facts: Facts) -> Keys:
        """Return the keys."""
        width = facts.get("moe.ffn")
        if width is None:
            width = facts.get("feed_forward.ffn")
            sizes = {"intermediate_size": width, "shared_intermediate_size": width}
            return {**sizes, "num_local_experts": 0, "num_experts_per_tok": 0}
        return {
            "intermediate_size": width,
            **SharedWidth(is_needed=True).write(facts),
            "num_local_experts": facts.get("moe.experts"),
            "num_experts_per_tok": facts.get("moe.top_k"),
        }


_HALVES = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), (MAMBA2, "none")),
    **dict.fromkeys(("*", "attention", "full_attention"), ("attention", "none")),
    **dict.fromkeys(("-", "mlp"), ("none", "mlp")),
    **dict.fromkeys(("E", "moe"), ("none", "moe")),
}
"""The halves of a layer, by its letter in a pattern and the names of its type."""


@dataclass(frozen=True)
class HalfLayers(Key):
    """The only half of each layer."""

    @property
    def types(self) -> Mapping[str, Any]:
        """The pattern, the list that transformers makes of it, and a number that it ignores."""
        pattern = {"layers_block_type": Texts, "hybrid_override_pattern": Text}
        return {**pattern, "num_hidden_layers": Count}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the halves of each layer."""
        key = "layers_block_type"
        if config.get(key) is None:
            key = "hybrid_override_pattern"
        for layer, kind in zip(facts.layers, config[key], strict=True):
            if kind not in _HALVES:
                names = [name for name in _HALVES if (len(name) == 1) == (len(kind) == 1)]
                raise UserError(f"{key}: {reprlib.repr(kind)} is none of {', '.join(names)}")
            layer["mixer.kind"], layer["feed_forward.kind"] = _HALVES[kind]

    def write(self, facts: Facts) -> Keys:
        """Return the pattern and the number of layers."""
        letters = {halves: letter for letter, halves in reversed(_HALVES.items())}
        halves = [*zip(*map(facts.list_values, ("mixer.kind", "feed_forward.kind")), strict=True)]
        both = [number for number, layer in enumerate(halves) if layer not in letters]
        if both:
            raise UserError(f"layer {both[0]} has two halves, and those of the family have one")
        pattern = "".join(letters[each] for each in halves)
        return {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


@dataclass(frozen=True)
class IfExperts(Key):
    """Keys that a config needs if a layer has experts.

    Attributes:
        keys: The keys.
    """

    keys: tuple[Key, ...]

    @property
    def types(self) -> Mapping[str, Any]:
        """Those of the keys."""
        return {name: kind for key in self.keys for name, kind in key.types.items()}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what the keys do."""
        if "moe" in facts.list_values("feed_forward.kind"):
            required = (name for key in self.keys for name in key.required)
            if missing := [name for name in required if config.get(name) is None]:
                raise UserError(f"{missing[0]} is missing")
            for key in self.keys:
                key.read(config, facts)

    def write(self, facts: Facts) -> Keys:
        """Return the keys."""
        if "moe" not in facts.list_values("feed_forward.kind"):
            return {}
        return {name: value for key in self.keys for name, value in key.write(facts).items()}
