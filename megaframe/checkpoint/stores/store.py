"""Where checkpoints are stored: in a folder of this machine, or under a URL of any fsspec store.

A place is a `Path` or a `RemotePath`, which has the part of a path's interface that checkpoints
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
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from megaframe.config.url import find_url_mistake, is_url
from megaframe.errors import UserError

POINTER = "latest"
LOCK = "lock"
"""The lock of a run on a folder that it writes (see `lock`)."""
CHECKPOINT_NAME = re.compile(r"step-([0-9]{8,12})(\.replaced)?")
TEMPORARY_NAME = re.compile(r"step-[0-9]{8,12}(\.replaced)?\.[0-9a-f]+\.tmp")
UPLOADED_NAME = re.compile(r"rank-[0-9]{5,9}\.[0-9]{5,9}\.([0-9a-f]{8})\.safetensors")
"""A file uploaded in one request; its name contains the attempt to save (see `remote`)."""
LOCK_BYTES = 4096
"""Most bytes of a lock."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def is_temporary(name: str) -> bool:
    return name.endswith(".tmp")


@dataclass(frozen=True)
class RemotePath:
    """A folder or file under a URL. url: has no trailing slash and contains no secrets."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])


StorePath: TypeAlias = Path | RemotePath
P = TypeVar("P", Path, RemotePath)


def parse_path(text: str) -> StorePath:
    """Return the place that a path or URL names. Raises UserError for a URL that cannot be used;
    the message repeats no secret."""
    if not is_url(text):
        return Path(text)
    mistake = find_url_mistake(text)
    if mistake:
        raise UserError(mistake)
    scheme, _, rest = text.partition("://")
    if scheme in ("file", "local"):
        return Path(rest)  # can rename, so it commits like a local folder
    found = RemotePath(f"{scheme}://{rest.rstrip('/')}")
    from megaframe.checkpoint.stores.retry import check_scheme

    check_scheme(found)
    return found


class ReadHandle(Protocol):
    """A file open for reading. Raises OSError."""

    size: int
    chunk: int
    """Best number of bytes per read."""
    at_once: int
    """Best number of threads to read with."""

    def read_into(self, start: int, into: memoryview) -> int:
        """Fill `into` from byte `start` on. Returns the number of bytes read: fewer than asked for
        only if the file ends."""

    def close(self) -> None: ...


class WriteHandle(Protocol):
    """A file being written. Raises OSError."""

    def put(self, data: memoryview) -> None:
        """Write the next bytes."""

    def finish(self, head: bytes) -> None:
        """Write the bytes left out at the start. Returns when the whole file is stored durably."""


class Store(ABC, Generic[P]):
    """Operations on places of one kind. Methods raise OSError only, with a `strerror` and a
    `filename` that can be shown to users."""

    max_file_bytes: int | None
    """Most bytes of tensors in one file. None: a rank writes a single file of any size."""
    keeps_replaced: bool
    """Whether `publish` keeps a checkpoint that it replaces until that is removed, so that the new
    one can still be withdrawn."""

    @abstractmethod
    def num_parallel_files(self, root: P) -> int:
        """Return the best number of files for one rank to write at the same time."""

    @abstractmethod
    def file_name(self, rank: int, part: int, attempt: str) -> str:
        """Return the name of a rank's file. part: its number, if a rank has several files."""

    @abstractmethod
    def is_folder(self, found: P) -> bool: ...

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

        lock: mark the file's checkpoint as in use while the file is open. bypass_cache: read from
        storage, not from the page cache. sole_reader: no other process of this machine will read
        the same data.
        """

    @abstractmethod
    def prepare(self, root: P) -> None:
        """Create the folder of checkpoints, and delete what killed saves have left in it."""

    @abstractmethod
    def draft_path(self, root: P, step: int, attempt: str) -> P:
        """Return the place where the files of a checkpoint are written before it is committed."""

    @abstractmethod
    def create_draft(self, draft: P) -> None: ...

    @abstractmethod
    def create_file(
        self, file: P, size: int, start: int, held: memoryview | None
    ) -> AbstractContextManager[WriteHandle]:
        """Create a file of `size` bytes.

        start: bytes left out at the start, to be written by `WriteHandle.finish`. held: everything
        that will be `put`, in aligned memory (see `room`) that does not change until the file is
        closed; None if the memory may change, so that `put` has to copy.
        """

    @abstractmethod
    def publish(
        self, draft: P, step: int, attempt: str, manifest: bytes, kept: Collection[str]
    ) -> P:
        """Turn a draft into a checkpoint atomically, by writing its manifest. It replaces any
        checkpoint of the same step. kept: names of the draft's files. Returns the checkpoint's
        place."""

    @abstractmethod
    def replace_file(self, file: P, content: bytes, attempt: str) -> None:
        """Write a small file, replacing an existing one atomically."""

    @abstractmethod
    def compare_and_swap(self, file: P, old: bytes | None, new: bytes | None) -> bool:
        """Replace the whole content of a small file if it is still `old`. None stands for no file;
        the folder is created if needed. Returns whether the file now has the content `new`."""

    def read_small_file(self, file: P, most: int) -> bytes | None:
        """Return the first bytes of a file, at most `most`, or None if there is no such file."""
        try:
            source = self.open(file)
        except FileNotFoundError:
            return None
        try:
            found = bytearray(min(source.size, most))
            return bytes(found[: source.read_into(0, memoryview(found))])
        finally:
            source.close()

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


def store_of(found: StorePath) -> Store:
    """Return the store that a place belongs to."""
    if isinstance(found, Path):
        from megaframe.checkpoint.stores.local import LOCAL_STORE

        return LOCAL_STORE
    from megaframe.checkpoint.stores.object_store import OBJECT_STORE

    return OBJECT_STORE
