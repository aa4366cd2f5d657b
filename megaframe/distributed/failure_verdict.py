"""Failure verdict: what ranks tell each other through the store when one of them is lost or late,
and how they agree on one verdict.

The store is one process, so the cost to it is what limits the number of ranks. Every rank writes a
few short lines and then looks at one key, that of the verdict. One rank at a time, the judge, reads
what all have written. With N ranks a verdict costs a number of requests proportional to N, and none
that grow faster. Ranks look less often where they are many. In each round the first rank to ask is
the judge; if it is lost before it has judged, the next round has another one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from torch.distributed import Store

from megaframe.distributed.rank_progress import RankStatus
from megaframe.layout import Layout

T = TypeVar("T")

MAX_REQUESTS_PER_SECOND = 16384
"""Requests per second with which all ranks together look at the store at most. A store answers
several times as many (docs/guides/faults.md)."""
MAX_NAMED = 8
"""Ranks that a message names at most."""
_ALARM, _LOST, _ANSWERED, _VERDICT = "alarm", "lost", "answered", "verdict"
_READY, _ALL_READY = "left", "all left"


@dataclass(frozen=True)
class FailureVerdict:
    """Who is at fault and what to say about it; the same on every rank that can reach the store.

    Attributes:
        ranks: The ranks at fault; empty if none is.
        text: The message.
        late: Whether the fault is that something took too long.
        restart: Whether all ranks restart in their processes.
        silent: Those at fault that did not answer, for whom nobody waits.
    """

    ranks: tuple[int, ...]
    text: str
    late: bool = False
    restart: bool = False
    silent: tuple[int, ...] = ()

    def encode(self) -> str:
        """Return the verdict as text."""
        runs = {"ranks": encode_ranks(self.ranks), "silent": encode_ranks(self.silent)}
        return json.dumps({**asdict(self), **runs})

    @staticmethod
    def decode(text: str) -> FailureVerdict:
        """Return the verdict that `encode` made this text from."""
        fields = json.loads(text)
        runs = {name: decode_ranks(fields[name]) for name in ("ranks", "silent")}
        return FailureVerdict(**{**fields, **runs})


@dataclass(frozen=True)
class FailureReports:
    """What the ranks have written to the store so far, as text."""

    losses: str = ""
    statuses: str = ""

    def decode_losses(self) -> dict[int, Collection[int]]:
        """Return the ranks that each rank lost, by the rank that has given up."""
        decoded: dict[str, Collection[int]] = {}
        lost: dict[int, Collection[int]] = {}
        for line in self.losses.splitlines():
            rank, runs = json.loads(line)
            # Members of a group report the same runs, which are decoded only once.
            text = str(runs)
            if text not in decoded:
                decoded[text] = decode_ranks(runs)
            lost[rank] = decoded[text]
        return lost

    def decode_statuses(self) -> dict[int, RankStatus]:
        """Return what each rank that answers is doing."""
        statuses = map(RankStatus.decode, self.statuses.splitlines())
        return {status.rank: status for status in statuses}


def blame_for_loss(
    lost: Mapping[int, Collection[int]], answered: Collection[int]
) -> tuple[int, ...]:
    """Return the ranks to blame for a loss.

    Args:
        lost: The ranks that each reporting rank lost.
        answered: Ranks whose watchdog is alive.

    Returns:
        The ranks that some rank lost and that reported no loss themselves, ascending. If any of
        these do not answer, only those. Empty if all lost ranks reported losses too, as in a
        network that is cut in two.
    """
    # Members of a group lose the same ranks, and share one collection of them.
    distinct = {id(ranks): ranks for ranks in lost.values()}.values()
    suspected = set[int]().union(*distinct) - lost.keys()
    return tuple(sorted(suspected - set(answered) or suspected))


def name_rank(layout: Layout, rank_of_stage: Sequence[int], rank: int) -> str:
    """Return a rank with its coordinate and its stages, as in
    `rank 2 (pipeline 1, data 0: stages 1, 3)`.

    Args:
        layout: Where each rank lies.
        rank_of_stage: Pipeline coordinate of each stage, by number; empty if not known.
        rank: The rank.
    """
    coordinate = layout.get_coordinate(rank)
    text = ", ".join(
        f"{axis} {coordinate[axis]}"
        for axis in reversed(tuple(coordinate))
        if axis in ("pipeline", "data") or layout.sizes[axis] > 1
    )
    stages = [n for n, owner in enumerate(rank_of_stage) if owner == coordinate["pipeline"]]
    if stages:
        text += f": stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
    return f"rank {rank} ({text})"


def describe_lost_ranks(names: Sequence[str], answering: bool) -> str:
    """Return in words what is wrong with lost ranks.

    Args:
        names: The names of those at fault, empty if none is.
        answering: Whether all of them answer.
    """
    if not names:
        return "no rank is gone, but ranks lost contact: check the network between them"
    text = "; ".join(names[:MAX_NAMED]) + " ..." * (len(names) > MAX_NAMED)
    verb = "are" if len(names) > 1 else "is"
    if answering:
        return f"{text} {verb} alive, but stuck or too slow for parallel.timeout"
    return f"{text} {verb} gone or stuck"


def compute_polling_interval(seconds: float, requests: int) -> float:
    """Return the seconds between two looks at the store: those given, or more if a look of all
    ranks makes so many requests that they would exceed `MAX_REQUESTS_PER_SECOND` per second."""
    return max(seconds, requests / MAX_REQUESTS_PER_SECOND)


def encode_ranks(ranks: Iterable[int]) -> list[list[int]]:
    """Return ranks in ascending order as runs [first, step, number]."""
    # The groups of a layout have few runs, however many ranks they have.
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        first, step, number = runs[-1] if runs else (0, 0, 0)
        if number == 1:
            runs[-1] = [first, rank - first, 2]
        elif number and rank == first + step * number:
            runs[-1][2] += 1
        else:
            runs.append([rank, 1, 1])
    return runs


def decode_ranks(runs: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """Return the ranks that `encode_ranks` made these runs of."""
    return tuple(
        rank for first, step, number in runs for rank in range(first, first + step * number, step)
    )


class FailureStore:
    """One rank's access to what the ranks write to each other in the store.

    Args:
        store: Shared by all ranks.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        # The store is used by nothing else, because others may block on theirs.
        self._store, self._rank, self._world = store, rank, world

    def is_alarmed(self) -> bool:
        """Return whether some rank was lost or is late, so that every rank is to answer."""
        return self._store.check([_ALARM])

    def raise_alarm(self) -> None:
        """Ask every rank to answer."""
        self._store.set(_ALARM, "")

    def report_loss(self, lost: Collection[int]) -> None:
        """Say that this rank has given up because it lost contact with other ranks."""
        # With itself, a rank reports the same as the other members of the group.
        text = json.dumps([self._rank, encode_ranks({*lost, self._rank})])
        self._append(_LOST, f"{text}\n")
        self.raise_alarm()

    def report_status(self, status: RankStatus) -> None:
        """Say what this rank is doing. The last answer counts."""
        self._append(_ANSWERED, status.encode() + "\n")

    def try_become_judge(self, number: int) -> bool:
        """Return whether this rank judges in a round: it is the first to ask. Each rank may ask
        once per round."""
        # The store counts; only the first rank to ask gets 1.
        return self._store.add(f"judge/{number}", 1) == 1

    def read_reports(self) -> FailureReports:
        """Return what all ranks have written so far. For the judge."""
        return FailureReports(self._read(_LOST), self._read(_ANSWERED))

    def read_verdict(self) -> FailureVerdict | None:
        """Return the verdict if there is one."""
        text = self._read(_VERDICT)
        return FailureVerdict.decode(text) if text else None

    def publish_verdict(self, own_verdict: FailureVerdict) -> FailureVerdict:
        """Publish a verdict unless there is one. Returns the one that was published first."""
        text = own_verdict.encode()
        # Atomic: of two judges the first one publishes, and both return its verdict.
        first = self._store.compare_set(_VERDICT, "", text).decode()
        return FailureVerdict.decode(first)

    def announce_exit(self, verdict: FailureVerdict) -> int:
        """Say that this rank is ready to end because of a verdict. Returns how many ranks are."""
        ready = self._store.add(_READY, int(self._rank not in verdict.silent))
        # The last one to be ready sets a key of its own, so that looking costs one request.
        if ready == self._world - len(verdict.silent):
            self._store.set(_ALL_READY, "")
        return ready

    def count_ready(self) -> int:
        """Return how many ranks are ready to end. For rank 0."""
        # Adding 0 returns the count.
        return self._store.add(_READY, 0)

    def are_all_ready(self) -> bool:
        """Return whether all ranks but those at fault that did not answer are ready to end."""
        return self._store.check([_ALL_READY])

    def _append(self, key: str, text: str) -> None:
        self._store.append(key, text)  # type: ignore[attr-defined]  # not in torch's stubs

    def _read(self, key: str) -> str:
        # `get` alone would block on a key that no rank has written yet.
        return self._store.get(key).decode() if self._store.check([key]) else ""


def call_with_timeout(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return the result of `ask`, or None if the store fails in it or it takes more than
    `seconds`."""
    box: SimpleQueue[T | None] = SimpleQueue()

    def run() -> None:
        try:
            box.put(ask())
        except RuntimeError:
            box.put(None)

    # In a thread, because a store in a stopped process would block the caller forever. Nobody ends
    # the thread; a daemon does not keep the process alive.
    threading.Thread(target=run, daemon=True).start()
    try:
        return box.get(timeout=seconds)
    except Empty:
        return None
