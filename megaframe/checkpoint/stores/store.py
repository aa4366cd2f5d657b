"""Where checkpoints are stored: in a folder of this machine, or under a URL of any fsspec store.

A `StorePath` is a `Path`, or a `RemotePath` that has the part of its interface that checkpoints
need; `store_of` returns the store that does the work there. Stores differ in how they commit: a
file system renames a complete folder; an object store cannot rename, so it writes one small object,
the manifest, after all files that the manifest names. Therefore commit is a method of the store
(`publish`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from megaframe.config.url import find_url_mistake, is_url
from megaframe.errors import UserError
from megaframe.io.remote_path import RemotePath

POINTER = "latest"
BEST = "best"
"""File that names the checkpoint with the lowest evaluation loss, with `checkpoint.keep_best`."""
LOCK = "lock"
"""The lock of a run on a folder that it writes (see `lock`)."""
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,12})(\.replaced)?")
TEMPORARY_NAME = re.compile(r"step-[0-9]{8,12}(\.replaced)?\.[0-9a-f]+\.tmp")
UPLOADED_NAME = re.compile(r"rank-[0-9]{5,9}\.[0-9]{5,9}\.([0-9a-f]{8})\.safetensors")
"""A file uploaded in one request; its name contains the attempt to save (see `object_store`)."""
LOCK_BYTES = 4096
"""Most bytes of a lock."""


def format_checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def is_temporary(name: str) -> bool:
    """Return whether a name is that of an unfinished save."""
    return name.endswith(".tmp")


StorePath: TypeAlias = Path | RemotePath
P = TypeVar("P", Path, RemotePath)


def parse_path(text: str) -> StorePath:
    """Parse a path or a URL.

    Raises:
        UserError: For a URL that cannot be used. The message repeats no secret.
    """
    if not is_url(text):
        return Path(text)
    mistake = find_url_mistake(text)
    if mistake:
        raise UserError(mistake)
    scheme, _, location = text.partition("://")
    if scheme in ("file", "local"):
        return Path(location)  # can rename, so it commits like a local folder
    path = RemotePath(f"{scheme}://{location.rstrip('/')}")
    from megaframe.io.remote_requests import find_scheme_mistake

    mistake = find_scheme_mistake(path)
    if mistake:
        raise UserError(mistake)
    return path


class ReadHandle(Protocol):
    """A file open for reading. All methods raise OSError."""

    size: int
    chunk_bytes: int
    """Best number of bytes per read."""
    num_threads: int
    """Best number of threads to read with."""

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Fill `buffer` from byte `start` on.

        Returns:
            The number of bytes read: fewer than asked for only if the file ends.
        """

    def close(self) -> None: ...


class WriteHandle(Protocol):
    """A file being written. All methods raise OSError."""

    def write(self, data: memoryview) -> None:
        """Write the next bytes."""

    def finish(self, header: bytes) -> None:
        """Write the bytes left out at the start. Returns when the whole file is stored durably."""


