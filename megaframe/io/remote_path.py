"""A folder or file under a URL, by name alone: `remote_requests.py` reaches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class RemotePath:
    """A folder or file under a URL.

    Attributes:
        url: Has no trailing slash and contains no secrets.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that contains it."""
        return RemotePath(self.url.rpartition("/")[0])


class RemoteEntry(NamedTuple):
    """A file below a URL: its own URL, and its size in bytes."""

    url: str
    size: int
