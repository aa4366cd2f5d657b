"""The layers that call modules from outside.

A module is called with our parameters in place of its own (`torch.func.functional_call`), so their
gradients are added to buckets like all others. At ZeRO stage 3 a value is withdrawn between the
passes and brought back to another place; what autograd saves of it is therefore kept as the
parameter itself with the shape of the view, and becomes a tensor when the backward pass reads it.

Shapes: B samples, S positions, T tokens of a microbatch, R rows of this tensor rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from megaframe.distributed.differentiable import gather_differentiably
from megaframe.errors import UserError
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.pass_state import PassState
from megaframe.model.torch_module.source import ModuleSource, get_module
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Elementwise


class TorchLayer(Module):
    """A mixer or a feed-forward layer from outside, with the parameters of this layer."""

    def __init__(
        self, name: str, source: ModuleSource, setup: LayerSetup, *, mixes_tokens: bool
    ) -> None:
        """Make the parameters.

        Args:
            name: Of the layer in the model.
            source: Makes the module.
            setup: What the run fixes.
            mixes_tokens: Whether it needs whole samples. Then every tensor rank gathers the rows of
                all and computes the same; otherwise each computes its own rows.
        """
        self.name, self.source, self.setup = name, source, setup
        self.mixes_tokens = mixes_tokens
        self.weights = [*map(Parameter, source.declare_parameters(name))]

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Return what the layer adds to this rank's rows of the stream. The arguments are those of
        `Attention`."""
        if norm is not None:
            x = norm(x, self.setup.kernels)
        if not self.mixes_tokens:
            return self._call(x.unsqueeze(0), {}).squeeze(0)
        rows, group = inputs.rows, self.setup.tensor.group
        # Its backward pass sums over the ranks: each has the gradient of its own rows of the result
        # alone, so what they add to parameters and to the input are parts of one sum.
        x_TH = rows.remove_padding(gather_differentiably(x, group))
        x_BSH = x_TH.view(inputs.batch, inputs.length, -1)
        positions_BS = inputs.positions_BS.expand(inputs.batch, inputs.length)
        arguments = self.source.select_inputs(positions_BS, inputs.documents_BS)
        out_TH = self._call(x_BSH, arguments).flatten(0, 1)
        return rows.pad(out_TH).chunk(group.size)[group.index]

    def _call(self, x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self._keep, _restore):
            out = call_module(self.source, [w.use() for w in self.weights], x, arguments)
        check_output(self.source, x, out)
        return out

    def _keep(self, tensor: Tensor) -> Tensor | _ViewOfParameter:
        """Return what autograd keeps for a tensor."""
        for weight in self.weights:
            value = weight.value
            start = int(tensor.storage_offset() - value.storage_offset())
            if (
                0 <= start < value.numel()
                and tensor.dtype == value.dtype
                and tensor.untyped_storage()._cdata == value.untyped_storage()._cdata
            ):
                return _ViewOfParameter(weight, tensor.shape, tensor.stride(), start)
        return tensor


class _ViewOfParameter(NamedTuple):
    """A view of the value of a parameter, wherever that is: size, strides, and its first element,
    counted from that of the value."""

    parameter: Parameter
    size: Sequence[int]
    stride: Sequence[int]
    start: int


def _restore(kept: Tensor | _ViewOfParameter) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    value = kept.parameter.value
    return value.as_strided(kept.size, kept.stride, value.storage_offset() + kept.start)


def call_module(
    source: ModuleSource, weights: Sequence[Tensor], x: Tensor, inputs: Mapping[str, Any]
) -> Any:
    """Return the module of x, computed with these values of its parameters.

    Args:
        source: Makes the module.
        weights: In the order of its parameters.
        x: Its first argument.
        inputs: Its other ones.
    """
    values = {
        key: weight.view(shape)
        for (key, shape), weight in zip(source.facts.shapes, weights, strict=True)
    }
    return functional_call(get_module(source, x.device), values, (x,), dict(inputs))


def check_output(source: ModuleSource, x: Tensor, out: object) -> None:
    """Raise `UserError` if what a module returns for x is no tensor like it."""
    if isinstance(out, Tensor) and out.shape == x.shape and out.dtype == x.dtype:
        return
    returned = type(out).__name__
    if isinstance(out, Tensor):
        returned = f"{tuple(out.shape)} of {out.dtype}"
    raise UserError(
        f"{source.place} returns {source.facts.kind}, whose forward returns {returned} for "
        f"{tuple(x.shape)} of {x.dtype}; let it return one tensor like its input"
    )
