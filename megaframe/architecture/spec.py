"""ParamSpec: everything that one parameter says about itself, and what is derived from it.

A spec is declared only by the layer that owns the parameter. The local slice, initial value,
gradient groups, bucket, norm and count, checkpoint slices, decay groups and model FLOPs are derived
from it. No code looks at names or attaches attributes to tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any, Literal

from megaframe.config.adapters import QuantisationConfig

Role = Literal["matrix", "embedding", "head", "gain", "bias", "balance", "table"]
"""matrix, head: multiplied once per token. embedding: looked up. gain, bias: of norms and linears.
balance: what a router knows of the load of its experts; not trained by gradients. table: numbers
of experts that a router looks up; not trained at all."""
NO_PARAMETERS: tuple[Role, ...] = ("balance", "table")
"""Roles of what no gradient trains, so that it does not count as parameters."""
EXPERT_AXES = ("expert", "expert_tensor")
"""Axes that split only the parameters of experts."""


@dataclass(frozen=True)
class Normal:
    """Initial values drawn from a normal distribution of mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same initial value everywhere."""

    value: float


class DrawnByLayer(ABC):
    """Initial values that the layer that declares them draws. A frozen dataclass."""

    @abstractmethod
    def draw(self, seed: int) -> Any:
        """Return the whole tensor, or a numpy array, the same on all ranks.

        Args:
            seed: Seed of the run.
        """


@dataclass(frozen=True)
class Growth:
    """How much a parameter has grown from the base model of a parametrisation.

    Attributes:
        inputs: The number of inputs of the matrix relative to that of the base model; 1 for what
            is no matrix.
        outputs: The same of its outputs, or of the elements of a vector.
        multiplier: The factor of what is computed with it.
    """

    inputs: float = 1.0
    outputs: float = 1.0
    multiplier: float = 1.0


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a tensor: its offset and size in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The piece as an index into the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of both boxes, None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if min(shape) > 0 else None

    def make_relative(self, outer: Box) -> Box:
        """Return the piece relative to the start of `outer`, which contains it."""
        offset = tuple(o - start for o, start in zip(self.offset, outer.offset, strict=True))
        return Box(offset, self.shape)


@dataclass(frozen=True)
class ParamSpec:
    """A whole logical tensor, independent of the layout.

    Attributes:
        name: Dotted path, unique in the model.
        shape: Full shape. Fused weights keep their parts as separate dims, so that a shard is
            always a plain slice.
        init: Distribution of the initial values.
        role: What the model uses it for.
        decay: Whether weight decay applies.
        axes: {dim: axis} for the dims that are split; the others are whole on every rank.
        inputs: How many of the last dims are inputs of a matrix; the dims before are its outputs.
        fused: {dim: sizes of the parts along it} if one weight is several matrices.
        token_share: Share of the tokens that each element is applied to; small for experts.
        quantised: How it is kept as codes, if it is frozen; None as a number for each element.
        growth: From which initial values and learning rates follow beside `init`. Layers leave it
            out; the model sets it.
    """

    name: str
    shape: tuple[int, ...]
    init: Normal | Constant | DrawnByLayer
    role: Role
    decay: bool = False
    axes: Mapping[int, str] = field(default_factory=dict)
    inputs: int = 1
    fused: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    token_share: Fraction = Fraction(1)
    quantised: QuantisationConfig | None = None
    growth: Growth = Growth()

    @property
    def size(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def matrices(self) -> list[Box]:
        """The matrices that the tensor consists of: one for each combination of `fused` parts."""
        # A fused weight is several matrices to Muon, e.g. queries, keys and values.
        parts = [
            list(_iterate_spans(self.fused.get(dim, (size,))))
            for dim, size in enumerate(self.shape)
        ]
        return [Box(*zip(*place, strict=True)) for place in product(*parts)]

    def find_local_box(self, coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> Box:
        """Return the piece of one rank. If a dim is not divisible, the first ranks have one index
        more. If it has fewer indices than the axis has ranks, neighbouring ranks hold the same one.

        Args:
            coordinate: The rank's index along each axis.
            sizes: The size of each axis.
        """
        offset, shape = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.axes.items():
            # With fewer items than ranks, neighbours hold the same one, as with few key/value
            # heads.
            copies = count_copies(self.shape[dim], sizes[axis])
            index, parts = coordinate[axis] // copies, sizes[axis] // copies
            offset[dim], shape[dim] = locate_shard(self.shape[dim], index, parts)
        return Box(tuple(offset), tuple(shape))

    def find_reduction_axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Return the axes over which gradients are summed: those whose ranks hold the same piece
        and each compute only a part of its gradient.

        Data and context ranks each have some of the tokens. A parameter that the tensor axis does
        not split sees some of the rows on each tensor rank; a piece that neighbouring tensor ranks
        share sees some of the heads on each. Each replica of an expert has some of its tokens.
        """
        # Tokens come to experts from all ranks, so only the replicas of an expert are left to sum
        # over.
        if any(axis in EXPERT_AXES for axis in self.axes.values()):
            # What ranks that divide an expert's width all have, each computes a part of.
            whole = "expert_tensor" not in self.axes.values() and sizes["expert_tensor"] > 1
            return ("expert_data", "expert_tensor") if whole else ("expert_data",)
        for dim, axis in self.axes.items():
            if axis == "tensor":
                # Ranks with the same piece each see the gradient of some of the query heads.
                shared = count_copies(self.shape[dim], sizes["tensor"]) > 1
                return ("data", "context", "tensor_copies") if shared else ("data", "context")
        return ("data", "context", "tensor") if sizes["tensor"] > 1 else ("data", "context")


