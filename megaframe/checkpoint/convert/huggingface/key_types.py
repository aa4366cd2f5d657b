"""Types and ranges of the keys in a foreign `config.json`, checked before anything else reads it.

A foreign config can hold anything under a key. After `check_types` every key that a family reads
has the type and the range that it relies on.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable

Shape = tuple[int, ...]
_MAX_SIZE = 2**31 - 1
"""Largest size that a config may have, before the tensors bound it further."""
Size = Annotated[int, Field(ge=1, le=_MAX_SIZE)] | None
"""No model can have more of it than its largest tensor has rows or columns, or than it has
tensors."""
Heads = Annotated[int, Field(ge=1, le=1 << 14)] | None
"""A size of which each is listed; models have up to 192 heads."""
Count = Annotated[int, Field(ge=0, le=_MAX_SIZE)] | None
Factor = Annotated[float, Field(gt=0)]
"""May be missing, and not null, which code takes for something else."""
Positive = Annotated[float, Field(gt=0)] | None
NonNegative = Annotated[float, Field(ge=0)] | None
Share = Annotated[float, Field(gt=0, le=1)] | None
Flag = bool | None
Text = str | None
Texts = list[str] | None
Counts = list[Annotated[int, Field(ge=0, le=_MAX_SIZE)]] | None


Range = (
    Annotated[
        list[Annotated[float, Field(ge=0, allow_inf_nan=True)]], Field(min_length=2, max_length=2)
    ]
    | None
)
"""Two numbers, of which the second one may be infinite."""
Factors = Annotated[list[Annotated[float, Field(gt=0)]], Field(max_length=4096)] | None


def make_factors(count: int) -> Any:
    """Return the type of a list of so many factors, which may be missing."""
    return (
        Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=count, max_length=count)]
        | None
    )


class LayerSizes(BaseModel):
    """What one layer has in place of the sizes of all."""

    model_config = ConfigDict(strict=True, extra="forbid")

    head_dim: Size = None
    num_key_value_heads: Size = None


class RopeKeys(BaseModel):
    """`rope_parameters`, or `rope_scaling` with the base outside. Other keys change the rotation in
    ways that are not supported, so they are refused, and `truncate` may not be null, which
    transformers takes for false."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive = None
    factor: Annotated[float, Field(ge=1)] | None = None
    original_max_position_embeddings: Size = None
    low_freq_factor: Positive = None
    high_freq_factor: Positive = None
    beta_fast: Positive = None
    beta_slow: Positive = None
    mscale: NonNegative = None
    mscale_all_dim: NonNegative = None
    partial_rotary_factor: Share = None
    attention_factor: Positive = None
    truncate: bool = True
    alpha: Positive = None
    llama_4_scaling_beta: Positive = None
    max_position_embeddings: Size = None
    mrope_section: Counts = None
    mrope_interleaved: Flag = None
    short_factor: Factors = None
    long_factor: Factors = None


def restore_floats(value: Any) -> Any:
    """Return a value of a config with the numbers that JSON cannot have, for which transformers
    writes `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [restore_floats(item) for item in value]
    return math.inf if value == {"__float__": "Infinity"} else value


TYPES_OF_FACTS: dict[str, Any] = {
    **dict.fromkeys(("layers", "hidden", "vocab", "positions"), Size),
    **dict.fromkeys(("mixer.kv_heads", "mixer.head_dim", "feed_forward.ffn"), Size),
    "mixer.v_head_dim": Size,
    **dict.fromkeys((f"moe.{name}" for name in ("experts", "top_k", "ffn", "groups")), Size),
    **dict.fromkeys(("moe.top_groups", "latent.query_rank", "latent.kv_rank"), Size),
    **dict.fromkeys((f"indexer.{name}" for name in ("heads", "head_dim", "top_k")), Size),
    **dict.fromkeys((f"latent.{name}_dim" for name in ("head", "rotary", "value")), Size),
    **dict.fromkeys(("norm_eps", "init_std", "moe.scale", "embedding_scale"), Positive),
    **dict.fromkeys(("mixer.score_scale", "mixer.softcap", "logit_softcap"), Positive),
    **dict.fromkeys(("residual_scale", "mixer.rotary_base"), Positive),
    **dict.fromkeys(("mixer.bias", "mixer.qkv_bias", "feed_forward.up_bias"), Flag),
    **dict.fromkeys(("moe.normalise", "norm_bias", "mixer.qk_norm"), Flag),
    "mixer.heads": Heads,
    **dict.fromkeys(("head_scale", "latent.norm_eps"), Positive),
    "moe.shared": Count,
    "tie_embeddings": bool,
}
"""The type that a key has whose value becomes a fact, by the path of the fact."""


def check_types(config: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise `UserError` for the first key whose type or range is wrong."""
    try:
        _make_model(tuple(types.items())).model_validate_json(json.dumps(config))
    except ValidationError as errors:
        error = errors.errors()[0]
        key = make_printable(".".join(map(str, error["loc"])) or "config.json")
        value = "" if error["type"] == "missing" else f"={reprlib.repr(error['input'])}"
        problem = error["msg"][0].lower() + error["msg"][1:]
        raise UserError(f"{key}{value}: {problem}") from None


@lru_cache(maxsize=256)
def _make_model(types: tuple[tuple[str, Any], ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {name: (kind, None) for name, kind in types}
    options = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    return create_model("Keys", __config__=options, **fields)


def check_sizes(
    config: Mapping[str, Any], types: Mapping[str, Any], shapes: Collection[Shape]
) -> None:
    """Raise `UserError` if a size or a count is more than tensors of these shapes can hold."""
    # A tensor without elements can have any number of rows or columns, and holds nothing.
    shapes = [shape for shape in shapes if 0 not in shape]
    widest = max((max(shape, default=0) for shape in shapes), default=0)
    for key, kind in types.items():
        size = config.get(key) or 0
        if kind in _SIZES and key in LAYERS and size > len(shapes):
            raise UserError(f"{size} layers are more than the folder's {len(shapes)} tensors")
    for key, kind in types.items():
        size = config.get(key) or 0
        if kind in _SIZES and key not in _FREE and size > max(widest, len(shapes)):
            raise UserError(
                f"{key}={size} is more than the folder holds: {len(shapes)} tensors, the widest "
                f"of {widest} rows or columns"
            )


_SIZES = (Size, Heads, Count)
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""The names of the number of layers."""
_FREE = (
    *("max_position_embeddings", "original_max_position_embeddings", "max_seq_len", "seq_length"),
    *("sliding_window", "max_window_layers", "window_size", "attention_chunk_size", "floor_scale"),
    *("index_topk", "sliding_window_size", "model_max_length", "vocab_size_per_layer_input"),
)
"""Numbers of tokens, and of layers beyond the last one, of which tensors have no rows, and one of
words, which is compared with another."""
