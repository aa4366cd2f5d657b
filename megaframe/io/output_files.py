"""Files of a run that its first rank writes while it trains, none of which may end the run.

A full disk, a quota, a server that is away, a folder that somebody deletes: training and its
checkpoints do not need these files, so it goes on. What cannot be written waits in memory, up to a
limit, and is tried again; a file that was deleted is made again with all that it had. What is
missing in the end is known, so that the run can say so.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from megaframe.io.regular_file import open_append, replace_file, write_file
from megaframe.io.untrusted import read_file

ROOM = 64 << 20
"""Bytes that wait in memory for each file that cannot be written: about a day's metrics."""
_PAUSE = 20
"""A write that fails is tried again after this many times the seconds that it took, so that failing
takes no more than a twentieth of the time of training."""
_CHUNK = 1 << 20
_WHOLE = "with all that they had"
_KEPT_BYTES = 1 << 20
"""Most bytes of a whole file that are kept in memory, to make it again."""


class _Unreadable(Exception):
    """What a deleted file had cannot be read any more."""


class GrowingFile:
    """A file to which records are appended, by any thread, without an error.

    Args:
        path: The file.
        inside: The folder of the run, below which no link is followed.
        room: Bytes that may wait in memory. Records beyond it are lost, and counted.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: Path, inside: Path, room: int = ROOM) -> None:
        self.path, self._inside, self._room = path, inside, room
        os.makedirs(inside, exist_ok=True)
        self._file: BinaryIO = open_append(path, 0, inside=inside)
        self._waiting = bytearray()
        self._lost = 0
        self._fault = self._gap = ""
        self._next_try = 0.0
        self._messages: list[str] = []
        self._made_again = ""
        self._lock = Lock()

    def append(self, record: bytes) -> None:
        """Append a record, now or once that works again."""
        with self._lock:
            if self._waiting and len(self._waiting) + len(record) > self._room:
                self._lost += 1
            else:
                self._waiting += record
            if not self._fault or time.monotonic() >= self._next_try:
                self._write()

    def retry(self) -> None:
        """Write what waits, and make the file again if it was deleted."""
        with self._lock:
            self._write()

    def change(self, replace: Callable[[], None]) -> None:
        """Have the file replaced, and go on at its end.

        Args:
            replace: Puts another file in the place of this one, or raises an error and does not.

        Raises:
            OSError: The other file cannot be opened.
        """
        with self._lock:
            self._write()
            replace()
            file = open_append(self.path, 0, inside=self._inside)
            self._file.close()
            self._file = file

    def take_messages(self) -> list[str]:
        """Return what the user should know since the last call."""
        with self._lock:
            messages, self._messages = self._messages, []
        return messages

    def take_restoration(self) -> str:
        """Return how the file was made again since the last call; empty if it was not."""
        with self._lock:
            how, self._made_again = self._made_again, ""
        return how

    def describe_missing(self) -> str:
        """Return what the file lacks, as part of a sentence; empty for nothing."""
        with self._lock:
            parts = [self._gap] if self._gap else []
            if self._waiting:
                parts.append(f"{len(self._waiting):,} bytes could not be written ({self._fault})")
            if self._lost:
                parts.append(f"{self._lost:,} records did not fit into memory")
        return f"{self.path}: {', and '.join(parts)}" if parts else ""

    def close(self) -> None:
        """Try for the last time to write what waits, and close the file."""
        with self._lock:
            self._write()
            self._file.close()

    def _write(self) -> None:
        if self._file.closed:
            return
        begin = time.monotonic()
        try:
            if not self._is_in_place():
                self._make_again()
            while self._waiting:  # a file on a full disk takes a part of a record
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            if not self._fault:
                self._messages.append(
                    f"warning: cannot write {self.path}: {error.strerror}; the run goes on, keeps "
                    f"up to {self._room >> 20} MiB of it in memory, and tries again"
                )
            self._fault = error.strerror or str(error)
            now = time.monotonic()
            self._next_try = now + _PAUSE * (now - begin)
            return
        if self._fault:
            lost = f"; {self._lost:,} records are missing" if self._lost else ""
            self._messages.append(f"{self.path} is written again{lost}")
            self._fault = ""

    def _is_in_place(self) -> bool:
        """Return whether the path still leads to the open file."""
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(status, os.fstat(self._file.fileno()))

    def _make_again(self) -> None:
        """Make the file again with what it had, which exists as long as it is open."""
        self._made_again = _WHOLE
        os.makedirs(self._inside, exist_ok=True)
        try:
            with replace_file(self.path, inside=self._inside) as new:
                for chunk in self._read_open_file():
                    new.write(chunk)
        except _Unreadable:
            self._gap = "what it had is lost, since it was deleted or moved"
            self._made_again = "without what they had"
        file = open_append(self.path, 0, inside=self._inside)
        self._file.close()
        self._file = file

    def _read_open_file(self) -> Iterator[bytes]:
        try:
            with open(f"/proc/self/fd/{self._file.fileno()}", "rb") as old:
                while chunk := old.read(_CHUNK):
                    yield chunk
        except OSError:
            raise _Unreadable from None


class OutputFiles:
    """All such files of a run.

    Args:
        folder: The folder of the run.
        room: As of `GrowingFile`.
    """

    def __init__(self, folder: Path, room: int = ROOM) -> None:
        self.folder, self._room = folder, room
        self._growing: dict[str, GrowingFile] = {}
        self._kept: dict[str, bytes] = {}
        self._unwritten: dict[str, str] = {}
        self._missing: list[str] = []
        self._messages: list[str] = []
        self._made_again: list[str] = []

    def open_growing(self, name: str) -> GrowingFile:
        """Open a file to append to it.

        Raises:
            OSError: It cannot be opened.
        """
        self._growing[name] = GrowingFile(self.folder / name, self.folder, self._room)
        return self._growing[name]

    def write(self, name: str, content: str) -> None:
        """Write a whole file, in place of what has this name, now or once that works."""
        self._kept[name] = content.encode()
        self._write_whole(name)

    def keep(self, name: str) -> None:
        """Make a file that others have written again, if it is deleted; it may be missing now."""
        with suppress(OSError):
            self._kept[name] = read_file(self.folder / name, _KEPT_BYTES, inside=self.folder)

    def report_missing(self, text: str) -> None:
        """Report something that is missing for good, which the run survives. text: a sentence."""
        self._missing.append(text)
        self._messages.append(f"warning: {text}; the run goes on")

    def retry(self) -> None:
        """Write what could not be written, and make again what was deleted."""
        for file in self._growing.values():
            file.retry()
        for name in list(self._kept):
            deleted = not os.path.lexists(self.folder / name)
            if name in self._unwritten:
                self._write_whole(name)
            elif deleted:
                self._write_whole(name)
                if name not in self._unwritten:
                    self._made_again.append(name)

    def take_messages(self) -> list[str]:
        """Return what the user should know since the last call. If there is anything, look after
        all files first."""
        messages, restored = self._collect()
        if messages or restored:
            self.retry()
            more_messages, more_restored = self._collect()
            messages += more_messages
            for how, names in more_restored.items():
                restored[how] += names
        for how, names in restored.items():
            messages.append(
                f"warning: {', '.join(names)} in {self.folder} were deleted or moved, and have "
                f"been made again, {how}"
            )
        return messages

    def _collect(self) -> tuple[list[str], defaultdict[str, list[str]]]:
        """Return messages, and the names of files that were made again by how they were."""
        messages, self._messages = self._messages, []
        restored: defaultdict[str, list[str]] = defaultdict(list)
        for name, file in self._growing.items():
            messages += file.take_messages()
            if how := file.take_restoration():
                restored[how].append(name)
        if self._made_again:
            restored[_WHOLE] += self._made_again
            self._made_again = []
        return messages, restored

    def list_missing(self) -> list[str]:
        """Return what is missing in the folder now, a part of a sentence each."""
        growing = (file.describe_missing() for file in self._growing.values())
        whole = (f"{self.folder / name} ({reason})" for name, reason in self._unwritten.items())
        return [*self._missing, *filter(None, growing), *whole]

    def close(self) -> None:
        """Try for the last time to write everything, and close all files."""
        self.retry()
        for file in self._growing.values():
            file.close()

    def _write_whole(self, name: str) -> None:
        path = self.folder / name
        try:
            os.makedirs(self.folder, exist_ok=True)
            write_file(path, self._kept[name], inside=self.folder)
        except OSError as error:
            if name not in self._unwritten:
                self._messages.append(
                    f"warning: cannot write {path}: {error.strerror}; the run goes on, and tries "
                    "again"
                )
            self._unwritten[name] = error.strerror or str(error)
            return
        if self._unwritten.pop(name, None) is not None:
            self._messages.append(f"{path} is written")
        if len(self._kept[name]) > _KEPT_BYTES:
            del self._kept[name]  # too large to be kept for the case that it is deleted
