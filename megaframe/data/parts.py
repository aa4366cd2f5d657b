"""The folder of an unfinished preprocessing run: one token file per part, and a journal.

The first line of the journal says what the run makes of which files; each further one is a finished
part with its counts and the checksum of its two files. Nothing here waits for the disk, which would
cost more than all else beside a fast tokenizer: what a kill or a loss of power leaves half written
fails its checksum, or is not in the journal, and is written again.
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

import xxhash

from megaframe.data.indexed import write_failure
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

    def record(self, number: int, counts: Counts, checksum: str) -> None:
        """Note a finished part; `checksum` is what `part_checksum` says of it."""
        self.finished[number] = counts
        with open(self._journal, "a", encoding="utf-8") as file:
            file.write(_line({"part": number, "checksum": checksum, **asdict(counts)}))

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
        found, entries = self._read()
        if found == manifest:
            self._continue(manifest, entries)
            return
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
        self._rewrite(manifest, [])

    def _read(self) -> tuple[Manifest | None, list[Manifest]]:
        """The manifest, if there is one, and the finished parts as far as the journal is whole."""
        try:
            with open(self._journal, encoding="utf-8", errors="replace") as file:
                lines = file.read().split("\n")[:-1]
        except FileNotFoundError:
            return None, []
        entries = []
        for line in lines:
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
        return (entries[0], entries[1:]) if entries else (None, [])

    def _continue(self, manifest: Manifest, entries: list[Manifest]) -> None:
        """Keep the parts whose files are what the journal says."""
        kept = [
            entry
            for entry in entries
            if entry["checksum"] == part_checksum(part_prefix(self._output, entry["part"]))
        ]
        for entry in kept:
            counts = {field.name: entry[field.name] for field in fields(Counts)}
            self.finished[entry["part"]] = Counts(**counts)
        self._rewrite(manifest, kept)

    def _rewrite(self, manifest: Manifest, entries: list[Manifest]) -> None:
        """Replace the journal by a whole one, and files that it does not name by nothing."""
        keep = {os.path.basename(self._journal), "lock"}
        for entry in entries:
            prefix = os.path.basename(part_prefix(self._output, entry["part"]))
            keep |= {f"{prefix}.bin", f"{prefix}.idx"}
        for name in set(os.listdir(self.path)) - keep:
            os.unlink(os.path.join(self.path, name))
        temporary = f"{self._journal}.new"
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(_line(entry) for entry in (manifest, *entries))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._journal)


def _line(entry: Manifest) -> str:
    return f"{json.dumps(entry)}\n"


def part_checksum(prefix: str) -> str:
    """Of both files of a part; empty when one is missing."""
    digest = xxhash.xxh3_128()
    try:
        for suffix in (".bin", ".idx"):
            with open(f"{prefix}{suffix}", "rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


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
