"""A causal convolution of each channel over a few tokens, as linear attention has before it, and
as a gated short convolution is.

Shape legend: B samples, S tokens of this context rank, P its pieces of samples, T tokens of a piece
with those before it, C dims of channels, D tokens that each token sees, with itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaframe.model.layer_inputs import MicrobatchInputs


def convolve(x_PTC: Tensor, gain_CD: Tensor, inputs: MicrobatchInputs) -> Tensor:
    """Add up what each channel has for the last tokens of its document, each with a factor.

    Args:
        x_PTC: This rank's pieces, with the D - 1 tokens before each (`prepend_tokens`).
        gain_CD: The factors; the last one is of the token itself.
        inputs: Of the microbatch.

    Returns:
        The sums, [B, S, C].
    """
    sums: Tensor = _Convolution.apply(x_PTC, gain_CD, inputs)
    return sums


def convolve_last(x_BDC: Tensor, gain_CD: Tensor) -> Tensor:
    """Return the sums of the last of as many tokens as a channel sees, [B, 1, C].

    Args:
        x_BDC: These tokens of samples, all of one document.
        gain_CD: The factors; the last one is of the token itself.
    """
    return (x_BDC.movedim(1, -1) * gain_CD).sum(-1).unsqueeze(1)


class _Convolution(torch.autograd.Function):
    """y_t = sum of g_d x_(t-d), dx_t = sum of g_d dy_(t+d), dg_d = sum of dy_t x_(t-d).

    Keeps only x and g. By autograd each product would keep its own result, and the gradient of each
    shift would be copied into zeros. Sums are in at least fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, inputs: MicrobatchInputs) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.inputs = inputs
        y = x.new_zeros(len(x), x.shape[1] - gain.shape[-1] + 1, *x.shape[2:], dtype=_widen(x))
        for tap, mask, shifted in _list_shifts(x, gain, inputs):
            y.addcmul_(shifted, gain[..., tap] if mask is None else gain[..., tap] * mask)
        return y.to(x.dtype).unflatten(0, (inputs.batch, -1)).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, gain), wide = ctx.saved_tensors, _widen(gradients[0])
        dy = gradients[0].unflatten(1, (len(x) // ctx.inputs.batch, -1)).flatten(0, 1)
        dx, dgain = x.new_zeros(x.shape, dtype=wide), gain.new_empty(gain.shape, dtype=wide)
        shifts = _list_shifts(x, gain, ctx.inputs)
        for (tap, mask, shifted), (_, _, d_shifted) in zip(
            shifts, _list_shifts(dx, gain, ctx.inputs), strict=True
        ):
            seen = dy if mask is None else dy * mask
            d_shifted.addcmul_(seen, gain[..., tap])
            dgain[..., tap] = (seen.to(wide) * shifted).sum((0, 1))
        return dx.to(x.dtype), dgain, None


def _list_shifts(
    x_PTC: Tensor, gain_CD: Tensor, inputs: MicrobatchInputs
) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """Yield for each factor its index, a mask of the tokens that see what it is of (None if all
    may, as what is before a sample is zero), and what they see."""
    taps = gain_CD.shape[-1]
    tokens = x_PTC.shape[1] - taps + 1
    for tap in range(taps):
        mask, distance = None, taps - 1 - tap
        if distance and inputs.documents_BS is not None:
            follows_BS = inputs.follows_BS(distance).to(x_PTC.dtype)
            mask_PT = follows_BS.unflatten(1, (-1, tokens)).flatten(0, 1)
            mask = mask_PT.view(*mask_PT.shape, *(1,) * (x_PTC.dim() - 2))
        yield tap, mask, x_PTC[:, tap : tap + tokens]


def _widen(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
