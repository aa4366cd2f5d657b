"""Reads files under URLs as they are, a range of bytes at a time, and waits until a store that
fails answers again.

Every range is a request of its own: what a broken connection has lost is asked for again from where
it stopped, and an answer of another length than asked for is no answer. So a reader gives the bytes
of the file or an error, never fewer bytes.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, BinaryIO, cast

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from megaframe.io.remote_path import RemoteEntry, RemotePath
from megaframe.io.remote_requests import open_filesystem, retry_request

OUTAGE_SECONDS = 1800.0
"""Seconds for which an outage is waited out."""
_READ = 8 << 20
"""Bytes of a request: its latency is little beside the time that they take."""
_MOST_FILES = 1_000_000


class RemoteReader(io.RawIOBase):
    """A file under a URL, open for reading.

    Args:
        path: The file.
        size: Bytes that it must have; None: as many as it has.

    Raises:
        OSError: It cannot be read, or has another size. So do its methods.
    """

    def __init__(self, path: RemotePath, size: int | None = None) -> None:
        self._path = path
        self.size = measure_remote_file(path)
        if size is not None and size != self.size:
            raise OSError(
                errno.ESTALE,
                f"it has {self.size:,} bytes now, and {size:,} when it was listed",
                str(path),
            )
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), _READ, max(0, self.size - self._place))
        if count:
            view[:count] = self._request(self._place, self._place + count)
            self._place += count
        return count

    def readall(self) -> bytes:
        content = bytearray()
        while chunk := self.read(_READ):
            content += chunk
        return bytes(content)

    def _request(self, start: int, stop: int) -> bytes:
        system, path = open_filesystem(self._path)

        def request_once() -> bytes:
            content: bytes = system.cat_file(path, start=start, end=stop)
            if len(content) == stop - start:
                return content
            if len(content) == self.size:
                raise ValueError("the server gives whole files where a range is asked for")
            raise OSError(
                errno.EIO, f"{len(content):,} of {stop - start:,} bytes answered", str(self._path)
            )

        return retry_request(self._path, request_once, OUTAGE_SECONDS)


def open_remote_file(path: RemotePath, buffering: int = -1, size: int | None = None) -> BinaryIO:
    """Open a file under a URL.

    Args:
        path: The file.
        buffering: Bytes that are asked for at least.
        size: Bytes that it must have; None: as many as it has.

    Raises:
        OSError: See `RemoteReader`.
    """
    reader = RemoteReader(path, size)
    return cast(BinaryIO, io.BufferedReader(reader, buffering if buffering > 0 else _READ))


def measure_remote_file(path: RemotePath) -> int:
    """Return the size of a file under a URL in bytes. Raises OSError if it has none."""
    system, name = open_filesystem(path)

    def request_once() -> dict[str, Any]:
        system.invalidate_cache()
        info: dict[str, Any] = system.info(name)
        return info

    info = retry_request(path, request_once, OUTAGE_SECONDS)
    if info["type"] != "file" or not isinstance(info.get("size"), int):
        raise OSError(errno.EINVAL, "it is no file whose size the store tells", str(path))
    return int(info["size"])


def list_remote_files(path: RemotePath) -> list[RemoteEntry]:
    """Return what is at a URL, in the order of the names: the file itself, or all files below.

    Raises:
        OSError: There is nothing, or more than a million files.
    """
    system, name = open_filesystem(path)
    if _goes_through_folders(system):
        found = _go_through_folders(path)
    else:
        found = _request_listing(path, partial(system.find, name, detail=True))
    if not found:
        raise OSError(errno.ENOENT, "there is no such file or folder", str(path))
    if len(found) > _MOST_FILES:
        raise OSError(errno.EFBIG, f"more than {_MOST_FILES:,} files", str(path))
    return list(_describe_entries(path, found))


def _goes_through_folders(system: AbstractFileSystem) -> bool:
    """Return whether a store has no request of its own for all files below a folder."""
    if isinstance(system, AsyncFileSystem):
        return type(system)._find is AsyncFileSystem._find
    return type(system).find is AbstractFileSystem.find


def _go_through_folders(path: RemotePath) -> dict[str, Any]:
    """Return all files at or below a URL. fsspec would leave out folders that it cannot list."""
    system, name = open_filesystem(path)
    found: dict[str, Any] = {}
    folders = [name.rstrip("/")]
    while folders and len(found) <= _MOST_FILES:
        folder = folders.pop()
        for entry in _request_listing(path, partial(system.ls, folder, detail=True)):
            below = entry["name"].rstrip("/")
            if entry["type"] != "directory":
                found[entry["name"]] = entry
            elif below.startswith(f"{folder}/"):
                folders.append(below)
    return found or {name: {"size": measure_remote_file(path)}}


def _request_listing(path: RemotePath, request: Callable[[], Any]) -> Any:
    system, _ = open_filesystem(path)

    def request_once() -> Any:
        system.invalidate_cache()
        return request()

    return retry_request(path, request_once, OUTAGE_SECONDS)


def _describe_entries(path: RemotePath, found: dict[str, Any]) -> Iterator[RemoteEntry]:
    scheme = path.url.partition("://")[0]
    for name in sorted(found):
        url = name if "://" in name else f"{scheme}://{name.lstrip('/')}"
        size = found[name].get("size")
        yield RemoteEntry(
            url, size if isinstance(size, int) else measure_remote_file(RemotePath(url))
        )
