"""Gated short convolution (Liquid AI 2025, "LFM2"): y = out(c * convolve(b * x)), where b, c and x
are products of the layer's input.

Shape legend: B samples, S tokens of this context rank, P pieces of samples, T tokens of a piece
with those before it, C channels of this tensor rank.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megaframe.architecture.gated_short_convolution import GatedShortConvolutionDescription
from megaframe.context_parallel.states import prepend_tokens
from megaframe.model.causal_convolution import convolve, convolve_last
from megaframe.model.key_value_cache import StateCache
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.pass_state import PassState
from megaframe.ops.autograd import recompute
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Elementwise, Linear


class GatedShortConvolution(Module):
    """The channels of this tensor rank for the tokens of this context rank."""

    def __init__(
        self, name: str, description: GatedShortConvolutionDescription, setup: LayerSetup
    ) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            setup: What the run fixes.
        """
        self.taps, self.context = description.taps, setup.context
        self.input = Linear(f"{name}.input", description.input, setup.tensor)
        specs = description.convolution.declare_parameters(f"{name}.convolution")
        self.convolution, *bias = map(Parameter, specs)
        self.bias: Parameter | None = bias[0] if bias else None
        self.output = Linear(f"{name}.output", description.output, setup.tensor)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Mix the tokens of samples. The arguments are those of `Attention`."""
        rows = inputs.rows.remove_padding(self.input(x, state.deferred, norm))
        parts_BS3C = rows.view(inputs.batch, inputs.length, 3, -1)
        cache = state.find_state(self)
        if cache is None:
            # Only the result of the product is kept; all that follows is computed again from it.
            out_BSC = recompute(partial(self._mix, inputs), parts_BS3C)
        elif cache.tensors:
            out_BSC = self._mix_token(parts_BS3C, cache)
        else:
            out_BSC = self._mix(inputs, parts_BS3C, cache)
        return self.output(inputs.rows.pad(out_BSC.flatten(0, 1)), state.deferred)

    def _mix(
        self, inputs: MicrobatchInputs, parts_BS3C: Tensor, cache: StateCache | None = None
    ) -> Tensor:
        """Return the gated channels of tokens, [B, S, C], and put what is left of whole samples
        into a cache."""
        before_BSC, after_BSC, x_BSC = parts_BS3C.unbind(2)
        seen_PTC = prepend_tokens(before_BSC * x_BSC, self.taps - 1, self.context)
        if cache is not None:
            cache.replace(inputs.length, seen=seen_PTC[:, inputs.length :])
        return after_BSC * self._add_bias(convolve(seen_PTC, self.convolution.use(), inputs))

    def _mix_token(self, parts_B13C: Tensor, cache: StateCache) -> Tensor:
        """Do the same for one token after those of the cache."""
        assert parts_B13C.shape[1] == 1, "after the first pass tokens come one by one"
        before_B1C, after_B1C, x_B1C = parts_B13C.unbind(2)
        seen_BTC = torch.cat((cache.tensors["seen"], before_B1C * x_B1C), 1)
        cache.replace(1, seen=seen_BTC[:, 1:])
        return after_B1C * self._add_bias(convolve_last(seen_BTC, self.convolution.use()))

    def _add_bias(self, mixed_BSC: Tensor) -> Tensor:
        return mixed_BSC if self.bias is None else mixed_BSC + self.bias.use()
