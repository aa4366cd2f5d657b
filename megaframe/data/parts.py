"""The folder of an unfinished preprocessing run: one token file per part, and a journal.

The first line of the journal says what the run makes of which files; each further one is a finished
part with its counts, appended once the part's files are on the disk. Whatever a kill leaves besides
is not in the journal and is written again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

from megaframe.data.indexed import flush_folder, write_failure
from megaframe.errors import UserError

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """What a part, or all of them, came to.

    empty:      documents without a token, which are left out.
    size:       bytes of input without compression.
    disk_bytes: bytes of input as it lies on the disk.
    """

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    size: int = 0
    disk_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


class PartsFolder:
    """`OUTPUT.parts`, held by one run at a time. `finished` maps part numbers to their counts."""

    def __init__(self, output: str) -> None:
        self.path = part_folder(output)
        self.finished: dict[int, Counts] = {}
        self._output = output
        self._journal = os.path.join(self.path, "journal.jsonl")

    def record(self, number: int, counts: Counts) -> None:
        """Note a finished part."""
        self.finished[number] = counts
        self._append({"part": number, **asdict(counts)})

    def total(self) -> Counts:
        return sum(self.finished.values(), Counts())

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def remove_if_new(self) -> None:
        """Remove the folder if no run has begun in it."""
        if not os.path.exists(self._journal):
            self.remove()

    def start(self, manifest: Manifest, overwrite: bool) -> None:
        """Continue the interrupted run of this manifest, or begin one. Raises `UserError`."""
        found = self._read()
        if found == manifest:
            self._rewrite(manifest)
            return
        self.finished = {}
        if found is not None and not overwrite:
            differing = [name for name in manifest if found.get(name) != manifest[name]]
            raise UserError(
                f"{self.path} holds an unfinished run with other {' and '.join(differing)}; repeat "
                f"that run, or drop it with --overwrite"
            )
        final = [f"{self._output}{suffix}" for suffix in (".idx", ".bin")]
        existing = [path for path in final if os.path.exists(path)]
        if existing and not overwrite:
            raise UserError(f"{existing[0]} exists already; replace it with --overwrite")
        self._rewrite(manifest)

    def _read(self) -> Manifest | None:
        """The manifest, if there is a journal; fills `finished`. A torn last line is no line."""
        try:
            with open(self._journal, encoding="utf-8") as file:
                lines = file.read().split("\n")[:-1]
        except FileNotFoundError:
            return None
        try:
            manifest, *parts = [json.loads(line) for line in lines]
            self.finished = {part.pop("part"): Counts(**part) for part in parts}
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(f"{self._journal} is damaged; remove {self.path}") from None
        return manifest if isinstance(manifest, dict) else {}

    def _rewrite(self, manifest: Manifest) -> None:
        """Replace the journal by a whole one, and files that it does not name by nothing."""
        keep = {os.path.basename(self._journal), "lock"}
        for number in self.finished:
            prefix = os.path.basename(part_prefix(self._output, number))
            keep |= {f"{prefix}.bin", f"{prefix}.idx"}
        for name in set(os.listdir(self.path)) - keep:
            os.unlink(os.path.join(self.path, name))
        entries = [{"part": number, **asdict(counts)} for number, counts in self.finished.items()]
        temporary = f"{self._journal}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(entry)}\n" for entry in (manifest, *entries))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._journal)
        flush_folder(self.path)

    def _append(self, entry: Manifest) -> None:
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(f"{json.dumps(entry)}\n")
            file.flush()
            os.fsync(file.fileno())


def part_folder(output: str) -> str:
    return f"{output}.parts"


def part_prefix(output: str, number: int) -> str:
    """Token file of a part, without suffix."""
    return os.path.join(part_folder(output), f"{number:08d}")


@contextmanager
def parts_folder(output: str, manifest: Manifest, overwrite: bool) -> Iterator[PartsFolder]:
    """Make or continue `OUTPUT.parts` and hold it. Raises `UserError`, also for failed writes."""
    folder = PartsFolder(output)
    try:
        os.makedirs(folder.path, exist_ok=True)
        with open(os.path.join(folder.path, "lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is writing {output}") from None
            try:
                folder.start(manifest, overwrite)
            except UserError:
                folder.remove_if_new()
                raise
            yield folder
    except OSError as error:
        raise UserError(write_failure(output, error)) from None
