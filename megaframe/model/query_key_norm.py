"""Norms of queries and keys: of each head (Qwen3, Phi), without gains (Llama 4) or with gains of
its own (Command R+), or of all heads of a token at once (OLMo 2), which tensor ranks divide.

Shape legend: B samples, S positions, N query heads, G key heads, D width of a head; of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.spec import count_copies
from megaframe.distributed.collectives import all_reduce
from megaframe.model.layer_inputs import LayerSetup
from megaframe.model.norm import Norm
from megaframe.parameters.parameter import Module, Parameter


class HeadNorms(Module):
    """A norm of each query head, and one of each key head, whose weights all heads share."""

    def __init__(self, name: str, description: AttentionDescription, setup: LayerSetup) -> None:
        self.setup = setup
        self.query_norm, self.key_norm = (
            Norm(f"{name}.{part}", norm) for part, norm in description.qk_norms.items()
        )

    def __call__(self, query_BSND: Tensor, key_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised queries and keys."""
        kernels = self.setup.kernels
        return self.query_norm(query_BSND, kernels), self.key_norm(key_BSGD, kernels)


class L2Norms(Module):
    """An RMSNorm of each query head and of each key head, without gains."""

    def __init__(self, name: str, description: AttentionDescription, setup: LayerSetup) -> None:
        self.eps = description.norm_eps

    def __call__(self, query_BSND: Tensor, key_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised queries and keys of this tensor rank."""
        return divide_by_size(query_BSND, self.eps), divide_by_size(key_BSGD, self.eps)


def divide_by_size(x: Tensor, eps: float) -> Tensor:
    """Return heads [..., D] divided by their root mean squares.

    Args:
        x: The heads.
        eps: Added to the mean square.
    """
    normed: Tensor = _L2Norm.apply(x, eps)
    return normed


class _L2Norm(torch.autograd.Function):
    """y = x r with r = (mean(x^2) + eps)^(-1/2). Keeps x and r: dx = r (dy - y mean(dy y))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide = _widen(x)
        scale = (torch.linalg.vecdot(wide, wide).unsqueeze(-1) / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, scale)
        return (wide * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, scale = ctx.saved_tensors
        # Computed again: a kept copy would be as large as x.
        normed, dy = _widen(x) * scale, _widen(gradients[0])
        mean = torch.linalg.vecdot(dy, normed).unsqueeze(-1) / x.shape[-1]
        return torch.addcmul(dy, normed, mean, value=-1.0).mul_(scale).to(x.dtype), None


class PerHeadNorms(Module):
    """A LayerNorm of each query head, and one of each key head, with gains of its own."""

    def __init__(self, name: str, description: AttentionDescription, setup: LayerSetup) -> None:
        self.eps = description.norm_eps
        self.query_gain, self.key_gain = _make_gains(name, description)

    def __call__(self, query_BSND: Tensor, key_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised queries and keys of this tensor rank."""
        query: Tensor = _PerHeadLayerNorm.apply(query_BSND, self.query_gain.use(), self.eps)
        key: Tensor = _PerHeadLayerNorm.apply(key_BSGD, self.key_gain.use(), self.eps)
        return query, key


class _PerHeadLayerNorm(torch.autograd.Function):
    """y = n gain, where n is x [B, S, heads, D] with mean 0 and variance 1 in each head, and the
    gain is [heads, D]. Keeps x and two statistics of each head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        y, mean, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        ctx.save_for_backward(x, gain, mean, scale)
        return y.mul_(gain)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, mean, scale = ctx.saved_tensors
        # Computed again: a kept copy would be as large as x.
        normed = (_widen(x) - mean) * scale
        dgain = (_widen(gradients[0]) * normed).sum((0, 1))
        dx, _, _ = torch.ops.aten.native_layer_norm_backward(
            gradients[0] * gain, x, x.shape[-1:], mean, scale, None, None, (True, False, False)
        )
        return dx, dgain, None


class WholeNorms(Module):
    """An RMSNorm of all query heads of a token, and one of all key heads."""

    def __init__(self, name: str, description: AttentionDescription, setup: LayerSetup) -> None:
        self.tensor, self.eps = setup.tensor.group, description.norm_eps
        self.copies = count_copies(description.kv_heads, self.tensor.size)
        self.widths = [norm.width for norm in description.qk_norms.values()]
        self.query_gain, self.key_gain = _make_gains(name, description)

    def __call__(self, query_BSND: Tensor, key_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised queries and keys of this tensor rank."""
        gains = self.query_gain.use(), self.key_gain.use()
        query, key = _WholeRMSNorms.apply(query_BSND, key_BSGD, *gains, self)
        return query, key

    def sum_heads(self, products: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return for queries and for keys the mean over all heads of the product of two tensors
        [B, S, heads, D], as [2, B, S, 1, 1]."""
        sums = torch.stack([(a * b).sum((-2, -1), keepdim=True) for a, b in products])
        # One transfer for both.
        sums = all_reduce(sums, self.tensor).wait()
        for mean, width in zip(sums, self.widths, strict=True):
            mean.div_(width)
        return sums


class _WholeRMSNorms(torch.autograd.Function):
    """y = x r gain with r = (mean(x^2) + eps)^(-1/2), of queries and of keys.

    With g = dy gain: dx = r g - x r^3 mean(g x), dgain = sum of dy x r. Both means are over the
    heads of all tensor ranks. Where ranks share a key head, each has the gradient that comes from
    its own query heads; the parts of g are summed in the mean, and each rank subtracts its share.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, query_gain: Tensor, key_gain: Tensor, own: WholeNorms
    ) -> tuple[Tensor, Tensor]:
        wide = [_widen(x) for x in (query, key)]
        scales = own.sum_heads([(x, x) for x in wide])
        scales[1] /= own.copies  # the squares of a shared head are those of each rank
        scales.add_(own.eps).rsqrt_()
        ctx.save_for_backward(query, key, query_gain, key_gain, scales)
        ctx.own = own
        normed = [(x * scale).to(query.dtype) for x, scale in zip(wide, scales, strict=True)]
        return normed[0].mul_(query_gain), normed[1].mul_(key_gain)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, query_gain, key_gain, scales = ctx.saved_tensors
        # Computed again: a kept copy would be as large as the queries.
        normed = [_widen(x) * r for x, r in zip((query, key), scales, strict=True)]
        wide = [_widen(dy) for dy in gradients]
        dgains = [(dy * x).sum((0, 1)) for dy, x in zip(wide, normed, strict=True)]
        inner = [dy * gain for dy, gain in zip(wide, (query_gain, key_gain), strict=True)]
        means = ctx.own.sum_heads([*zip(inner, normed, strict=True)])
        means[1] /= ctx.own.copies
        dx = [
            g.addcmul_(x, mean, value=-1.0).mul_(r).to(query.dtype)
            for g, x, mean, r in zip(inner, normed, means, scales, strict=True)
        ]
        return *dx, *dgains, None


def _widen(x: Tensor) -> Tensor:
    """Return x in at least fp32, in which many squares are summed."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _make_gains(name: str, description: AttentionDescription) -> Iterator[Parameter]:
    """Yield the gain of queries and that of keys."""
    for part, norm in description.qk_norms.items():
        yield from map(Parameter, norm.declare_parameters(f"{name}.{part}"))


def make_query_key_norms(
    name: str, description: AttentionDescription, setup: LayerSetup
) -> HeadNorms | L2Norms | PerHeadNorms | WholeNorms | None:
    """Return the norms that attention declares, or None if it has none.

    Args:
        name: Of the attention in the model.
        description: What it declares.
        setup: What the run fixes.
    """
    if description.qk_norm == "none":
        return None
    if description.qk_norm == "whole":
        return WholeNorms(name, description, setup)
    if description.qk_norm == "l2":
        return L2Norms(name, description, setup)
    per_head = description.qk_norm == "layernorm_per_head"
    return (PerHeadNorms if per_head else HeadNorms)(name, description, setup)
