"""Attention by a kernel of the library, for tokens that are all on this rank or for one tile of a
ring.

Shape legend: B samples, S tokens, Q queries, K keys, N query heads, G key/value heads, D width of a
query or key head, V width of a value head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from megaframe.ops.attention_mask import SequenceMask
from megaframe.ops.kernel_dispatch import Kernels

if TYPE_CHECKING:
    from megaframe_kernels.attention.spans import Spans


def attend_by_kernel(
    kernels: Kernels,
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGV: Tensor,
    mask: SequenceMask,
    scale: float,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor | None:
    """Compute attention over whole samples by a kernel.

    Args:
        kernels: The kernels of the run.
        query_BQND: The queries, [B, S, N, D].
        key_BKGD: The keys, [B, S, G, D].
        value_BKGV: The values, [B, S, G, V].
        mask: Which tokens attend to which.
        scale: Factor on the scores.
        softcap: Bound of the scores; None for no bound.
        sinks_N: A logit without a value in the softmax of each query head; None for none.

    Returns:
        The output [B, S, N, V], or None if no kernel takes these arguments.
    """
    # Chosen keys are no spans.
    if not kernels.has("attention") or mask.chosen is not None:
        return None
    # Kernels take one width for all heads; those of values may be narrower.
    value = _pad_heads_like(value_BKGV, query_BQND)
    operands = (query_BQND, key_BKGD, value, mask.spans)
    options = {"scale": scale, "softcap": softcap, "sinks_N": sinks_N}
    kernel = kernels.find("attention", *operands, **options)
    if kernel is None:
        return None
    out, _ = kernel(*operands, **options)
    return out if value is value_BKGV else out[..., : value_BKGV.shape[-1]]


TileResult = tuple[Tensor, Tensor]
"""Output [B, Q, N, V] and log-sum-exp [B, N, Q] of a tile."""


def attend_tile_by_kernel(
    kernels: Kernels,
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGV: Tensor,
    make_spans: Callable[[], Spans],
    scale: float,
    softcap: float | None = None,
) -> TileResult | None:
    """Compute a tile like `attention_tiles.attend` by a kernel.

    The gradient of a tile computed here comes from `attend_tile_backward_by_kernel`.

    Args:
        kernels: The kernels of the run.
        query_BQND: The queries, [B, Q, N, D].
        key_BKGD: The keys, [B, K, G, D].
        value_BKGV: The values, [B, K, G, V].
        make_spans: Returns what the queries see; not called if there is no kernel.
        scale: Factor on the scores.
        softcap: Bound of the scores; None for no bound.

    Returns:
        The output and log-sum-exp, or None if no kernel takes these arguments.
    """
    if not (kernels.has("attention") and kernels.has("attention_backward")):
        return None
    value = _pad_heads_like(value_BKGV, query_BQND)
    operands = (query_BQND, key_BKGD, value, make_spans())
    options = {"scale": scale, "softcap": softcap, "need_lse": True}
    kernel = kernels.find("attention", *operands, **options)
    if kernel is None:
        return None
    out, lse = kernel(*operands, **options)
    return out[..., : value_BKGV.shape[-1]], lse


def attend_tile_backward_by_kernel(
    kernels: Kernels,
    d_out: Tensor,
    query_BQND: Tensor,
    key_BKGD: Tensor,
    value_BKGV: Tensor,
    out_BQNV: Tensor,
    lse_BNQ: Tensor,
    make_spans: Callable[[], Spans],
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Compute the gradients of a tile like `attention_tiles.attend_backward` by a kernel.

    Args:
        kernels: The kernels of the run.
        d_out: Gradient of the output, [B, Q, N, V].
        query_BQND: The queries, [B, Q, N, D].
        key_BKGD: The keys, [B, K, G, D].
        value_BKGV: The values, [B, K, G, V].
        out_BQNV: The output merged over all tiles, [B, Q, N, V].
        lse_BNQ: The log-sum-exp merged over all tiles, [B, N, Q].
        make_spans: Returns what the queries see; not called if there is no kernel.
        scale: Factor on the scores.
        softcap: Bound of the scores; None for no bound.

    Returns:
        The gradients of queries, keys and values, or None if no kernel takes these arguments.
    """
    # A tile that a kernel computed gets its gradient from one too, so both must be there.
    if not (kernels.has("attention") and kernels.has("attention_backward")):
        return None
    d_out, out, value = (
        _pad_heads_like(head, query_BQND) for head in (d_out, out_BQNV, value_BKGV)
    )
    operands = (d_out, query_BQND, key_BKGD, value, out, lse_BNQ, make_spans())
    options = {"scale": scale, "softcap": softcap}
    kernel = kernels.find("attention_backward", *operands, **options)
    if kernel is None:
        return None
    d_query, d_key, d_value = kernel(*operands, **options)
    # Gradients of padding are cut off with it.
    return d_query, d_key, d_value[..., : value_BKGV.shape[-1]]


def _pad_heads_like(x: Tensor, like: Tensor) -> Tensor:
    """Pad the heads of x with zeros to the width of `like`. Zeros contribute nothing, and callers
    cut off the extra outputs."""
    padding = like.shape[-1] - x.shape[-1]
    return F.pad(x, (0, padding)) if padding > 0 else x
