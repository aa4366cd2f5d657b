"""Several residual streams: how each half of a block, or a block, reads and writes them, and what
is at both ends of the model.

What is computed from a row is computed again in the backward pass, which needs only the streams
themselves, what a half adds to them, and a few numbers of each token, in at least fp32.

Shape legend: R rows of this rank, n streams, M = n - 1, H width of a stream, W = n * H, N = n * n,
K numbers of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megaframe.architecture.streams import (
    AltUpDescription,
    HyperConnectionDescription,
    StreamProjectionsDescription,
    StreamSumDescription,
)
from megaframe.ops.autograd import recompute
from megaframe.parameters.parameter import Module, Parameter

_LEAST_SQUARE = 1e-5
"""The least mean square by whose root a projected stream is divided."""


class HyperConnection(Module):
    """How one half of a block reads and writes streams (`HyperConnectionDescription`)."""

    def __init__(self, name: str, description: HyperConnectionDescription) -> None:
        self.description = description
        self.weight, self.bias, self.scale = map(Parameter, description.declare_parameters(name))

    def read(self, x_RW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of a half [R, H], and numbers with which `write` writes its output."""
        weights_RK = recompute(self._compute_weights, x_RW)
        return recompute(self._sum_streams, x_RW, weights_RK), weights_RK

    def write(self, x_RW: Tensor, weights_RK: Tensor, y_RH: Tensor) -> Tensor:
        """Return the streams after a half.

        Args:
            x_RW: The streams before it.
            weights_RK: What `read` returned of them.
            y_RH: What the half adds.
        """
        return recompute(self._mix_streams, x_RW, weights_RK, y_RH)

    def _compute_weights(self, x_RW: Tensor) -> Tensor:
        """Return a, c and M of each row, one after the other."""
        of, sizes = self.description, self.description.sizes
        results_RK = _project(x_RW, self.weight.use(), of.norm_eps)
        of_parts = (
            results_RK.split(sizes, 1),
            self.scale.use().unbind(),
            self.bias.use().split(sizes),
        )
        read_Rn, write_Rn, mix_RN = (r * s + b for r, s, b in zip(*of_parts, strict=True))
        mix_Rnn = _balance(mix_RN.unflatten(1, (of.number, of.number)), of.iterations, of.eps)
        parts = read_Rn.sigmoid() + of.eps, 2 * write_Rn.sigmoid(), mix_Rnn.flatten(1)
        return torch.cat(parts, 1)

    def _sum_streams(self, x_RW: Tensor, weights_RK: Tensor) -> Tensor:
        return _sum_weighted(x_RW, weights_RK.split(self.description.sizes, 1)[0])

    def _mix_streams(self, x_RW: Tensor, weights_RK: Tensor, y_RH: Tensor) -> Tensor:
        n = self.description.number
        _, write_Rn, mix_RN = weights_RK.to(x_RW.dtype).split(self.description.sizes, 1)
        x_RnH, mix_Rnn = x_RW.unflatten(1, (n, -1)), mix_RN.unflatten(1, (n, n))
        mixed_RnH = mix_Rnn.mT @ x_RnH
        return (mixed_RnH + write_Rn.unsqueeze(2) * y_RH.unsqueeze(1)).flatten(1)


class StreamSum(Module):
    """What the head reads of the streams (`StreamSumDescription`)."""

    def __init__(self, name: str, description: StreamSumDescription) -> None:
        self.description = description
        self.weight, self.bias, self.scale = map(Parameter, description.declare_parameters(name))

    def __call__(self, x_RW: Tensor) -> Tensor:
        """Return one stream [R, H] of all."""
        return recompute(self._sum, x_RW)

    def _sum(self, x_RW: Tensor) -> Tensor:
        of = self.description
        results_Rn = _project(x_RW, self.weight.use(), of.norm_eps)
        weights_Rn = (results_Rn * self.scale.use() + self.bias.use()).sigmoid() + of.eps
        return _sum_weighted(x_RW, weights_Rn)


