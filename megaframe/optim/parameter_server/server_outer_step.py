"""The outer step of an island that is a run of its own: a server sums and applies.

Each rank exchanges its own weights with the shards. Only the first asks the coordinator, and tells
the others, so all ranks of an island decide alike. An exchange goes on between steps as far as it
can without waiting. An island waits in short collectives, which is why its watchdog sees no hang
while others train."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaframe.config.sync import SyncConfig
from megaframe.distributed.collectives import Group, Pending, all_reduce
from megaframe.errors import UserError
from megaframe.optim.outer_step import SpanShape
from megaframe.optim.parameter_server.coordinator import SyncedModel
from megaframe.optim.parameter_server.rounds import (
    HEARD_EVERY,
    Answer,
    Contribution,
    Joined,
    PushKind,
)
from megaframe.optim.parameter_server.shard import ParameterBox, find_shard_box

Values = NDArray[np.generic]
T_co = TypeVar("T_co", covariant=True)
_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 0.005, 1.0, 0.1
"""Seconds between two questions: a share of those waited so far, between bounds."""


class Call(Protocol[T_co]):
    """A call that has been started, as a `concurrent.futures.Future`."""

    def done(self) -> bool:
        """Return whether `result` returns or raises at once, or has to call again."""
        ...

    def result(self) -> T_co:
        """Return the result when it is there."""
        ...


class ServerConnection(Protocol):
    """What an island needs of a server, however it is reached. Calls wait as long as its rules say,
    and are safe to repeat.

    Attributes:
        shards: How many there are.
    """

    shards: int

    def connect(self) -> None:
        """Find the server. Raises `UserError` if there is none."""
        ...

    def join(self, island: int, clock: int, model: SyncedModel) -> Joined | None:
        """As `Coordinator.join`."""
        ...

    def finish_push(self, island: int, session: int, clock: int, kind: PushKind) -> Call[Answer]:
        """Start `Coordinator.push`."""
        ...

    def poll(self, island: int, session: int) -> Call[Answer]:
        """Start `Coordinator.poll`."""
        ...

    def hear(self, island: int, session: int) -> None:
        """As `Coordinator.hear`, without waiting."""
        ...

    def leave(self, island: int, session: int) -> None:
        """As `Coordinator.leave`."""
        ...

    def start_push(
        self,
        shard: int,
        contribution: Contribution,
        rank: int,
        parts: Sequence[tuple[ParameterBox, Values]],
    ) -> Call[object]:
        """Start `OuterShard.push`."""
        ...

    def start_pull(
        self, shard: int, version: int, parts: Sequence[ParameterBox]
    ) -> Call[Sequence[Values]]:
        """Start `OuterShard.pull`."""
        ...


@dataclass(frozen=True)
class _Place:
    """A box of a span that one shard has, and where it is in the span.

    Attributes:
        part: As the shard knows it.
        start: Of the span's box that it is in.
        shape: Of that box.
        index: Of the part within that box.
    """

    part: ParameterBox
    start: int
    shape: tuple[int, ...]
    index: tuple[slice, ...]

    def view(self, flat: Tensor) -> Tensor:
        """Return the part of a span."""
        size = int(np.prod(self.shape))
        return flat[self.start : self.start + size].view(self.shape)[self.index]


@dataclass
class _Exchange:
    """What an island sends to the server, and what it gets back.

    Attributes:
        clock: The rounds that the island had pushed before.
        kind: Of what it sends; None for nothing.
        spans: Those that it gets.
        sending: Calls of this rank that send, until all ranks have sent.
        asking: On the first rank, what asks whether the island may train on.
        receiving: Calls of this rank that receive, each with the places in the spans.
    """

    clock: int
    kind: PushKind | None
    spans: Sequence[int]
    sending: list[Call[object]] | None
    asking: Call[Answer] | None = None
    receiving: list[tuple[list[tuple[int, _Place]], Call[Sequence[Values]]]] = field(
        default_factory=list
    )


class ServerOuterStep:
    """Lets a server make new weights of differences.

    Args:
        sync: How.
        server: The server, to be connected to in `join`.
        ranks: All ranks of this island, on the host.
        counterparts: This rank alone; has the traffic with other islands.
        spans: All spans of this rank.
        model: What the island trains.
    """

    def __init__(
        self,
        sync: SyncConfig,
        server: ServerConnection,
        ranks: Group,
        counterparts: Group,
        spans: Sequence[SpanShape],
        model: SyncedModel,
    ) -> None:
        self._sync, self._server, self._ranks = sync, server, ranks
        self._counterparts, self._spans, self._model = counterparts, spans, model
        self._clock, self._session, self._said = 0, 0, 0.0
        self._exchange: _Exchange | None = None

    def join(self, clock: int, synced: Mapping[int, Tensor], *, fresh: bool) -> int:
        self._server.connect()
        self._session, self._clock, brings_weights = self._join(clock)
        if self._clock < clock:
            raise UserError(
                f"island {self._sync.island} has trained {clock} rounds and server "
                f"{self._sync.server} has {self._clock} of it, so the checkpoint is of another "
                "server; continue with that one, or use an earlier checkpoint"
            )
        # Who brings weights pulls too: shards keep a push until somebody pulls what it makes.
        if brings_weights or fresh or self._clock != clock:
            if brings_weights:
                self._send(synced, self._clock - 1, "weights")
            else:
                self._exchange = _Exchange(self._clock, None, [*synced], [])
            self._receive(synced)
        return self._clock

    def end_step(self) -> None:
        self._say_alive()
        self._advance()

    def push(self, differences: Mapping[int, Tensor]) -> None:
        self._send(differences, self._clock, "differences")

    def advance(self, spans: Iterable[int]) -> None:
        """There is nothing to do: an island sends once, and receives once."""

    def pull(self, synced: Mapping[int, Tensor]) -> None:
        def wait() -> None:
            self._clock += 1
            self._receive(synced)

        timer = self._counterparts.traffic.collective_timer
        Pending(synced, finish=wait, kind="outer step", timer=timer).wait()

    def finish(self, synced: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> None:
        """Bulk-synchronous islands end with the mean of all. Others push what they have trained
        since the last push, and end with the weights that the server has then."""
        if self._sync.consistency == "bulk_synchronous":
            self._send(weights, self._clock, "weights")
        else:
            self._send_rest({n: synced[n] - flat for n, flat in weights.items()})
        self._clock += 1
        self._receive(synced)
        self.leave()

    def leave(self) -> None:
        if not self._ranks.index:
            self._server.leave(self._sync.island, self._session)

    def abandon(self) -> None:
        self._exchange = None

    def list_state(self, span: int) -> Iterator[tuple[str, Tensor]]:
        """The server has all state."""
        return iter(())

    def _say_alive(self) -> None:
        now = time.monotonic()
        if not self._ranks.index and now - self._said > HEARD_EVERY * self._sync.timeout:
            self._said = now
            self._server.hear(self._sync.island, self._session)

    def _send_rest(self, differences: Mapping[int, Tensor]) -> None:
        largest = max(
            (float(flat.abs().max()) for flat in differences.values() if len(flat)), default=0.0
        )
        changed = torch.tensor(largest, dtype=torch.float64)
        if float(all_reduce(changed, self._ranks, "max").wait()):
            self._send(differences, self._clock, "differences")
        else:
            self._exchange = _Exchange(self._clock, None, [*differences], [])

    def _send(self, values: Mapping[int, Tensor], clock: int, kind: PushKind) -> None:
        """Start to send spans to the shards."""
        contribution, sending = Contribution(self._sync.island, self._session, clock), []
        copies = {span: flat.cpu() for span, flat in values.items()}
        for shard in range(self._server.shards):
            parts = [
                (place.part, place.view(copies[span]).contiguous().numpy())
                for span, place in self._list_places(copies, shard)
            ]
            self._counterparts.traffic.count(sum(values.nbytes for _, values in parts))
            sending.append(self._server.start_push(shard, contribution, self._ranks.index, parts))
        self._exchange = _Exchange(clock, kind, [*values], sending)

    def _receive(self, synced: Mapping[int, Tensor]) -> None:
        """Wait until this island may train on, and replace all given spans."""
        begun = time.monotonic()
        while not self._advance(wait=True):
            _pause(begun)
            self._say_alive()
        assert self._exchange is not None, "there is something to wait for"
        for places, call in self._exchange.receiving:
            for (span, place), values in zip(places, call.result(), strict=True):
                place.view(synced[span]).copy_(torch.tensor(values))
        self._exchange = None

    def _advance(self, *, wait: bool = False) -> bool:
        """Go on with an exchange; return whether all that comes is on its way. All ranks of the
        island must call this alike. wait: for answers, instead of going only as far as they are
        there."""
        exchange = self._exchange
        if exchange is None or exchange.receiving:
            return True
        if exchange.sending is not None:
            sent = wait or all(call.done() for call in exchange.sending)
            for call in exchange.sending if sent else ():
                call.result()
            if self._reduce(float(sent)) == self._ranks.size:
                exchange.sending = None
                if exchange.kind is not None and not self._ranks.index:
                    exchange.asking = self._server.finish_push(
                        self._sync.island, self._session, exchange.clock, exchange.kind
                    )
        if exchange.sending is None:
            version = self._take_answer(exchange, wait=wait)
            answer = self._reduce(0.0 if version is None else version + 1.0)
            for shard in range(self._server.shards if answer else 0):
                places = [*self._list_places(exchange.spans, shard)]
                parts = [place.part for _, place in places]
                call = self._server.start_pull(shard, int(answer) - 1, parts)
                exchange.receiving.append((places, call))
        return bool(exchange.receiving)

    def _reduce(self, value: float) -> float:
        """Return the sum over the island's ranks."""
        return float(all_reduce(torch.tensor(value, dtype=torch.float64), self._ranks).wait())

    def _take_answer(self, exchange: _Exchange, *, wait: bool) -> int | None:
        """Return the version to train on with, on the first rank and if it is known now."""
        if self._ranks.index:
            return None
        island = self._sync.island, self._session
        if exchange.asking is None:
            exchange.asking = self._server.poll(*island)
        if not (wait or exchange.asking.done()):
            return None
        version = exchange.asking.result().version
        # Who waits asks after a pause; between steps the answer has a step's time.
        exchange.asking = None if wait or version is not None else self._server.poll(*island)
        return version

    def _join(self, clock: int) -> tuple[int, int, bool]:
        """Let the first rank ask until the island takes part; return its session, its clock and
        whether it brings weights, on all ranks."""
        begun = time.monotonic()
        while True:
            row = torch.zeros(4, dtype=torch.float64)
            if not self._ranks.index:
                joined = self._server.join(self._sync.island, clock, self._model)
                if joined is not None:
                    values = 1, joined.session, joined.clock, joined.brings_weights
                    row = torch.tensor(values, dtype=torch.float64)
            takes_part, session, clock_now, brings = all_reduce(row, self._ranks).wait().tolist()
            if takes_part:
                return int(session), int(clock_now), bool(brings)
            _pause(begun)

    def _list_places(self, spans: Iterable[int], shard: int) -> Iterator[tuple[int, _Place]]:
        """Yield what a shard has of these spans."""
        for span in spans:
            start = 0
            for spec, box in self._spans[span].boxes:
                own = find_shard_box(spec.shape, shard, self._server.shards)
                common = box.intersect(own) if own.size else None
                if common is not None:
                    part = ParameterBox(spec.name, spec.shape, common)
                    index = common.make_relative(box).slices
                    yield span, _Place(part, start, box.shape, index)
                start += box.size


def _pause(begun: float) -> None:
    """Wait before the next question for a share of the time since `begun`."""
    waited = time.monotonic() - begun
    time.sleep(min(_LONGEST_PAUSE, max(_FIRST_PAUSE, _PAUSE_SHARE * waited)))
