"""The queue: starts runs and asks them to leave, as the scheduler decides, until all have ended.

A run that leaves for another has saved, and continues when there is room, with the number of ranks
that is free then. The queue itself may be killed at any moment: what it must know again are the
folders of the runs and one small file (`queue_state.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megaframe.checkpoint.lock import RunLock, find_holder
from megaframe.errors import EXIT_USER_ERROR, UserError
from megaframe.run_queue.halving import find_lagging
from megaframe.run_queue.queue_file import RunOfQueue
from megaframe.run_queue.queue_page import QueuePage
from megaframe.run_queue.queue_state import ENDED, AdoptedProcess, QueueState, RunRecord, State
from megaframe.run_queue.run_process import RunProcess
from megaframe.run_queue.scheduler import QueuedRun, decide

_PAUSE = 0.1
_PAGE_SECONDS = 5.0
_LEAVE_SECONDS = 330.0
"""Time to finish two steps and save; torchrun gives its ranks 300 s (tools/launch/node.py)."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LEFT = {*(128 + number for number in _SIGNALS), *(-number for number in _SIGNALS)}
"""Exit statuses of a run that was asked to leave, as shells and as `subprocess` report them."""


class Launcher(Protocol):
    """What starts runs, and where."""

    def count_devices(self) -> int:
        """Return how many ranks there is room for."""
        ...

    def make_command(self, words: Sequence[str], ranks: int) -> list[str]:
        """Return the command that runs a command line of `pretrain_gpt.py` on so many ranks, and
        exits with the status of the run."""
        ...

    def make_environment(self, devices: Sequence[int]) -> dict[str, str]:
        """Return the variables of a run that has these devices, by their numbers."""
        ...


@dataclass
class ActiveRun:
    """A run that has a process.

    Attributes:
        run: The run.
        process: What runs it.
        output: Its folder and what it prints.
        devices: Those that it has.
        asked: When it was asked to leave; None if it was not.
        is_behind: Whether it was asked because other trials are better.
    """

    run: RunOfQueue
    process: subprocess.Popen[bytes] | AdoptedProcess
    output: RunProcess
    devices: tuple[int, ...]
    asked: float | None = None
    is_behind: bool = False

    def poll(self) -> int | None:
        """Return the exit status of its process; None until it and its ranks have ended. A launcher
        that is killed leaves ranks behind, which save before they end."""
        status = self.process.poll()
        return None if status is None or find_holder(self.run.folder) is not None else status


