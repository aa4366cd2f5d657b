"""Checkpoints in a folder of this machine.

A checkpoint gets its final name only when it is complete, and loses that name before any of it is
deleted. So whenever a process is killed, a folder with a final name is a complete checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from megaframe.checkpoint.manifest import MANIFEST
from megaframe.checkpoint.stores.direct_io import DirectReadHandle, DirectWriteHandle
from megaframe.checkpoint.stores.store import (
    BEST,
    CHECKPOINT_NAME,
    LOCK_BYTES,
    POINTER,
    TEMPORARY_NAME,
    ReadHandle,
    Store,
    WriteHandle,
    format_checkpoint_name,
    is_temporary,
)
from megaframe.io.regular_file import write_file
from megaframe.io.untrusted import open_file


class LocalStore(Store[Path]):
    """Folders of this machine."""

    max_file_bytes = None
    keeps_replaced = True

    def count_parallel_files(self, root: Path) -> int:
        return 1

    def make_file_name(self, rank: int, part: int, attempt: str) -> str:
        return f"rank-{rank:05d}.safetensors"

    def is_folder(self, path: Path) -> bool:
        return path.is_dir()

    def list_entries(self, folder: Path) -> dict[str, int | None]:
        sizes: dict[str, int | None] = {}
        for entry in _list_folder(folder):
            with suppress(FileNotFoundError):  # a link to nothing, or deleted meanwhile
                status = entry.stat()
                sizes[entry.name] = status.st_size if stat.S_ISREG(status.st_mode) else None
        return sizes

    def list_committed(self, root: Path) -> list[str]:
        return [
            path.name
            for path in _list_folder(root)
            if CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()
        ]

    def open(
        self,
        file: Path,
        *,
        lock: bool = False,
        bypass_cache: bool = False,
        sole_reader: bool = False,
    ) -> ReadHandle:
        opened = open_file(file, 0)
        if lock:
            # Without a lock the file can still be read. If a checkpoint is deleted meanwhile, the
            # reader's error names the missing file.
            with suppress(OSError):
                fcntl.flock(opened.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
        return DirectReadHandle(opened, bypass_cache=bypass_cache, sole_reader=sole_reader)

    def prepare(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        for path in root.iterdir():
            if TEMPORARY_NAME.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
            elif re.fullmatch(rf"({POINTER}|{BEST})\.[0-9a-f]+\.tmp", path.name):
                path.unlink(missing_ok=True)

    def make_draft_path(self, root: Path, step: int, attempt: str) -> Path:
        # The name contains the attempt, so a process of a dead run cannot write into this save.
        return root / f"{format_checkpoint_name(step)}.{attempt}.tmp"

    def create_draft(self, draft: Path) -> None:
        draft.mkdir(parents=True)

    def create_file(
        self, file: Path, size: int, reserved: int, aligned_data: memoryview | None
    ) -> AbstractContextManager[WriteHandle]:
        return DirectWriteHandle(file, size, reserved, aligned_data)

    def publish(
        self, draft: Path, step: int, attempt: str, manifest: bytes, file_names: Collection[str]
    ) -> Path:
        """Commit a draft by renaming it. A checkpoint that already has the final name is first
        renamed to `.replaced`; `checkpoints` finds it there if this process is killed in
        between."""
        with open(draft / MANIFEST, "xb") as opened:
            opened.write(manifest)
            opened.flush()
            os.fsync(opened.fileno())
        sync_folder(draft)
        final = draft.parent / format_checkpoint_name(step)
        replaced = draft.parent / f"{final.name}.replaced"
        if final.exists():
            if replaced.exists():
                self.remove_checkpoint(replaced, attempt)
            os.rename(final, replaced)
        os.rename(draft, final)
        sync_folder(draft.parent)
        return final

    def replace_file(self, file: Path, content: bytes, attempt: str) -> None:
        write_file(file, content, inside=file.parent, sync=True)
        sync_folder(file.parent)

    def compare_and_swap(self, file: Path, old: bytes | None, new: bytes | None) -> bool:
        if old is None:
            file.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # network file systems without locks: the last writer has it
                fcntl.flock(folder, fcntl.LOCK_EX)
            if self.read_small_file(file, LOCK_BYTES) != old:
                return False
            if new is None:
                file.unlink(missing_ok=True)
                return True
            write_file(file, new, inside=file.parent)
            return True
        finally:
            os.close(folder)

    def discard_draft(self, draft: Path, attempt: str) -> None:
        self.remove_checkpoint(draft, attempt)

    def remove_checkpoint(self, checkpoint: Path, attempt: str) -> None:
        temporary = checkpoint
        if not is_temporary(checkpoint.name):
            temporary = checkpoint.with_name(f"{checkpoint.name}.{attempt}.tmp")
        try:
            if temporary != checkpoint:
                os.rename(checkpoint, temporary)
        except OSError:
            return
        shutil.rmtree(temporary, ignore_errors=True)

    def delete_file(self, file: Path) -> None:
        with suppress(OSError):
            file.unlink()

    def is_in_use(self, checkpoint: Path) -> bool:
        try:
            with open_file(checkpoint / MANIFEST) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            # Damaged, or a file system without locks: it is not known to be in use.
            return False
        return False

    def free_bytes(self, root: Path) -> int | None:
        return shutil.disk_usage(root).free


def _list_folder(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder; nothing if it is gone or was never there."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from folder.iterdir()


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that its entries are as durable as the files themselves."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCAL_STORE = LocalStore()
