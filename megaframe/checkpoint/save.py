"""Saves checkpoints in the background, so that training waits only for a copy in memory.

No rank decides alone: every rank writes its own file, and rank 0 gives the folder its final name
after every rank has reported the file that rank 0 finds there. Only then does every rank read its
file back: the checkpoint counts meanwhile, since whoever loads it checks all that he reads, and the
ones before it stay until that is done. A save that fails, anywhere, leaves no trace but an error on
every rank.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from pydantic import JsonValue
from torch.distributed import Store

from megaframe.checkpoint.background import Background, Copy
from megaframe.checkpoint.container import (
    Piece,
    divided,
    write,
)
from megaframe.checkpoint.folder import move_pointer, prune, read_pointer, take_back
from megaframe.checkpoint.manifest import Manifest, SavedFile, SavedTensor, encode, merged
from megaframe.checkpoint.meeting import NEED, READ_BACK, WRITE, Meeting, Message
from megaframe.checkpoint.names import final_name
from megaframe.checkpoint.reader import Reader, verify
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.storage import Place, store_of
from megaframe.errors import UserError


@dataclass(frozen=True)
class _Job:
    step: int
    planned: list[Piece]
    data: Copy
    state: dict[str, JsonValue]
    files: dict[str, SavedFile] = field(default_factory=dict)
    """Those that this rank has written."""


_HEADERS_AT_ONCE = 16
"""Files of all ranks whose headers rank 0 reads at a time."""


class Writer(Background):
    """Writes one rank's part of each checkpoint of a run into `home`, which all ranks share.

    keep:       how many of the newest checkpoints stay (at least 1).
    keep_every: those of steps that are multiples of it stay for good; 0: none.
    read_back:  check what the disk gives, before checkpoints that are older go (in a store that
                cannot take back what it has, before this one counts).
    timeout:    seconds to wait for another rank before a save is given up.
    saved:      is told by rank 0, in the background, of the step of each checkpoint that is there.
    Whatever goes wrong in the background is raised by the next `save`, `wait` or `poll`: UserError
    for what a user can mend. The writer can be used again after that.
    Its thread ends with the process: call `wait` before leaving.
    """

    def __init__(
        self,
        home: Place,
        *,
        rank: int,
        world: int,
        store: Store,
        keep: int,
        keep_every: int = 0,
        read_back: bool = True,
        timeout: float = 600.0,
        saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        super().__init__()
        self._home = home
        self._storage = store_of(home)
        self._rank = rank
        self._world = world
        # A connection of its own, since others may wait in the given one (not in torch's stubs).
        self._store: Store = store.clone()  # type: ignore[attr-defined]
        self._keep, self._keep_every = keep, keep_every
        later = self._storage.keeps_replaced
        self._verifies = read_back and not later
        self._stages = (WRITE, READ_BACK) if read_back and later else (WRITE,)
        self._timeout, self._saved = timeout, saved
        if rank == 0:
            with _explained(f"cannot use {home} for checkpoints", home):
                self._storage.prepare(home)

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
        draft = self._storage.draft(self._home, job.step, attempt)
        failure = "rank 0 was stopped"
        try:
            meeting.tell(attempt, NEED, {"bytes": job.data.size})
            needed = sum(int(message["bytes"]) for message in meeting.hear(attempt, NEED))
            with _explained(f"cannot write the checkpoint of step {job.step}", draft, needed):
                _require_space(self._home, job.step, needed)
                self._storage.begin(draft)
                meeting.go(attempt, WRITE)
                self._contribute(meeting, attempt, job, WRITE)
                files = _reported(job.step, meeting.hear(attempt, WRITE))
                before = read_pointer(self._home)
                final = commit(draft, self._home, job.step, job.state, files, attempt)
                if READ_BACK in self._stages:
                    self._prove(meeting, attempt, job, final, before)
                self._saved(job.step)
                prune(self._home, final, self._keep, self._keep_every, attempt)
            failure = ""
        except Exception as error:
            failure = str(error) if isinstance(error, UserError) else repr(error)
            raise
        finally:
            if failure:
                self._storage.discard(draft, attempt)
            meeting.end(attempt, failure)

    def _prove(
        self, meeting: Meeting, attempt: str, job: _Job, final: Place, before: str | None
    ) -> None:
        """Have all files of a checkpoint read back; take back one that has another content. One of
        which nobody knows stays, with those before it. before: what `latest` named."""
        meeting.go(attempt, READ_BACK)
        self._contribute(meeting, attempt, job, READ_BACK)
        told = meeting.hear(attempt, READ_BACK)
        try:
            _reported(job.step, told)
        except UserError:
            take_back(self._home, final, before, attempt)
            raise

    def _follow(self, meeting: Meeting, job: _Job) -> None:
        taken, old_failure = None, None
        left = [*self._stages]
        patience = (1 + len(left)) * self._timeout
        for _ in meeting.looks(patience):  # the leader, who can name ranks, ends first
            attempt = meeting.attempt()
            if attempt is not None and attempt != taken:
                old_failure = meeting.ending(attempt)
                if old_failure is None:
                    taken, left = attempt, [*self._stages]
                    meeting.tell(taken, NEED, {"bytes": job.data.size})
            if taken is None:
                continue
            failure = meeting.ending(taken)
            if failure:
                raise UserError(failure)
            if failure is not None:
                return
            if left and meeting.may_go(taken, left[0]):
                self._contribute(meeting, taken, job, left.pop(0))
        raise UserError(
            f"checkpoint of step {job.step} was abandoned by rank {self._rank} after "
            f"{patience:g} s: rank 0 did not finish it"
            + (f" (it said: {old_failure})" if old_failure else "")
        )

    def _contribute(self, meeting: Meeting, attempt: str, job: _Job, stage: str) -> None:
        """Write this rank's files, if it holds anything, or read them back; report them, or what
        went wrong."""
        message: Message = {}
        try:
            if stage == WRITE:
                self._write_files(attempt, job)
            else:
                for name, saved in job.files.items():
                    verify(self._home / final_name(job.step) / name, saved)
            message = {"files": {name: saved.model_dump() for name, saved in job.files.items()}}
        except UserError as error:
            message = {"error": str(error)}
        except Exception:
            message = {"error": traceback.format_exc()}
        meeting.tell(attempt, stage, message)

    def _write_files(self, attempt: str, job: _Job) -> None:
        job.files.clear()
        with ThreadPoolExecutor(self._storage.at_once(self._home)) as pool:
            groups = enumerate(divided(job.planned, self._storage.file_bytes))
            job.files.update(pool.map(lambda one: self._file(attempt, job, *one), groups))

    def _file(
        self, attempt: str, job: _Job, part: int, pieces: Sequence[Piece]
    ) -> tuple[str, SavedFile]:
        draft = self._storage.draft(self._home, job.step, attempt)
        path = draft / self._storage.file_name(self._rank, part, attempt)
        with _explained("cannot write", path, job.data.size, discard=path):
            held = job.data.held() if len(pieces) == len(job.planned) else None
            saved = write(path, pieces, job.data.take, held)
            if self._verifies:
                verify(path, saved)
        return path.name, saved


def commit(
    draft: Place,
    home: Place,
    step: int,
    state: Mapping[str, JsonValue],
    files: Mapping[str, SavedFile],
    attempt: str,
) -> Place:
    """Make the files of a draft the newest checkpoint of its home: manifest and final
    name, and last the pointer. Returns where it is. Raises OSError."""

    def tensors(name: str) -> dict[str, SavedTensor]:
        with Reader(draft / name, files[name]) as reader:
            return reader.tensors()

    with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
        parts = list(pool.map(tensors, files))
    manifest = Manifest(step=step, state=dict(state), files=dict(files), tensors=merged(parts))
    final = store_of(home).publish(draft, step, attempt, encode(manifest), files.keys())
    move_pointer(home, final.name, attempt)
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
        name: SavedFile.model_validate(saved)
        for message in messages
        for name, saved in message["files"].items()
    }


def _require_space(home: Place, step: int, needed: int) -> None:
    free = store_of(home).free(home)
    if free is not None and free < needed:
        raise UserError(
            f"checkpoint of step {step} needs {needed:,} bytes but {home} has {free:,} bytes "
            "free; free some space or lower checkpoint.keep"
        )


@contextmanager
def _explained(
    what: str, path: Place, needed: int | None = None, discard: Place | None = None
) -> Iterator[None]:
    """Turn an OSError into a UserError that names the path, and needed and free bytes.

    `discard` is a file to delete first, so that the free bytes are those of another try.
    """
    try:
        yield
    except OSError as error:
        if discard is not None:
            store_of(discard).delete(discard)
        text = f"{what}: {error.filename or path}: {error.strerror}"
        if needed is not None:
            with suppress(OSError):
                free = store_of(path).free(path.parent)
                if free is not None:
                    text += f" (it needs {needed:,} bytes and {free:,} bytes are free)"
        raise UserError(text) from error
