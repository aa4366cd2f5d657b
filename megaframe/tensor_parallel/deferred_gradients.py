"""Weight gradients, which nothing else in a backward pass waits for, and which a pipeline schedule
may therefore compute later (W of zero-bubble schedules, Qi et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from torch import Tensor

from megaframe.distributed.collectives import Pending


class DeferredGradient(NamedTuple):
    """A weight gradient that is still to be computed.

    Attributes:
        compute: Adds it to the sum. Called with what `fetch` brought, if there is a `fetch`.
        fetch: Starts the transfer of what `compute` needs from other ranks.
    """

    compute: Callable[..., None]
    fetch: Callable[[], Pending[Tensor]] | None


class InputDropout(Protocol):
    """Drops inputs of products of low rank."""

    def __call__(self, x: Tensor, place: str, first: int, *, all_rows: bool) -> Tensor:
        """Return x with some elements 0 and the others scaled up.

        Args:
            x: Rows of the microbatch.
            place: Name of what they are inputs of, on which the mask depends.
            first: Number of the first column among all inputs.
            all_rows: Whether these are the rows of all tensor ranks, and not only this rank's.
        """
        ...


class DeferredGradients:
    """The weight gradients of one microbatch's backward pass. They are computed at once, or with
    `deferring` kept until they are taken.

    Attributes:
        deferring: Whether they are kept.
        dropout: Drops inputs of adapters in this microbatch; None if nothing is dropped. It lies
            here because linears need nothing else of a microbatch.
    """

    def __init__(self, dropout: InputDropout | None = None) -> None:
        self.deferring, self.dropout = False, dropout
        self._deferred: list[DeferredGradient] = []

    def add(
        self, compute: Callable[..., None], fetch: Callable[[], Pending[Tensor]] | None = None
    ) -> None:
        """Compute a gradient now, or keep it if `deferring` is set. The arguments are those of
        `DeferredGradient`."""
        if self.deferring:
            self._deferred.append(DeferredGradient(compute, fetch))
        elif fetch is None:
            compute()
        else:
            # `fetch` may return a transfer that the layer started before.
            compute(fetch().wait())

    def take(self) -> list[DeferredGradient]:
        """Return the kept gradients, in order, and start a new list."""
        gradients, self._deferred = self._deferred, []
        return gradients


class DeferredGradientQueue:
    """Computes kept gradients one by one, in order. The transfer for the next one starts before the
    current one is computed."""

    def __init__(self, gradients: Iterable[DeferredGradient]) -> None:
        self._remaining = iter(gradients)
        self._next = self._start_next()

    def compute_next(self) -> None:
        """Compute the next gradient. There must be one."""
        assert self._next is not None
        # The next transfer starts before the current gradient is computed, so that it travels
        # meanwhile.
        (compute, operand), self._next = self._next, self._start_next()
        if operand is None:
            compute()
        else:
            compute(operand.wait())

    def _start_next(self) -> tuple[Callable[..., None], Pending[Tensor] | None] | None:
        """Start the transfer for the gradient after the current one, if there is one."""
        gradient = next(self._remaining, None)
        if gradient is None:
            return None
        return gradient.compute, None if gradient.fetch is None else gradient.fetch()
