"""Saves checkpoints in the background, so that training waits only for a copy in memory.

No rank decides alone: every rank writes and reads back its own file, and rank 0 gives the folder
its final name after every rank has reported the file that rank 0 finds there. A save that fails,
anywhere, leaves no trace but an error on every rank; the checkpoints before it stay.
"""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from torch.distributed import Store

from megaframe.checkpoint.background import Background
from megaframe.checkpoint.container import Piece, Reader, write
from megaframe.checkpoint.folder import (
    final_name,
    flush,
    move_pointer,
    prune,
    publish,
    remove,
    remove_stale,
)
from megaframe.checkpoint.manifest import MANIFEST, Manifest, SavedFile, encode, merged
from megaframe.checkpoint.meeting import Meeting, Message
from megaframe.checkpoint.slices import Slice
from megaframe.errors import UserError


@dataclass(frozen=True)
class _Job:
    step: int
    planned: list[Piece]
    data: memoryview
    state: dict[str, JsonValue]


class Writer(Background):
    """Writes one rank's part of each checkpoint of a run into `folder`, which all ranks share.

    keep:       how many of the newest checkpoints stay (at least 1).
    keep_every: those of steps that are multiples of it stay for good; 0: none.
    timeout:    seconds to wait for another rank before a save is given up.
    Whatever goes wrong in the background is raised by the next `save`, `wait` or `poll`: UserError
    for what a user can mend. The writer can be used again after that.
    Its thread ends with the process: call `wait` before leaving.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world: int,
        store: Store,
        keep: int,
        keep_every: int = 0,
        timeout: float = 600.0,
    ) -> None:
        super().__init__()
        self._folder = folder
        self._rank = rank
        self._world = world
        # A connection of its own, since others may wait in the given one (not in torch's stubs).
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._keep, self._keep_every = keep, keep_every
        self._timeout = timeout
        if rank == 0:
            with _explained(f"cannot use {folder} for checkpoints", folder):
                folder.mkdir(parents=True, exist_ok=True)
                remove_stale(folder)

    def save(self, step: int, slices: Sequence[Slice], state: Mapping[str, JsonValue]) -> None:
        """Take the state, and return; the rest happens in the background, a copy of the slices
        first. Until `copied` has returned they must not change.

        Every rank calls this with the same step. Together the ranks' slices cover each tensor
        once; a rank may have none. Rank 0's `state` is the one that is saved; its floats come back
        bit for bit. Waits for the save before.
        """
        kept = json.loads(json.dumps(dict(state)))
        self.start(slices, lambda planned, data: self._write(_Job(step, planned, data, kept)))

    def _write(self, job: _Job) -> None:
        meeting = Meeting(
            self._store,
            step=job.step,
            rank=self._rank,
            world=self._world,
            timeout=self._timeout,
        )
        if self._rank == 0:
            self._lead(meeting, job)
        else:
            self._follow(meeting, job)

    def _lead(self, meeting: Meeting, job: _Job) -> None:
        attempt = meeting.open()
        temporary = self._temporary(job.step, attempt)
        failure = "rank 0 was stopped"
        try:
            meeting.tell(attempt, "need", {"bytes": len(job.data)})
            needed = sum(int(message["bytes"]) for message in meeting.hear(attempt, "need"))
            with _explained(f"cannot write the checkpoint of step {job.step}", temporary, needed):
                _require_space(self._folder, job.step, needed)
                temporary.mkdir()
                meeting.go(attempt)
                self._contribute(meeting, attempt, job)
                files = _reported(job.step, meeting.hear(attempt, "done"))
                final = commit(temporary, job.step, job.state, files, attempt)
                prune(self._folder, final, self._keep, self._keep_every, attempt)
            failure = ""
        except Exception as error:
            failure = str(error) if isinstance(error, UserError) else repr(error)
            raise
        finally:
            if failure:
                remove(temporary, attempt)
            meeting.end(attempt, failure)

    def _follow(self, meeting: Meeting, job: _Job) -> None:
        taken, written, old_failure = None, False, None
        for _ in meeting.looks(2 * self._timeout):  # the leader, who can name ranks, ends first
            attempt = meeting.attempt()
            if attempt is not None and attempt != taken:
                old_failure = meeting.ending(attempt)
                if old_failure is None:
                    taken, written = attempt, False
                    meeting.tell(taken, "need", {"bytes": len(job.data)})
            if taken is None:
                continue
            failure = meeting.ending(taken)
            if failure:
                raise UserError(failure)
            if failure is not None:
                return
            if not written and meeting.may_go(taken):
                self._contribute(meeting, taken, job)
                written = True
        raise UserError(
            f"checkpoint of step {job.step} was given up by rank {self._rank} after "
            f"{2 * self._timeout:g} s: rank 0 did not finish it"
            + (f" (it said: {old_failure})" if old_failure else "")
        )

    def _temporary(self, step: int, attempt: str) -> Path:
        # With the attempt in its name, a process of a dead run cannot write into this save.
        return self._folder / f"{final_name(step)}.{attempt}.tmp"

    def _contribute(self, meeting: Meeting, attempt: str, job: _Job) -> None:
        """Write this rank's file, if it has anything to hold, and report it or what went wrong."""
        path = self._temporary(job.step, attempt) / f"rank-{self._rank:05d}.safetensors"
        message: Message = {}
        try:
            if job.planned:
                with _explained("cannot write", path, len(job.data), discard=path):
                    saved = write(path, job.planned, lambda p: job.data[p.start : p.stop])
                message = {"file": path.name, "bytes": saved.bytes, "header": saved.header}
        except UserError as error:
            message = {"error": str(error)}
        except Exception:
            message = {"error": traceback.format_exc()}
        meeting.tell(attempt, "done", message)