@dataclass
class RunQueue:
    """Runs of one folder.

    Attributes:
        folder: Where the runs have their folders; no two queues may have the same.
        runs: The runs, in their order.
        launcher: What starts them.
        retries: How often a run may fail and be started again.
        read_changes: Returns the runs if they have changed since the last call, or None.
    """

    folder: Path
    runs: list[RunOfQueue]
    launcher: Launcher
    retries: int = 2
    read_changes: Callable[[], list[RunOfQueue] | None] = lambda: None
    _state: QueueState = field(default_factory=QueueState)
    _active: dict[str, ActiveRun] = field(default_factory=dict)
    _histories: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    _page_time: float = 0.0

    def __post_init__(self) -> None:
        for run in self.runs:
            self._check_size(run)
        self.page = QueuePage(self.folder)

    def run(self) -> list[tuple[RunOfQueue, RunRecord]]:
        """Run until all runs have ended, and return them with what has become of them.

        Raises:
            UserError: Another queue has the folder, or what this one has left there is damaged.
        """
        lock = RunLock({"folder": self.folder})
        lock.take()
        try:
            self._state = QueueState.read(self.folder)
            self._prepare()
            try:
                while self._take_turn():
                    time.sleep(_PAUSE)
            finally:
                self._leave_all()
        finally:
            lock.release()
        return self.list_records()

    def _prepare(self) -> None:
        """Take over what a queue before this one has left."""
        for name, record in self._state.runs.items():
            if record.state == "failed":
                self._state.runs[name] = RunRecord(record.words)
        self._adopt_processes()
        self._update_records()
        for run, record in self.list_records():
            if run.grace is not None and record.starts:
                self._read_history(run, RunProcess(run.folder, ()))
        done = sum(record.state in ENDED for _, record in self.list_records())
        print(f"{len(self.runs)} runs in {self.folder}, {done} done before", flush=True)

    def list_records(self) -> list[tuple[RunOfQueue, RunRecord]]:
        """Return the runs with what has become of them so far."""
        return [(run, self._state.runs[run.name]) for run in self.runs]

    def _take_turn(self) -> bool:
        """Look at everything once, and act; return whether anything is left to do."""
        self._take_changes()
        for active in [*self._active.values()]:
            status = active.poll()
            if status is not None:
                self._settle(active, status)
            elif active.asked is not None and time.monotonic() - active.asked > _LEAVE_SECONDS:
                os.killpg(active.process.pid, signal.SIGKILL)
        self._stop_lagging()
        self._start_and_ask()
        if time.monotonic() - self._page_time > _PAGE_SECONDS:
            self._write_page()
        return any(record.state not in ENDED for _, record in self.list_records())

    def _write_page(self) -> None:
        try:
            self.page.write(self.list_records())
        except UserError as error:  # the runs go on without it
            print(f"no page: {error}", file=sys.stderr, flush=True)
        self._page_time = time.monotonic()

    def _check_size(self, run: RunOfQueue) -> None:
        devices = self.launcher.count_devices()
        if run.sizes[0] > devices:
            raise UserError(
                f"{run.name} needs {run.sizes[0]} ranks, and there is room for {devices}; let it "
                "have fewer, or the queue more"
            )

    def _take_changes(self) -> None:
        """Take over what has changed in the file of the queue, if all of it is right."""
        try:
            changed = self.read_changes()
            for run in changed or ():
                self._check_size(run)
        except UserError as error:
            print(f"the runs stay as they were: {error}", file=sys.stderr, flush=True)
            return
        if changed is not None:
            self.runs = changed
            names = {run.name for run in changed}
            for name, active in self._active.items():
                if name not in names:
                    self._ask(active, f"{name}: asked to leave, because it is no longer listed")
            self._update_records()

    def _update_records(self) -> None:
        """Give each new run a record, and each that has ended and got another command line."""
        for run in self.runs:
            record = self._state.runs.get(run.name)
            has_changed = record is not None and record.words != list(run.words)
            if record is None or (has_changed and record.state in ENDED):
                self._state.runs[run.name] = RunRecord(list(run.words))
        self._save()

    def _save(self) -> None:
        self._state.write(self.folder)
        self._page_time = 0.0  # something has happened

    def _adopt_processes(self) -> None:
        """Ask the runs of a queue that was killed to leave; they have their devices until then."""
        next_device = self.launcher.count_devices()
        by_name = {run.name: run for run in self.runs}
        for name, record in self._state.runs.items():
            if record.state not in ("running", "leaving"):
                continue
            record.state = "waiting"
            if record.process is None or name not in by_name:
                continue
            # Which devices it has is not known: beyond all others, it is counted only.
            devices = tuple(range(next_device, next_device + record.ranks))
            process, output = AdoptedProcess(*record.process), RunProcess(by_name[name].folder, ())
            active = ActiveRun(by_name[name], process, output, devices)
            if active.poll() is None:
                next_device += record.ranks
                self._active[name] = active
                self._ask(active, f"{name}: still runs; asked to leave")

    def _start_and_ask(self) -> None:
        """Do what the scheduler decides."""
        devices = self.launcher.count_devices()
        decision = decide(self._list_queued(), devices)
        for name, other in decision.leave.items():
            reason = "start again with more ranks" if name == other else f"make room for {other}"
            self._ask(self._active[name], f"{name}: asked to leave, to {reason}")
        by_name = {run.name: run for run in self.runs}
        for name, ranks in decision.start.items():
            taken = {device for active in self._active.values() for device in active.devices}
            free = [device for device in range(devices) if device not in taken]
            self._start(by_name[name], tuple(free[:ranks]))

    def _list_queued(self) -> list[QueuedRun]:
        queued = []
        for run, record in self.list_records():
            active = self._active.get(run.name)
            if active is not None:
                ranks, is_leaving = len(active.devices), active.asked is not None
                # A restart should be short beside what is left.
                may_grow = self.page.estimate_seconds_left(run) > _LEAVE_SECONDS
                queued.append(
                    QueuedRun(run.name, run.sizes, run.priority, ranks, is_leaving, may_grow)
                )
            elif record.state not in ENDED:
                queued.append(QueuedRun(run.name, run.sizes, run.priority))
        names = {run.name for run in self.runs}
        for name, active in self._active.items():
            if name not in names:  # no longer listed, but not yet gone
                queued.append(QueuedRun(name, active.run.sizes, 0, len(active.devices), True))
        return queued

    def _start(self, run: RunOfQueue, devices: tuple[int, ...]) -> None:
        record = self._state.runs[run.name]
        output = RunProcess(run.folder, self.launcher.make_command(run.words, len(devices)))
        environment = {**os.environ, **self.launcher.make_environment(devices)}
        # In a session of its own: Ctrl-C reaches it through this program only.
        process = output.start(env=environment, start_new_session=True)
        record.state, record.words, record.ranks = "running", list(run.words), len(devices)
        record.starts += 1
        record.note_process(process.pid)
        self._active[run.name] = ActiveRun(run, process, output, devices)
        self._histories[run.name] = []
        self._save()
        word = "started" if record.starts == 1 else "continues"
        print(f"{run.name}: {word} on {_count(len(devices), 'rank')}", flush=True)

    def _ask(self, active: ActiveRun, message: str) -> None:
        """Ask a run to save and exit, once."""
        if active.asked is None:
            print(message, flush=True)
            active.process.terminate()
            active.asked = time.monotonic()
            self._state.runs[active.run.name].state = "leaving"
            self._save()

    def _settle(self, active: ActiveRun, status: int) -> None:
        """Note what has become of a run whose process has ended with this status."""
        name = active.run.name
        del self._active[name]
        record = self._state.runs[name]
        record.process = None
        record.state, outcome = self._judge(active, record, status)
        if name not in {run.name for run in self.runs}:
            del self._state.runs[name]
        self._update_records()
        ended = sum(record.state in ENDED for _, record in self.list_records())
        print(f"{ended} of {len(self.runs)}: {name}: {outcome}", flush=True)

    def _judge(self, active: ActiveRun, record: RunRecord, status: int) -> tuple[State, str]:
        """Return the state of a run that has ended with this status, and what to print."""
        if status == 0:
            record.error = None
            return "done", self._describe_outcome(active)
        if status in _LEFT:
            text = self._describe_outcome(active)
            return ("stopped", f"behind others: {text}") if active.is_behind else ("waiting",
                f"has left: {text}")  # fmt: skip
        record.failures += 1
        record.error = active.output.describe_failure(status)
        if status == EXIT_USER_ERROR or record.failures > self.retries:
            return "failed", record.error
        return "waiting", f"{record.error}; tried again"

    def _describe_outcome(self, active: ActiveRun) -> str:
        history = self._read_history(active.run, active.output)
        if not history:
            return "no step was done"
        step, value = history[-1]
        return f"step {step}, {active.run.metric} {value:.4f}"

    def _read_history(self, run: RunOfQueue, output: RunProcess) -> list[tuple[int, float]]:
        """Return (step, metric) of a run so far."""
        history = self._histories.setdefault(run.name, [])
        history += output.read_metric(run.metric)
        return history

    def _stop_lagging(self) -> None:
        """Ask trials to leave for good that are behind others of their sweep."""
        for active in self._active.values():
            if active.run.grace is not None:
                self._read_history(active.run, active.output)
        graces = {run.sweep: run.grace for run in self.runs if run.grace is not None}
        for sweep, grace in graces.items():
            names = [run.name for run in self.runs if run.sweep == sweep]
            lagging = find_lagging({name: self._histories.get(name, []) for name in names}, grace)
            for name in lagging:
                record, behind = self._state.runs[name], self._active.get(name)
                if behind is not None:
                    behind.is_behind = True
                    self._ask(behind, f"{name}: asked to leave, because other trials are better")
                elif record.state == "waiting":
                    record.state = "stopped"
                    self._save()

    def _leave_all(self) -> None:
        """Ask all runs to leave, wait for them, and write the page."""
        if self._active:
            print("running runs save and end; the same command continues", file=sys.stderr)
        for active in [*self._active.values()]:
            self._ask(active, f"{active.run.name}: asked to leave, because the queue ends")
        while self._active:
            for active in [*self._active.values()]:
                if (status := active.poll()) is not None:
                    self._settle(active, status)
            time.sleep(_PAUSE)
        self._write_page()


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
