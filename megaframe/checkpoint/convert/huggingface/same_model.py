"""Whether two `model` sections mean the same model.

A section can say the same in several ways: `model.blocks` or its shorthand, a width that is given
or follows from another, keys that have no effect beside others. So both are first written in one
form, from the descriptions of their layers, and what concerns training alone gets its default.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.block import BlockDescription, describe_block, find_block_config
from megaframe.architecture.mlp import MLPDescription
from megaframe.architecture.moe import MoEDescription, has_experts
from megaframe.config import ModelConfig
from megaframe.config.blocks import MLPConfig
from megaframe.config.compare import TRAINING_ONLY
from megaframe.config.model import MoEConfig
from megaframe.errors import UserError

_NO_LOGITS = TRAINING_ONLY | {"model.mtp_depth", "model.positions"}
"""Keys that no logit depends on; how many positions there are is a matter of a text's length."""
_ROTARY = ("rotary_base", "rotary_fraction", "rotary_scaling")
"""Keys that have an effect with rotary positions only."""
_REMEDIES = {
    "model.moe.balance": ", and the bias takes part in the choice of experts; train with "
    "model.moe.balance=sequence, global or none, or with model.moe.score=sigmoid and model.latent",
    "model.latent.norm_eps": "; train with model.latent.norm_eps=1e-6",
}
_ROUNDING = 1e-12
"""Relative distance of two numbers of which one was computed from the other and back."""


def simplify_model(model: ModelConfig) -> ModelConfig:
    """Return a section without `model.blocks` that means the same, with what follows from its other
    keys.

    Raises:
        UserError: If `model.blocks` has layers that the other keys cannot describe.
    """
    blocks = [describe_block(model, layer) for layer in range(model.layers)]
    changes: dict[str, Any] = {
        "blocks": None,
        "window": find_shortest_pattern([block.mixer.window for block in blocks]),
        **_find_attention_keys(model, blocks[0]),
        **_find_feed_forward_keys(model, blocks),
    }
    if model.latent is not None:
        latent_eps = model.latent.norm_eps or model.norm_eps
        changes["latent"] = model.latent.model_copy(update={"norm_eps": latent_eps})
    simple = model.model_copy(update=changes)
    if model.blocks is not None:
        _refuse_other_blocks(model, simple)
    return simple


def find_model_differences(model: ModelConfig, converted: ModelConfig) -> list[str]:
    """Return a line for each key whose meaning a conversion would change."""
    models = (_reset_without_effect(simplify_model(m)) for m in (model, converted))
    before, after = (_flatten(simple.model_dump(), "model") for simple in models)
    if before.get("model.moe.balance") == "none":
        after["model.moe.balance"] = "none"  # a family whose routers have biases gets zeros
    return [
        f"{key}={before.get(key)!r} would become {after.get(key)!r}{_REMEDIES.get(key, '')}"
        for key in {**before, **after}
        if key not in _NO_LOGITS and not _are_same(before.get(key), after.get(key))
    ]


def find_shortest_pattern(windows: Sequence[int | None]) -> int | tuple[int | None, ...] | None:
    """Return the shortest `model.window` that gives the layers these windows."""
    size = next(
        size
        for size in range(1, len(windows) + 1)
        if all(windows[layer] == windows[layer % size] for layer in range(len(windows)))
    )
    return windows[0] if size == 1 else tuple(windows[:size])


def _find_attention_keys(model: ModelConfig, block: BlockDescription) -> dict[str, Any]:
    """Return the keys of the attention of a block, which all blocks should have."""
    attention = block.mixer
    if not isinstance(attention, AttentionDescription):
        return {}
    form = attention.qk_norm
    keys: dict[str, Any] = {
        **{"heads": attention.heads, "kv_heads": attention.kv_heads},
        **{"head_dim": attention.head_dim, "qkv_bias": attention.qkv_bias},
        "qk_norm": {"none": False, "head": True}.get(form, form),
    }
    if model.position != "learned":
        rotary = attention.rotary
        keys["position"] = "none" if rotary is None else "rotary"
        if rotary is not None:
            keys |= {
                "rotary_base": rotary.base,
                "rotary_fraction": rotary.width / attention.head_dim,
            }
    return keys


