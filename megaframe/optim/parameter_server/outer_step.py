"""The outer step of an island that is a run of its own: a server sums and applies.

Each rank exchanges its own weights with the shards. Only the first asks the coordinator, and tells
the others, so all ranks of an island decide alike. An island waits in short collectives, which is
why its watchdog sees no hang while others train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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
_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 0.005, 1.0, 0.1
"""Seconds between two questions: a share of those waited so far, between bounds."""


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

    def finish_push(self, island: int, session: int, clock: int, kind: PushKind) -> None:
        """As `Coordinator.push`."""
        ...

    def poll(self, island: int, session: int) -> Answer:
        """As `Coordinator.poll`."""
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
    ) -> Callable[[], object]:
        """Start `OuterShard.push`; return what waits for its end."""
        ...

    def start_pull(
        self, shard: int, version: int, parts: Sequence[ParameterBox]
    ) -> Callable[[], Sequence[Values]]:
        """Start `OuterShard.pull`; return what waits for its result."""
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


class ServerOuterStep:
    """Lets a server make new weights of differences.

    Args:
        sync: How.
        server: The server, to be connected to in `join`.
        ranks: All ranks of this island.
        counterparts: This rank alone; has the traffic with other islands.
        device: Of this rank.
        spans: All spans of this rank.
        model: What the island trains.
    """

    def __init__(
        self,
        sync: SyncConfig,
        server: ServerConnection,
        ranks: Group,
        counterparts: Group,
        device: torch.device,
        spans: Sequence[SpanShape],
        model: SyncedModel,
    ) -> None:
        self._sync, self._server, self._ranks = sync, server, ranks
        self._counterparts, self._device = counterparts, device
        self._spans, self._model = spans, model
        self._clock, self._session, self._said = 0, 0, 0.0
        self._sending: list[Callable[[], object]] = []

    def join(self, clock: int, synced: Mapping[int, Tensor], *, fresh: bool) -> int:
        self._server.connect()
        joined = self._ask(lambda: self._try_to_join(clock))
        self._session, self._clock, brings_weights = int(joined[0]), int(joined[1]), joined[2]
        if self._clock < clock:
            raise UserError(
                f"island {self._sync.island} has trained {clock} rounds and server "
                f"{self._sync.server} has {self._clock} of it, so the checkpoint is of another "
                "server; continue with that one, or use an earlier checkpoint"
            )
        if brings_weights:
            self._start_push(synced, self._clock - 1)
            self._finish_push(self._clock - 1, "weights")
        # Who brings weights pulls too: shards keep a push until somebody pulls what it makes.
        if brings_weights or fresh or self._clock != clock:
            self._receive(synced)
        return self._clock

    def hear(self) -> None:
        now = time.monotonic()
        if not self._ranks.index and now - self._said > HEARD_EVERY * self._sync.timeout:
            self._said = now
            self._server.hear(self._sync.island, self._session)

    def push(self, differences: Mapping[int, Tensor]) -> None:
        self._start_push(differences, self._clock)

    def advance(self, spans: Iterable[int]) -> None:
        """There is nothing to do: an island sends once, and receives once."""

    def pull(self, synced: Mapping[int, Tensor]) -> None:
        def wait() -> None:
            self._finish_push(self._clock, "differences")
            self._clock += 1
            self._receive(synced)

        timer = self._counterparts.traffic.collective_timer
        Pending(synced, finish=wait, kind="outer step", timer=timer).wait()

    def finish(self, synced: Mapping[int, Tensor], weights: Mapping[int, Tensor]) -> None:
        """Bulk-synchronous islands end with the mean of all. Others push what they have trained
        since the last push, and end with the weights that the server has then."""
        if self._sync.consistency == "bulk_synchronous":
            self._start_push(weights, self._clock)
            self._finish_push(self._clock, "weights")
        else:
            self._push_rest({n: synced[n] - flat for n, flat in weights.items()})
        self._clock += 1
        self._receive(synced)
        self.leave()

    def leave(self) -> None:
        if not self._ranks.index:
            self._server.leave(self._sync.island, self._session)

    def abandon(self) -> None:
        self._sending.clear()

    def list_state(self, span: int) -> Iterator[tuple[str, Tensor]]:
        """The server has all state."""
        return iter(())

    def _push_rest(self, differences: Mapping[int, Tensor]) -> None:
        largest = max(
            (float(flat.abs().max()) for flat in differences.values() if len(flat)), default=0.0
        )
        changed = torch.tensor(largest, dtype=torch.float64, device=self._device)
        if float(all_reduce(changed, self._ranks, "max").wait()):
            self._start_push(differences, self._clock)
            self._finish_push(self._clock, "differences")

    def _start_push(self, values: Mapping[int, Tensor], clock: int) -> None:
        """Start to send spans to the shards."""
        contribution = Contribution(self._sync.island, self._session, clock)
        copies = {span: flat.cpu() for span, flat in values.items()}
        for shard in range(self._server.shards):
            parts = [
                (place.part, place.view(copies[span]).contiguous().numpy())
                for span, place in self._list_places(copies, shard)
            ]
            self._counterparts.traffic.count(sum(values.nbytes for _, values in parts))
            self._sending.append(
                self._server.start_push(shard, contribution, self._ranks.index, parts)
            )

    def _finish_push(self, clock: int, kind: PushKind) -> None:
        """Wait until all ranks of the island have sent everything, and say so."""
        for wait in self._sending:
            wait()
        self._sending.clear()

        def tell() -> tuple[float, ...]:
            self._server.finish_push(self._sync.island, self._session, clock, kind)
            return (1.0,)

        all_reduce(torch.zeros((), device=self._device), self._ranks).wait()
        self._ask(tell)

    def _receive(self, synced: Mapping[int, Tensor]) -> None:
        """Wait until this island may train on, and replace all given spans."""
        (version,) = self._ask(self._try_to_train_on)
        waits = []
        for shard in range(self._server.shards):
            places = [*self._list_places(synced, shard)]
            parts = [place.part for _, place in places]
            waits.append((places, self._server.start_pull(shard, int(version), parts)))
        for places, wait in waits:
            for (span, place), values in zip(places, wait(), strict=True):
                place.view(synced[span]).copy_(torch.tensor(values))

    def _try_to_join(self, clock: int) -> tuple[float, ...] | None:
        joined = self._server.join(self._sync.island, clock, self._model)
        if joined is None:
            return None
        return joined.session, joined.clock, float(joined.brings_weights)

    def _try_to_train_on(self) -> tuple[float, ...] | None:
        version = self._server.poll(self._sync.island, self._session).version
        return None if version is None else (float(version),)

    def _ask(self, question: Callable[[], tuple[float, ...] | None]) -> tuple[float, ...]:
        """Let the first rank ask until there is an answer; return it on all ranks."""
        begun = time.monotonic()
        while True:
            row = torch.zeros(4, dtype=torch.float64, device=self._device)
            if not self._ranks.index and (answer := question()) is not None:
                row[0], row[1 : 1 + len(answer)] = len(answer), torch.tensor(answer)
            values = all_reduce(row, self._ranks).wait().tolist()
            if values[0]:
                return tuple(values[1 : 1 + int(values[0])])
            waited = time.monotonic() - begun
            time.sleep(min(_LONGEST_PAUSE, max(_FIRST_PAUSE, _PAUSE_SHARE * waited)))

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
