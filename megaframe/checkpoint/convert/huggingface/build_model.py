"""The shortest `model` section with given facts.

It has no `model.blocks` where its shorthand says the same, and otherwise the shortest pattern of
blocks, which say only what the model does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megaframe.checkpoint.convert.huggingface.model_facts import (
    COMPRESSED,
    DELTA_NET,
    DELTA_NET_SIZES,
    MAMBA2,
    SHORT_CONVOLUTION,
    Facts,
)
from megaframe.config.blocks import Mamba2Config

_KEYS = {
    **{f"mixer.{name}": name for name in ("heads", "kv_heads", "head_dim", "qk_norm")},
    **{f"mixer.{name}": name for name in ("rotary_base", "rotary_fraction")},
    **{f"feed_forward.{name}": name for name in ("ffn", "activation")},
}
"""Facts of layers, and the keys of the model that are their defaults."""
_BLOCK_DEFAULTS = {
    **{"norms": "before", "parallel": "none", "residual_scale": 1.0, "layer_scalar": False},
    "laurel_rank": None,
}
_MIXER_DEFAULTS = {
    **{"softcap": None, "sinks": False, "output_gate": "none"},
    **{"norm_after_rotation": False, "alibi": None, "attention_chunk": None},
    "alibi_form": "exact",
    **{"value_norm": False, "keys_as_values": False, "shared_keys": False},
}
_MAMBA2_SIZES = ("heads", "head_dim", "groups", "state_dim", "convolution")
_BIASES = ("mixer.bias", "feed_forward.up_bias", "feed_forward.down_bias")


def build_model(facts: Facts) -> dict[str, Any]:
    """Return the keys of a `model` section. What no fact says has its default."""
    keys = _build_shared_keys(facts)
    for path, key in _KEYS.items():
        keys[key] = facts.get(path)
    rotated = (layer for layer in facts.layers if layer.get("mixer.rotary"))
    keys["rotary_scaling"] = _get_scaling(next(rotated, {})) or None
    has_experts = [layer.get("feed_forward.kind") == "moe" for layer in facts.layers]
    if any(has_experts):
        keys["ffn"] = keys["ffn"] or keys["moe"].get("ffn")
    else:
        keys["moe"] = None
    keys = {key: value for key, value in keys.items() if value is not None}
    blocks = [_build_block(layer, keys) for layer in facts.layers]
    windows = [block["mixer"].pop("window", None) for block in blocks]
    regular = _find_regular_experts(has_experts)
    shorthand = regular is not None or not any(has_experts)
    if shorthand and all(_is_plain(block, keys) for block in blocks):
        pattern = find_shortest_pattern(windows)
        keys["window"] = pattern[0] if len(pattern) == 1 else tuple(pattern)
        if regular is not None:
            keys["moe"] |= regular
    else:
        for block, window in zip(blocks, windows, strict=True):
            block["mixer"] |= {} if window is None else {"window": window}
        keys["blocks"] = _join_equal([_drop_empty(b) for b in find_shortest_pattern(blocks)])
    return {key: value for key, value in keys.items() if value is not None}


def find_shortest_pattern(items: Sequence[Any]) -> list[Any]:
    """Return the shortest beginning of which the items are repetitions, the last one perhaps in
    part."""
    size = next(
        size
        for size in range(1, len(items) + 1)
        if all(items[n] == items[n % size] for n in range(size, len(items)))
    )
    return list(items[:size])


def _build_shared_keys(facts: Facts) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for path, value in facts.shared.items():
        section, _, name = path.rpartition(".")
        if value is None:
            continue
        if section:
            keys.setdefault(section, {})[name] = value
        else:
            keys[name] = value
    if keys.get("position") is None:
        keys["position"] = "rotary" if any(facts.list_values("mixer.rotary")) else "none"
    norm_bias = bool(keys.pop("norm_bias", False))
    values = [bool(layer.get(path)) for layer in facts.layers for path in _BIASES]
    bias = norm_bias if keys["norm"] == "layernorm" else all(values)
    qkv_bias = bool(facts.get("mixer.qkv_bias"))
    if bias:
        keys["bias"] = True
    if qkv_bias != bias:
        keys["qkv_bias"] = qkv_bias
    return keys


def _build_block(layer: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Return what a block says beside the keys of the model."""
    bias = keys.get("bias", False)
    block = {k: layer.get(k, v) for k, v in _BLOCK_DEFAULTS.items() if layer.get(k, v) != v}
    if layer.get("second_mixer.kind") == MAMBA2:
        block["second_mixer"] = {"kind": MAMBA2, **_build_mamba2(layer, bias)}
    mixer: dict[str, Any] = {"window": layer.get("mixer.window")}
    if layer.get("mixer.kind") == "latent":
        mixer["kind"] = "latent"
        mixer |= {"shared_indexer": True} if layer.get("mixer.shared_indexer") else {}
    elif layer.get("mixer.kind") == DELTA_NET:
        names = *DELTA_NET_SIZES, "convolution"
        mixer |= {"kind": DELTA_NET, **{name: layer[f"mixer.{name}"] for name in names}}
        if layer.get("mixer.strongest", 1.0) != 1.0:
            mixer["negative_eigenvalues"] = True
        for name, default in (("decay_rank", None), ("gate_rank", None), ("gate", "silu")):
            if (value := layer.get(f"mixer.{name}", default)) != default:
                mixer[name] = value
        if (eps := layer.get("mixer.norm_eps", keys["norm_eps"])) != keys["norm_eps"]:
            mixer["norm_eps"] = eps
    elif layer.get("mixer.kind") == SHORT_CONVOLUTION:
        mixer |= {"kind": SHORT_CONVOLUTION, "convolution": layer["mixer.convolution"]}
        if layer["mixer.bias"] != bias:
            mixer["bias"] = layer["mixer.bias"]
    elif layer.get("mixer.kind") == MAMBA2:
        mixer |= {"kind": MAMBA2, **_build_mamba2(layer, bias)}
    elif layer.get("mixer.kind") == "none":
        mixer["kind"] = "none"
    elif layer.get("mixer.kind") == COMPRESSED:
        ranks = {n: layer[f"mixer.{n}"] for n in ("query_rank", "output_groups", "output_rank")}
        mixer |= {"kind": COMPRESSED, **ranks}
        mixer |= _build_attention(layer, keys, bias) | _build_compression(layer)
    else:
        mixer |= _build_attention(layer, keys, bias)
    scale = _get_section(layer, "mixer.query_scale")
    mixer |= {"query_scale": scale} if scale else {}
    feed_forward: dict[str, Any] = {}
    if layer.get("feed_forward.kind") in ("moe", "none"):
        feed_forward["kind"] = layer["feed_forward.kind"]
        shared = layer.get("feed_forward.shared")
        if shared is not None and shared != keys["moe"].get("shared", 0):
            feed_forward["shared"] = shared
        if layer.get("feed_forward.router") == "hash":
            feed_forward["router"] = "hash"
    else:
        for name in ("ffn", "activation"):
            value = layer.get(f"feed_forward.{name}")
            if value is not None and value != keys.get(name):
                feed_forward[name] = value
        if layer.get("feed_forward.sparsity"):
            feed_forward["sparsity"] = layer["feed_forward.sparsity"]
        biases = [bool(layer.get(f"feed_forward.{name}_bias")) for name in ("up", "down")]
        if biases[0] == biases[1] != bias:
            feed_forward["bias"] = biases[0]
        elif biases[0] != biases[1]:
            feed_forward |= {"up_bias": biases[0], "down_bias": biases[1]}
    return {**block, "mixer": mixer, "feed_forward": feed_forward}