def _find_feed_forward_keys(
    model: ModelConfig, blocks: Sequence[BlockDescription]
) -> dict[str, Any]:
    """Return the keys of the dense layers and of the experts, which should be all layers after some
    dense ones."""
    layers = [block.feed_forward for block in blocks]
    keys: dict[str, Any] = {"moe": None}
    dense = [(n, layer) for n, layer in enumerate(layers) if isinstance(layer, MLPDescription)]
    if dense:
        number, layer = dense[0]
        keys["ffn"] = layer.width
        config = find_block_config(model, number).feed_forward
        if isinstance(config, MLPConfig) and config.activation is not None:
            keys["activation"] = config.activation
    experts = [(n, layer) for n, layer in enumerate(layers) if isinstance(layer, MoEDescription)]
    if experts and model.moe is not None:
        numbers, width = [n for n, _ in experts], experts[0][1].width
        keys["moe"] = _simplify_experts(model.moe, width, numbers, len(layers))
    return keys


def _simplify_experts(
    moe: MoEConfig, width: int, expert_layers: Sequence[int], layers: int
) -> MoEConfig:
    changes: dict[str, Any] = {"ffn": width}
    if expert_layers == list(range(expert_layers[0], layers)):
        changes |= {"first": expert_layers[0], "every": 1}
    return moe.model_copy(update=changes)


def _reset_without_effect(simple: ModelConfig) -> ModelConfig:
    """Return a simplified section with one value of each key that has no effect beside others."""
    unused = _ROTARY if simple.position != "rotary" else ()
    changes = {key: ModelConfig.model_fields[key].get_default() for key in unused}
    moe = simple.moe
    if moe is not None:
        if all(has_experts(moe, layer) for layer in range(simple.layers)):
            changes["ffn"] = moe.ffn
        moe_changes: dict[str, Any] = {}
        if moe.groups == moe.top_groups:  # a token may use them all
            moe_changes |= {"groups": 1, "top_groups": 1, "group_best": 1}
        if moe.balance != "bias":  # only its bias takes part in the choice of experts
            moe_changes["balance"] = "none"
        changes["moe"] = moe.model_copy(update=moe_changes)
    return simple.model_copy(update=changes)


def _refuse_other_blocks(model: ModelConfig, simple: ModelConfig) -> None:
    """Raise `UserError` with the first thing in `model.blocks` that the other keys do not say."""
    for layer in range(model.layers):
        given, simplified = (describe_block(m, layer) for m in (model, simple))
        if isinstance(given.feed_forward, MoEDescription) and simple.moe is not None:
            expected = has_experts(simple.moe, layer)
            experts = replace(given.feed_forward, moe=simple.moe) if expected else None
            given = replace(given, feed_forward=experts) if experts else given
        for name, here, there in _compare_parts("", given, simplified):
            raise UserError(
                f"no Hugging Face model matches model.blocks: layer {layer} has {name}={here!r}, "
                f"and with the other layers it would have {there!r}"
            )


def _compare_parts(name: str, given: Any, simplified: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each field in which two descriptions differ."""
    if given == simplified:
        return
    if type(given) is not type(simplified) or not isinstance(
        given, BlockDescription | AttentionDescription | MLPDescription | MoEDescription
    ):
        kinds = (given, simplified) if not hasattr(given, "name") else (given.name, simplified.name)
        yield name, *kinds
        return
    for field in fields(given):
        path = f"{name}.{field.name}".lstrip(".")
        yield from _compare_parts(path, *(getattr(p, field.name) for p in (given, simplified)))


def _flatten(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flatten(inner, f"{name}.{key}")
    return flat


def _are_same(value: Any, other: Any) -> bool:
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=_ROUNDING, abs_tol=_ROUNDING)
    return bool(value == other)
