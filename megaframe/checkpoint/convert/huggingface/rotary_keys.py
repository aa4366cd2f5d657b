"""Rotary positions in Hugging Face configs: their base, the share of a head that is rotated, and
how they are scaled to longer contexts.

What transformers computes is decided by `RotaryEmbeddingConfigMixin` and
`_compute_yarn_parameters` (`modeling_rope_utils.py`): which of two sections it takes, and which
keys YaRN's factor depends on. Keys that it would not read with a kind of scaling are refused.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from megaframe.architecture.rotary import compute_yarn_mscale
from megaframe.checkpoint.convert.huggingface.key_pairs import FULL, SLIDING, Key, Keys
from megaframe.checkpoint.convert.huggingface.key_types import Positive, RopeKeys, Share, Size
from megaframe.checkpoint.convert.huggingface.model_facts import Facts
from megaframe.config import RotaryScalingConfig
from megaframe.errors import UserError

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "proportional": (),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
"""The kinds of scaling, and the keys without which each is refused."""
_OPTIONAL = {
    "proportional": ("factor",),
    "dynamic": ("original_max_position_embeddings",),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RotaryKeys(Key):
    """The base of rotary positions, their scaling, and the share of a head that they rotate.

    Attributes:
        base: The base of a config without one.
        share: The share of a config without one; None if code rotates whole heads always.
        share_name: The key of the share.
        base_name: The key of the base.
        kinds: The kinds of scaling that code has.
        latent: Whether attention is latent, where `mscale_all_dim` also scales the scores.
        section: That of a config without one.
    """

    base: float = 10000.0
    share: float | None = None
    share_name: str = "partial_rotary_factor"
    base_name: str = "rope_theta"
    kinds: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
    latent: bool = False
    section: Mapping[str, Any] = field(default_factory=dict)

    @property
    def types(self) -> Mapping[str, Any]:
        """The sections, and the keys that older configs have outside."""
        share = {} if self.share is None else {self.share_name: Share}
        rope = RopeKeys | None
        return {self.base_name: Positive, "rope_parameters": rope, "rope_scaling": rope, **share}

    def find_section(self, config: Mapping[str, Any]) -> tuple[str, Keys]:
        """Return the name of the section that is read, and its keys that have values."""
        # Of two sections transformers takes `rope_scaling`, and nothing of the other one.
        name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        given = config.get(name) or self.section
        return name, {key: value for key, value in given.items() if value is not None}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what is rotated, and how.

        Raises:
            UserError: For a scaling that is not supported, or keys that do not belong to it.
        """
        name, rope = self.find_section(config)
        kind = read_rope_kind(name, rope)
        facts.set("mixer.rotary", True)
        if kind not in self.kinds:
            known = " and ".join(map(repr, self.kinds))
            raise UserError(f"rope_type {kind!r} is not supported, only {known}")
        base = rope.get("rope_theta") or config.get(self.base_name) or self.base
        facts.set("mixer.rotary_base", base)
        share = rope.get("partial_rotary_factor")
        if self.share is not None:
            outside = config.get(self.share_name)
            share = share or (self.share if outside is None else outside)
            set_share(facts, share)
        elif share not in (None, 1):
            raise UserError(f"{name}.partial_rotary_factor={share} is not supported, only 1.0")
        if kind == "dynamic":
            rope = {**rope, "original_max_position_embeddings": _read_length(name, rope, config)}
        for key, value in read_scaling(kind, rope, self.latent).items():
            facts.set(f"mixer.rotary_scaling.{key}", value)

    def write(self, facts: Facts) -> Keys:
        """Return the section `rope_parameters`, and base and share outside of it, too, where
        programs look that serve a model."""
        share, base = facts.get("mixer.rotary_fraction"), facts.get("mixer.rotary_base")
        base = self.base if base is None else base  # code may need it although it rotates nothing
        rotated = next((layer for layer in facts.layers if layer.get("mixer.rotary")), {})
        section = {"rope_theta": base, **write_scaling(rotated)}
        outside = {self.base_name: base}
        if self.share is not None and share is not None:
            section["partial_rotary_factor"] = outside[self.share_name] = share
        return {"rope_parameters": section, **outside}


