"""How rows reach the experts, and how results come back.

A route is a list of steps, and each step is a linear map that selects, exchanges or gathers rows.
The way back is therefore the transpose of the way out, which is also its gradient. No step needs a
backward of its own, and whatever dispatches rows also combines them.

Shape legend: R rows of this rank, K choices of a row, P pairs of a row and a choice, N rows that
arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.distributed.collectives import (
    Group,
    Pending,
    all_gather_v,
    all_to_all_v,
    reduce_scatter_v,
)
from megaframe.distributed.interleaving import InterleaveHook
from megaframe.ops.kernel_dispatch import Kernels


class RouteStep(Protocol):
    """A linear map of rows and its transpose. communicates: whether it is a collective."""

    @property
    def communicates(self) -> bool: ...

    def forward(self, x: Tensor) -> Pending[Tensor]: ...

    def transpose(self, y: Tensor) -> Pending[Tensor]: ...


class LocalStep(RouteStep, Protocol):
    """A step within a rank, which can also be computed for only a slice of the rows that it
    makes."""

    def forward_slice(self, x: Tensor, places: slice, copies: int = 0) -> Tensor:
        """Return the rows at these places, and the last of them again as often as `copies` says."""
        ...


def count_occurrences(numbers: Tensor, most: int) -> Tensor:
    """Return how often each number below `most` occurs, int64 [most]. On a GPU `bincount` would
    make the host wait for the least and the largest number."""
    if not numbers.is_cuda:
        return torch.bincount(numbers, minlength=most)
    return numbers.new_zeros(most).scatter_add_(0, numbers, torch.ones_like(numbers))


def _repeat_last(index: Tensor, copies: int) -> Tensor:
    """Return the index with its last element repeated at the end."""
    return torch.cat((index, index[-1:].expand(copies))) if copies else index


@dataclass(frozen=True)
class ExpertRows:
    """Rows that lie expert after expert.

    Attributes:
        ends_E: Where the rows of each expert end, int32 [E], on the device.
        counts: How many rows each expert has, if the host knows it.
    """

    ends_E: Tensor
    counts: Sequence[int] | None = None

    def read_counts(self) -> Sequence[int]:
        """Return the counts. The host waits for the device if it does not know them."""
        if self.counts is not None:
            return self.counts
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1)).tolist()


class SelectRows:
    """Select rows `index` of `rows` rows. On the way back, each row is the sum of everything that
    was selected from it, in that order."""

    communicates = False

    def __init__(self, index: Tensor, rows: int) -> None:
        self.index, self.rows = index, rows
        # The transpose, prepared once: the places of each row's copies, row after row, in a fixed
        # order.
        self._order = index.argsort(stable=True)
        self._ends = F.pad(count_occurrences(index, rows).cumsum(0), (1, 0))

    def forward(self, x: Tensor) -> Pending[Tensor]:
        return Pending(self.forward_slice(x, slice(None)))

    def forward_slice(self, x: Tensor, places: slice, copies: int = 0) -> Tensor:
        return x.index_select(0, _repeat_last(self.index[places], copies))

    def transpose(self, y: Tensor) -> Pending[Tensor]:
        if not len(y):
            return Pending(y.new_zeros((self.rows, *y.shape[1:])))
        # A sum over bags adds in a fixed order. Atomic additions of a scatter on a GPU would not.
        sums = F.embedding_bag(
            self._order, y.reshape(len(y), -1), self._ends, mode="sum", include_last_offset=True
        )
        return Pending(sums.view(self.rows, *y.shape[1:]))


class SortByExpert:
    """Copy each row to the places of its choices. On the way back, each row is the sum of what is
    at its places."""

    communicates = False

    def __init__(self, order_P: Tensor, places_RK: Tensor, kernels: Kernels) -> None:
        """Set the order.

        Args:
            order_P: Which choice is at each place.
            places_RK: The place of each choice.
            kernels: The kernels of the run.
        """
        self._order, self._places, self._kernels = order_P, places_RK, kernels

    def forward(self, x: Tensor) -> Pending[Tensor]:
        return Pending(self.forward_slice(x, slice(None)))

    def forward_slice(self, x: Tensor, places: slice, copies: int = 0) -> Tensor:
        order = _repeat_last(self._order[places], copies)
        if kernel := self._kernels.find("permute", x, order, self._places):
            return kernel(x, order, self._places)
        return x.index_select(0, order // self._places.shape[1])

    def transpose(self, y: Tensor) -> Pending[Tensor]:
        arguments = y, self._order, self._places
        if kernel := self._kernels.find("unpermute", *arguments):
            return Pending(kernel(*arguments))
        # Summed over the choices of a row, in the order of its choices.
        return Pending(y[self._places].sum(1))


class SelectGates:
    """Select elements `index` of the flattened [R, K]. Each is selected at most once, so the way
    back only copies.

    Args:
        index: Numbers of the elements.
        rows: R, the rows.
        choices: K, the experts of a row.
    """

    communicates = False

    def __init__(self, index: Tensor, rows: int, choices: int) -> None:
        self.index, self._shape = index, (rows, choices)

    def forward(self, x: Tensor) -> Pending[Tensor]:
        return Pending(x.flatten().index_select(0, self.index))

    def transpose(self, y: Tensor) -> Pending[Tensor]:
        # Choices that are not sent get a gradient of zero.
        x = y.new_zeros(self._shape)
        x.view(-1).index_copy_(0, self.index, y)
        return Pending(x)


@dataclass(frozen=True)
class AllToAllRows:
    """Exchange rows with every rank of the group. The first send_counts[0] rows go to rank 0, and
    so on, and the first receive_counts[0] rows of the result come from it."""

    group: Group
    send_counts: Sequence[int]
    receive_counts: Sequence[int]

    @property
    def communicates(self) -> bool:
        return self.group.size > 1

    def forward(self, x: Tensor) -> Pending[Tensor]:
        return all_to_all_v(x, self.send_counts, self.receive_counts, self.group)

    def transpose(self, y: Tensor) -> Pending[Tensor]:
        # Back the same way: what was received is sent, and the other way round.
        return all_to_all_v(y, self.receive_counts, self.send_counts, self.group)


@dataclass(frozen=True)
class AllGatherRows:
    """Gather the rows of all ranks of the group, of which rank i has sizes[i]. On the way back they
    are summed over the ranks."""

    group: Group
    sizes: Sequence[int]

    @property
    def communicates(self) -> bool:
        return self.group.size > 1

    def forward(self, x: Tensor) -> Pending[Tensor]:
        return all_gather_v(x, self.sizes, self.group)

    def transpose(self, y: Tensor) -> Pending[Tensor]:
        return reduce_scatter_v(y, self.sizes, self.group)


RouteSteps = Sequence[RouteStep]
_Move = tuple[bool, Callable[[Tensor], Pending[Tensor]]]
"""Whether a move communicates, and the function that starts it."""


def dispatch_along(steps: RouteSteps, interleave_hook: InterleaveHook) -> TokenTransfer:
    """Return the transfer to the experts: [R, ...] to [N, ...]."""
    return TokenTransfer(_forward_moves(steps), _transpose_moves(steps), interleave_hook)


def combine_along(steps: RouteSteps, interleave_hook: InterleaveHook) -> TokenTransfer:
    """Return the transfer back from the experts: [N, ...] to [R, ...]."""
    return TokenTransfer(_transpose_moves(steps), _forward_moves(steps), interleave_hook)


def _forward_moves(steps: RouteSteps) -> list[_Move]:
    return [(step.communicates, step.forward) for step in steps]


def _transpose_moves(steps: RouteSteps) -> list[_Move]:
    return [(step.communicates, step.transpose) for step in reversed(steps)]


class TokenTransfer:
    """A transfer of rows along a route, in one direction. What is computed between `start` and
    `finish` overlaps with it, and its backward with the transfer of the gradients in the opposite
    direction."""

    def __init__(
        self, moves: Sequence[_Move], reverse: Sequence[_Move], interleave_hook: InterleaveHook
    ) -> None:
        """Prepare the transfer.

        Args:
            moves: Of the rows.
            reverse: Of their gradients.
            interleave_hook: Lets other work run before this waits.
        """
        self.moves, self.reverse, self._interleave_hook = moves, reverse, interleave_hook
        self.in_flight: _InFlight

    def start(self, x: Tensor) -> Tensor:
        """Start to transfer rows.

        Args:
            x: The rows, [R, ...] on the way out and [N, ...] on the way back.

        Returns:
            An empty tensor that represents them in the autograd graph until they arrive.
        """
        return _Start.apply(x, self)

    def finish(self, ticket: Tensor) -> Tensor:
        """Wait for the rows.

        Args:
            ticket: As returned by `start`.

        Returns:
            The rows at their destination.
        """
        return _Finish.apply(ticket, self)

    def run(self, x: Tensor) -> Tensor:
        """Start and finish at once."""
        return self.finish(self.start(x))

    def wait(self) -> Tensor:
        """Finish what is in flight, rows or gradients, and return it."""
        # Lets other work compute while this waits, at a point that does not depend on timing.
        if any(communicates for communicates, _ in self.moves):
            self._interleave_hook.hand_over()
        return self.in_flight.finish()


class _InFlight:
    """Rows in transit. Creation starts the first collective, with the steps before it; `finish`
    does the rest."""

    def __init__(self, moves: Sequence[_Move], x: Tensor) -> None:
        self._rows, self._remaining = x, iter(moves)
        self._pending: Pending[Tensor] | None = None
        for communicates, move in self._remaining:
            pending = move(self._rows)
            # Stops after the first collective, whatever has arrived, so that all ranks start their
            # collectives in the same order.
            if communicates:
                self._pending = pending
                return
            self._rows = pending.wait()

    def finish(self) -> Tensor:
        """Wait for the collective in transit, do the other steps and return the rows."""
        if self._pending is not None:
            self._rows = self._pending.wait()
            self._pending = None
        for _, move in self._remaining:
            self._rows = move(self._rows).wait()
        rows = self._rows
        # The transfer lives until backward, and would keep the rows until then.
        del self._rows
        return rows


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: TokenTransfer) -> Tensor:
        ctx.transfer = transfer
        transfer.in_flight = _InFlight(transfer.moves, x.detach())
        # Stands for the rows until they arrive. Its gradient is empty too, and carries only the
        # order.
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Gradients that `_Finish.backward` sent off: they travel while autograd runs what lies
        # between.
        return ctx.transfer.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, transfer: TokenTransfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.in_flight = _InFlight(ctx.transfer.reverse, gradients[0])
        return gradients[0].new_empty(0), None