def _build_attention(layer: dict[str, Any], keys: dict[str, Any], bias: bool) -> dict[str, Any]:
    mixer: dict[str, Any] = {}
    rotary = bool(layer.get("mixer.rotary"))
    for name in ("heads", "kv_heads", "head_dim", "qk_norm", "rotary_base", "rotary_fraction"):
        value = layer.get(f"mixer.{name}")
        needed = rotary or not name.startswith("rotary_")
        if needed and value is not None and value != keys.get(name):
            mixer[name] = value
    if rotary and (scaling := _get_scaling(layer)) != keys.get("rotary_scaling", {}):
        mixer["rotary_scaling"] = scaling or {"kind": "none"}
    for name, default in (("bias", bias), ("qkv_bias", keys.get("qkv_bias", bias))):
        if bool(layer.get(f"mixer.{name}")) != default:
            mixer[name] = not default
    if rotary != (keys["position"] == "rotary"):
        mixer["rotary"] = rotary
    head_dim = layer.get("mixer.head_dim") or keys["hidden"] // max(1, keys.get("heads", 1))
    scale = layer.get("mixer.score_scale")
    if scale is not None and not math.isclose(scale, max(1, head_dim) ** -0.5, rel_tol=1e-12):
        mixer["score_scale"] = scale
    if layer.get("mixer.v_head_dim") not in (None, head_dim):
        mixer["v_head_dim"] = layer["mixer.v_head_dim"]
    for name, value in _MIXER_DEFAULTS.items():
        if layer.get(f"mixer.{name}", value) != value:
            mixer[name] = layer[f"mixer.{name}"]
    return mixer