@dataclass(frozen=True)
class LongRotaryKeys(RotaryKeys):
    """Those of Phi-3 and 4. Their code takes three names for LongRoPE, and the length before
    scaling from outside of the section, whose own is not heeded."""

    kinds: tuple[str, ...] = ("default", "longrope")

    @property
    def types(self) -> Mapping[str, Any]:
        """Those of others, and the length before scaling."""
        return {**super().types, "original_max_position_embeddings": Size}

    def find_section(self, config: Mapping[str, Any]) -> tuple[str, Keys]:
        """Return the section with the keys that it would have elsewhere."""
        name, rope = super().find_section(config)
        kind = rope.pop("type", "default")
        kind = rope.get("rope_type", kind)
        rope["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
        if rope["rope_type"] == "longrope":
            length = config.get("original_max_position_embeddings") or _PHI3_LENGTH
            rope["original_max_position_embeddings"] = length
            rope.setdefault("factor", config["max_position_embeddings"] / length)
        return name, rope

    def write(self, facts: Facts) -> Keys:
        """Return the keys of others, and the length before scaling if there is one."""
        length = facts.get("mixer.rotary_scaling.original_length")
        return {**super().write(facts), "original_max_position_embeddings": length or _PHI3_LENGTH}


@dataclass(frozen=True)
class AlphaRotaryKeys(RotaryKeys):
    """Those of Hunyuan, whose code takes `dynamic` with an `alpha` for a larger base, and reads
    nothing else of the section then."""

    def find_section(self, config: Mapping[str, Any]) -> tuple[str, Keys]:
        """Return the section with the base that alpha makes."""
        name, rope = super().find_section(config)
        kind, alpha = rope.get("rope_type", rope.get("type")), rope.get("alpha")
        if kind != "dynamic" or alpha is None:
            return name, rope
        width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if width < 4:
            raise UserError(f"head_dim={width} has no base with alpha={alpha:g}; it is 4 or more")
        base = rope.get("rope_theta") or config.get(self.base_name) or self.base
        return name, {"rope_type": "default", "rope_theta": base * alpha ** (width / (width - 2))}


@dataclass(frozen=True)
class TextRotaryKeys(RotaryKeys):
    """Those of models for texts and images whose section divides pairs of dims over places in time,
    height and width, which are all the same for a token of a text."""

    def find_section(self, config: Mapping[str, Any]) -> tuple[str, Keys]:
        """Return the section without the division."""
        name, rope = super().find_section(config)
        return name, {key: value for key, value in rope.items() if not key.startswith("mrope_")}


@dataclass(frozen=True)
class OptionalRotaryKeys(RotaryKeys):
    """Those of OLMo hybrid, whose code rotates nothing if the base is there and null."""

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set what is rotated, and how."""
        section = {**config, **(config.get("rope_scaling") or config.get("rope_parameters") or {})}
        if self.base_name in section and section[self.base_name] is None:
            facts.set("mixer.rotary", False)
        else:
            super().read(config, facts)

    def write(self, facts: Facts) -> Keys:
        """Return the keys of others, or the base as null."""
        if any(facts.list_values("mixer.rotary")):
            return super().write(facts)
        return {"rope_parameters": {"rope_type": "default", self.base_name: None}}


@dataclass(frozen=True)
class ScaledRotaryKeys(RotaryKeys):
    """Those of Ministral 3 and Mistral 4, whose section also says how a factor of queries grows
    with their positions, and the longest text, which code does not read there."""

    def find_section(self, config: Mapping[str, Any]) -> tuple[str, Keys]:
        """Return the section with what rotates alone."""
        name, rope = super().find_section(config)
        for key in ("llama_4_scaling_beta", "max_position_embeddings"):
            rope.pop(key, None)
        if self.latent and (share := rope.pop("partial_rotary_factor", None)) is not None:
            rotated = config["qk_rope_head_dim"]
            if int((rotated + config["qk_nope_head_dim"]) * share) != rotated:
                raise UserError(
                    f"{name}.partial_rotary_factor={share:g} is not the share of "
                    f"qk_rope_head_dim={rotated} in a head; remove it from config.json"
                )
        if rope.get("rope_type", rope.get("type", "default")) == "default":
            rope.pop("original_max_position_embeddings", None)
        return name, rope

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the rotation and the factor."""
        super().read(config, facts)
        name, section = super().find_section(config)
        for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
            if section.get(key) is None:
                raise UserError(f"{name}.{key} is missing, by which code scales queries")
        facts.set("mixer.query_scale.rate", section["llama_4_scaling_beta"])
        facts.set("mixer.query_scale.length", section["original_max_position_embeddings"])
        facts.set("mixer.query_scale.first", 0)

    def write(self, facts: Facts) -> Keys:
        """Return the section with the factor."""
        keys = super().write(facts)
        factor = {
            "llama_4_scaling_beta": facts.get("mixer.query_scale.rate"),
            "original_max_position_embeddings": facts.get("mixer.query_scale.length"),
        }
        return {**keys, "rope_parameters": {**keys["rope_parameters"], **factor}}


_PHI3_LENGTH = 4096
"""Of a config without it."""


class _RopeKeysOfTypes(BaseModel):
    """`rope_parameters` with a section for each type of layers."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    full_attention: RopeKeys | None = None
    sliding_attention: RopeKeys | None = None


@dataclass(frozen=True)
class RotaryKeysOfTypes(Key):
    """Bases and scaling of rotary positions for each type of layers, which are known before. A
    section outside of those of the types is that of layers with full attention.

    Attributes:
        base: That of layers with full attention, of a config without one.
        sliding_base: That of layers that slide.
        sliding_name: The key of that; empty if there is none.
        share: The share of a head that is rotated, of a config without one; None if code rotates
            whole heads always.
        reads_outside: Whether keys outside of the sections are read.
        proportional: Whether code has this kind of scaling.
        sections: Those of a config without any.
    """

    base: float
    sliding_base: float
    sliding_name: str = ""
    share: float | None = None
    reads_outside: bool = True
    proportional: bool = False
    sections: Mapping[str, Any] = field(default_factory=dict)

    @property
    def types(self) -> Mapping[str, Any]:
        """The sections, and the keys that older configs have outside."""
        sections = {"rope_parameters": _RopeKeysOfTypes | None}
        if not self.reads_outside:
            return sections
        sliding = {self.sliding_name: Positive} if self.sliding_name else {}
        return {**sections, "rope_theta": Positive, **sliding, "rope_scaling": RopeKeys | None}

    def read(self, config: Mapping[str, Any], facts: Facts) -> None:
        """Set the base of each layer."""
        sections = config.get("rope_parameters") or self.sections
        bases: dict[str, float] = {}
        scalings: dict[str, Keys] = {}
        shares: dict[str, float | None] = {}
        for kind, name, base in (
            (FULL, "rope_theta", self.base),
            (SLIDING, self.sliding_name, self.sliding_base),
        ):
            name = name if self.reads_outside else ""
            rope = {k: v for k, v in (sections.get(kind) or {}).items() if v is not None}
            if kind == FULL and self.reads_outside:
                rope |= {
                    k: v for k, v in (config.get("rope_scaling") or {}).items() if v is not None
                }
            if not rope.get("truncate", True):
                raise UserError(
                    f"rope_parameters.{kind}.truncate=False is not supported, only True: "
                    "transformers reads it only where all layers have one section"
                )
            rope_type = read_rope_kind(f"rope_parameters.{kind}", rope)
            if rope_type == "dynamic" or (rope_type == "proportional" and not self.proportional):
                raise UserError(f"rope_parameters.{kind}.rope_type={rope_type!r} is not supported")
            bases[kind] = rope.get("rope_theta") or (config.get(name) if name else None) or base
            scalings[kind] = read_scaling(rope_type, rope)
            shares[kind] = self._read_share(kind, rope_type, rope)
        facts.set("mixer.rotary", True)
        for layer in facts.layers:
            kind = FULL if layer.get("mixer.window") is None else SLIDING
            layer["mixer.rotary_base"] = bases[kind]
            if (share := shares[kind]) is not None:
                layer["mixer.rotary_fraction"] = round_share(facts, share)
            for key, value in scalings[kind].items():
                layer[f"mixer.rotary_scaling.{key}"] = value

    def _read_share(self, kind: str, rope_type: str, rope: Mapping[str, Any]) -> float | None:
        """Return the share of heads that layers of a type rotate; None if it is whole heads."""
        share: float | None = rope.get("partial_rotary_factor")
        if self.share is None and rope_type == "proportional":
            return None  # it says which pairs of whole heads turn
        if self.share is None:
            if share not in (None, 1):
                raise UserError(
                    f"rope_parameters.{kind}.partial_rotary_factor={share} is not supported, "
                    "only 1.0"
                )
            return None
        # Only the functions of scaled kinds take a missing one for 1.
        return share or (self.share if rope_type == "default" else 1.0)

    def write(self, facts: Facts) -> Keys:
        """Return a section for each type."""
        bases = {FULL: self.base, SLIDING: self.sliding_base}
        sections: dict[str, Keys]
        sections = {k: {"rope_type": "default", "rope_theta": base} for k, base in bases.items()}
        for layer in reversed([layer for layer in facts.layers if layer.get("mixer.rotary")]):
            kind = FULL if layer.get("mixer.window") is None else SLIDING
            base = layer.get("mixer.rotary_base", bases[kind])
            sections[kind] = {**write_scaling(layer), "rope_theta": base}
            if self.share is not None:
                sections[kind]["partial_rotary_factor"] = layer.get("mixer.rotary_fraction", 1.0)
        return {"rope_parameters": sections}


def read_rope_kind(name: str, rope: Mapping[str, Any]) -> str:
    """Return the kind of scaling of a section.

    Raises:
        UserError: If it is not known, lacks keys, or has keys that it does not read.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _NEEDED:
        raise UserError(f"rope_type {reprlib.repr(kind)} is not one of {', '.join(_NEEDED)}")
    if missing := [key for key in _NEEDED[kind] if key not in rope]:
        raise UserError(f"rope_type {kind!r} needs {', '.join(missing)}")
    for key in rope:
        if key not in (*_ALWAYS, *_NEEDED[kind], *_OPTIONAL.get(kind, ())):
            raise UserError(
                f"{name}.{key}={reprlib.repr(rope[key])} does not belong to rope_type={kind!r}; "
                "remove it from config.json, or give the rope_type that reads it"
            )
    return str(kind)


def set_share(facts: Facts, share: float) -> None:
    """Set the share of heads that is rotated, as transformers rounds their width."""
    facts.set("mixer.rotary_fraction", round_share(facts, share))


def round_share(facts: Facts, share: float) -> float:
    """Return the share of a head that is rotated, in whole dims, as transformers rounds it."""
    head_dim = get_head_dim(facts)
    return int(head_dim * share) / head_dim if head_dim else share


def get_head_dim(facts: Facts) -> int:
    """Return the width of a head."""
    head_dim: int | None = facts.get("mixer.head_dim")
    if head_dim is None:
        head_dim = facts.get("hidden") // facts.get("mixer.heads")
    return head_dim


_FIELDS = tuple(RotaryScalingConfig.model_fields)


def read_scaling(kind: str, rope: Mapping[str, Any], latent: bool = False) -> Keys:
    """Return the keys of `rotary_scaling` for a section of this kind."""
    if kind == "default":
        return {}
    if kind == "linear":
        return {"kind": "linear", "factor": rope["factor"]}
    if kind == "proportional":
        share = rope.get("partial_rotary_factor", 1.0)
        return {"kind": kind, "factor": rope.get("factor", 1.0), "proportion": share}
    shared = {"factor": rope["factor"], "original_length": rope["original_max_position_embeddings"]}
    if kind == "dynamic":
        return {"kind": kind, **shared}
    if kind == "longrope":
        factors = {f"{name}_factors": tuple(rope[f"{name}_factor"]) for name in ("short", "long")}
        return {"kind": kind, **shared, **factors, "factor": _read_growth(rope)}
    if kind == "llama3":
        frequencies = {name: rope[f"{name}_freq_factor"] for name in ("low", "high")}
        renamed = {f"{name}_frequency": value for name, value in frequencies.items()}
        return {"kind": "llama3", **shared, **renamed}
    return {
        **{"kind": "yarn", **shared, **_read_strengths(rope, latent)},
        "low_frequency": rope.get("beta_slow", 1),
        "high_frequency": rope.get("beta_fast", 32),
        "truncate": rope.get("truncate", True),
    }


def _read_length(name: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the length above which dynamic scaling begins, which code takes from outside."""
    length: int | None = config.get("max_position_embeddings")
    own = rope.get("original_max_position_embeddings", length)
    if length is None or own != length:
        raise UserError(
            f"{name}.original_max_position_embeddings={own} is not the length above which code "
            f"scales with rope_type 'dynamic', max_position_embeddings={length}"
        )
    return length


def _read_growth(rope: Mapping[str, Any]) -> float:
    """Return the factor with which LongRoPE multiplies rotated queries and keys as theirs does."""
    if (wanted := rope.get("attention_factor")) is None:
        return float(rope["factor"])
    if wanted < 1:
        raise UserError(
            f"longrope multiplies rotated queries and keys by attention_factor={wanted:g}; no "
            "model.rotary_scaling.factor of 1 or more does"
        )
    return math.exp((wanted**2 - 1) * math.log(rope["original_max_position_embeddings"]))


def _read_strengths(rope: Mapping[str, Any], latent: bool) -> Keys:
    """Return YaRN's m of rotated dims and of all dims.

    With y(m) = 0.1 m ln(factor) + 1, transformers multiplies rotated queries and keys by
    `attention_factor`, else by y(mscale) / y(mscale_all_dim) if both are given and not 0, else by
    y(1). Here it is y(mscale) / y(mscale_all_dim) always.
    """
    mscale, over_all = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    own_over_all = over_all if latent else 0.0
    scaling = RotaryScalingConfig(factor=rope["factor"])
    if "attention_factor" in rope:
        wanted = rope["attention_factor"]
    elif mscale and over_all:
        if latent:
            return {"mscale": mscale, "mscale_all_dim": over_all}
        wanted = compute_yarn_mscale(scaling, mscale) / compute_yarn_mscale(scaling, over_all)
    elif not own_over_all:
        return {"mscale": 1.0}
    else:
        wanted = compute_yarn_mscale(scaling, 1.0)
    wanted *= compute_yarn_mscale(scaling, own_over_all)
    logarithm = math.log(rope["factor"])
    if wanted < 1 or (not logarithm and wanted != 1):
        raise UserError(
            f"yarn multiplies rotated queries and keys by {wanted:g} with factor={rope['factor']:g}"
            f", attention_factor={rope.get('attention_factor')}, mscale={mscale:g} and "
            f"mscale_all_dim={over_all:g}; no model.rotary_scaling.mscale of 0 or more does"
        )
    own_mscale = (wanted - 1) / (0.1 * logarithm) if logarithm else 1.0
    return {"mscale": own_mscale, "mscale_all_dim": own_over_all}


def write_scaling(layer: Mapping[str, Any]) -> Keys:
    """Return the keys of the scaling of a layer with these facts."""
    keys = {name: layer.get(f"mixer.rotary_scaling.{name}") for name in _FIELDS}
    given = {name: value for name, value in keys.items() if value is not None}
    scaling = RotaryScalingConfig.model_validate(given)
    if scaling.kind == "none":
        return {"rope_type": "default"}
    if scaling.kind in ("linear", "dynamic"):
        return {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "proportional":
        share = {"partial_rotary_factor": scaling.proportion}
        return {"rope_type": scaling.kind, "factor": scaling.factor, **share}
    shared = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_length,
    }
    if scaling.kind == "longrope":
        factors = {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
        return {**shared, **{name: list(values) for name, values in factors.items()}}
    low, high = scaling.low_frequency, scaling.high_frequency
    if scaling.kind == "llama3":
        return {**shared, "low_freq_factor": low, "high_freq_factor": high}
    whole = {} if scaling.truncate else {"truncate": False}
    return {**shared, **_write_strengths(scaling), "beta_slow": low, "beta_fast": high, **whole}


def _write_strengths(scaling: RotaryScalingConfig) -> Keys:
    """Return the keys with which transformers computes the same as `_read_strengths`."""
    mscale, over_all = scaling.mscale, scaling.mscale_all_dim
    if mscale and over_all:
        return {"mscale": mscale, "mscale_all_dim": over_all}
    if mscale == 1 and not over_all:
        return {}
    factor = compute_yarn_mscale(scaling, mscale) / compute_yarn_mscale(scaling, over_all)
    # It reads mscale_all_dim for the scores of latent attention even if it is alone.
    return {"attention_factor": factor, **({"mscale_all_dim": over_all} if over_all else {})}
