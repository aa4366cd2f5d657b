"""Where checkpoints lie: in a folder of this machine, or under a URL of any fsspec store.

A place is a `Path` or a `Remote`, which has as much of a path's interface as checkpoints need;
`store_of` says what can be done there. Stores differ in one thing that matters: a file system
renames a folder that is whole, an object store has no names to change and puts one small object,
the manifest, once all that it names is there. So what commits is a method of the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeAlias, TypeVar

from megaframe.config.url import is_url, url_mistake
from megaframe.errors import UserError


@dataclass(frozen=True)
class Remote:
    """A folder or file under a URL. url: without a slash at its end, and without secrets."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self.url.rpartition("/")[0])


Place: TypeAlias = Path | Remote
P = TypeVar("P", Path, Remote)


def place(text: str) -> Place:
    """The place that a path or URL names. UserError for a URL that cannot be used; its message
    repeats no secret."""
    if not is_url(text):
        return Path(text)
    mistake = url_mistake(text)
    if mistake:
        raise UserError(mistake)
    scheme, _, rest = text.partition("://")
    if scheme in ("file", "local"):
        return Path(rest)  # a file system renames
    found = Remote(f"{scheme}://{rest.rstrip('/')}")
    from megaframe.checkpoint.patience import require

    require(found)
    return found


class Source(Protocol):
    """A file open for reading. Raises OSError."""

    size: int
    chunk: int
    """Bytes that are well read at a time."""
    at_once: int
    """Threads that best read at the same time."""

    def read_into(self, start: int, into: memoryview) -> int:
        """Fill `into` from byte `start` on. Returns how many bytes there were, fewer at the end."""

    def close(self) -> None: ...


class Sink(Protocol):
    """A file being written. Raises OSError."""

    def put(self, data: memoryview) -> None:
        """Write the next bytes."""

    def finish(self, head: bytes) -> None:
        """Write what was left out at the start, and return when all is stored for good."""


class Store(ABC, Generic[P]):
    """What can be done at the places of one kind. Every method raises OSError, its `strerror` and
    `filename` fit to be shown, and nothing else."""

    file_bytes: int | None
    """Most bytes of tensors in one file; None where a rank writes one file, whatever its size."""
    keeps_replaced: bool
    """Whether a checkpoint that `publish` replaces stays until it is removed, so that the new one
    can still be taken back."""

    @abstractmethod
    def at_once(self, home: P) -> int:
        """Files that one rank best writes at the same time."""

    @abstractmethod
    def file_name(self, rank: int, part: int, attempt: str) -> str:
        """What a rank's file is called; part: its number where a rank has several."""

    @abstractmethod
    def is_folder(self, found: P) -> bool: ...

    @abstractmethod
    def entries(self, folder: P) -> Mapping[str, int | None]:
        """What is in a folder: the bytes of each file, and None for all that is no regular file.
        Empty where there is no folder."""

    @abstractmethod
    def finished(self, home: P) -> list[str]:
        """Names of the checkpoints in a folder of them that were committed, in any order."""

    @abstractmethod
    def open(
        self, file: P, *, hold: bool = False, fresh: bool = False, alone: bool = False
    ) -> Source:
        """Open a regular file. hold: the checkpoint that it is of is in use while it stays open.
        fresh: read what is stored, not what memory has of it. alone: no other process of this
        machine is going to read the same."""

    @abstractmethod
    def prepare(self, home: P) -> None:
        """Make the home of checkpoints, and delete what killed saves have left in it."""

    @abstractmethod
    def draft(self, home: P, step: int, attempt: str) -> P:
        """Where the files of a checkpoint are written before it is one."""

    @abstractmethod
    def begin(self, draft: P) -> None: ...

    @abstractmethod
    def create(
        self, file: P, size: int, start: int, held: memoryview | None
    ) -> AbstractContextManager[Sink]:
        """A new file of `size` bytes, to be written. start: bytes left out at the start. held: all
        that will be put, in memory that is aligned as `direct` says and stays as it is until the
        file is closed; None where it does not stay."""

    @abstractmethod
    def publish(
        self, draft: P, step: int, attempt: str, manifest: bytes, kept: Collection[str]
    ) -> P:
        """Make a checkpoint of a draft by writing its manifest, at one instant and in place of one
        that has its name. kept: the names of its files. Returns where it is."""

    @abstractmethod
    def replace(self, file: P, content: bytes, attempt: str) -> None:
        """Write a small file in place of the one that is there, at one instant."""

    @abstractmethod
    def discard(self, draft: P, attempt: str) -> None:
        """Delete what is left of a draft, unless it has become a checkpoint. Raises nothing."""

    @abstractmethod
    def remove(self, checkpoint: P, attempt: str) -> None:
        """Delete a checkpoint: first what makes it one. What cannot be deleted is left for next
        time. Raises nothing."""

    @abstractmethod
    def delete(self, file: P) -> None:
        """Delete a file, if it is there and can be deleted. Raises nothing."""

    @abstractmethod
    def is_in_use(self, checkpoint: P) -> bool:
        """Whether any process is known to have it open (see `open`)."""

    @abstractmethod
    def free(self, home: P) -> int | None:
        """Bytes that can still be written, where there is a limit that is known."""


def store_of(found: Place) -> Store:
    """What can be done at a place."""
    if isinstance(found, Path):
        from megaframe.checkpoint.local import LOCAL

        return LOCAL
    from megaframe.checkpoint.remote import REMOTE

    return REMOTE
