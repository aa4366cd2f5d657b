"""What adapters do to the results of a linear layer: they add to those of their matrix, and rescale
the rows of the weight (DoRA, Liu et al. 2024).

With DoRA the rows of W + scale B A are divided by their norms, and multiplied by trained
magnitudes. A parameter is what a magnitude differs by from the norm of the row of W. The norms that
rows are divided by have no gradient (section 4.3 there).

Shape legend: T rows of the stream, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaframe.architecture.adapters import Adapter
from megaframe.distributed.collectives import Group, all_reduce
from megaframe.ops.autograd import get_direct_apply
from megaframe.ops.matmul import multiply
from megaframe.parameters.parameter import Parameter


class _Addition(torch.autograd.Function):
    """Adds to the results of one of the matrices of a weight, in place."""

    @staticmethod
    def forward(
        ctx: Any, y_TO: Tensor, added: Tensor, outputs: tuple[int, ...], place: Adapter
    ) -> Tensor:
        ctx.outputs, ctx.place = outputs, place
        part = _select_part(y_TO, outputs, place)
        part.add_(added.view(part.shape))
        ctx.mark_dirty(y_TO)
        return y_TO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (dy,) = gradients
        part = _select_part(dy, ctx.outputs, ctx.place)
        # The matrix's own part is copied, unless it is all of the gradient.
        return dy, part.reshape(len(dy), -1), None, None


apply_addition = get_direct_apply(_Addition)


def _select_part(y_TO: Tensor, outputs: tuple[int, ...], place: Adapter) -> Tensor:
    """Return the results of one matrix, as a view [T, ...]."""
    y = y_TO.view(len(y_TO), *outputs)
    # Of the only matrix tensor ranks may have some outputs: those that there are.
    return y.narrow(place.dim + 1, place.start, place.size) if place.name else y


@dataclass(frozen=True)
class AdaptedRows:
    """The rows of a matrix with an adapter and magnitudes: where they are, and the parameters."""

    place: Adapter
    a: Parameter
    b: Parameter
    magnitude: Parameter


class RowMagnitudes:
    """The magnitudes of all matrices of a weight that have any.

    What results are multiplied by follows from the weights, which only change between steps. So it
    is the same in every pass of a step, whose backward passes find it here and keep nothing.
    """

    _factors_O: Tensor
    _inverse_O: Tensor

    def __init__(self, weight: Parameter, adapted: Sequence[AdaptedRows], group: Group) -> None:
        """Keep the parameters.

        Args:
            weight: The weight.
            adapted: Its matrices that have magnitudes.
            group: The ranks that have parts of each row.
        """
        self._weight, self._adapted, self._group = weight, adapted, group

    def rescale(self, y_TO: Tensor) -> Tensor:
        """Return the results, without bias, of the weight with its rows rescaled."""
        self._measure()
        result: Tensor = _apply_rescaling(y_TO, self)
        return result

    @torch.no_grad()
    def _measure(self) -> None:
        """Compute the factors of the current weights; 1 where a matrix has no magnitudes."""
        value = self._weight.value
        outputs = self._outputs
        dtype = torch.promote_types(value.dtype, torch.float32)
        self._factors_O = value.new_ones(outputs, dtype=dtype).view(-1)
        self._inverse_O = torch.zeros_like(self._factors_O)
        for rows in self._adapted:
            place, rank = rows.place, rows.place.rank
            part = _select_part(value.view(1, -1), value.shape, place)
            a_RI, b_OR = rows.a.value.view(rank, -1), rows.b.value.view(-1, rank)
            squares = _measure_rows(part.reshape(len(b_OR), -1), a_RI, b_OR, place.scale)
            norms = all_reduce(squares, self._group).wait().sqrt_()
            factors = compute_row_factors(norms, rows.magnitude.value.view(-1))
            for whole, own in zip((self._factors_O, self._inverse_O), factors, strict=True):
                into = _select_part(whole.view(1, -1), outputs, place)
                into.copy_(own.view(into.shape))

    @property
    def _outputs(self) -> tuple[int, ...]:
        shape = self._weight.box.shape
        return shape[: len(shape) - self._weight.spec.inputs]

    def multiply(self, y_TO: Tensor) -> Tensor:
        """Return y times the factors, rounded once to the type of y."""
        out = torch.empty_like(y_TO)
        torch.mul(y_TO, self._factors_O, out=out)
        return out

    def add_gradients(self, dy_TO: Tensor, y_TO: Tensor) -> None:
        """Add to the gradients of the magnitudes.

        Args:
            dy_TO: Gradient of the rescaled results.
            y_TO: The results before.
        """
        sums_O = (dy_TO * y_TO).sum(0, dtype=self._inverse_O.dtype) * self._inverse_O
        for rows in self._adapted:
            part = _select_part(sums_O.view(1, -1), self._outputs, rows.place)
            rows.magnitude.add(part.reshape(rows.magnitude.box.shape))


class _Rescaling(torch.autograd.Function):
    """Multiplies each result by the factor of its row of the weight."""

    @staticmethod
    def forward(ctx: Any, y_TO: Tensor, magnitudes: RowMagnitudes) -> Tensor:
        ctx.save_for_backward(y_TO)
        ctx.magnitudes = magnitudes
        return magnitudes.multiply(y_TO)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (y_TO,), (dy_TO,) = ctx.saved_tensors, gradients
        ctx.magnitudes.add_gradients(dy_TO, y_TO)
        return ctx.magnitudes.multiply(dy_TO), None


_apply_rescaling = get_direct_apply(_Rescaling)


def _measure_rows(matrix_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    """Return the squared norms of the rows of W and of W + scale B A, [2, O] in at least fp32,
    without making the sum. Those of parts of the inputs add up."""
    dtype = torch.promote_types(matrix_OI.dtype, torch.float32)
    squares_O = torch.linalg.vector_norm(matrix_OI, dim=1, dtype=dtype).square()
    # |w + s A^T b|^2 = |w|^2 + s b (2 A w + s A A^T b)
    crossed_OR = multiply(matrix_OI, a_RI.t()).to(dtype)
    squared_OR = multiply(b_OR, multiply(a_RI, a_RI.t())).to(dtype)
    added_O = (b_OR * (2 * crossed_OR + scale * squared_OR)).sum(1) * scale
    return torch.stack((squares_O, squares_O + added_O))


def compute_row_factors(norms: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the rows of W + scale B A are multiplied by, and one over their norms.

    Args:
        norms: Of the rows of W and of W + scale B A, [2, ...]; not a number counts as 0.
        magnitude: What magnitudes differ by from the former, [...].
    """
    base, whole = norms
    # Without a direction a row stays as it is, and so can learn one.
    inverse = torch.where(whole > 0, 1 / whole, 0.0)
    return torch.where(whole > 0, (base + magnitude) * inverse, 1.0), inverse