def iterate_row_major_runs(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield elements `start` to `stop` of a box, in row-major order, as consecutive boxes: at most
    two for each dim but the last, plus one."""
    if start >= stop:
        return
    row = math.prod(box.shape[1:])
    # Whole rows are `first` to `last`; what is left on both sides is cut within a row.
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _iterate_runs_of_row(box, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _iterate_runs_of_row(box, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.shape[1:]))
    if last * row < stop:
        yield from _iterate_runs_of_row(box, last, 0, stop - last * row)


def _iterate_runs_of_row(box: Box, row: int, start: int, stop: int) -> Iterator[Box]:
    """Do the same for elements of one row of a box with at least two dims."""
    for inner in iterate_row_major_runs(Box(box.offset[1:], box.shape[1:]), start, stop):
        yield Box((box.offset[0] + row, *inner.offset), (1, *inner.shape))


def _iterate_spans(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, size) of consecutive parts with these sizes."""
    start = 0
    for size in sizes:
        yield start, size
        start += size


def count_copies(total: int, parts: int) -> int:
    """Return how many neighbouring ranks hold the same item when `total` items are divided among
    `parts` ranks: 1 unless there are fewer items than ranks."""
    return parts // total if 0 < total < parts else 1


def locate_shard(total: int, index: int, parts: int) -> tuple[int, int]:
    """Return start and length of part `index` when `total` items are divided among `parts` ranks in
    order, the first ones getting one more if it is not divisible."""
    whole, remainder = divmod(total, parts)
    return index * whole + min(index, remainder), whole + (index < remainder)


def count_parameters(specs: Iterable[ParamSpec]) -> int:
    """Return the number of parameters of the model, without what routers know of the load, and
    without their tables."""
    return sum(spec.size for spec in specs if spec.role not in NO_PARAMETERS)


def count_active_parameters(specs: Iterable[ParamSpec]) -> int:
    """Return the number of parameters that one token uses: of the experts, only those that it is
    routed to."""
    trained = (spec for spec in specs if spec.role not in NO_PARAMETERS)
    return int(sum(spec.size * spec.token_share for spec in trained))
