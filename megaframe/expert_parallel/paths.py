"""Paths: how rows reach the experts, and how results come back.

A path is a list of steps, and each step is a linear map that selects, exchanges or gathers rows.
The way back is therefore the transpose of the way there, which is also its gradient. No step needs
a backward of its own, and whatever sends rows out also brings them back.

Shape legend: R rows of this rank, K choices of a row, P pairs of a row and a choice, N rows that
arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.distributed.collectives import (
    Group,
    Pending,
    all_gather_uneven,
    all_to_all_uneven,
    reduce_scatter_uneven,
)
from megaframe.distributed.interleaving import InterleaveHook
from megaframe.ops.kernel_dispatch import Kernels


class Step(Protocol):
    """A linear map of rows (`there`) and its transpose (`back`). travels: whether it
    communicates."""

    @property
    def travels(self) -> bool: ...

    def there(self, x: Tensor) -> Pending[Tensor]: ...

    def back(self, y: Tensor) -> Pending[Tensor]: ...


class Local(Step, Protocol):
    """A step within a rank, which can also be computed for only some of the places that rows go
    to."""

    def some(self, x: Tensor, places: slice) -> Tensor: ...


def counts(numbers: Tensor, most: int) -> Tensor:
    """Return how often each number below `most` occurs, int64 [most]. On a GPU `bincount` would
    make the host wait for the least and the largest number."""
    if not numbers.is_cuda:
        return torch.bincount(numbers, minlength=most)
    return numbers.new_zeros(most).scatter_add_(0, numbers, torch.ones_like(numbers))


@dataclass(frozen=True)
class Dealt:
    """Rows that lie expert after expert. ends_E: where the rows of each expert end, int32 [E], on
    the device. counts: how many rows each expert has, if the host knows it."""

    ends_E: Tensor
    counts: Sequence[int] | None = None

    def numbers(self) -> Sequence[int]:
        """Return the counts. The host waits for them if it does not know them."""
        if self.counts is not None:
            return self.counts
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).tolist()


class Pick:
    """Select rows `index` of `rows` rows. On the way back, each row is the sum of everything that
    was picked from it, in the order in which it was picked."""

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
    """Copy each row to the places of its choices. order_P: which choice is at each place.
    places_RK: the place of each choice. On the way back, each row is the sum of what is at its
    places."""

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
    """Select elements `index` of the flattened [R, K]. Each is selected at most once, so the way
    back only copies."""

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
    """Exchange rows with every rank of the group. The first leaving[0] rows go to rank 0, and so
    on, and the first coming[0] rows of the result come from it."""

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
    """Gather the rows of all ranks of the group, of which rank i has sizes[i]. On the way back they
    are summed over the ranks."""

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
"""Whether the move communicates, and the function that starts it."""


def there(path: Path, turn: InterleaveHook) -> Passage:
    """Return the way out: [R, ...] to [N, ...]."""
    return Passage(_out(path), _home(path), turn)


def back(path: Path, turn: InterleaveHook) -> Passage:
    """Return the way home: [N, ...] to [R, ...]."""
    return Passage(_home(path), _out(path), turn)


class Passage:
    """One way along a path. What is computed between `depart` and `arrive` overlaps with the
    transfer, and its backward with the transfer of the gradients in the opposite direction. turn:
    lets other work run before this waits."""

    def __init__(
        self, moves: Sequence[_Move], reverse: Sequence[_Move], turn: InterleaveHook
    ) -> None:
        self.moves, self.reverse, self._turn = moves, reverse, turn
        self.trip: _Trip

    def depart(self, x: Tensor) -> Tensor:
        """Send rows on their way. The returned ticket represents them in the graph until they
        `arrive`."""
        return _Depart.apply(x, self)

    def arrive(self, ticket: Tensor) -> Tensor:
        """Return the rows at their destination."""
        return _Arrive.apply(ticket, self)

    def cross(self, x: Tensor) -> Tensor:
        """Depart and arrive at once."""
        return self.arrive(self.depart(x))

    def end(self) -> Tensor:
        """Finish the current trip and return its rows."""
        if any(travels for travels, _ in self.moves):
            self._turn.hand_over()
        return self.trip.end()


def _out(path: Path) -> list[_Move]:
    return [(step.travels, step.there) for step in path]


def _home(path: Path) -> list[_Move]:
    return [(step.travels, step.back) for step in reversed(path)]


class _Trip:
    """Rows in transit. Creation starts the first transfer, with the steps before it; `end` does the
    rest. Where it stops does not depend on what has arrived, so all ranks start transfers in the
    same order."""

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
        del self._rows  # the passage lives until backward, and would keep the rows until then
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
