"""Products with a weight, as layers declare them.

The parameters of a linear layer, its FLOPs, the time of its products, what it sends over the tensor
axis and what it keeps for its weight gradient all follow from one `LinearSpec`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from megaframe.architecture.adapters import Adapter
from megaframe.architecture.spec import Constant, Normal, ParamSpec
from megaframe.config.adapters import QuantisationConfig

Number = Any
"""A number, or a numpy array of them."""


@dataclass(frozen=True)
class LinearSpec:
    """y = x W^T + b, with a weight of shape (*outputs, *inputs).

    Attributes:
        inputs: Dims that are summed over.
        outputs: Dims of the result. Fused parts and heads are separate dims.
        std: Standard deviation of the initial weight.
        split: The dim of the weight that tensor ranks divide, one of the outputs (a column linear)
            or of the inputs (a row linear). With None every rank has the undivided weight and
            multiplies its own rows, without communication.
        bias: Whether there is one; it starts at 0.
        fused: {dim along which the weight is several matrices: their sizes}.
        matrices: The names of these matrices, in order.
        adapters: Products of low rank that are added to matrices of the weight.
        quantised: How the weight is kept as codes; None as a number for each element.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    std: float
    split: int | None = None
    bias: bool = False
    fused: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    matrices: tuple[str, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    quantised: QuantisationConfig | None = None

    @property
    def terms(self) -> int:
        """Elements of an input row."""
        return math.prod(self.inputs)

    @property
    def results(self) -> int:
        """Elements of an output row."""
        return math.prod(self.outputs)

    @property
    def elements(self) -> int:
        """Elements of the weight that one token is multiplied by."""
        return self.terms * self.results

    @property
    def is_column(self) -> bool:
        """Whether tensor ranks divide the outputs."""
        return self.split is not None and self.split < len(self.outputs)

    @property
    def is_row(self) -> bool:
        """Whether tensor ranks divide the inputs."""
        return self.split is not None and not self.is_column

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the weight, of the bias if there is one, and of all adapters."""
        yield from self.declare_own_parameters(name)
        for adapter in self.adapters:
            for factor, factor_name in zip(
                self.make_factors(adapter), adapter.name_factors(name), strict=True
            ):
                yield from factor.declare_own_parameters(factor_name)
            if adapter.dora:
                yield self.declare_magnitude(adapter, name)

    def declare_own_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the weight and, if there is one, of the bias."""
        axes = {} if self.split is None else {self.split: "tensor"}
        yield ParamSpec(
            f"{name}.weight",
            (*self.outputs, *self.inputs),
            _draw(self.std),
            role="matrix",
            decay=True,
            axes=axes,
            inputs=len(self.inputs),
            fused=self.fused,
            quantised=self.quantised,
        )
        if self.bias:
            # Only a column linear divides its bias: that of a row linear is added to complete sums.
            axes = axes if self.is_column else {}
            yield ParamSpec(f"{name}.bias", self.outputs, Constant(0.0), role="bias", axes=axes)

    def list_matrices(self) -> Iterator[tuple[str, Adapter]]:
        """Yield the name of each matrix of the weight, empty if it is the only one, and an adapter
        of rank 0 at its place."""
        for dim, sizes in self.fused.items():
            names = self.matrices or tuple(map(str, range(len(sizes))))
            for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
                yield name, Adapter(dim=dim, start=sum(sizes[:index]), size=size)
        if not self.fused:
            yield "", Adapter(size=self.outputs[0])

    def make_factors(self, adapter: Adapter) -> tuple[LinearSpec, LinearSpec]:
        """Return the two products of an adapter: from the inputs to `rank` numbers per row, and
        from these to the outputs. The rows of these numbers are divided over tensor ranks like
        those of the stream, so they alone travel: the second product is a column linear where this
        one is, and the first one a row linear."""
        outputs = list(self.outputs)
        outputs[adapter.dim] = adapter.size
        bare = replace(self, matrices=(), adapters=(), fused={}, bias=False, quantised=None)
        # The variance of the values that peft draws: uniform within 1 / sqrt(inputs).
        std = (3 * self.terms) ** -0.5
        first = None if self.split is None or self.is_column else self.split - len(outputs) + 1
        down = replace(bare, outputs=(adapter.rank,), std=std, split=first)
        last = self.split if self.is_column else None
        inputs, starts = (adapter.rank,), 0.0
        up = replace(bare, inputs=inputs, outputs=tuple(outputs), std=starts, split=last)
        return down, up

    def declare_magnitude(self, adapter: Adapter, name: str) -> ParamSpec:
        """Return the spec of what is added to the norms of the rows of an adapter's matrix. It
        starts at 0: no initial value depends on the base, and low precision rounds what a norm has
        changed by, not the norm.

        Args:
            adapter: Which one.
            name: Of the linear layer in the model.
        """
        _, up = self.make_factors(adapter)
        axes = {} if up.split is None else {up.split: "tensor"}
        name = adapter.name_magnitude(name)
        return ParamSpec(name, up.outputs, Constant(0.0), role="gain", axes=axes)

    @property
    def products(self) -> Iterator[LinearSpec]:
        """The product and those of its adapters, in order of use."""
        yield self
        for adapter in self.adapters:
            yield from self.make_factors(adapter)

    def compute_local_sizes(self, tensor: Number) -> tuple[Number, Number]:
        """Return the results and the terms of one of `tensor` ranks. If there are fewer items than
        ranks, neighbouring ranks have the same one."""
        if self.split is None:
            return self.results, self.terms
        items = (*self.outputs, *self.inputs)[self.split]
        local_items = np.maximum(1.0, items / tensor) / items
        if self.is_column:
            return self.results * local_items, self.terms
        return self.results, self.terms * local_items

    def count_kept_for_weights(self, tensor: int) -> Number:
        """Return the elements per token, summed over tensor ranks, that a separate weight pass
        needs: the input, and the gradient of the output."""
        results, terms = self.compute_local_sizes(tensor)
        return (results * tensor if self.is_column else results) + (
            terms * tensor if self.is_row else terms
        )

    @property
    def rescales(self) -> bool:
        """Whether rows of the weight with its adapters have trained norms."""
        return any(adapter.dora for adapter in self.adapters)

    def count_saved_by_adapters(self, tensor: int) -> Number:
        """Return the elements per token, summed over tensor ranks, that a forward pass keeps for
        the adapters: the numbers between A and B, and the results before they are rescaled."""
        results, _ = self.compute_local_sizes(tensor)
        results = results * tensor if self.is_column else results
        return sum(adapter.rank for adapter in self.adapters) + results * self.rescales

    def count_norms(self, tensor: int) -> tuple[Number, Number]:
        """Return what the norms of rows need in each forward pass whatever the tokens: FLOPs of a
        rank, and sums over tensor ranks, which have parts of the rows if they divide inputs."""
        results, terms = self.compute_local_sizes(tensor)
        flops: Number = 0
        sums: Number = 0
        for adapter in self.adapters:
            if adapter.dora:
                rows, rank = results * adapter.size / self.outputs[adapter.dim], adapter.rank
                flops += 2 * rank * (rows * terms + rank * (rows + terms))
                sums += 2 * rows * self.is_row
        return flops, sums

    def count_shared_by_adapters(self, tensor: int, *, recompute: bool) -> Number:
        """Return the elements per token, summed over tensor ranks, that a weight pass needs for the
        adapters and keeps for the weight itself: the inputs, and the gradients of the results if
        those of the matrix are a view of them.

        Args:
            tensor: Number of tensor ranks.
            recompute: Whether norms and activations are computed again for each product.
        """
        results, terms = self.compute_local_sizes(tensor)
        shared: Number = 0
        for adapter in self.adapters:
            if not (adapter.dropout or (recompute and adapter.inputs == "computed")):
                shared += terms * tensor if self.is_row else terms
            before = math.prod(self.outputs[: adapter.dim])
            if before <= tensor or adapter.size * math.prod(self.outputs[adapter.dim + 1 :]) == 1:
                own = results * adapter.size / self.outputs[adapter.dim]
                shared += own * tensor if self.is_column else own
        return shared

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """What the rows of a token move over the tensor axis.

        A column linear gathers its input, and again for its weight gradient, and scatters the
        gradient of the input. A row linear scatters its output and gathers the gradient of it, and
        once more in a separate weight pass.
        """
        if self.is_column:
            return TensorTraffic(self.terms, 2 * self.terms, 0)
        if self.is_row:
            return TensorTraffic(self.results, self.results, self.results)
        return TensorTraffic(0, 0, 0)


def _draw(std: float) -> Normal | Constant:
    return Normal(std) if std else Constant(0.0)


@dataclass(frozen=True)
class RepeatedLinearSpec(LinearSpec):
    """A product that every tensor rank computes for the rows of all of them."""


@dataclass(frozen=True)
class TensorTraffic:
    """Elements per token that are gathered or scattered over the tensor axis.

    Attributes:
        forward: In a forward pass, which a recomputed block repeats.
        backward: In a backward pass.
        weight: What a separate weight pass adds.
    """

    forward: int
    backward: int
    weight: int

    def __add__(self, other: TensorTraffic) -> TensorTraffic:
        return TensorTraffic(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight + other.weight,
        )


@dataclass(frozen=True)
class GroupedLinearSpec(LinearSpec):
    """One such product for each of many experts, each over the rows that are routed to it. The
    weight has the shape (experts, *outputs, *inputs); `split` and `fused` count the dims after the
    first, and the expert axis divides the experts. Ranks that divide an expert's inputs divide its
    bias too, and each adds its part to its partial sum: the rows are complete on all of them.

    Attributes:
        experts: Number of experts.
        top_k: How many of them a token is routed to.
    """

    experts: int = 1
    top_k: int = 1

    def declare_own_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of the weights and, if there are any, of the biases."""
        divided = {} if self.split is None else {self.split + 1: "expert_tensor"}
        token_share = Fraction(self.top_k, self.experts)
        yield ParamSpec(
            f"{name}.weight",
            (self.experts, *self.outputs, *self.inputs),
            _draw(self.std),
            role="matrix",
            decay=True,
            axes={0: "expert", **divided},
            inputs=len(self.inputs),
            fused={
                0: (1,) * self.experts,  # one matrix per expert
                **{dim + 1: sizes for dim, sizes in self.fused.items()},
            },
            token_share=token_share,
            quantised=self.quantised,
        )
        if self.bias:
            yield ParamSpec(
                f"{name}.bias",
                (self.experts, *self.outputs),
                Constant(0.0),
                role="bias",
                axes={0: "expert", 1 + (self.split or 0) * self.is_column: "expert_tensor"},
                token_share=token_share,
            )

    @property
    def elements(self) -> int:
        """Elements of the weights that one token is multiplied by."""
        return self.top_k * self.terms * self.results

    def count_kept_for_weights(self, tensor: int) -> Number:
        """Rows of experts are kept as dispatch brings them, which their layer knows."""
        raise NotImplementedError

    @property
    def tensor_traffic(self) -> TensorTraffic:
        """Nothing: rows go to experts from the rank that has them."""
        return TensorTraffic(0, 0, 0)
