"""What a queue must know again after it was killed, beside the folders of its runs: one small file,
replaced as a whole."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from megaframe.errors import UserError, explain_failed_write
from megaframe.io.process import has_ended, read_namespace, read_start_time
from megaframe.io.regular_file import write_file
from megaframe.io.untrusted import read_file

STATE_FILE = "queue.json"
_LARGEST = 1 << 26

State = Literal["waiting", "running", "leaving", "done", "stopped", "failed"]
"""`leaving` is asked to save and exit, `stopped` is a trial that was behind others."""
ENDED: tuple[State, ...] = ("done", "stopped", "failed")


@dataclass
class RunRecord:
    """What has become of a run.

    Attributes:
        words: Its command line when it was started last.
        state: Where it stands.
        ranks: With which it was started last.
        starts: How often it was started.
        failures: How often it failed.
        error: Of its last failure, in one line.
        process: Id and start of its process, while it has one (`io/process.py`).
    """

    words: list[str]
    state: State = "waiting"
    ranks: int = 0
    starts: int = 0
    failures: int = 0
    error: str | None = None
    process: tuple[int, int] | None = None

    def note_process(self, number: int) -> None:
        """Note the process that runs it now."""
        self.process = number, read_start_time(number) or 0


@dataclass
class QueueState:
    """The records of all runs by their names.

    Attributes:
        runs: The records.
        namespace: In which the numbers of processes are valid.
    """

    runs: dict[str, RunRecord] = field(default_factory=dict)
    namespace: str = field(default_factory=read_namespace)

    @staticmethod
    def read(folder: Path) -> QueueState:
        """Return the state that a queue has left in its folder; an empty one if there was none.

        Processes of another boot or container are forgotten.

        Raises:
            UserError: The file is damaged.
        """
        path = folder / STATE_FILE
        try:
            state = _ADAPTER.validate_json(read_file(path, _LARGEST, inside=folder))
        except FileNotFoundError:
            return QueueState()
        except (OSError, ValidationError):
            raise UserError(f"{path} is not the state of a queue; move it away") from None
        if state.namespace != read_namespace():
            state = QueueState(state.runs)
            for record in state.runs.values():
                record.process = None
        return state

    def write(self, folder: Path) -> None:
        """Write the state into the folder of the queue."""
        path = folder / STATE_FILE
        with explain_failed_write(path):
            write_file(path, json.dumps(asdict(self), indent=2) + "\n", inside=folder, sync=True)


_ADAPTER = TypeAdapter(QueueState)


class AdoptedProcess:
    """A run that a queue before this one has started, and whose exit status nobody can know.

    Args:
        number: Id of its process.
        start: When that started.
    """

    def __init__(self, number: int, start: int) -> None:
        self.pid, self._start = number, start

    def poll(self) -> int | None:
        """Return None while it runs, and then the status of a run that was asked to leave."""
        return 128 + signal.SIGTERM if has_ended(self.pid, self._start) else None

    def terminate(self) -> None:
        """Ask it to leave."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)
