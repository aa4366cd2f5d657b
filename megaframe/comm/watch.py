"""Watch: finds out which rank is at fault when ranks lose each other, and lets no rank stay behind.

The first to notice a dead rank are its neighbours; then theirs notice that those have left. So no
rank blames whom it lost: all write down whom they lost, and at fault is who was lost by somebody,
lost nobody and does not answer. The answers come from a thread that each rank has beside its work,
which also ends ranks that would notice nothing before their timeout, and one that is stuck itself.
The same threads end what takes too long: each then tells where its rank is, and at fault is who
does not, or waits for no other rank (`place.held_up_by`).

Where all ranks are alive, and have given up or wait for others, nothing but a transfer has failed:
then the verdict is that they begin again in their processes, if they may. What still waits is ended
by cutting its connections.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

from torch.distributed import Store

from megaframe.comm.place import Place, Sight, gathered, held_up_by
from megaframe.errors import EXIT_LOST_RANKS, LostRanks, OutOfStep
from megaframe.layout import Layout

T = TypeVar("T")

_LOOK, _PAUSE = 1.0, 0.1
"""Seconds between two looks at the store: in peace, and once somebody is lost."""
_PATIENCE = 2.5
"""Seconds for others to report and to answer, more than two looks; once more if all who are
suspected answer, for they may report yet."""
_FAREWELL = 5.0
"""Seconds that a rank waits at most for the others to be ready to leave."""
_NAMED = 8
"""Ranks that a message names at most."""
ENDED_FILE = "ended.jsonl"
"""Where is written when a run was ended, and why."""
_LATE = "late"


@dataclass(frozen=True)
class Verdict:
    """Who is at fault and what to say about it; the same on every rank that the store reaches.
    late: whether it is that something took too long. again: whether all go on, and begin again."""

    ranks: tuple[int, ...]
    text: str
    late: bool = False
    again: bool = False


def at_fault(lost: Mapping[int, Collection[int]], answered: Collection[int]) -> tuple[int, ...]:
    """The ranks to blame, ascending: lost by somebody and lost nobody; those of them that do not
    answer, if there are any. Empty when all who were lost lost others, as in a cut network.

    lost: whom each rank that reported lost. answered: ranks whose watch is alive.
    """
    suspected = {rank for ranks in lost.values() for rank in ranks} - lost.keys()
    return tuple(sorted(suspected - set(answered) or suspected))


class Watch:
    """One rank's part in it.

    timeout: seconds that a rank may go on when the store is gone. place: where the rank is.
    rank_of: pipeline coordinate of each stage, by number; may be set, for what messages say.
    limit, folder: seconds that what `place` says to be under way may take, 0 for any, and where
    verdicts and stacks are written; may be set. may_begin_again: asked before a verdict that all
    begin again; may be set. cut: ends every wait of this rank for others.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        rank: int,
        timeout: float,
        place: Place,
        cut: Callable[[], object],
    ) -> None:
        # A connection of its own, since others may wait in the given one (not in torch's stubs).
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._layout, self._rank, self._timeout = layout, rank, timeout
        self._place, self._cut = place, cut
        self.may_begin_again: Callable[[], bool] = lambda: False
        self.rank_of: tuple[int, ...] = ()
        self.limit = 0.0
        self.folder: Path | None = None
        self._reachable = True
        self._stop = threading.Event()
        self._leaving = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="megaframe-watch", daemon=True)
        self._thread.start()

    def leave(self, lost: LostRanks) -> str:
        """Say which rank is at fault and end this process with status `EXIT_LOST_RANKS`; or, where
        all ranks begin again in their processes, return what happened."""
        self._leaving.acquire()  # for good: the other thread may be ending the process already
        if threading.current_thread() is threading.main_thread():
            # A launcher that has noticed too names the rank itself, and need not wait for this one.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._place.told:  # by a launcher that has lost a rank, and names it itself
            _within(_PATIENCE, lambda: self._report(lost))
            os._exit(EXIT_LOST_RANKS)
        verdict = self._judged(lost)
        if not verdict.again:
            self._end(verdict, lost)
        self._cut()
        return verdict.text

    def close(self) -> None:
        """End the thread, in time: a store that does not answer may keep it for longer."""
        self._stop.set()
        self._thread.join(timeout=_PATIENCE)

    def _look(self) -> None:
        """Answer when somebody is lost or late, and leave when it is known who is at fault."""
        answered = waits = False
        judged = 0.0
        try:
            while not self._stop.wait(_PAUSE if answered else _LOOK):
                if not answered:
                    late = self._place.overrun(self.limit) or self._place.stalled(self._timeout)
                    if late:
                        self._append("lost", json.dumps([self._rank, _LATE]) + "\n")
                        judged = time.monotonic() + _PATIENCE
                    if late or self._store.check(["lost"]):
                        waits = self._answer()
                        answered = True
                elif self._place.waits and not waits:
                    waits = self._answer()
                verdict = self._verdict() if answered else None
                if verdict is None and judged and time.monotonic() > judged:
                    verdict = self._first(self._lateness())
                if verdict is not None and verdict.again:
                    self._let_go(verdict)
                    return
                if verdict is not None and self._leaving.acquire(blocking=False):
                    self._end(verdict)
        except RuntimeError:
            # The store is gone, and so is the run; mostly the work notices that soon by itself.
            if not self._stop.wait(self._timeout) and self._leaving.acquire(blocking=False):
                self._end(self._alone())

    def _answer(self) -> bool:
        """Tell where this rank is. Returns whether it waits for others."""
        sight = self._place.seen(self._rank)
        self._append("answered", sight.encode() + "\n")
        return bool(sight.waiting)

    def _let_go(self, verdict: Verdict) -> None:
        """End every wait, so that the work of this rank comes here by itself."""
        if verdict.late:
            self._dump_stacks(verdict)
        self._cut()

    def _all_here(self, seen: Mapping[int, Sight]) -> bool:
        """Whether ranks may begin again, and each of them can: it has given up, or waits."""
        given_up = self._reports().keys()
        return (
            len(seen) == self._layout.world > 1
            and self.may_begin_again()
            and all(
                sight.steady and (rank in given_up or bool(sight.waiting))
                for rank, sight in seen.items()
            )
        )

    def _lateness(self) -> Verdict:
        """Who holds up what takes too long."""
        seen = self._answers()
        ranks = held_up_by(seen, self._layout.world)
        limit = f"faults.step_timeout={self.limit:g} s"
        if not self._place.overrun(self.limit):
            limit = f"parallel.timeout={self._timeout:g} s"
        text = f"{seen[self._rank].doing.partition(',')[0]} took more than {limit}: "
        text += "; ".join(
            f"{self._name(rank)} {'at ' + str(seen[rank]) if rank in seen else 'does not answer'}"
            for rank in ranks[:_NAMED]
        ) + " ..." * (len(ranks) > _NAMED)
        if others := gathered([seen[rank] for rank in sorted(seen.keys() - set(ranks))]):
            text += f" | {others}"
        if len(seen) == self._layout.world > 1 and all(sight.waiting for sight in seen.values()):
            text += " | every rank waits for another; faults.check_collectives=true compares what "
            text += "they start"
        return Verdict(ranks, text, late=True, again=self._all_here(seen))

    def _judged(self, lost: LostRanks) -> Verdict:
        """The verdict of all, or what can be said without a store that answers."""
        if _within(_PATIENCE, lambda: self._report(lost)):
            verdict = _within(3 * _PATIENCE, lambda: self._judge(lost))
            if verdict is not None:
                return verdict
        return self._alone()

    def _alone(self) -> Verdict:
        """What to say without a store that answers: it is rank 0's, if not the launcher's."""
        self._reachable = False
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return Verdict((), "the launcher that holds the store is gone or stuck")
        return Verdict((0,), f"{self._name(0)} is gone or stuck, and the store with it")

    def _report(self, lost: LostRanks) -> bool:
        self._append("lost", json.dumps([self._rank, lost.ranks]) + "\n")
        return self._store.check(["lost"])

    def _judge(self, lost: LostRanks) -> Verdict:
        """Wait for others to report and to answer, and judge unless somebody has."""
        if isinstance(lost, OutOfStep):
            return self._first(Verdict((), str(lost)))
        ranks: tuple[int, ...] = ()
        for _ in range(2):
            deadline = time.monotonic() + _PATIENCE
            while time.monotonic() < deadline:
                verdict = self._verdict()
                if verdict is not None:
                    return verdict
                if self._all_here(self._answers()):
                    text = f"{self._accusation((), False)}; {lost}"
                    return self._first(Verdict((), text, again=True))
                time.sleep(_PAUSE)
            answered = self._answers().keys()
            ranks = at_fault(self._reports(), answered)
            if not answered >= set(ranks):
                break
        text = self._accusation(ranks, bool(ranks) and answered >= set(ranks))
        return self._first(Verdict(ranks, f"{text}; {lost}"))

    def _first(self, mine: Verdict) -> Verdict:
        """The verdict of the first rank that has one."""
        text = json.dumps(asdict(mine))
        said = self._store.compare_set("verdict", "", text).decode()
        if said == text and self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                with open(self.folder / ENDED_FILE, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"at": time.time(), "text": mine.text}) + "\n")
        return _decoded(said)

    def _accusation(self, ranks: tuple[int, ...], answering: bool) -> str:
        if not ranks:
            return "no rank is gone, but ranks lost contact: check the network between them"
        names = "; ".join(map(self._name, ranks[:_NAMED])) + " ..." * (len(ranks) > _NAMED)
        verb = "are" if len(ranks) > 1 else "is"
        if answering:
            return f"{names} {verb} alive, but stuck or too slow for parallel.timeout"
        return f"{names} {verb} gone or stuck"

    def _name(self, rank: int) -> str:
        """A rank, where it is and what it ran: `rank 2 (pipeline 1, data 0: stages 1, 3)`."""
        where = self._layout.coordinate(rank)
        text = ", ".join(
            f"{axis} {where[axis]}"
            for axis in reversed(tuple(where))
            if axis in ("pipeline", "data") or self._layout.sizes[axis] > 1
        )
        stages = [n for n, owner in enumerate(self.rank_of) if owner == where["pipeline"]]
        if stages:
            text += f": stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        return f"rank {rank} ({text})"

    def _end(self, verdict: Verdict, lost: LostRanks | None = None) -> NoReturn:
        """Print, and leave at once: to destroy process groups, or to end threads that wait in them
        or in the store, can take as long as their timeout when the other end is gone."""
        text = verdict.text
        # After a hang ranks lose those that have left for it, which says no more.
        if lost is not None and not verdict.late and str(lost) not in text:
            text += f"; {lost}"
        print(f"error: rank {self._rank}: {text}", file=sys.stderr, flush=True)
        if verdict.late or (lost is None and self._rank in verdict.ranks):
            self._dump_stacks(verdict)
        sys.stdout.flush()
        if self._reachable:
            _within(_FAREWELL, lambda: self._take_leave(verdict))
        os._exit(EXIT_LOST_RANKS)

    def _dump_stacks(self, verdict: Verdict) -> None:
        """Write where all threads of this process are."""
        faulthandler.dump_traceback()
        if self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                with open(self.folder / f"rank-{self._rank:05d}.txt", "w") as file:
                    print(
                        f"{verdict.text}\nrank {self._rank}: {self._place.seen(self._rank)}",
                        file=file,
                        flush=True,
                    )
                    faulthandler.dump_traceback(file)

    def _take_leave(self, verdict: Verdict) -> None:
        """Rank 0, which may hold the store, leaves after all but the silent. So does every rank
        when something took too long: what waits for a rank that is gone is no longer where it was
        when its stacks are written."""
        self._append("left", f"{self._rank} ")
        silent = set(verdict.ranks) - self._answers().keys()
        staying = set(range(self._layout.world)) - silent
        stays = self._rank == 0 or verdict.late
        while stays and staying - {int(rank) for rank in self._read("left").split()}:
            time.sleep(_PAUSE)

    def _append(self, key: str, text: str) -> None:
        self._store.append(key, text)  # type: ignore[attr-defined]  # not in torch's stubs

    def _read(self, key: str) -> str:
        # `get` alone would wait for a key that nobody has written yet.
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _reports(self) -> dict[int, Collection[int]]:
        """Whom each rank lost that has given up."""
        lines = map(json.loads, self._read("lost").splitlines())
        return {rank: ranks for rank, ranks in lines if ranks != _LATE}

    def _answers(self) -> dict[int, Sight]:
        sights = map(Sight.decode, self._read("answered").splitlines())
        return {sight.rank: sight for sight in sights}

    def _verdict(self) -> Verdict | None:
        text = self._read("verdict")
        return _decoded(text) if text else None


def _decoded(text: str) -> Verdict:
    known = json.loads(text)
    return Verdict(tuple(known["ranks"]), known["text"], known["late"], known["again"])


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What the store answers to `ask`, None when it fails or takes longer; for the store of a
    process that is stopped would keep the caller for ever."""
    box: SimpleQueue[T | None] = SimpleQueue()

    def run() -> None:
        try:
            box.put(ask())
        except RuntimeError:
            box.put(None)

    threading.Thread(target=run, daemon=True).start()
    try:
        return box.get(timeout=seconds)
    except Empty:
        return None
