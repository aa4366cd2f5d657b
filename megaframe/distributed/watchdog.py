"""Watchdog: finds which rank is at fault when ranks lose contact, and makes sure that no rank keeps
running.

A dead rank is first noticed by its neighbours. When they leave, their own neighbours notice that,
and so on. Therefore a rank does not blame the ranks that it lost. All ranks write to the store whom
they lost, and a rank is at fault if some rank lost it, it lost nobody, and it does not answer. Each
rank answers from a thread that runs in parallel with its work. This thread also ends ranks that
would notice nothing before their timeout, and a rank that is stuck itself. The same threads end a
run in which something takes too long: each reports where its rank is, and at fault are the ranks
that do not report, else those that wait for no other rank (`blame_for_hang`). What is written,
and which rank reads it and judges for all, is in `failure_verdict.py`.

If all ranks are alive, and each has given up or waits for others, only a transfer has failed. Then
the verdict is an in-process restart, if it is allowed, and remaining waits are ended by cutting
their connections.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

from torch.distributed import Store

from megaframe.distributed.failure_verdict import (
    MAX_NAMED,
    FailureReports,
    FailureStore,
    FailureVerdict,
    blame_for_loss,
    call_with_timeout,
    compute_polling_interval,
    describe_lost_ranks,
    name_rank,
)
from megaframe.distributed.fault_records import dump_stacks, record_end
from megaframe.distributed.rank_progress import (
    RankProgress,
    RankStatus,
    blame_for_hang,
    describe_statuses,
)
from megaframe.distributed.rendezvous import is_store_at_agent
from megaframe.errors import EXIT_LOST_RANKS, CollectiveMismatch, LostRanks
from megaframe.layout import Layout

Judge = Callable[[FailureReports, int, bool], FailureVerdict | None]
"""Returns the verdict of a rank for what the ranks have reported, the number of the round and
whether its time is over; None to wait."""

_POLL_SECONDS, _FAST_POLL_SECONDS = 1.0, 0.1
"""Seconds between two looks at the store, unless there are very many ranks: normally, and after a
rank was lost."""
_ANSWER_SECONDS = 2.5
"""Seconds that others have to report and to answer; more than two looks take. They have the same
time again if all suspects answer, because these may still report, and up to three times as much
while reports and answers still arrive."""
_STORE_SECONDS, _VERDICT_SECONDS = 5.0, 20.0
"""Seconds within which the store answers if it is there, although it may have to answer all ranks
at once; and within which there is a verdict."""
_EXIT_SECONDS = 5.0
"""Seconds that a rank waits at most for the others to be ready to leave, or rank 0 for the next of
them."""


class Watchdog:
    """The watchdog of one rank. Its attributes may be set after it was made.

    Attributes:
        communicator_error: Returns what the device's communicators report, empty if nothing.
        write_flight_record: Writes the flight record into a folder and returns what to say about
            it.
        rank_of_stage: Pipeline coordinate of each stage, by number, for messages.
        limit: Seconds that the activity recorded in `progress` may take, 0 for no limit.
        folder: Where verdicts and stacks are written.
        may_restart: Asked before a verdict that all ranks restart in their processes.
        before_exit: Called before the process ends, for at most a few seconds.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        rank: int,
        timeout: float,
        progress: RankProgress,
        end_transfers: Callable[[], str],
    ) -> None:
        """Start the thread that watches.

        Args:
            store: The run's store; the watchdog makes a connection of its own to it.
            layout: Where each rank lies.
            rank: This rank.
            timeout: Seconds that the rank may continue after the store is gone, and that its
                device may wait for other ranks in one part of a step.
            progress: Where the rank is in its work.
            end_transfers: Ends every wait of this rank for others. Returns why this process cannot
                restart, empty if it can.
        """
        # A separate connection, because other threads may block on the given one. (`clone` is not
        # in torch's stubs.)
        self._failure_store = FailureStore(store.clone(), rank, layout.world)  # type: ignore[attr-defined]
        # Ranks that wait for a verdict look half as often, because they also report and answer.
        self._fast_poll = compute_polling_interval(_FAST_POLL_SECONDS, 2 * layout.world)
        self._poll = compute_polling_interval(_POLL_SECONDS, layout.world)
        self._answer_seconds = _ANSWER_SECONDS * self._poll / _POLL_SECONDS
        self._layout, self._rank, self._timeout = layout, rank, timeout
        self._progress, self._end_transfers = progress, end_transfers
        self.may_restart: Callable[[], bool] = lambda: False
        self.before_exit: Callable[[], object] = lambda: None
        self.communicator_error: Callable[[], str] = lambda: ""
        self.write_flight_record: Callable[[Path], str] | None = None
        self.rank_of_stage: tuple[int, ...] = ()
        self.limit = 0.0
        self.folder: Path | None = None
        self._reachable = True
        self._answered_waiting: bool | None = None
        """Whether this rank waited for others when it last answered; None before it has."""
        self._stop = threading.Event()
        self._leaving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="megaframe-watch", daemon=True)
        self._thread.start()

    def leave(self, lost: LostRanks) -> str:
        """Report which rank is at fault and end this process with status `EXIT_LOST_RANKS`. If all
        ranks restart in their processes, return what happened instead."""
        self._leaving.acquire()  # never released: the watchdog's thread may be ending the process
        if threading.current_thread() is threading.main_thread():
            # A launcher that has noticed the loss names the rank itself. It need not wait for this
            # process, so SIGTERM ends it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._progress.leave_signal:  # by a launcher that has lost a rank and names it itself
            call_with_timeout(
                self._answer_seconds, lambda: self._failure_store.report_loss(lost.ranks)
            )
            call_with_timeout(_ANSWER_SECONDS, self.before_exit)
            os._exit(EXIT_LOST_RANKS)
        verdict = self._decide(lost)
        if not verdict.restart:
            self._exit(verdict, lost)
        if reason := self._end_transfers():
            self._exit(self._make_restart_refusal(reason))
        return verdict.text

    def close(self) -> None:
        """Stop the thread, and wait for it only briefly: a store that does not answer may block
        it."""
        self._stop.set()
        self._thread.join(timeout=_ANSWER_SECONDS)

    def _run(self) -> None:
        """Run the thread: answer when a rank is lost or late, and end the process, or cut its
        waits for a restart, when there is a verdict."""
        verdict: FailureVerdict | None = None
        try:
            while not self._stop.wait(self._fast_poll if self._awaits_verdict else self._poll):
                late = (
                    self._progress.has_activity_exceeded(self.limit)
                    or self._progress.has_device_stalled(self._timeout)
                    or bool(self.communicator_error())
                )
                # Raised once: from then on every rank answers, this one too.
                if late and self._answered_waiting is None:
                    self._failure_store.raise_alarm()
                if self._answered_waiting is None and (late or self._failure_store.is_alarmed()):
                    self._answer()
                if not self._awaits_verdict:
                    continue
                if late:
                    verdict = self._wait_for_verdict(self._judge_late)
                else:
                    self._update_answer()
                    verdict = self._failure_store.read_verdict()
                if verdict is not None and verdict.restart:
                    self._cut_waits(verdict)
                    return
                # Only one thread ends the process; the working thread may have begun to leave.
                if verdict is not None and self._leaving.acquire(blocking=False):
                    self._exit(verdict)
        except RuntimeError:
            # The store is gone, so the run is over. Usually the work soon notices that by itself.
            if not self._stop.wait(self._timeout) and self._leaving.acquire(blocking=False):
                self._exit(self._blame_store())

    @property
    def _awaits_verdict(self) -> bool:
        """Whether the watchdog's thread looks for a verdict. It does not while all is well, nor if
        the working thread does."""
        return self._answered_waiting is not None and not self._leaving.locked()

    def _answer(self) -> None:
        """Write to the store where this rank is."""
        status = self._progress.read_status(self._rank)
        self._failure_store.report_status(status)
        self._answered_waiting = bool(status.waiting)

    def _update_answer(self) -> None:
        """Answer once more if this rank has begun to wait for others since it answered."""
        if self._answered_waiting is False and self._progress.is_waiting:
            self._answer()

    def _cut_waits(self, verdict: FailureVerdict) -> None:
        """End every wait of this rank, so that its working thread raises and calls `leave`."""
        if verdict.late:
            self._dump_stacks(verdict)
        self._write_record()
        if (reason := self._end_transfers()) and self._leaving.acquire(blocking=False):
            self._exit(self._make_restart_refusal(reason))

    def _make_restart_refusal(self, reason: str) -> FailureVerdict:
        """Return the verdict of a rank that alone cannot restart in its process."""
        text = f"{self._name_rank(self._rank)} cannot restart in its process: {reason}"
        return FailureVerdict((self._rank,), text)

    def _can_all_restart(self, reports: FailureReports, statuses: Mapping[int, RankStatus]) -> bool:
        """Return whether the ranks may restart in their processes and each of them can: it is in
        the loop over steps, and has given up or waits for others."""
        if not len(statuses) == self._layout.world > 1 or not self.may_restart():
            return False
        given_up = reports.decode_losses().keys()
        return all(
            status.can_restart and (rank in given_up or bool(status.waiting))
            for rank, status in statuses.items()
        )

    def _judge_late(
        self, reports: FailureReports, number: int, over: bool
    ) -> FailureVerdict | None:
        """Return this rank's verdict about what takes too long; see `_wait_for_verdict`."""
        if not over:
            return None
        statuses = reports.decode_statuses()
        ranks = blame_for_hang(statuses, self._layout.world)
        text = statuses[self._rank].activity.partition(",")[0]
        if self._progress.has_activity_exceeded(self.limit):
            text += f" took more than faults.step_timeout={self.limit:g} s: "
        elif error := self.communicator_error():
            text += f" failed, NCCL reports {error}: "
        else:
            text += f" took more than parallel.timeout={self._timeout:g} s: "
        answers = {rank: f"at {status}" for rank, status in statuses.items()}
        text += "; ".join(
            f"{self._name_rank(rank)} {answers.get(rank, 'does not answer')}"
            for rank in ranks[:MAX_NAMED]
        ) + " ..." * (len(ranks) > MAX_NAMED)
        other_ranks = sorted(statuses.keys() - set(ranks))
        if other_ranks:
            text += f" | {describe_statuses([statuses[rank] for rank in other_ranks])}"
        all_answered = len(statuses) == self._layout.world > 1
        if all_answered and all(status.waiting for status in statuses.values()):
            text += " | every rank waits for another; faults.check_collectives=true compares what "
            text += "they start"
        silent = tuple(rank for rank in ranks if rank not in statuses)
        return FailureVerdict(
            ranks, text, late=True, restart=self._can_all_restart(reports, statuses), silent=silent
        )

    def _decide(self, lost: LostRanks) -> FailureVerdict:
        """Return the common verdict, or `_blame_store` if the store does not answer."""
        if call_with_timeout(_STORE_SECONDS, lambda: self._report_loss(lost)):
            verdict = call_with_timeout(_VERDICT_SECONDS, lambda: self._judge_and_wait(lost))
            if verdict is not None:
                return verdict
        return self._blame_store()

    def _judge_and_wait(self, lost: LostRanks) -> FailureVerdict | None:
        if isinstance(lost, CollectiveMismatch):
            return self._publish(FailureVerdict((), str(lost)))
        return self._wait_for_verdict(partial(self._judge_loss, lost))

    def _blame_store(self) -> FailureVerdict:
        """Return the verdict for a store that does not answer: the fault is with the process that
        holds it, which is the launcher or else rank 0."""
        self._reachable = False
        if is_store_at_agent():
            return FailureVerdict((), "the launcher that holds the store is gone or stuck")
        return FailureVerdict((0,), f"{self._name_rank(0)} is gone or stuck, and the store with it")

    def _report_loss(self, lost: LostRanks) -> bool:
        self._failure_store.report_loss(lost.ranks)
        return self._failure_store.is_alarmed()

    def _wait_for_verdict(self, judge: Judge) -> FailureVerdict | None:
        """Wait for the verdict, in rounds; in each of them one of the ranks that wait is the judge.
        Returns None if the watchdog is closed meanwhile."""
        for number in count():
            verdict = self._run_round(number, judge)
            if verdict is not None or self._stop.is_set():
                break
        return verdict

    def _run_round(self, number: int, judge: Judge) -> FailureVerdict | None:
        """Wait for the verdict until the time of a round is over; see `_wait_for_verdict`."""
        is_judge, reports = self._failure_store.try_become_judge(number), FailureReports()
        begun = news = time.monotonic()
        over = False
        while not over and not self._stop.wait(self._fast_poll):
            self._update_answer()
            verdict = self._failure_store.read_verdict()
            now = time.monotonic()
            if verdict is None and is_judge:
                reports, before = self._failure_store.read_reports(), reports
                # The judge waits for reports as long as new ones arrive.
                news = now if reports != before else news
                over = now > begun + self._answer_seconds and now > news + self._poll
                # An end even if reports keep arriving.
                over |= now > begun + 3 * self._answer_seconds
                own_verdict = judge(reports, number, over)
                verdict = None if own_verdict is None else self._publish(own_verdict)
            else:
                # Then another rank judges, because the judge may be lost.
                over = now > begun + self._answer_seconds + 2 * self._fast_poll
            if verdict is not None:
                return verdict
        return None

    def _judge_loss(
        self, lost: LostRanks, reports: FailureReports, number: int, over: bool
    ) -> FailureVerdict | None:
        """Return this rank's verdict about lost ranks; see `_wait_for_verdict`."""
        statuses = reports.decode_statuses()
        if not over:
            if not self._can_all_restart(reports, statuses):
                return None
            return FailureVerdict((), f"{describe_lost_ranks((), False)}; {lost}", restart=True)
        ranks = blame_for_loss(reports.decode_losses(), statuses.keys())
        silent = tuple(rank for rank in ranks if rank not in statuses)
        # All suspects answer, so they may still report a loss: wait for one more round.
        if number == 0 and not silent:
            return None
        names = [self._name_rank(rank) for rank in ranks[: MAX_NAMED + 1]]  # one more, for "..."
        text = describe_lost_ranks(names, bool(ranks) and not silent)
        return FailureVerdict(ranks, f"{text}; {lost}", silent=silent)

    def _publish(self, own_verdict: FailureVerdict) -> FailureVerdict:
        """Publish this rank's verdict unless there is one, and return the first one published. The
        rank whose verdict it is also writes it to the folder."""
        published = self._failure_store.publish_verdict(own_verdict)
        if published == own_verdict and self.folder is not None:
            record_end(self.folder, own_verdict.text)
        return published

    def _name_rank(self, rank: int) -> str:
        return name_rank(self._layout, self.rank_of_stage, rank)

    def _exit(self, verdict: FailureVerdict, lost: LostRanks | None = None) -> NoReturn:
        """Print the verdict and end the process at once."""
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
            call_with_timeout(_VERDICT_SECONDS, lambda: self._wait_for_others(verdict))
        call_with_timeout(_ANSWER_SECONDS, self.before_exit)
        # At once: destroying process groups, or ending threads that wait in them or in the store,
        # could take until their timeout when the other end is gone.
        os._exit(EXIT_LOST_RANKS)

    def _dump_stacks(self, verdict: FailureVerdict) -> None:
        def describe() -> str:
            return f"{verdict.text}\nrank {self._rank}: {self._progress.read_status(self._rank)}"

        dump_stacks(self.folder, self._rank, describe)

    def _write_record(self) -> None:
        """Write the flight record of this rank into the folder, if there is a recorder."""
        if self.write_flight_record is not None and self.folder is not None:
            message = self.write_flight_record(self.folder)
            print(f"rank {self._rank}: {message}", file=sys.stderr, flush=True)

    def _wait_for_others(self, verdict: FailureVerdict) -> None:
        """Announce that this rank is ready to leave. Rank 0, which may hold the store, also waits
        until all others are ready, except ranks at fault that do not answer. If something took too
        long, every rank waits for this."""
        num_ready = self._failure_store.announce_exit(verdict)
        # After a hang every rank stays: one that leaves ends the waits of others, whose stacks
        # would then no longer show where they waited.
        stays, last = self._rank == 0 or verdict.late, time.monotonic()
        while stays and not self._failure_store.are_all_ready():
            time.sleep(self._fast_poll)
            # Rank 0 stays longer while others still leave: very many need their time to see the
            # verdict, and without a store they would blame it.
            if self._rank == 0 and num_ready != (num_ready := self._failure_store.count_ready()):
                last = time.monotonic()
            stays = time.monotonic() < last + _EXIT_SECONDS
