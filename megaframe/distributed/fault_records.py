"""Fault records: what a rank writes into the run folder before the watchdog ends it: why the run
ended, the stacks of its threads, and what NCCL's flight recorder knows.

torch keeps the latest collectives of every rank and writes them when its own watchdog sees a
timeout. Ours is earlier by design (`mesh._NCCL_EXTRA_SECONDS`), so it asks for the record itself,
in the format and under the name that torch's analyser takes:
`torchfrtrace RUN/faults -p nccl-rank-`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch._C import _distributed_c10d

from megaframe.io.regular_file import open_append, open_fresh, write_file

ENDED_FILE = "ended.jsonl"
"""File that says when a run was ended, and why."""
RECORD_PREFIX = "nccl-rank-"
"""What the name of a record begins with; the rank follows, and nothing else, as torch demands."""
_SECONDS = 10.0
"""After which a process that cannot be asked is ended. Reading the record queries CUDA's events
with Python's lock held, so no thread of Python could end it."""


def record_end(folder: Path, text: str) -> None:
    """Append when and why the run was ended to `ENDED_FILE`, if the folder can be written."""
    with suppress(OSError), open_append(folder / ENDED_FILE, inside=folder.parent) as file:
        file.write((json.dumps({"at": time.time(), "text": text}) + "\n").encode())


def dump_stacks(folder: Path | None, rank: int, describe: Callable[[], str]) -> None:
    """Write the stacks of all threads of this process to standard error and to a file.

    Args:
        folder: Where the file is written, if that is possible; None for no file.
        rank: The rank of this process, which names the file.
        describe: Returns what the file says above the stacks.
    """
    faulthandler.dump_traceback()
    if folder is not None:
        with suppress(OSError):
            path = folder / f"rank-{rank:05d}.txt"
            with open_fresh(path, inside=folder.parent) as file:
                file.write(f"{describe()}\n".encode(errors="backslashreplace"))
                file.flush()
                faulthandler.dump_traceback(file)


def write_flight_record(folder: Path, rank: int) -> str:
    """Write the flight record of this rank into `folder`. If the device's driver does not answer,
    the process writes its stacks and ends, with status 1. Returns what to say about it."""
    # A build of torch without CUDA has only the recorder of gloo, whose records name no groups.
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return "no flight record: this torch has none of NCCL"
    if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        return "no flight record: TORCH_FR_BUFFER_SIZE=0"
    path = folder / f"{RECORD_PREFIX}{rank}"
    faulthandler.dump_traceback_later(_SECONDS, exit=True)
    try:
        record = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
        write_file(path, record, inside=folder.parent)
    except (OSError, RuntimeError) as error:
        return f"no flight record: {(str(error).splitlines() or [''])[0]}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    command = f"torchfrtrace {folder} -p {RECORD_PREFIX}"
    return f"flight record in {path}; {command} compares those of all ranks"


def reset_flight_recorder() -> None:
    """Empty the flight recorder, because new groups count their collectives from the beginning."""
    reset = getattr(_distributed_c10d, "_reset_fr_recording_nccl", None)
    if reset is not None:
        with suppress(RuntimeError):
            reset()
