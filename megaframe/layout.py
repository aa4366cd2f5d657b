"""Layout: the sizes of all axes, the coordinate of every rank, and groups, as plain integers.

The ranks of a pipeline stage are numbered in two views, one for dense parameters and one for
experts, so that attention and experts can choose their sizes independently. All methods are
computed from one table of strides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from math import gcd, isqrt, prod
from typing import Protocol

from megaframe.errors import TIMES, UserError, find_nearest_divisors, find_nearest_multiples

DENSE_VIEW = ("tensor", "context", "data", "pipeline")
EXPERT_VIEW = ("expert_tensor", "expert", "expert_data", "pipeline")
DATA_PARTS = ("data_shard", "data_replicate", "islands")
"""The parts of `data`: ranks that shard one copy of the state (the fastest index), copies of it,
and islands, which sum no gradients with each other (the slowest index)."""
AXIS_SETS: tuple[tuple[str, ...], ...] = (
    ("data",),
    ("tensor",),
    ("data_shard", "context"),
    ("data_shard", "context", "tensor"),
    ("data_replicate",),
    ("islands",),
    ("pipeline", "data_shard", "context", "tensor"),
    ("pipeline", "data_shard", "data_replicate", "context", "tensor"),
    ("pipeline", "data", "context", "tensor"),
)
"""The axis sets over which some part of megaframe communicates. The last two are an island and the
world."""
EXPERT_SETS: tuple[tuple[str, ...], ...] = (
    ("context", "tensor"),
    ("expert",),
    ("expert_tensor",),
    ("expert", "expert_tensor"),
    ("expert_shard",),
)
"""The axis sets over which experts communicate."""


class AxisSizes(Protocol):
    """The axis sizes that a config asks for, such as `config.parallel`."""

    @property
    def tensor(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def data(self) -> int | None:
        """None: the ranks that the other axes leave."""
        ...

    @property
    def pipeline(self) -> int: ...

    @property
    def expert(self) -> int: ...

    @property
    def expert_tensor(self) -> int: ...

    @property
    def data_replicate(self) -> int: ...

    @property
    def islands(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """The size of every axis.

    Ranks are numbered with tensor fastest, then context, the data ranks of one island, pipeline,
    and islands slowest, so that an island is consecutive ranks. `data` counts the data ranks of all
    islands. For experts, the tensor × context × data ranks of a stage are viewed as expert_tensor
    (fastest), expert, and `expert_data`, the replicas of an expert.

    Raises:
        UserError: For sizes that do not form a layout.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    data_replicate: int = 1
    islands: int = 1

    def __post_init__(self) -> None:
        _raise_mistakes(find_layout_mistakes(asdict(self)))

    @classmethod
    def from_parallel(cls, parallel: AxisSizes, world: int) -> Layout:
        """Return the layout of `world` ranks under a config.

        If the config leaves `data` out, it is what the other axes leave of `world`.

        Raises:
            UserError: If the product of the sizes is not `world`.
        """
        sizes, mistakes = resolve_axis_sizes(parallel, world)
        _raise_mistakes(mistakes)
        return cls(**sizes)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.context * self.data * self.pipeline

    @property
    def data_shard(self) -> int:
        """Data ranks that shard one copy of the state."""
        return self.island_data // self.data_replicate

    @property
    def island_data(self) -> int:
        """Data ranks of an island: those that sum gradients."""
        return self.data // self.islands

    @property
    def expert_data(self) -> int:
        """Replicas of an expert within a stage."""
        return self.tensor * self.context * self.data // (self.expert * self.expert_tensor)

    @property
    def expert_shard(self) -> int:
        """Replicas of an expert within one copy of the state."""
        return self.expert_data // (self.data_replicate * self.islands)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of every axis of both views."""
        return {axis: prod(size for _, size in parts) for axis, parts in self._divide().items()}

    def get_coordinate(self, rank: int) -> Mapping[str, int]:
        """Return the index of `rank` on each axis of the dense view."""
        return self._compute_coordinate(rank, DENSE_VIEW)

    def get_expert_coordinate(self, rank: int) -> Mapping[str, int]:
        """Return the index of `rank` on each axis of the expert view."""
        return self._compute_coordinate(rank, EXPERT_VIEW)

    def get_full_coordinate(self, rank: int) -> Mapping[str, int]:
        """Return the index of `rank` on each axis of both views."""
        return {**self.get_coordinate(rank), **self.get_expert_coordinate(rank)}

    def rank(self, **coordinate: int) -> int:
        """Return the rank at `coordinate`, which is given in one view.

        The index of an axis that is left out is 0.

        Raises:
            ValueError: For an index outside of its axis and for axes of two views.
        """
        _check_view(coordinate)
        parts, rank = self._divide(), 0
        for axis, index in coordinate.items():
            if not 0 <= index < prod(size for _, size in parts[axis]):
                raise ValueError(f"{axis}={index} is outside of 0..{self.sizes[axis] - 1}")
            for stride, size in parts[axis]:
                rank += index % size * stride
                index //= size
        return rank

    def list_members(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks whose coordinate differs from that of `rank` only on `axes`, including
        `rank`, in ascending order (fastest axis first).

        The view is the one that `axes` belong to. `data` is `data_shard`, `data_replicate` and
        `islands`.
        """
        self._check_rank(rank)
        parts = self._list_parts(axes)
        first = rank - sum(rank // stride % size * stride for stride, size in parts)
        return tuple(first + offset for offset in self._list_offsets(axes))

    def list_groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return the distinct `list_members(rank, *axes)`: a partition of the world."""
        parts, offsets = self._list_parts(axes), self._list_offsets(axes)
        firsts = (
            rank
            for rank in range(self.world)
            if all(rank // stride % size == 0 for stride, size in parts)
        )
        return tuple(tuple(first + offset for offset in offsets) for first in firsts)

    def __str__(self) -> str:
        axes = [f"{axis} {self.sizes[axis]}" for axis in DENSE_VIEW if self.sizes[axis] > 1]
        text = f"{self.world} rank{'s' if self.world > 1 else ''}"
        if axes:
            text += " = " + TIMES.join(axes)
        if self.data_replicate > 1:
            text += f" (data = shard {self.data_shard}{TIMES}replicate {self.data_replicate})"
        if self.islands > 1:
            text += f" in {self.islands} islands"
        if self.expert > 1 or self.expert_tensor > 1:
            experts = [f"{axis} {self.sizes[axis]}" for axis in EXPERT_VIEW[:3]]
            text += "; experts: " + TIMES.join(experts) + " per stage"
        return text

    def _divide(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return the parts of every axis, the fastest first, as (distance in ranks between
        neighbours, size)."""
        context = self.tensor
        data = context * self.context
        pipeline = data * self.island_data
        experts = self.expert_tensor * self.expert
        islands = ((pipeline * self.pipeline, self.islands),) if self.islands > 1 else ()
        return {
            "tensor": ((1, self.tensor),),
            "context": ((context, self.context),),
            "data": ((data, self.island_data), *islands),
            "data_shard": ((data, self.data_shard),),
            "data_replicate": ((data * self.data_shard, self.data_replicate),),
            "islands": islands,
            "pipeline": ((pipeline, self.pipeline),),
            "expert_tensor": ((1, self.expert_tensor),),
            "expert": ((self.expert_tensor, self.expert),),
            "expert_data": ((experts, self.expert_data // self.islands), *islands),
            "expert_shard": ((experts, self.expert_shard),),
        }

    def _compute_coordinate(self, rank: int, view: tuple[str, ...]) -> Mapping[str, int]:
        self._check_rank(rank)
        coordinate, all_parts = {}, self._divide()
        for axis in view:
            index, times = 0, 1
            for stride, size in all_parts[axis]:
                index += rank // stride % size * times
                times *= size
            coordinate[axis] = index
        return coordinate

    def _list_parts(self, axes: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return (distance in ranks between neighbours, size) of all parts of `axes`."""
        parts = self._divide()
        return [part for axis in _check_view(axes) for part in parts[axis]]

    def _list_offsets(self, axes: tuple[str, ...]) -> list[int]:
        """Return the distance from the first member of a group over `axes` to each member,
        ascending."""
        steps = [range(0, stride * size, stride) for stride, size in self._list_parts(axes)]
        return sorted(sum(step) for step in product(*steps))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside of 0..{self.world - 1}")


@cache
def exchange_steps(ranks: int, inside: int) -> tuple[int, int, int]:
    """Return in which steps the ranks of a group exchange their parts of a sum.

    In a single step each of N ranks sends a message to each other one: N - 1 messages, whose
    latencies add up, and as many connections. In steps over groups of a, then b, ... ranks, with
    N = a b ..., the bytes are the same and the messages are (a - 1) + (b - 1) + ...; but every step
    rounds once more what it sends. The runtime and the planner both call this function.

    Args:
        ranks: ranks of the group.
        inside: neighbours of the group in one node, the same in every node; 1 if they differ.

    Returns:
        The ranks that exchange in each of three steps, whose product is `ranks`; 1 where there is
        no such step. The first is within a node, so that slow links carry only what the ranks of a
        node have summed. The remaining ranks are divided in two, by the divisor nearest to the
        root, where this saves at least half of their messages; fewer would not be worth a rounding.
    """
    node = inside if 1 < inside < ranks and ranks % inside == 0 else 1
    nodes = ranks // node
    near = next(divisor for divisor in range(isqrt(nodes), 0, -1) if nodes % divisor == 0)
    far = nodes // near
    if 2 * (near - 1 + far - 1) > nodes - 1:
        near, far = nodes, 1
    return node, near, far


def count_ranks_per_node(groups: Iterable[Sequence[int]], node_size: int) -> int:
    """Return how many ranks of a group are in one node, if that is the same for every node and
    every one of `groups`, and otherwise 1.

    Args:
        groups: World ranks of each group.
        node_size: Ranks per node.
    """
    counts: set[int] = set()
    for ranks in groups:
        nodes = [rank // node_size for rank in ranks]
        counts |= {nodes.count(node) for node in set(nodes)}
    return counts.pop() if len(counts) == 1 else 1


def exchange_groups(ranks: Sequence[int], steps: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Return for each step the groups in which ranks exchange: in the first one neighbours, in a
    later one the ranks with the same indices in the groups of all steps before."""
    groups_per_step, stride = [], 1
    for size in steps:
        block = stride * size
        groups_per_step.append(
            [
                tuple(ranks[start + offset : start + block : stride])
                for start in range(0, len(ranks), block)
                for offset in range(stride)
            ]
        )
        stride = block
    return groups_per_step


def _check_view(axes: Mapping[str, int] | tuple[str, ...]) -> set[str]:
    """Return the set of axes. Raises `ValueError` unless all belong to one view, and if `data` is
    combined with one of its parts."""
    named = set(axes)
    dense = named <= {*DENSE_VIEW, *DATA_PARTS}
    if not dense and not named <= {*EXPERT_VIEW, "expert_shard"}:
        raise ValueError(f"axes {sorted(named)} are not of one view: {DENSE_VIEW} or {EXPERT_VIEW}")
    if "data" in named and named & {*DATA_PARTS}:
        raise ValueError(f"axis data already holds {', '.join(DATA_PARTS)}")
    return named


def _raise_mistakes(mistakes: list[str]) -> None:
    if mistakes:
        raise UserError("\n".join(mistakes))


def find_layout_mistakes(sizes: Mapping[str, int]) -> list[str]:
    """Return why `sizes`, one per axis, `data_replicate` and `islands`, cannot be a layout; empty
    if valid."""
    mistakes = [
        f"parallel.{axis}={size} must be a whole number >= 1"
        for axis, size in sizes.items()
        if type(size) is not int or size < 1
    ]
    if mistakes:
        return mistakes
    data, replicas, islands = sizes["data"], sizes["data_replicate"], sizes["islands"]
    if data % islands:
        mistakes.append(
            f"parallel.islands={islands} does not divide parallel.data={data}; "
            f"use {find_nearest_divisors(data, islands)}"
        )
        return mistakes
    if data // islands % replicas:
        ranks = f"parallel.data={data}"
        if islands > 1:
            ranks = f"the {data // islands} data ranks of each of parallel.islands={islands}"
        mistakes.append(
            f"parallel.data_replicate={replicas} does not divide {ranks}; "
            f"use {find_nearest_divisors(data // islands, replicas)}"
        )
    stage = sizes["tensor"] * sizes["context"] * data
    of_a_stage = f"the {stage} ranks of a stage ({TIMES.join(('tensor', 'context', 'data'))})"
    expert, expert_tensor = sizes["expert"], sizes["expert_tensor"]
    if stage % expert_tensor:
        mistakes.append(
            f"parallel.expert_tensor={expert_tensor} does not divide {of_a_stage}; "
            f"use {find_nearest_divisors(stage, expert_tensor)}"
        )
    elif stage % (expert * expert_tensor):
        mistakes.append(
            f"parallel.expert={expert}{TIMES}parallel.expert_tensor={expert_tensor} does not "
            f"divide {of_a_stage}; use "
            f"parallel.expert={find_nearest_divisors(stage // expert_tensor, expert)}"
        )
    elif stage // islands % (expert * expert_tensor):
        mistakes.append(
            f"parallel.expert={expert}{TIMES}parallel.expert_tensor={expert_tensor} does not "
            f"divide the {stage // islands} ranks of a stage in each of "
            f"parallel.islands={islands}; use parallel.islands="
            f"{find_nearest_divisors(gcd(stage // (expert * expert_tensor), data), islands)}"
        )
    elif data // islands % replicas == 0 and stage // islands // replicas % (
        expert * expert_tensor
    ):
        copies = gcd(stage // islands // (expert * expert_tensor), data // islands)
        mistakes.append(
            f"parallel.expert={expert}{TIMES}parallel.expert_tensor={expert_tensor} does not "
            f"divide the {stage // islands // replicas} ranks of a stage that hold one of "
            f"parallel.data_replicate={replicas} copies; use parallel.data_replicate="
            f"{find_nearest_divisors(copies, replicas)}"
        )
    return mistakes


def count_fewest_ranks(parallel: AxisSizes) -> int:
    """Return the smallest world that the axes can be a layout of."""
    stage, experts = parallel.tensor * parallel.context, parallel.expert * parallel.expert_tensor
    fewest = parallel.islands * parallel.data_replicate * (experts // gcd(experts, stage))
    return stage * parallel.pipeline * (parallel.data or fewest)


def resolve_axis_sizes(parallel: AxisSizes, world: int) -> tuple[dict[str, int], list[str]]:
    """Return the axis sizes of `parallel` for `world` ranks, and everything that is wrong with
    them.

    If `parallel.data` is not given, it is the world divided by the other axes, rounded down, and at
    least 1.
    """
    other_ranks = parallel.tensor * parallel.context * parallel.pipeline
    data = parallel.data or max(1, world // other_ranks)
    sizes = {
        "tensor": parallel.tensor,
        "context": parallel.context,
        "data": data,
        "pipeline": parallel.pipeline,
        "expert": parallel.expert,
        "expert_tensor": parallel.expert_tensor,
        "data_replicate": parallel.data_replicate,
        "islands": parallel.islands,
    }
    mistakes = find_layout_mistakes(sizes)
    if other_ranks * data != world:
        mistakes.append(_describe_world_mistake(parallel, data, other_ranks, world))
    return sizes, mistakes


def _describe_world_mistake(parallel: AxisSizes, data: int, other_ranks: int, world: int) -> str:
    """Return the message if `data` × `rest` (the product of the other axes) is not the world."""
    axes = TIMES.join(
        f"parallel.{axis}={getattr(parallel, axis)}" for axis in ("tensor", "context", "pipeline")
    )
    if world % other_ranks:
        return (
            f"{axes} = {other_ranks} does not divide the world of {world} ranks; start "
            f"{find_nearest_multiples(other_ranks, world)} ranks or make the product "
            f"{find_nearest_divisors(world, other_ranks)}"
        )
    return (
        f"parallel.data={data}{TIMES}{axes} = {data * other_ranks} is not the world of {world} "
        f"ranks; use parallel.data={world // other_ranks} or leave it out"
    )