def _build_compression(layer: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of compressed keys and of what chooses them, if there are any."""
    section = _get_section(layer, "mixer.compression")
    start = "indexer."
    indexer = {k.removeprefix(start): v for k, v in section.items() if k.startswith(start)}
    keys = {name: value for name, value in section.items() if not name.startswith(start)}
    if not keys:
        return {}
    return {"compression": {**keys, **({"indexer": indexer} if indexer else {})}}


def _build_mamba2(layer: dict[str, Any], bias: bool) -> dict[str, Any]:
    """Return the keys of Mamba-2: all sizes, and what is not the default."""
    section = _get_section(layer, "mixer.mamba2")
    output_bias = section.get("bias", False)
    defaults = {name: field.default for name, field in Mamba2Config.model_fields.items()}
    defaults |= {"bias": bias, "input_bias": output_bias, **dict.fromkeys(_MAMBA2_SIZES)}
    return {name: value for name, value in section.items() if value != defaults[name]}


def _get_scaling(layer: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a layer's scaling of rotary positions."""
    found = _get_section(layer, "mixer.rotary_scaling")
    return {} if found.get("kind", "none") == "none" else found


def _get_section(layer: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the keys of a section of a layer."""
    start = f"{name}."
    return {path.removeprefix(start): v for path, v in layer.items() if path.startswith(start)}


def _is_plain(block: dict[str, Any], keys: dict[str, Any]) -> bool:
    """Return whether a block says nothing but its kind of mixer and of what follows."""
    kind = {"kind": "latent"} if "latent" in keys else {}
    return (
        block.keys() == {"mixer", "feed_forward"}
        and block["mixer"] == kind
        and block["feed_forward"] in ({}, {"kind": "moe"})
    )


def _find_regular_experts(has_experts: Sequence[bool]) -> dict[str, int] | None:
    """Return `first` and `every` of `model.moe` for layers with experts, None if they are not
    regular."""
    numbers = [layer for layer, has in enumerate(has_experts) if has]
    if not numbers:
        return None
    every = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    first = numbers[0] - every + 1
    expected = list(range(numbers[0], len(has_experts), every))
    if first < 0 or numbers != expected:
        return None
    return {**({"first": first} if first else {}), **({"every": every} if every > 1 else {})}


def _drop_empty(block: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if value != {}}


def _join_equal(blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return blocks of which equal neighbours are one with `repeat`."""
    joined: list[dict[str, Any]] = []
    counts: list[int] = []
    for block in blocks:
        if joined and joined[-1] == block:
            counts[-1] += 1
        else:
            joined.append(block)
            counts.append(1)
    return [
        block if count == 1 else {**block, "repeat": count}
        for block, count in zip(joined, counts, strict=True)
    ]
