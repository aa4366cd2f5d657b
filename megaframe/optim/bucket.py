"""Bucket: a flat span of parameters that are reduced, updated and gathered together.

Parameters with weight decay come first, so that each group of the optimizer is one contiguous span.
Every parameter starts on a 64-byte boundary; the padding stays zero and changes no norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megaframe.comm import Group, Pending, all_reduce
from megaframe.init import fill
from megaframe.optim.adamw import AdamW, AdamWOptions
from megaframe.parameter import Parameter, Precision
from megaframe.spec import Box, ParamSpec

_ALIGNMENT = 64


class Bucket:
    """Three flat buffers: `values` (what the model computes with), `weights` (the same numbers in
    master precision; the same tensor where the types agree) and `grads` (sums, master precision).
    group: the ranks whose gradients are summed. counted: in the norm, on this rank. replica: the
    parameters are those of another stage, which speaks for them.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        boxes: Mapping[str, Box],
        precision: Precision,
        device: torch.device,
        group: Group,
        options: AdamWOptions,
        *,
        counted: bool = True,
        replica: bool = False,
    ) -> None:
        self.counted, self.replica = counted, replica
        self.parameters = sorted(parameters, key=lambda parameter: not parameter.spec.decay)
        self._group = group
        self._pending: Pending[Tensor] | None = None
        step = _ALIGNMENT // precision.compute.itemsize
        starts, end, decayed = [], 0, 0
        for parameter in self.parameters:
            starts.append(end)
            end += step * math.ceil(boxes[parameter.spec.name].size / step)
            if parameter.spec.decay:
                decayed = end
        self.weights = torch.zeros(end, dtype=precision.master, device=device)
        self.grads = torch.zeros_like(self.weights)
        self.values = self.weights.to(precision.compute)
        self.optimizer = AdamW(self.weights, decayed, options)
        self._spans = {}
        for parameter, start in zip(self.parameters, starts, strict=True):
            box = boxes[parameter.spec.name]
            span = slice(start, start + box.size)
            self._spans[parameter.spec.name] = span
            parameter.bind(box, self.values[span].view(box.shape), self.grads[span].view(box.shape))

    def initialise(self, seed: int) -> None:
        """Set the initial weights."""
        for parameter, weights in self.pieces(self.weights):
            fill(weights, parameter.spec, parameter.box, seed)
        self.gather()

    def pieces(self, flat: Tensor) -> Iterator[tuple[Parameter, Tensor]]:
        """Each parameter with its view, in its own shape, into one of the flat buffers."""
        for parameter in self.parameters:
            yield parameter, flat[self._spans[parameter.spec.name]].view(parameter.box.shape)

    def reduce(self) -> None:
        """Start summing the gradients over the ranks that have the same parameters."""
        for parameter in self.parameters:
            parameter.finish()
        self._pending = all_reduce(self.grads, self._group)

    def wait(self) -> None:
        """Return when the gradients are summed."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def update(self, number: int, lr: float, divisor: Tensor) -> None:
        """Optimizer update `number` with gradients divided by `divisor`."""
        self.optimizer.update(self.weights, self.grads, number=number, lr=lr, divisor=divisor)

    def gather(self) -> None:
        """Bring the updated weights to where the model computes."""
        if self.values is not self.weights:
            self.values.copy_(self.weights)

    def start_step(self) -> None:
        """Forget the gradients."""
        for parameter in self.parameters:
            parameter.fresh = True

    def tensors(self) -> Iterator[tuple[str, ParamSpec, Box, Tensor]]:
        """Everything that a checkpoint holds of this bucket: key, spec, box and the piece."""
        for prefix, flat in (("", self.weights), *self.optimizer.state.items()):
            for parameter, piece in self.pieces(flat):
                name = parameter.spec.name
                key = f"optimizer.{prefix}/{name}" if prefix else name
                yield key, parameter.spec, parameter.box, piece
