"""ParamSpec: everything that one parameter says about itself, and what follows from it.

The layer that owns a parameter declares its spec and nothing else does. Local slice, initial value,
gradient groups, bucket, norm and count, checkpoint slices, decay groups and model FLOPs are derived
from it; no code looks at names or hangs attributes on tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Literal

Role = Literal["matrix", "embedding", "head", "gain", "bias", "balance"]
"""matrix, head: multiplied once per token; embedding: looked up; gain, bias: of norms, linears;
balance: what a router knows of the load of its experts, which no gradient trains."""
EXPERT_AXES = ("expert", "expert_tensor")


@dataclass(frozen=True)
class Normal:
    """Initial values drawn from a normal distribution of mean 0."""

    std: float


@dataclass(frozen=True)
class Constant:
    """The same initial value everywhere."""

    value: float


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a tensor: where it starts and how far it goes in each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The same piece as an index into the full tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def shared(self, other: Box) -> Box | None:
        """The box that both hold, if there is one."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        ]
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if min(shape) > 0 else None

    def inside(self, outer: Box) -> Box:
        """The same piece, counted from the start of `outer`, which holds it."""
        offset = tuple(o - start for o, start in zip(self.offset, outer.offset, strict=True))
        return Box(offset, self.shape)


@dataclass(frozen=True)
class ParamSpec:
    """A logical tensor, whole, whatever the layout.

    name:    dotted path, unique in the model.
    shape:   full shape. Fused weights keep their parts as dims of their own, so that a shard is
             always a plain slice.
    init:    distribution of the initial values.
    role:    what the model does with it.
    decay:   whether weight decay applies.
    axes:    {dim: axis} for the dims that are split; the others are whole on every rank.
    inputs:  how many of the last dims are inputs of a matrix; those before are its outputs.
    fused:   {dim: sizes of the parts along it} where one weight is several matrices.
    used:    share of the tokens that each element meets; that of an expert is small.
    """

    name: str
    shape: tuple[int, ...]
    init: Normal | Constant
    role: Role
    decay: bool = False
    axes: Mapping[int, str] = field(default_factory=dict)
    inputs: int = 1
    fused: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    used: Fraction = Fraction(1)

    @property
    def size(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def matrices(self) -> list[Box]:
        """The matrices that the tensor is made of."""
        parts = [list(_spans(self.fused.get(dim, (size,)))) for dim, size in enumerate(self.shape)]
        return [Box(*zip(*place, strict=True)) for place in product(*parts)]

    def local(self, coordinate: Mapping[str, int], sizes: Mapping[str, int]) -> Box:
        """The piece held at `coordinate` of axes with `sizes`; remainders go to the first ranks.
        Where there are fewer things than ranks, neighbours hold the same one."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.axes.items():
            copies = copies_of(self.shape[dim], sizes[axis])
            index, parts = coordinate[axis] // copies, sizes[axis] // copies
            offset[dim], shape[dim] = share(self.shape[dim], index, parts)
        return Box(tuple(offset), tuple(shape))

    def summed_over(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes over whose ranks gradients are summed, because each has only a part of it: all
        whose ranks hold the same piece. Data and context ranks have some of the tokens; what the
        tensor axis does not split works on some of the rows, and what neighbours share on some of
        the heads. Of an expert's tokens each of its replicas has some."""
        if any(axis in EXPERT_AXES for axis in self.axes.values()):
            return ("expert_data",)
        for dim, axis in self.axes.items():
            if axis == "tensor":
                shared = copies_of(self.shape[dim], sizes["tensor"]) > 1
                return ("data", "context", "tensor_copies") if shared else ("data", "context")
        return ("data", "context", "tensor") if sizes["tensor"] > 1 else ("data", "context")


def runs(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Elements `start` to `stop` of a box, in row-major order, as boxes one after the other: at
    most two for each dim but the last, and one more."""
    if start >= stop:
        return
    row = math.prod(box.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        yield from _row_runs(box, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _row_runs(box, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.shape[1:]))
    if last * row < stop:
        yield from _row_runs(box, last, 0, stop - last * row)


def _row_runs(box: Box, row: int, start: int, stop: int) -> Iterator[Box]:
    """The same of one row of a box of at least two dims."""
    for inner in runs(Box(box.offset[1:], box.shape[1:]), start, stop):
        yield Box((box.offset[0] + row, *inner.offset), (1, *inner.shape))


def _spans(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(start, size) of parts one after the other."""
    start = 0
    for size in sizes:
        yield start, size
        start += size


def copies_of(total: int, parts: int) -> int:
    """How many neighbouring ranks hold the same thing when `total` things are dealt to `parts`
    ranks: 1, but where there are fewer things than ranks."""
    return parts // total if 0 < total < parts else 1


def share(total: int, index: int, parts: int) -> tuple[int, int]:
    """Start and length of part `index` when `total` things are dealt to `parts` ranks in order."""
    whole, rest = divmod(total, parts)
    return index * whole + min(index, rest), whole + (index < rest)


def parameter_count(specs: Iterable[ParamSpec]) -> int:
    """Number of parameters of the model, each counted once."""
    return sum(spec.size for spec in specs if spec.role != "balance")


def active_parameters(specs: Iterable[ParamSpec]) -> int:
    """Parameters that one token meets: of the experts only those that it goes to."""
    return int(sum(spec.size * spec.used for spec in specs if spec.role != "balance"))
