"""Exiting on request: SIGTERM, SIGUSR1, SIGINT (Ctrl-C) or the end of the launcher end a run after
a step, with a checkpoint.

The signal handler only records that it was called. The ranks decide together when to exit, because
a launcher may reach them at different steps, or not reach all of them.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megaframe.config import RunSection
from megaframe.distributed.rank_progress import RankProgress
from megaframe.resilience.downtime import FAULTS
from megaframe.resilience.launcher import has_torchrun

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
REPEAT_SECONDS = 2.0
"""Seconds within which the same signal again counts as the same request. Slurm signals all
processes of a job that it cancels, and a launcher among them forwards the signal to its ranks."""
_STATUS_BASE = 128
"""Shells and launchers report a process that was ended by a signal as this plus its number."""
_SAVING_MESSAGE = b"\ninterrupted: saving after this step; Ctrl-C again ends the run at once\n"


@contextmanager
def handle_signals(progress: RankProgress) -> Iterator[None]:
    """Record signals in `progress` while this context is active. If the same signal arrives again
    after more than `REPEAT_SECONDS`, its previous handler runs. A second SIGINT ends the process
    wherever it is, and without a torchrun, which would repeat the first one, at any time. A signal
    that is ignored, as SIGINT is by jobs in the background of a shell, stays so. Does nothing in a
    thread other than the main one, which alone can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    first_time: dict[int, float] = {}

    def handle(number: int, _: FrameType | None) -> None:
        progress.leave_signal = number
        now = time.monotonic()
        if number == signal.SIGINT and not first_time and os.environ.get("LOCAL_RANK", "0") == "0":
            os.write(2, _SAVING_MESSAGE)  # not `print`, which this signal may have interrupted
        late = now - first_time.setdefault(number, now) > REPEAT_SECONDS
        if late or (number == signal.SIGINT and not has_torchrun()):
            signal.signal(number, after[signal.Signals(number)])
        if late:
            signal.raise_signal(number)

    handled = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    # Python's own handler would run only when a wait for other ranks is over.
    after = {**before, signal.SIGINT: signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resume_command() -> str:
    """Return the command that continues the run of this process from its newest checkpoint."""
    world, ranks, nodes = (
        os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    )
    program = [sys.orig_argv[0]]
    if has_torchrun():
        program = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", ranks]
        program += ["--nnodes", nodes] if nodes != "1" else []
    words = [word for word in sys.argv if not word.startswith("checkpoint.resume=")]
    command = shlex.join([*program, *words, "checkpoint.resume=latest"])
    return command if has_torchrun() or world == "1" else f"{world} ranks of: {command}"


def exit_status(signal_number: int) -> int:
    """Return the exit status of a process that has saved and exits because of `signal_number`: 143
    for SIGTERM, 138 for SIGUSR1, 130 for SIGINT.

    It is not 0, which would mean that the run is finished. It is above 127, which launchers that
    look at the status take for a cause outside of the program, so that they restart it.
    """
    return _STATUS_BASE + signal_number


def enable_flight_recorder(run: RunSection) -> None:
    """Make NCCL's flight recorder keep the last collectives of every rank.

    The watchdog writes them next to the stacks before it ends a rank
    (`distributed/fault_records.py`), and so does torch, should a collective time out without the
    watchdog. Variables that are already set in the environment take precedence. Must be called
    before any process group is created.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    folder = Path(run.dir).absolute() / FAULTS
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl-rank-"))
