"""Types and ranges of the keys in a foreign `config.json`, checked before anything else reads it.

A foreign config can hold anything under a key. After `check_keys` every key that a family reads has
the type and the range that it relies on. `family_keys.py` says which keys those are.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megaframe.checkpoint.convert.huggingface.read_files import make_printable
from megaframe.errors import UserError

Shape = tuple[int, ...]
_MAX_SIZE = 2**31 - 1
"""Largest size that a config may have, before the tensors bound it further."""
_Size = Annotated[int, Field(ge=1, le=_MAX_SIZE)] | None
_Count = Annotated[int, Field(ge=0, le=_MAX_SIZE)] | None
_Positive = Annotated[float, Field(gt=0)] | None
_NonNegative = Annotated[float, Field(ge=0)] | None


class _RopeKeys(BaseModel):
    """`rope_parameters`, or `rope_scaling` with the base outside. Other keys change the rotation in
    ways that are not supported, so they are refused, and `truncate` may not even be null, which
    transformers takes for false."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive = None
    factor: Annotated[float, Field(ge=1)] | None = None
    original_max_position_embeddings: _Size = None
    low_freq_factor: _Positive = None
    high_freq_factor: _Positive = None
    beta_fast: _Positive = None
    beta_slow: _Positive = None
    mscale: _NonNegative = None
    mscale_all_dim: _NonNegative = None
    partial_rotary_factor: Annotated[float, Field(ge=1, le=1)] | None = None
    attention_factor: _Positive = None
    truncate: Literal[True] = True


class _SizeKeys(BaseModel):
    """Sizes that no model can have more of than its largest tensor has rows or columns, or than it
    has tensors."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    vocab_size: _Size = None
    num_hidden_layers: _Size = None
    hidden_size: _Size = None
    num_attention_heads: _Size = None
    num_key_value_heads: _Size = None
    head_dim: _Size = None
    intermediate_size: _Size = None
    n_layer: _Size = None
    n_embd: _Size = None
    n_head: _Size = None
    n_inner: _Size = None
    n_positions: _Size = None
    q_lora_rank: _Size = None
    kv_lora_rank: _Size = None
    qk_nope_head_dim: _Size = None
    qk_rope_head_dim: _Size = None
    v_head_dim: _Size = None
    num_experts: _Size = None
    num_local_experts: _Size = None
    n_routed_experts: _Size = None
    num_experts_per_tok: _Size = None
    moe_intermediate_size: _Size = None
    n_shared_experts: _Count = None
    first_k_dense_replace: _Count = None
    n_group: _Size = None
    topk_group: _Size = None
    qk_head_dim: _Size = None
    num_nextn_predict_layers: _Count = None


class _ConfigKeys(_SizeKeys):
    """All keys that are read, of every family."""

    model_type: str
    dtype: str | None = None
    torch_dtype: str | None = None
    max_position_embeddings: _Size = None
    rms_norm_eps: _Positive = None
    layer_norm_epsilon: _Positive = None
    initializer_range: _Positive = None
    tie_word_embeddings: bool = False
    rope_theta: _Positive = None
    rope_parameters: _RopeKeys | None = None
    rope_scaling: _RopeKeys | None = None
    sliding_window: _Size = None
    use_sliding_window: bool | None = None
    max_window_layers: _Count = None
    layer_types: list[str] | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: _Positive = None
    topk_method: str | None = None


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise `UserError` for the first key whose type or range is wrong."""
    try:
        _ConfigKeys.model_validate_json(json.dumps(config))
    except ValidationError as errors:
        error = errors.errors()[0]
        key = make_printable(".".join(map(str, error["loc"])) or "config.json")
        value = "" if error["type"] == "missing" else f"={reprlib.repr(error['input'])}"
        problem = error["msg"][0].lower() + error["msg"][1:]
        raise UserError(f"{key}{value}: {problem}") from None


def check_sizes(config: Mapping[str, Any], shapes: Collection[Shape]) -> None:
    """Raise `UserError` if a size is more than tensors of these shapes can hold."""
    widest = max((max(shape, default=0) for shape in shapes), default=0)
    layers = config.get("num_hidden_layers") or config.get("n_layer") or 0
    if layers > len(shapes):
        raise UserError(f"{layers} layers are more than the folder's {len(shapes)} tensors")
    for key in _SizeKeys.model_fields:
        size = config.get(key) or 0
        if size > max(widest, len(shapes)):
            raise UserError(
                f"{key}={size} is more than the folder holds: {len(shapes)} tensors, the widest "
                f"of {widest} rows or columns"
            )
