"""Leaving when asked: SIGTERM and SIGUSR1 end a run after the step, with a checkpoint. So does the
end of the launcher.

The handler only writes down that it was called. What is done about it the ranks decide together,
for a launcher does not reach all of them at the same step, nor always all of them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from megaframe.comm.place import Place
from megaframe.config import RunConfig
from megaframe.faults.ledger import FAULTS

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
ECHO = 2.0
"""Seconds in which a signal again is the same request, by another way: Slurm tells all processes of
a job that it cancels, and a launcher among them passes on what it was told."""
_BASE = 128
"""What shells and launchers add to the number of a signal that ended a process."""


@contextmanager
def heeding_signals(place: Place) -> Iterator[None]:
    """Within it a signal is written down in `place`; the same one again, later than `ECHO`, does
    what it would without. Only the main thread can hear signals; elsewhere nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked: dict[int, float] = {}

    def heard(number: int, _: FrameType | None) -> None:
        place.told = number
        now = time.monotonic()
        if now - asked.setdefault(number, now) > ECHO:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    before = {number: signal.signal(number, heard) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Launcher:
    """The torchrun that started this process, where one did. One that is killed cannot ask its
    ranks to leave, which would then keep their devices from those that are started next. To be
    made once, as early as can be: only who knew it notices that it is gone."""

    def __init__(self) -> None:
        self._number = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def gone(self) -> bool:
        """Whether it has ended before this process."""
        return self._number is not None and self._number != os.getppid()


def exit_status(told: int) -> int:
    """Of a process that was asked to leave and has saved: 143 for SIGTERM, 138 for SIGUSR1. Not 0,
    which would say that the run is finished; and over 127, which launchers that look at the number
    take for a cause outside of the program, so that they start it again."""
    return _BASE + told


def record_flights(config: RunConfig) -> None:
    """Have NCCL's flight recorder keep the last collectives of every rank, and write them beside
    the stacks when one times out, unless the environment says otherwise. To be called before any
    process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    folder = Path(config.run.dir).absolute() / FAULTS
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / "nccl-rank-"))
