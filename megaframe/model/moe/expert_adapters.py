"""Adapters of experts: to each expert's matrix a product of low rank of its own is added.

Both factors are multiplied where the rows of a slice of experts are, and nothing of them is kept:
the backward pass computes the few numbers between them again. Ranks that divide an expert's inner
width each have a part of one factor and all of the other, whose gradient is summed over them.

Shape legend: E experts, n rows of a slice, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from megaframe.architecture.adapters import Adapter
from megaframe.architecture.linear import GroupedLinearSpec
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.deferred_gradients import DeferredGradients


class RowsOfExperts(Protocol):
    """How the rows of one expert, or of all, are multiplied by their matrices."""

    @property
    def experts(self) -> int | slice:
        """Index of the expert among this rank's, or all."""
        ...

    def multiply(self, x_nI: Tensor, matrix: Tensor) -> Tensor:
        """Return rows times the transposed matrix of their expert."""
        ...

    def compute_input_gradient(self, dy_nO: Tensor, matrix: Tensor) -> Tensor:
        """Return rows times the matrix of their expert."""
        ...

    def add_weight_gradient(self, weight: Parameter, dy_nO: Tensor, x_nI: Tensor) -> None:
        """Add dy^T x to the gradient of the expert's matrix."""
        ...


class ExpertAdapter(Module):
    """scale B A of one of the matrices of each expert."""

    def __init__(self, name: str, spec: GroupedLinearSpec, place: Adapter) -> None:
        """Make both factors.

        Args:
            name: Of the experts' product in the model.
            spec: What that declares.
            place: Which of its adapters this is.
        """
        self.place, self._parts = place, spec.outputs[: place.dim + 1] if place.name else ()
        factors = zip(spec.make_factors(place), place.name_factors(name), strict=True)
        self.a, self.b = (
            Parameter(own)
            for factor, factor_name in factors
            for own in factor.declare_own_parameters(factor_name)
        )

    def add_to(self, y_nO: Tensor, x_nI: Tensor, piece: RowsOfExperts) -> None:
        """Add to the results of the product, in place."""
        y = self._select(y_nO)
        low_nR = piece.multiply(x_nI, get_matrices(self.a)[piece.experts]).mul_(self.place.scale)
        y += piece.multiply(low_nR, get_matrices(self.b)[piece.experts])

    def add_input_gradient(self, dx_nI: Tensor, dy_nO: Tensor, piece: RowsOfExperts) -> Tensor:
        """Add to the gradient of the inputs, in place, and return that of the results of A."""
        d_low_nR = piece.compute_input_gradient(
            self._select(dy_nO).contiguous(), get_matrices(self.b)[piece.experts]
        ).mul_(self.place.scale)
        dx_nI += piece.compute_input_gradient(d_low_nR, get_matrices(self.a)[piece.experts])
        return d_low_nR

    def add_weight_gradients(
        self,
        dy_nO: Tensor,
        d_low_nR: Tensor,
        x_nI: Tensor,
        piece: RowsOfExperts,
        deferred: DeferredGradients,
    ) -> None:
        """Add the gradients of both factors, now or with those of the other weights."""
        low_nR = piece.multiply(x_nI, get_matrices(self.a)[piece.experts]).mul_(self.place.scale)
        deferred.add(partial(piece.add_weight_gradient, self.a, d_low_nR, x_nI))
        dy = self._select(dy_nO).clone() if self._parts else dy_nO
        deferred.add(partial(piece.add_weight_gradient, self.b, dy, low_nR))

    def _select(self, y_nO: Tensor) -> Tensor:
        """Return the results of the matrix, as a view."""
        if not self._parts:
            return y_nO
        # Matrices of one weight are its first dim, which no axis divides.
        place = self.place
        parts = y_nO.unflatten(1, (self._parts[0], -1))
        return parts[:, place.start : place.start + place.size].flatten(1)


def make_expert_adapters(name: str, spec: GroupedLinearSpec) -> list[ExpertAdapter]:
    """Return the adapters of a product of all experts.

    Args:
        name: Of the product in the model.
        spec: What it declares.
    """
    return [ExpertAdapter(name, spec, place) for place in spec.adapters]


def iterate_matrices(adapters: Sequence[ExpertAdapter]) -> Iterator[Tensor]:
    """Yield the factors of adapters, [E, outputs, inputs] each."""
    for adapter in adapters:
        yield from (get_matrices(adapter.a), get_matrices(adapter.b))


def get_matrices(weight: Parameter) -> Tensor:
    """Return the value of the weight as [experts, outputs, inputs]."""
    value = weight.value
    return value.view(value.shape[0], -1, value.shape[-1])
