"""Watch: finds which rank is at fault when ranks lose contact, and makes sure that no rank keeps
running.

A dead rank is first noticed by its neighbours. When they leave, their own neighbours notice that,
and so on. Therefore a rank does not blame the ranks that it lost. All ranks write to the store whom
they lost, and a rank is at fault if some rank lost it, it lost nobody, and it does not answer. Each
rank answers from a thread that runs in parallel with its work. This thread also ends ranks that
would notice nothing before their timeout, and a rank that is stuck itself. The same threads end a
run in which something takes too long: each reports where its rank is, and at fault are the ranks
that do not report, else those that wait for no other rank (`place.held_up_by`). What is written,
and which rank reads it and judges for all, is in `hearing.py`.

If all ranks are alive, and each has given up or waits for others, only a transfer has failed. Then
the verdict is an in-process restart, if it is allowed, and remaining waits are ended by cutting
their connections.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn, TypeVar

from torch.distributed import Store

from megaframe.distributed.failure_verdict import Hearing, Told, Verdict, at_fault, spaced
from megaframe.distributed.rank_progress import Place, Sight, gathered, held_up_by
from megaframe.distributed.rendezvous import agent_has_store
from megaframe.errors import EXIT_LOST_RANKS, CollectiveMismatch, LostRanks
from megaframe.layout import Layout

T = TypeVar("T")

_LOOK, _PAUSE = 1.0, 0.1
"""Seconds between two looks at the store, unless there are very many ranks: normally, and after a
rank was lost."""
_PATIENCE = 2.5
"""Seconds that others have to report and to answer; more than two looks take. They have the same
time again if all suspects answer, because these may still report, and up to three times as much
while reports and answers still arrive."""
_REACH, _LONGEST = 5.0, 20.0
"""Seconds within which the store answers if it is there, although it may have to answer all ranks
at once; and within which there is a verdict."""
_FAREWELL = 5.0
"""Seconds that a rank waits at most for the others to be ready to leave, or rank 0 for the next of
them."""
_NAMED = 8
"""Ranks that a message names at most."""
ENDED_FILE = "ended.jsonl"
"""File that says when a run was ended, and why."""


class Watch:
    """The watch of one rank.

    timeout: seconds that the rank may continue after the store is gone, and that its device may
    wait for other ranks in one part of a step.
    place: where the rank is in its work.
    cut: ends every wait of this rank for others. Returns why this process cannot restart, empty
    if it can.

    May be set:
    error: returns what the device's communicators report, empty if nothing.
    record: writes the flight record into a folder and returns what to say about it.
    rank_of: pipeline coordinate of each stage, by number, for messages.
    limit: seconds that the activity recorded in `place` may take, 0 for no limit.
    folder: where verdicts and stacks are written.
    may_begin_again: asked before a verdict that all ranks restart in their processes.
    at_end: called before the process ends, for at most a few seconds.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        rank: int,
        timeout: float,
        place: Place,
        cut: Callable[[], str],
    ) -> None:
        # A separate connection, because other threads may block on the given one. (`clone` is not
        # in torch's stubs.)
        self._hearing = Hearing(store.clone(), rank, layout.world)  # type: ignore[attr-defined]
        # Ranks that wait for a verdict look half as often, because they also report and answer.
        self._pause = spaced(_PAUSE, 2 * layout.world)
        self._look_every = spaced(_LOOK, layout.world)
        self._patience = _PATIENCE * self._look_every / _LOOK
        self._layout, self._rank, self._timeout = layout, rank, timeout
        self._place, self._cut = place, cut
        self.may_begin_again: Callable[[], bool] = lambda: False
        self.at_end: Callable[[], object] = lambda: None
        self.error: Callable[[], str] = lambda: ""
        self.record: Callable[[Path], str] | None = None
        self.rank_of: tuple[int, ...] = ()
        self.limit = 0.0
        self.folder: Path | None = None
        self._reachable = True
        self._waits: bool | None = None
        """Whether this rank waited for others when it last answered; None before it has."""
        self._stop = threading.Event()
        self._leaving = threading.Lock()
        self._thread = threading.Thread(target=self._look, name="megaframe-watch", daemon=True)
        self._thread.start()

    def leave(self, lost: LostRanks) -> str:
        """Report which rank is at fault and end this process with status `EXIT_LOST_RANKS`. If all
        ranks restart in their processes, return what happened instead."""
        self._leaving.acquire()  # never released: the watch's thread may be ending the process
        if threading.current_thread() is threading.main_thread():
            # A launcher that has noticed the loss names the rank itself. It need not wait for this
            # process, so SIGTERM ends it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._place.told:  # by a launcher that has lost a rank and names it itself
            _within(self._patience, lambda: self._hearing.report(lost.ranks))
            _within(_PATIENCE, self.at_end)
            os._exit(EXIT_LOST_RANKS)
        verdict = self._judged(lost)
        if not verdict.again:
            self._end(verdict, lost)
        if wrong := self._cut():
            self._end(self._stays_out(wrong))
        return verdict.text

    def close(self) -> None:
        """Stop the thread, and wait for it only briefly: a store that does not answer may block
        it."""
        self._stop.set()
        self._thread.join(timeout=_PATIENCE)

    def _look(self) -> None:
        """Run the thread: answer when a rank is lost or late, and end the process, or cut its
        waits for a restart, when there is a verdict."""
        verdict: Verdict | None = None
        try:
            while not self._stop.wait(self._pause if self._waits_for_verdict else self._look_every):
                late = self._place.overrun(self.limit) or self._place.stalled(self._timeout)
                late = late or bool(self.error())
                if late and self._waits is None:
                    self._hearing.call()
                if self._waits is None and (late or self._hearing.called()):
                    self._answer()
                if not self._waits_for_verdict:
                    continue
                if late:
                    verdict = self._agreed(self._late)
                else:
                    self._answer_again()
                    verdict = self._hearing.verdict()
                if verdict is not None and verdict.again:
                    self._let_go(verdict)
                    return
                if verdict is not None and self._leaving.acquire(blocking=False):
                    self._end(verdict)
        except RuntimeError:
            # The store is gone, so the run is over. Usually the work soon notices that by itself.
            if not self._stop.wait(self._timeout) and self._leaving.acquire(blocking=False):
                self._end(self._alone())

    @property
    def _waits_for_verdict(self) -> bool:
        """Whether the watch's thread looks for a verdict. It does not while all is well, nor if the
        working thread does."""
        return self._waits is not None and not self._leaving.locked()

    def _answer(self) -> None:
        """Write to the store where this rank is."""
        sight = self._place.seen(self._rank)
        self._hearing.answer(sight)
        self._waits = bool(sight.waiting)

    def _answer_again(self) -> None:
        """Answer once more if this rank has begun to wait for others since it answered."""
        if self._waits is False and self._place.waits:
            self._answer()

    def _let_go(self, verdict: Verdict) -> None:
        """End every wait of this rank, so that its working thread raises and calls `leave`."""
        if verdict.late:
            self._dump_stacks(verdict)
        self._write_record()
        if (wrong := self._cut()) and self._leaving.acquire(blocking=False):
            self._end(self._stays_out(wrong))

    def _stays_out(self, wrong: str) -> Verdict:
        """Return the verdict of a rank that alone cannot restart in its process."""
        text = f"{self._name(self._rank)} cannot restart in its process: {wrong}"
        return Verdict((self._rank,), text)

    def _all_here(self, told: Told, seen: Mapping[int, Sight]) -> bool:
        """Return whether the ranks may restart in their processes and each of them can: it is in
        the loop over steps, and has given up or waits for others."""
        if not len(seen) == self._layout.world > 1 or not self.may_begin_again():
            return False
        given_up = told.reports().keys()
        return all(
            sight.steady and (rank in given_up or bool(sight.waiting))
            for rank, sight in seen.items()
        )

    def _late(self, told: Told, number: int, over: bool) -> Verdict | None:
        """Return this rank's verdict about what takes too long; see `_agreed`."""
        if not over:
            return None
        seen = told.answers()
        ranks = held_up_by(seen, self._layout.world)
        text = seen[self._rank].doing.partition(",")[0]
        if self._place.overrun(self.limit):
            text += f" took more than faults.step_timeout={self.limit:g} s: "
        elif error := self.error():
            text += f" failed, NCCL reports {error}: "
        else:
            text += f" took more than parallel.timeout={self._timeout:g} s: "
        text += "; ".join(
            f"{self._name(rank)} {'at ' + str(seen[rank]) if rank in seen else 'does not answer'}"
            for rank in ranks[:_NAMED]
        ) + " ..." * (len(ranks) > _NAMED)
        if others := gathered([seen[rank] for rank in sorted(seen.keys() - set(ranks))]):
            text += f" | {others}"
        if len(seen) == self._layout.world > 1 and all(sight.waiting for sight in seen.values()):
            text += " | every rank waits for another; faults.check_collectives=true compares what "
            text += "they start"
        silent = tuple(rank for rank in ranks if rank not in seen)
        return Verdict(ranks, text, late=True, again=self._all_here(told, seen), silent=silent)

    def _judged(self, lost: LostRanks) -> Verdict:
        """Return the common verdict, or `_alone` if the store does not answer."""
        if _within(_REACH, lambda: self._reported(lost)):
            verdict = _within(_LONGEST, lambda: self._judge(lost))
            if verdict is not None:
                return verdict
        return self._alone()

    def _judge(self, lost: LostRanks) -> Verdict | None:
        if isinstance(lost, CollectiveMismatch):
            return self._first(Verdict((), str(lost)))
        return self._agreed(partial(self._accused, lost))

    def _alone(self) -> Verdict:
        """Return the verdict for a store that does not answer: the fault is with the process that
        holds it, which is the launcher or else rank 0."""
        self._reachable = False
        if agent_has_store():
            return Verdict((), "the launcher that holds the store is gone or stuck")
        return Verdict((0,), f"{self._name(0)} is gone or stuck, and the store with it")

    def _reported(self, lost: LostRanks) -> bool:
        self._hearing.report(lost.ranks)
        return self._hearing.called()

    def _agreed(self, judge: Callable[[Told, int, bool], Verdict | None]) -> Verdict | None:
        """Wait for the verdict, in rounds; in each of them one of the ranks that wait is the judge.
        Returns None if the watch is closed meanwhile.

        judge: returns the verdict of this rank for what the ranks have told, the number of the
        round and whether its time is over, or None to wait.
        """
        for number in count():
            verdict = self._round(number, judge)
            if verdict is not None or self._stop.is_set():
                break
        return verdict

    def _round(
        self, number: int, judge: Callable[[Told, int, bool], Verdict | None]
    ) -> Verdict | None:
        """Wait for the verdict until the time of a round is over; see `_agreed`."""
        mine, told = self._hearing.is_judge(number), Told()
        begun = news = time.monotonic()
        over = False
        while not over and not self._stop.wait(self._pause):
            self._answer_again()
            verdict = self._hearing.verdict()
            now = time.monotonic()
            if verdict is None and mine:
                told, before = self._hearing.told(), told
                news = now if told != before else news
                over = now > begun + self._patience and now > news + self._look_every
                over |= now > begun + 3 * self._patience
                found = judge(told, number, over)
                verdict = None if found is None else self._first(found)
            else:
                # Then another rank judges, because the judge may be lost.
                over = now > begun + self._patience + 2 * self._pause
            if verdict is not None:
                return verdict
        return None

    def _accused(self, lost: LostRanks, told: Told, number: int, over: bool) -> Verdict | None:
        """Return this rank's verdict about lost ranks; see `_agreed`."""
        seen = told.answers()
        if not over:
            if not self._all_here(told, seen):
                return None
            return Verdict((), f"{self._accusation((), False)}; {lost}", again=True)
        ranks = at_fault(told.reports(), seen.keys())
        silent = tuple(rank for rank in ranks if rank not in seen)
        if number == 0 and not silent:
            return None
        text = self._accusation(ranks, bool(ranks) and not silent)
        return Verdict(ranks, f"{text}; {lost}", silent=silent)

    def _first(self, mine: Verdict) -> Verdict:
        """Publish this rank's verdict unless there is one, and return the first one published. The
        rank whose verdict it is also writes it to the folder."""
        said = self._hearing.publish(mine)
        if said == mine and self.folder is not None:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                with open(self.folder / ENDED_FILE, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"at": time.time(), "text": mine.text}) + "\n")
        return said

    def _accusation(self, ranks: tuple[int, ...], answering: bool) -> str:
        if not ranks:
            return "no rank is gone, but ranks lost contact: check the network between them"
        names = "; ".join(map(self._name, ranks[:_NAMED])) + " ..." * (len(ranks) > _NAMED)
        verb = "are" if len(ranks) > 1 else "is"
        if answering:
            return f"{names} {verb} alive, but stuck or too slow for parallel.timeout"
        return f"{names} {verb} gone or stuck"

    def _name(self, rank: int) -> str:
        """Name a rank with its coordinate and its stages, as in
        `rank 2 (pipeline 1, data 0: stages 1, 3)`."""
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
        """Print the verdict and end the process at once. Destroying process groups, or ending
        threads that wait in them or in the store, could take until their timeout when the other end
        is gone."""
        text = verdict.text
        # After a hang, a rank also loses those that have already left because of it. That would
        # add nothing to the message.
        if lost is not None and not verdict.late and str(lost) not in text:
            text += f"; {lost}"
        print(f"error: rank {self._rank}: {text}", file=sys.stderr, flush=True)
        if verdict.late or (lost is None and self._rank in verdict.ranks):
            self._dump_stacks(verdict)
        self._write_record()
        sys.stdout.flush()
        if self._reachable:
            _within(_LONGEST, lambda: self._take_leave(verdict))
        _within(_PATIENCE, self.at_end)
        os._exit(EXIT_LOST_RANKS)

    def _dump_stacks(self, verdict: Verdict) -> None:
        """Write the stacks of all threads of this process, to standard error and to the folder."""
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

    def _write_record(self) -> None:
        """Write the flight record of this rank into the folder, if there is a recorder."""
        if self.record is not None and self.folder is not None:
            said = self.record(self.folder)
            print(f"rank {self._rank}: {said}", file=sys.stderr, flush=True)

    def _take_leave(self, verdict: Verdict) -> None:
        """Announce that this rank is ready to leave. Rank 0, which may hold the store, also waits
        until all others are ready, except ranks at fault that do not answer. If something took too
        long, every rank waits for this: a rank that leaves ends the waits of others, whose stacks
        would then no longer show where they waited. Rank 0 stays longer while others still leave:
        very many need their time to see the verdict, and without a store they would blame it."""
        left = self._hearing.leave(verdict)
        stays, last = self._rank == 0 or verdict.late, time.monotonic()
        while stays and not self._hearing.all_left():
            time.sleep(self._pause)
            if self._rank == 0 and left != (left := self._hearing.left()):
                last = time.monotonic()
            stays = time.monotonic() < last + _FAREWELL


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return the result of `ask`, or None if the store fails in it or it takes more than `seconds`.
    Without this limit, a store in a stopped process would block the caller forever."""
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