class AltUp(Module):
    """How a block reads and writes streams (`AltUpDescription`)."""

    def __init__(self, name: str, description: AltUpDescription) -> None:
        self.number, self.eps = description.number, description.norm_eps
        self.gain, self.router, self.predict, self.correct, *scale = map(
            Parameter, description.declare_parameters(name)
        )
        self.scale = scale[0] if scale else None

    def read(self, x_RW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predicted first stream [R, H], and numbers with which `write` predicts all."""
        weights_RN = recompute(self._compute_weights, x_RW)
        return recompute(self._predict_first, x_RW, weights_RN), weights_RN

    def write(self, x_RW: Tensor, weights_RN: Tensor, y_RH: Tensor) -> Tensor:
        """Return the streams after a block.

        Args:
            x_RW: The streams before it.
            weights_RN: What `read` returned of them.
            y_RH: What the block has made of what it read.
        """
        return recompute(self._correct, x_RW, weights_RN, y_RH)

    def select(self, x_RW: Tensor) -> Tensor:
        """Return the first stream times the factors, [R, H]."""
        return recompute(self._scale_first, x_RW)

    def add_to_others(self, x_RW: Tensor, added_RH: Tensor) -> Tensor:
        """Return the streams, to all but the first of which something is added."""
        first, others = x_RW.split([added_RH.shape[1], x_RW.shape[1] - added_RH.shape[1]], 1)
        return torch.cat((first, others + added_RH.repeat(1, self.number - 1)), 1)

    def _compute_weights(self, x_RW: Tensor) -> Tensor:
        """Return P of each row."""
        modes_Rn = self._route(self._take_first(x_RW))
        return modes_Rn @ self.predict.use().flatten(0, 1).to(modes_Rn.dtype).t()

    def _route(self, x_RH: Tensor) -> Tensor:
        """Return the numbers of a row that its weights are computed from, in at least fp32."""
        matrix_nH = self.router.use() * self.gain.use()
        return (_project(x_RH, matrix_nH, self.eps) / x_RH.shape[1]).tanh()

    def _predict_first(self, x_RW: Tensor, weights_RN: Tensor) -> Tensor:
        row_Rn = weights_RN.chunk(self.number, 1)[0]
        return self._take_first(x_RW) + _sum_weighted(x_RW, row_Rn)

    def _correct(self, x_RW: Tensor, weights_RN: Tensor, y_RH: Tensor) -> Tensor:
        n = self.number
        x_RnH = x_RW.unflatten(1, (n, -1))
        predicted_RnH = x_RnH + weights_RN.unflatten(1, (n, n)).to(x_RW.dtype) @ x_RnH
        modes_Rn = self._route(y_RH)
        factors_Rn = 1 + modes_Rn @ self.correct.use().to(modes_Rn.dtype).t()
        change_R1H = y_RH.unsqueeze(1) - predicted_RnH.chunk(n, 1)[0]
        return (predicted_RnH + factors_Rn.to(x_RW.dtype).unsqueeze(2) * change_R1H).flatten(1)

    def _scale_first(self, x_RW: Tensor) -> Tensor:
        assert self.scale is not None, "an input of the layer's own needs it"
        return self._take_first(x_RW) * self.scale.use()

    def _take_first(self, x_RW: Tensor) -> Tensor:
        return x_RW.chunk(self.number, 1)[0]


class FirstStreams(Module):
    """Makes several streams of one (`StreamProjectionsDescription`)."""

    def __init__(self, name: str, description: StreamProjectionsDescription) -> None:
        (self.weight,) = map(Parameter, description.declare_parameters(name))

    def __call__(self, x_RH: Tensor) -> Tensor:
        """Return the stream itself, and its projections with its size, [R, W]."""
        return recompute(self._project, x_RH)

    def _project(self, x_RH: Tensor) -> Tensor:
        weight_MHH = self.weight.use()
        others_RMH = (x_RH @ weight_MHH.flatten(0, 1).t()).unflatten(1, weight_MHH.shape[:2])
        others_RMH = _resize(others_RMH, x_RH.unsqueeze(1))
        return torch.cat((x_RH, others_RMH.flatten(1)), 1)


class StreamMean(Module):
    """Makes the head's input of several streams (`StreamProjectionsDescription`)."""

    def __init__(self, name: str, description: StreamProjectionsDescription) -> None:
        (self.weight,) = map(Parameter, description.declare_parameters(name))

    def __call__(self, x_RW: Tensor) -> Tensor:
        """Return the mean of the first stream and of the projections of the others, with its size,
        [R, H]."""
        return recompute(self._average, x_RW)

    def _average(self, x_RW: Tensor) -> Tensor:
        weight_MHH = self.weight.use()
        x_RnH = x_RW.reshape(-1, len(weight_MHH) + 1, weight_MHH.shape[1])
        first_R1H, others_RMH = x_RnH.split([1, len(weight_MHH)], 1)
        others_RMH = (others_RMH.transpose(0, 1) @ weight_MHH.mT).transpose(0, 1)
        all_RnH = torch.cat((first_R1H, _resize(others_RMH, first_R1H)), 1)
        return all_RnH.mean(1).view(*x_RW.shape[:-1], -1)


def make_last_streams(
    name: str, description: StreamSumDescription | StreamProjectionsDescription
) -> StreamSum | StreamMean:
    """Return what makes the head's input of several streams."""
    if isinstance(description, StreamProjectionsDescription):
        return StreamMean(name, description)
    return StreamSum(name, description)


def _resize(x: Tensor, other: Tensor) -> Tensor:
    """Return rows [..., H] with the root mean squares of others."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    size = other.to(wide.dtype).square().mean(-1, keepdim=True).sqrt()
    own = wide.square().mean(-1, keepdim=True).clamp_min(_LEAST_SQUARE).sqrt()
    return (wide * (size / own)).to(x.dtype)


def _project(x_RW: Tensor, weight_KW: Tensor, eps: float) -> Tensor:
    """Return the products of normalised rows with a matrix, in at least fp32 [R, K]. A row is
    divided by its root mean square after the product, which is shorter."""
    wide_RW = x_RW.to(torch.promote_types(x_RW.dtype, torch.float32))
    scale_R1 = (wide_RW.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide_RW @ weight_KW.to(wide_RW.dtype).t()) * scale_R1


def _balance(logits_Rnn: Tensor, iterations: int, eps: float) -> Tensor:
    """Return matrices whose rows and columns each sum to about 1 (Sinkhorn and Knopp 1967)."""
    mix_Rnn = logits_Rnn.softmax(-1) + eps
    mix_Rnn = mix_Rnn / (mix_Rnn.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix_Rnn = mix_Rnn / (mix_Rnn.sum(-1, keepdim=True) + eps)
        mix_Rnn = mix_Rnn / (mix_Rnn.sum(-2, keepdim=True) + eps)
    return mix_Rnn


def _sum_weighted(x_RW: Tensor, weights_Rn: Tensor) -> Tensor:
    """Return the sum of a row's streams with these weights, [R, H]."""
    x_RnH = x_RW.unflatten(-1, (weights_Rn.shape[-1], -1))
    return (weights_Rn.to(x_RW.dtype).unsqueeze(-2) @ x_RnH).squeeze(-2)