def commit(
    temporary: Path,
    step: int,
    state: Mapping[str, JsonValue],
    files: Mapping[str, SavedFile],
    attempt: str,
) -> Path:
    """Make the verified files in a temporary folder the newest checkpoint of the folder around it:
    manifest, final name, and last the pointer. Returns its path. Raises OSError."""
    parts = []
    for name, saved in files.items():
        with Reader(temporary / name, saved) as reader:
            parts.append(reader.tensors())
    manifest = Manifest(step=step, state=dict(state), files=dict(files), tensors=merged(parts))
    with open(temporary / MANIFEST, "xb") as file:
        file.write(encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    flush(temporary)
    final = publish(temporary, step, attempt)
    move_pointer(temporary.parent, final.name, attempt)
    return final


def _reported(step: int, messages: Sequence[Message]) -> dict[str, SavedFile]:
    """The files that the ranks wrote. UserError with the first errors, where there are any."""
    errors = [
        f"rank {rank}: {message['error']}"
        for rank, message in enumerate(messages)
        if "error" in message
    ]
    if errors:
        more = f" (and {len(errors) - 3} more ranks)" if len(errors) > 3 else ""
        raise UserError(
            f"checkpoint of step {step} could not be saved: " + "; ".join(errors[:3]) + more
        )
    return {
        str(message["file"]): SavedFile(bytes=int(message["bytes"]), header=str(message["header"]))
        for message in messages
        if message
    }


def _require_space(folder: Path, step: int, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"checkpoint of step {step} needs {needed:,} bytes but {folder} has {free:,} bytes "
            "free; free some space or lower checkpoint.keep"
        )


@contextmanager
def _explained(
    what: str, path: Path, needed: int | None = None, discard: Path | None = None
) -> Iterator[None]:
    """Turn an OSError into a UserError that names the path, and needed and free bytes.

    `discard` is a file to delete first, so that the free bytes are those of another try.
    """
    try:
        yield
    except OSError as error:
        if discard is not None:
            with suppress(OSError):
                discard.unlink()
        text = f"{what}: {error.filename or path}: {error.strerror}"
        if needed is not None:
            with suppress(OSError):
                free = shutil.disk_usage(path.parent).free
                text += f" (it needs {needed:,} bytes and {free:,} bytes are free)"
        raise UserError(text) from error
