"""A run's folder in the memory of a node, and the records of the copies in it.

A record is written after its file is complete, so a copy without a record does not count.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationError

from megaframe.checkpoint.manifest import JsonRecord, Offset, SavedFile, seal, unseal
from megaframe.checkpoint.stores.store import format_checkpoint_name
from megaframe.errors import UserError
from megaframe.io.regular_file import write_file

MAX_RECORD_BYTES = 16 << 20
"""Largest record that is written or read. It contains the config of a run and a few counters."""
_MARK = "mark-"
_STEP_NAME = re.compile(r"step-([0-9]{8,12})")
_RECORD_NAME = re.compile(r"rank-[0-9]{5,9}\.json")


class CopyRecord(JsonRecord):
    """Describes the copy of one rank's part of one step.

    Attributes:
        run: Id of the run.
        step: Step of the run that was copied.
        rank: Rank whose part it is.
        world: Number of ranks whose parts make up the step.
        state: See `Manifest`.
        file: Expected size and header checksum of the file, as in a manifest.
    """

    format: Literal["megaframe-memory"] = "megaframe-memory"
    version: Literal[1] = 1
    run: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    step: Offset
    rank: Offset
    world: Offset
    state: dict[str, JsonValue]
    file: SavedFile


@dataclass(frozen=True)
class MemoryFolder:
    """The folder for one run in the memory of this node."""

    folder: Path

    @staticmethod
    def create(memory: Path, run_folder: Path) -> MemoryFolder:
        """Create the folder in `memory`, or use the existing one.

        Args:
            memory: Folder of a file system in memory: `checkpoint.memory_dir`.
            run_folder: Path of the run's own folder.

        Raises:
            UserError: If it cannot be created or is not private to this user.
        """
        path = os.fsencode(os.path.realpath(run_folder))
        digest = hashlib.blake2b(path, digest_size=8).hexdigest()
        memory_folder = MemoryFolder(memory / f"megaframe-{os.getuid()}-{digest}")
        try:
            memory_folder.make()
        except OSError as error:
            raise UserError(
                f"checkpoint.memory_dir={memory} cannot be used: {memory_folder.folder}: "
                f"{error.strerror}"
            ) from None
        return memory_folder

    def make(self) -> None:
        """Make the folder, unless it is there.

        Raises:
            OSError: If it cannot be made.
            UserError: If it is not private to this user.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        status = self.folder.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if not private or status.st_uid != os.getuid():
            raise UserError(
                f"{self.folder} must be a folder of user {os.getuid()} alone, with mode 0700, and "
                f"belongs to {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}; remove "
                "it, or give another checkpoint.memory_dir"
            )

    def leave_mark(self) -> str:
        """Make a file by which ranks that share this folder recognise each other. Returns its name,
        also if it cannot be made."""
        name = f"{_MARK}{secrets.token_hex(8)}"
        with suppress(OSError), open(self.folder / name, "xb"):
            pass
        return name

    def list_marks(self) -> list[str]:
        """Return the names of the marks in this folder."""
        return [path.name for path in self.folder.glob(f"{_MARK}*")]

    def remove_mark(self, name: str) -> None:
        """Delete a mark, if it is there."""
        (self.folder / name).unlink(missing_ok=True)

    def get_path(self, step: int, rank: int) -> Path:
        """Return the path of the file of a rank."""
        return self.folder / format_checkpoint_name(step) / f"rank-{rank:05d}.safetensors"

    def prepare(self, step: int, rank: int) -> Path:
        """Return the path for the file of a rank, after deleting what an earlier copy left there.
        Makes the folder again if it was deleted, as cleaners of /dev/shm do.

        Raises:
            OSError, UserError: As `make`.
        """
        self.make()
        path = self.get_path(step, rank)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        for old in (path.with_suffix(".json"), path):
            old.unlink(missing_ok=True)
        return path

    def commit(self, step: int, rank: int, record: bytes) -> None:
        """Write the record of a rank's file. To be called when the file is complete.

        Args:
            step: Step of the copy.
            rank: The rank whose values it has.
            record: The record, encoded.
        """
        final = self.get_path(step, rank).with_suffix(".json")
        write_file(final, record)

    def read_records(self, run_id: str) -> Iterator[CopyRecord]:
        """Yield the valid records of a run in this folder. The files are not checked here."""
        for path in sorted(self.folder.glob("step-*/rank-*.json")):
            if not _STEP_NAME.fullmatch(path.parent.name) or not _RECORD_NAME.fullmatch(path.name):
                continue
            record = _read_record(path)
            if record is None or record.run != run_id:
                continue
            if self.get_path(record.step, record.rank).with_suffix(".json") == path:
                yield record

    def remove(self, *, below: int | None = None, keep_step: int | None = None) -> None:
        """Delete the copies of all steps, or of those lower than `below`, always except step
        `keep_step`."""
        for path in self.folder.glob("step-*"):
            match = _STEP_NAME.fullmatch(path.name)
            step = int(match[1]) if match else -1
            if step != keep_step and (below is None or step < below):
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def encode_record(record: CopyRecord) -> bytes:
    """Serialise a record.

    Raises:
        UserError: If it is larger than `MAX_RECORD_BYTES`.
    """
    data = seal(record)
    if len(data) > MAX_RECORD_BYTES:
        raise UserError(f"the record of a copy has {len(data)} bytes, over {MAX_RECORD_BYTES}")
    return data


def _read_record(path: Path) -> CopyRecord | None:
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            return None
        text = unseal(path.read_bytes())
        return None if text is None else CopyRecord.model_validate_json(text)
    except (OSError, ValidationError):
        return None
