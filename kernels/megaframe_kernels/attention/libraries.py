"""Attention by other libraries: torch's own backends (Flash Attention, cuDNN) and flash-attn.

They compute plain causal attention. What each one lacks is why it refuses arguments.

Shape legend: B samples, Q queries, K keys, N query heads, G key and value heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from megaframe_kernels.attention.spans import Spans
from megaframe_kernels.installed import check_cuda, check_flash_attention, require_nothing
from megaframe_kernels.kernel import Implementation


def _run_torch(
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGD: Tensor,
    spans: Spans,
    *,
    scale: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the reference by the fastest of torch's own attentions that supports the
    arguments."""
    out = F.scaled_dot_product_attention(
        query_BQND.transpose(1, 2),
        key_BKGD.transpose(1, 2),
        value_BKGD.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=query_BQND.shape[2] != key_BKGD.shape[2],
    )
    return out.transpose(1, 2), None


def _run_torch_flash(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return _run_torch(*arguments, **options)


def _run_cudnn(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _run_torch(*arguments, **options)


def _run_flash_attention(
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGD: Tensor,
    spans: Spans,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the reference by the package flash-attn, in its deterministic mode."""
    from flash_attn import flash_attn_func

    # flash-attn counts the keys before a query; our window includes the query's own place.
    window = (-1, -1) if spans.window is None else (spans.window - 1, 0)
    out = flash_attn_func(
        query_BQND,
        key_BKGD,
        value_BKGD,
        softmax_scale=scale,
        causal=True,
        window_size=window,
        softcap=softcap or 0.0,
        deterministic=True,
    )
    return out, None


def _refuse_for_library(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    *,
    sinks_N: Tensor | None = None,
    need_lse: bool = False,
    **_: Any,
) -> str | None:
    if not spans.plain:
        return "documents or the tiles of a ring are not a plain causal mask"
    if sinks_N is not None or need_lse:
        return "it has no sinks and gives no log-sum-exp"
    return None


def _refuse_for_torch(*arguments: Any, softcap: float | None = None, **options: Any) -> str | None:
    if softcap is not None or arguments[3].window is not None:
        return "torch's attention has neither softcap nor window without a mask"
    return _refuse_for_library(*arguments, **options)


def _refuse_for_backend(
    can_use: Callable[[SDPAParams], bool],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Spans,
    **options: Any,
) -> str | None:
    """Return why a backend of torch cannot run, or None.

    Forcing a backend to run on anything that it does not support fails.

    Args:
        can_use: torch's own check of what the backend supports on this GPU (widths of heads,
            numbers of keys, deterministic algorithms).
        query: The queries.
        key: The keys.
        value: The values.
        spans: Which keys each query sees.
        options: The keyword arguments of the reference.
    """
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return "it takes bf16 and fp16 on a GPU"
    reason = _refuse_for_torch(query, key, value, spans, **options)
    if reason is not None:
        return reason
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    # No mask, no dropout, causal, and whether heads of keys are shared.
    params = SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])
    if not can_use(params):
        return f"torch's {can_use.__name__} says no; with debug=True it says why"
    return None


def _refuse_for_flash(query: Tensor, *arguments: Any, **options: Any) -> str | None:
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16):
        return "it takes bf16 and fp16 on a GPU"
    return _refuse_for_library(query, *arguments, **options)


LIBRARIES = (
    Implementation("torch", _run_torch, require_nothing, _refuse_for_torch),
    Implementation(
        "torch-flash",
        _run_torch_flash,
        check_cuda,
        partial(_refuse_for_backend, can_use_flash_attention),
    ),
    Implementation(
        "cudnn", _run_cudnn, check_cuda, partial(_refuse_for_backend, can_use_cudnn_attention)
    ),
    Implementation("flash-attn", _run_flash_attention, check_flash_attention, _refuse_for_flash),
)
"""Implementations by other libraries."""