class Store(ABC, Generic[P]):
    """Operations on paths of one kind.

    Methods raise OSError only, with a `strerror` and a `filename` that can be shown to users.
    """

    max_file_bytes: int | None
    """Most bytes of tensors in one file. None: a rank writes a single file of any size."""
    keeps_replaced: bool
    """Whether `publish` keeps a checkpoint that it replaces until that is removed, so that the new
    one can still be withdrawn."""

    @abstractmethod
    def count_parallel_files(self, root: P) -> int:
        """Return the best number of files for one rank to write at the same time."""

    @abstractmethod
    def make_file_name(self, rank: int, part: int, attempt: str) -> str:
        """Return the name of a rank's file.

        Args:
            rank: The rank that writes it.
            part: Number of the file, if a rank has several files.
            attempt: Id of the save.
        """

    @abstractmethod
    def is_folder(self, path: P) -> bool: ...

    @abstractmethod
    def list_entries(self, folder: P) -> Mapping[str, int | None]:
        """Return the size in bytes of each file in a folder, and None for entries that are not
        regular files. Empty if there is no such folder."""

    @abstractmethod
    def list_committed(self, root: P) -> list[str]:
        """Return the names of the committed checkpoints in `root`, in any order."""

    @abstractmethod
    def open(
        self, file: P, *, lock: bool = False, bypass_cache: bool = False, sole_reader: bool = False
    ) -> ReadHandle:
        """Open a regular file for reading.

        Args:
            file: The file.
            lock: Mark the file's checkpoint as in use while the file is open.
            bypass_cache: Read from storage, not from the page cache.
            sole_reader: No other process of this machine will read the same data.
        """

    @abstractmethod
    def prepare(self, root: P) -> None:
        """Create the folder of checkpoints, and delete what killed saves have left in it."""

    @abstractmethod
    def make_draft_path(self, root: P, step: int, attempt: str) -> P:
        """Return the path under which the files of a checkpoint are written before the commit.

        Args:
            root: The folder of checkpoints.
            step: Step of the checkpoint.
            attempt: Id of the attempt to save it.
        """

    @abstractmethod
    def create_draft(self, draft: P) -> None: ...

    @abstractmethod
    def create_file(
        self, file: P, size: int, reserved: int, aligned_data: memoryview | None
    ) -> AbstractContextManager[WriteHandle]:
        """Create a file of `size` bytes.

        Args:
            file: Where to create it.
            size: Bytes of the whole file.
            reserved: Bytes left out at the start, to be written by `WriteHandle.finish`.
            aligned_data: Everything that will be written, in aligned memory (see
                `allocate_aligned`) that does not change until the file is closed; None if the
                memory may change, so that `write` has to copy.
        """

    @abstractmethod
    def publish(
        self, draft: P, step: int, attempt: str, manifest: bytes, file_names: Collection[str]
    ) -> P:
        """Turn a draft into a checkpoint atomically, by writing its manifest.

        It replaces any checkpoint of the same step.

        Args:
            draft: Path of the draft: `make_draft_path`.
            step: The step of the checkpoint.
            attempt: Id of the save.
            manifest: Content of the manifest.
            file_names: Names of the draft's files.

        Returns:
            The path of the checkpoint.
        """

    @abstractmethod
    def replace_file(self, file: P, content: bytes, attempt: str) -> None:
        """Write a small file, replacing an existing one atomically.

        Args:
            file: The file.
            content: Its new content.
            attempt: Id of the attempt, for the name of a temporary file.
        """

    @abstractmethod
    def compare_and_swap(self, file: P, old: bytes | None, new: bytes | None) -> bool:
        """Replace the whole content of a small file if it is still `old`. None stands for no file;
        the folder is created if needed.

        Args:
            file: The file.
            old: The content that it must have.
            new: The content that it gets.

        Returns:
            Whether the file now has the content `new`.
        """

    def read_small_file(self, file: P, max_bytes: int) -> bytes | None:
        """Return the first bytes of a file, at most `max_bytes`, or None if there is no such
        file."""
        try:
            handle = self.open(file)
        except FileNotFoundError:
            return None
        try:
            buffer = bytearray(min(handle.size, max_bytes))
            return bytes(buffer[: handle.read_into(0, memoryview(buffer))])
        finally:
            handle.close()

    @abstractmethod
    def discard_draft(self, draft: P, attempt: str) -> None:
        """Delete what is left of a draft, unless it has become a checkpoint. Never raises."""

    @abstractmethod
    def remove_checkpoint(self, checkpoint: P, attempt: str) -> None:
        """Delete a checkpoint, beginning with what makes it one (its name or manifest). What cannot
        be deleted is left for a later call. Never raises."""

    @abstractmethod
    def delete_file(self, file: P) -> None:
        """Delete a file, if it exists and can be deleted. Never raises."""

    @abstractmethod
    def is_in_use(self, checkpoint: P) -> bool:
        """Return whether a process is known to have the checkpoint open (see `lock` of `open`)."""

    @abstractmethod
    def free_bytes(self, root: P) -> int | None:
        """Return how many bytes can still be written, or None if no limit is known."""


def store_of(path: StorePath) -> Store:
    """Return the store that a path belongs to."""
    if isinstance(path, Path):
        from megaframe.checkpoint.stores.local import LOCAL_STORE

        return LOCAL_STORE
    from megaframe.checkpoint.stores.object_store import OBJECT_STORE

    return OBJECT_STORE
