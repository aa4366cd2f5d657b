"""Recurrent mixers: the gated delta rule (Yang et al. 2024, "Gated Delta Networks"), with decays of
heads or, as in Kimi delta attention (Kimi Linear 2025), of channels; and the state space dual form
of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs"), which is the same without corrections.

Tokens of a chunk see each other through matrix products, and what is before the chunk through the
state, so a state is passed only from chunk to chunk. Corrections within a chunk are a triangular
system, whose inverse is made of those of its blocks.

Shape legend: B samples, S tokens, G key heads, H value heads, K and V their widths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types
from megaframe_kernels.recurrent.launches import (
    WIDEST,
    choose_chunk,
    launch_backward,
    launch_forward,
)


def run_reference_delta_rule(
    query_BSGK: Tensor,
    key_BSGK: Tensor,
    value_BSHV: Tensor,
    strength_BSH: Tensor | None,
    falls_BSHF: Tensor,
    documents_BS: Tensor,
    initial_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pass a state through the tokens: S_t = a_t S_(t-1) + k_t^T c_t with the corrections
    c_t = b_t (v_t - a_t k_t S_(t-1)); outputs are o_t = q_t S_t.

    Value head h uses key head h // (H / G).

    Args:
        query_BSGK: Queries [B, S, G, K].
        key_BSGK: Keys [B, S, G, K].
        value_BSHV: Values [B, S, H, V].
        strength_BSH: b, how much of what is wrong a token corrects, [B, S, H]; without it
            c_t = v_t.
        falls_BSHF: Logarithms of the decays a_t, at most 0, [B, S, H, 1], or [B, S, H, K] if
            channels of keys decay by themselves.
        documents_BS: How many documents have begun since the state before the tokens, int32
            [B, S], so that a state starts anew where this grows.
        initial_BHKV: The state before the tokens, [B, H, K, V], by default 0.

    Returns:
        The outputs [B, S, H, V], and the state after all tokens in at least fp32, [B, H, K, V].
    """
    wide = torch.promote_types(query_BSGK.dtype, torch.float32)
    repeat = value_BSHV.shape[2] // query_BSGK.shape[2]
    query, key = (x.to(wide).repeat_interleave(repeat, 2) for x in (query_BSGK, key_BSGK))
    value, decay = value_BSHV.to(wide), falls_BSHF.to(wide).exp().unsqueeze(-1)
    state = query.new_zeros(
        *value[:, :1].shape[:1], *value.shape[2:3], key.shape[-1], value.shape[-1]
    )
    if initial_BHKV is not None:
        state = initial_BHKV.to(wide)
    continues = documents_BS == F.pad(documents_BS[:, :-1], (1, 0))
    outputs = []
    for t in range(value.shape[1]):
        state = decay[:, t] * state * continues[:, t, None, None, None]
        correction = value[:, t]
        if strength_BSH is not None:
            wrong = correction - (key[:, t, :, None] @ state).squeeze(-2)
            correction = strength_BSH[:, t].to(wide).unsqueeze(-1) * wrong
        state = state + key[:, t].unsqueeze(-1) * correction.unsqueeze(-2)
        outputs.append((query[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, 1).to(value_BSHV.dtype), state


def run_reference_ssd(
    query_BSGK: Tensor,
    key_BSGK: Tensor,
    value_BSHV: Tensor,
    falls_BSH: Tensor,
    documents_BS: Tensor,
    initial_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pass a state through the tokens: S_t = a_t S_(t-1) + k_t^T v_t and o_t = q_t S_t. Queries and
    keys are `C` and `B` of Mamba-2, and values its inputs times their steps.

    Args:
        query_BSGK: Queries [B, S, G, K].
        key_BSGK: Keys [B, S, G, K].
        value_BSHV: Values [B, S, H, V].
        falls_BSH: Logarithms of the decays a_t, at most 0, [B, S, H].
        documents_BS: As for `run_reference_delta_rule`.
        initial_BHKV: As for `run_reference_delta_rule`.

    Returns:
        As `run_reference_delta_rule`.
    """
    return run_reference_delta_rule(
        query_BSGK, key_BSGK, value_BSHV, None, falls_BSH[..., None], documents_BS, initial_BHKV
    )


_forward_op = torch.library.custom_op("megaframe::recurrence", launch_forward, mutates_args=())
_backward_op = torch.library.custom_op(
    "megaframe::recurrence_backward", launch_backward, mutates_args=()
)


@_forward_op.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor | None,
    sums: Tensor,
    documents: Tensor,
    initial: Tensor | None,
) -> Any:
    batch, length, heads, width = value.shape
    size = choose_chunk(query, sums.shape[-1] > 1)
    chunks = -(-length // size)
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    corrected = strength is not None
    states = query.new_empty(batch, heads, chunks, query.shape[-1], width)
    scores = query.new_empty(batch, heads, chunks, size, size)
    return (
        *(out, states.new_empty(*states[:, :, 0].shape, dtype=torch.float32), scores),
        torch.empty_like(scores) if corrected else query.new_empty(0),
        torch.empty_like(out) if corrected else query.new_empty(0),
        states,
    )


@_backward_op.register_fake
def _(
    d_out: Tensor,
    d_final: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    strength: Tensor | None,
    sums: Tensor,
    documents: Tensor,
    scores: Tensor,
    inverse: Tensor,
    corrections: Tensor,
    states: Tensor,
) -> Any:
    whole = torch.contiguous_format
    d_query, d_key, d_value, d_sums = (
        torch.empty_like(x, memory_format=whole) for x in (query, key, value, sums)
    )
    d_strength = sums.new_empty(0)
    if strength is not None:
        d_strength = torch.empty_like(strength, memory_format=whole)
    d_initial = sums.new_empty(states[:, :, 0].shape)
    return d_query, d_key, d_value, d_strength, d_sums, d_initial


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *arguments, initial = inputs
    ctx.has_initial = initial is not None
    ctx.save_for_backward(*arguments, *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    # None instead of zeros for what has no gradient, such as a final state that nobody needs.
    ctx.set_materialize_grads(False)


def _compute_gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    d_out = torch.zeros_like(saved[2]) if gradients[0] is None else gradients[0]
    results = _direct_backward(d_out, gradients[1], *saved)
    d_query, d_key, d_value, d_strength, d_sums, d_initial = results
    return (
        *(d_query, d_key, d_value, None if saved[3] is None else d_strength, d_sums, None),
        d_initial if ctx.has_initial else None,
    )


_forward_op.register_autograd(_compute_gradients, setup_context=_keep)
_direct_forward = bypass_dispatcher(_forward_op, launch_forward, _keep, _compute_gradients)
_direct_backward = bypass_dispatcher(_backward_op, launch_backward)


def run_triton_delta_rule(
    query_BSGK: Tensor,
    key_BSGK: Tensor,
    value_BSHV: Tensor,
    strength_BSH: Tensor | None,
    falls_BSHF: Tensor,
    documents_BS: Tensor,
    initial_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the reference in Triton."""
    size, length = choose_chunk(query_BSGK, falls_BSHF.shape[-1] > 1), value_BSHV.shape[1]
    falls = F.pad(falls_BSHF.float(), (0, 0, 0, 0, 0, -length % size))
    sums = falls.unflatten(1, (-1, size)).cumsum(2).flatten(1, 2)[:, :length]
    strength = None if strength_BSH is None else strength_BSH.float()
    initial = None if initial_BHKV is None else initial_BHKV.float()
    out, final, *_ = _direct_forward(
        *(query_BSGK, key_BSGK, value_BSHV, strength, sums, documents_BS, initial)
    )
    return out, final


def run_triton_ssd(
    query_BSGK: Tensor,
    key_BSGK: Tensor,
    value_BSHV: Tensor,
    falls_BSH: Tensor,
    documents_BS: Tensor,
    initial_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the reference in Triton."""
    return run_triton_delta_rule(
        query_BSGK, key_BSGK, value_BSHV, None, falls_BSH[..., None], documents_BS, initial_BHKV
    )


def _refuse(
    query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None, channels: int = 1
) -> str | None:
    """Return why queries, keys and values, or so many channels with decays of their own, are not
    for these kernels."""
    width, wide = query.shape[-1], query.dtype == torch.float32
    if not value.dtype == key.dtype == query.dtype:
        return f"queries, keys and values are {query.dtype}, {key.dtype} and {value.dtype}"
    if width > (widest := WIDEST // 2 if wide else WIDEST):
        return f"keys are {width} wide, more than the {widest} that registers hold"
    if wide and channels > WIDEST // 4:
        return f"{channels} channels have decays, more than the {WIDEST // 4} that registers hold"
    return refuse_types(query, key, value)


def _refuse_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, strength: Tensor, falls: Tensor, *_: Tensor | None
) -> str | None:
    return _refuse(query, key, value, channels=falls.shape[-1])


_ROUNDINGS = 8.0
"""Of scores, inverses, corrections, states and their gradients, and of what reads them."""
DELTA_RULE = Kernel(
    "delta_rule",
    run_reference_delta_rule,
    {
        "triton": Implementation(
            "triton", run_triton_delta_rule, require_nothing, _refuse_delta_rule
        ),
    },
    _ROUNDINGS,
)
SSD = Kernel(
    "ssd",
    run_reference_ssd,
    {"triton": Implementation("triton", run_triton_ssd, require_nothing, _refuse)},
    _ROUNDINGS,
)
