"""Paths on which rows reach the experts, and on which what became of them comes back.

A path is a list of steps, and each step is a linear map: it picks rows, sends them, or gathers
them. So the way back is the transposed of the way there, which is also its gradient: no step needs
a backward of its own, and whatever sends rows out brings them home.

Shape legend: R rows of this rank, K choices of a row, N rows that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.comm import Group, Pending
from megaframe.comm.uneven import all_gather_uneven, all_to_all_uneven, reduce_scatter_uneven
from megaframe.kernels import Kernels
from megaframe.nn.turns import Turn


class Step(Protocol):
    """A linear map of rows, and its transposed. travels: over a group, which takes its time."""

    @property
    def travels(self) -> bool: ...

    def there(self, x: Tensor) -> Pending[Tensor]: ...

    def back(self, y: Tensor) -> Pending[Tensor]: ...


class Local(Step, Protocol):
    """One within a rank, which can be made for some of the places that rows go to."""

    def some(self, x: Tensor, places: slice) -> Tensor: ...


def counts(numbers: Tensor, most: int) -> Tensor:
    """How often each number below `most` is there, int64 [most]. On a GPU `bincount` would ask
    which is the least and the largest, and the host wait for it."""
    if not numbers.is_cuda:
        return torch.bincount(numbers, minlength=most)
    return numbers.new_zeros(most).scatter_add_(0, numbers, torch.ones_like(numbers))


@dataclass(frozen=True)
class Dealt:
    """Rows that lie expert after expert. ends: where those of each end, int32 [E], on the device.
    counts: how many each has, where the host knows it."""

    ends_E: Tensor
    counts: Sequence[int] | None = None

    def numbers(self) -> Sequence[int]:
        """The counts; the host may wait for them."""
        if self.counts is not None:
            return self.counts
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).tolist()


class Pick:
    """Rows `index` of so many; back, each row is the sum of all that were picked of it, in the
    order in which they were."""

    travels = False

    def __init__(self, index: Tensor, rows: int) -> None:
        self.index, self.rows = index, rows
        self._order = index.argsort(stable=True)
        self._ends = F.pad(counts(index, rows).cumsum(0), (1, 0))

    def there(self, x: Tensor) -> Pending[Tensor]:
        return Pending(self.some(x, slice(None)))

    def some(self, x: Tensor, places: slice) -> Tensor:
        return x.index_select(0, self.index[places])

    def back(self, y: Tensor) -> Pending[Tensor]:
        if not len(y):
            return Pending(y.new_zeros((self.rows, *y.shape[1:])))
        sums = F.embedding_bag(
            self._order, y.reshape(len(y), -1), self._ends, mode="sum", include_last_offset=True
        )
        return Pending(sums.view(self.rows, *y.shape[1:]))


class Sort:
    """Each row at the places of its choices, of which `order` [P] says which one is at a place, and
    `places` [R, K] the place of each; back, the sum of what is at them."""

    travels = False

    def __init__(self, order_P: Tensor, places_RK: Tensor, kernels: Kernels) -> None:
        self._order, self._places, self._kernels = order_P, places_RK, kernels

    def there(self, x: Tensor) -> Pending[Tensor]:
        return Pending(self.some(x, slice(None)))

    def some(self, x: Tensor, places: slice) -> Tensor:
        given = x, self._order[places], self._places
        if run := self._kernels.find("permute", *given):
            return run(*given)
        return x.index_select(0, given[1] // self._places.shape[1])

    def back(self, y: Tensor) -> Pending[Tensor]:
        given = y, None, self._order, self._places
        if run := self._kernels.find("unpermute", *given):
            return Pending(run(*given))
        return Pending(y[self._places].sum(1))


class Choose:
    """Elements `index` of rows [R, K], flat, of which each is chosen at most once."""

    travels = False

    def __init__(self, index: Tensor, rows: int, choices: int) -> None:
        self.index, self._shape = index, (rows, choices)

    def there(self, x: Tensor) -> Pending[Tensor]:
        return Pending(x.flatten().index_select(0, self.index))

    def back(self, y: Tensor) -> Pending[Tensor]:
        x = y.new_zeros(self._shape)
        x.view(-1).index_copy_(0, self.index, y)
        return Pending(x)


@dataclass(frozen=True)
class Exchange:
    """The first leaving[0] rows go to rank 0 of the group, and so on; coming[0] come from it."""

    group: Group
    leaving: Sequence[int]
    coming: Sequence[int]

    @property
    def travels(self) -> bool:
        return self.group.size > 1

    def there(self, x: Tensor) -> Pending[Tensor]:
        return all_to_all_uneven(x, self.leaving, self.coming, self.group)

    def back(self, y: Tensor) -> Pending[Tensor]:
        return all_to_all_uneven(y, self.coming, self.leaving, self.group)


@dataclass(frozen=True)
class Gather:
    """The rows of all ranks of the group, of which rank i has sizes[i]; back, their sums."""

    group: Group
    sizes: Sequence[int]

    @property
    def travels(self) -> bool:
        return self.group.size > 1

    def there(self, x: Tensor) -> Pending[Tensor]:
        return all_gather_uneven(x, self.sizes, self.group)

    def back(self, y: Tensor) -> Pending[Tensor]:
        return reduce_scatter_uneven(y, self.sizes, self.group)


Path = Sequence[Step]
_Move = tuple[bool, Callable[[Tensor], Pending[Tensor]]]
"""Whether it travels, and what it does."""


def there(path: Path, turn: Turn) -> Passage:
    """The way out: [R, ...] to [N, ...]."""
    return Passage(_out(path), _home(path), turn)


def back(path: Path, turn: Turn) -> Passage:
    """The way home: [N, ...] to [R, ...]."""
    return Passage(_home(path), _out(path), turn)


class Passage:
    """One way along a path. What is done between `depart` and `arrive` is done while rows travel;
    in backward, where gradients go the other way, so is the backward of that. turn: lets others
    work before it waits."""

    def __init__(self, moves: Sequence[_Move], reverse: Sequence[_Move], turn: Turn) -> None:
        self.moves, self.reverse, self._turn = moves, reverse, turn
        self.trip: _Trip

    def depart(self, x: Tensor) -> Tensor:
        """Send rows on their way. The result stands for them until they `arrive`."""
        return _Depart.apply(x, self)

    def arrive(self, ticket: Tensor) -> Tensor:
        """The rows, where they were to go."""
        return _Arrive.apply(ticket, self)

    def cross(self, x: Tensor) -> Tensor:
        """Both at once."""
        return self.arrive(self.depart(x))

    def end(self) -> Tensor:
        """What arrives of the trip that was begun."""
        if any(travels for travels, _ in self.moves):
            self._turn.pass_on()
        return self.trip.end()


def _out(path: Path) -> list[_Move]:
    return [(step.travels, step.there) for step in path]


def _home(path: Path) -> list[_Move]:
    return [(step.travels, step.back) for step in reversed(path)]


class _Trip:
    """Rows on their way: up to the first transfer when it is made, to their end when asked. Where
    it stops does not depend on what has arrived, so that all ranks start transfers in one order."""

    def __init__(self, moves: Sequence[_Move], x: Tensor) -> None:
        self._rows = x
        self._walk = self._go(moves)
        next(self._walk, None)

    def _go(self, moves: Sequence[_Move]) -> Iterator[None]:
        for travels, move in moves:
            pending = move(self._rows)
            if travels:
                yield
            self._rows = pending.wait()

    def end(self) -> Tensor:
        for _ in self._walk:
            pass
        rows = self._rows
        del self._rows  # the passage lives until backward, and would keep them as long
        return rows


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        passage.trip = _Trip(passage.moves, x.detach())
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.passage.end(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        return passage.end()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.passage.trip = _Trip(ctx.passage.reverse, gradients[0])
        return gradients[0].new_empty(0), None
