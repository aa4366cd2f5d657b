"""Checkpoints under the URL of an fsspec store: S3, Google Cloud, Azure, or any other.

A rank's data are split into files of one size, each sent in one request and read back before the
checkpoint counts. If a request fails, only its file is sent again, in the same way for every store,
and no store is left with a partial upload. File names contain the attempt to save, so only the
manifest is ever overwritten. Writing this small file commits the checkpoint, and replaces another
one of the same step at that moment.
"""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from fsspec.spec import AbstractFileSystem

from megaframe.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, decode_manifest
from megaframe.checkpoint.stores.store import (
    CHECKPOINT_NAME,
    LOCK_BYTES,
    UPLOADED_NAME,
    ReadHandle,
    Store,
    WriteHandle,
    format_checkpoint_name,
)
from megaframe.errors import UserError
from megaframe.io.remote_path import RemotePath
from megaframe.io.remote_requests import open_filesystem, retry_request

FILE_BYTES = 64 << 20
"""Bytes of tensors in a file: the memory needed per upload, and the most that is sent again after a
broken connection. s3fs sends up to 100 MiB in one request."""
_PARALLEL_REQUESTS = 4
"""Requests at a time. One connection to an object store reaches a tenth of the speed of several."""
_READ_BYTES = 8 << 20
"""Bytes read by one request."""
_SETTLE_SECONDS = 1.0
"""Seconds after which whatever was written at the same time is there."""


class ObjectReadHandle:
    """A file under a URL, read by several requests at a time."""

    chunk_bytes, num_threads = FILE_BYTES, 1

    def __init__(self, file: RemotePath, size: int) -> None:
        self.size = size
        self._file = file

    def read_into(self, start: int, buffer: memoryview) -> int:
        system, path = open_filesystem(self._file)
        stop = min(start + len(buffer), self.size)
        begins = range(start, stop, _READ_BYTES)
        for index in range(0, len(begins), _PARALLEL_REQUESTS):
            batch = begins[index : index + _PARALLEL_REQUESTS]
            ends = [min(begin + _READ_BYTES, stop) for begin in batch]
            parts = retry_request(
                self._file,
                lambda batch=batch, ends=ends: system.cat_ranges(  # type: ignore[misc]
                    [path] * len(batch), list(batch), ends, on_error="raise"
                ),
            )
            for begin, end, part in zip(batch, ends, parts, strict=True):
                if len(part) != end - begin:
                    return begin - start
                buffer[begin - start : end - start] = part
        return max(0, stop - start)

    def close(self) -> None:
        """Do nothing: no connection is held between two reads."""


class ObjectWriteHandle:
    """A file that is assembled in memory and sent by `finish`."""

    def __init__(self, file: RemotePath, start: int) -> None:
        self._file = file
        self._data = io.BytesIO()
        self._data.seek(start)

    def write(self, data: memoryview) -> None:
        self._data.write(data)

    def finish(self, header: bytes) -> None:
        self._data.seek(0)
        self._data.write(header)
        _upload(self._file, self._data.getvalue())


class ObjectStore(Store[RemotePath]):
    """Folders in any store that fsspec supports."""

    keeps_replaced = False

    @property
    def max_file_bytes(self) -> int:  # type: ignore[override]
        return FILE_BYTES

    def count_parallel_files(self, root: RemotePath) -> int:
        system, _ = open_filesystem(root)
        return _PARALLEL_REQUESTS if system.async_impl else 1  # others may not be thread-safe

    def make_file_name(self, rank: int, part: int, attempt: str) -> str:
        return f"rank-{rank:05d}.{part:05d}.{attempt}.safetensors"

    def is_folder(self, path: RemotePath) -> bool:
        return bool(_list_folder(path))

    def list_entries(self, folder: RemotePath) -> dict[str, int | None]:
        return {
            str(info["name"]).rstrip("/").rpartition("/")[2]: info.get("size")
            if info["type"] == "file"
            else None
            for info in _list_folder(folder)
        }

    def list_committed(self, root: RemotePath) -> list[str]:
        names = [name for name, size in self.list_entries(root).items() if size is None]
        names = [name for name in names if CHECKPOINT_NAME.fullmatch(name)]
        return [name for name, committed in self._find_committed(root, names) if committed]

    def _find_committed(self, root: RemotePath, names: list[str]) -> list[tuple[str, bool]]:
        def has_manifest(name: str) -> tuple[str, bool]:
            with suppress(FileNotFoundError):
                _read_file_size(root / name / MANIFEST)
                return name, True
            return name, False

        with ThreadPoolExecutor(self.count_parallel_files(root)) as pool:
            return list(pool.map(has_manifest, names))

    def open(
        self,
        file: RemotePath,
        *,
        lock: bool = False,
        bypass_cache: bool = False,
        sole_reader: bool = False,
    ) -> ReadHandle:
        return ObjectReadHandle(file, _read_file_size(file))

    def prepare(self, root: RemotePath) -> None:
        system, path = open_filesystem(root)
        retry_request(root, lambda: system.makedirs(path, exist_ok=True))
        names = [name for name, size in self.list_entries(root).items() if size is None]
        for name, has_manifest in self._find_committed(
            root, [name for name in names if CHECKPOINT_NAME.fullmatch(name)]
        ):
            self._remove_leftovers(root / name, has_manifest)

    def _remove_leftovers(self, folder: RemotePath, has_manifest: bool) -> None:
        """Delete the files that no manifest names, if it is certain which ones these are. whole:
        whether the folder has a manifest."""
        named: Collection[str] = ()
        files = [name for name in self.list_entries(folder) if UPLOADED_NAME.fullmatch(name)]
        if has_manifest:
            if len({name.split(".")[-2] for name in files}) < 2:
                return  # all of one attempt, which was committed
            try:
                named = decode_manifest(_read_file(folder / MANIFEST), folder / MANIFEST).files
            except UserError:
                return
        _delete_files([folder / name for name in files if name not in named])

    def make_draft_path(self, root: RemotePath, step: int, attempt: str) -> RemotePath:
        return root / format_checkpoint_name(step)

    def create_draft(self, draft: RemotePath) -> None:
        """Do nothing: object stores have no folders, and in other stores `_upload_once` creates
        them."""

    def create_file(
        self, file: RemotePath, size: int, reserved: int, aligned_data: memoryview | None
    ) -> AbstractContextManager[WriteHandle]:
        return nullcontext(ObjectWriteHandle(file, reserved))

    def publish(
        self,
        draft: RemotePath,
        step: int,
        attempt: str,
        manifest: bytes,
        file_names: Collection[str],
    ) -> RemotePath:
        _upload(draft / MANIFEST, manifest)
        with suppress(OSError):
            names = [name for name in self.list_entries(draft) if name.endswith(".safetensors")]
            _delete_files(
                [draft / name for name in names if name not in file_names and _is_shard_file(name)]
            )
        return draft

    def replace_file(self, file: RemotePath, content: bytes, attempt: str) -> None:
        _upload(file, content)

    def compare_and_swap(self, file: RemotePath, old: bytes | None, new: bytes | None) -> bool:
        """Few stores compare and write in one request. Therefore the content is read again after a
        while: of several that write at the same time, the last one has it."""
        if self.read_small_file(file, LOCK_BYTES) != old:
            return False
        if new is None:
            _delete_files([file])
            return True
        _upload(file, new)
        time.sleep(_SETTLE_SECONDS)
        return self.read_small_file(file, LOCK_BYTES) == new

    def discard_draft(self, draft: RemotePath, attempt: str) -> None:
        with suppress(OSError):
            own_files = [
                name
                for name in self.list_entries(draft)
                if (match := UPLOADED_NAME.fullmatch(name)) and match[1] == attempt
            ]
            # The manifest may have been stored although its request seemed to fail. Then the draft
            # is a checkpoint.
            if own_files and not self._is_committed(draft, attempt):
                _delete_files([draft / name for name in own_files])

    def _is_committed(self, draft: RemotePath, attempt: str) -> bool:
        """Return whether the manifest in a folder names files of an attempt."""
        try:
            return f".{attempt}.safetensors".encode() in _read_file(draft / MANIFEST)
        except FileNotFoundError:
            return False

    def remove_checkpoint(self, checkpoint: RemotePath, attempt: str) -> None:
        with suppress(OSError):
            _delete_files([checkpoint / MANIFEST])
            _delete_files(
                [
                    checkpoint / name
                    for name in self.list_entries(checkpoint)
                    if _is_shard_file(name)
                ]
            )

    def delete_file(self, file: RemotePath) -> None:
        with suppress(OSError):
            _delete_files([file])

    def is_in_use(self, checkpoint: RemotePath) -> bool:
        return False  # stores have no locks; a reader's error names the missing file

    def free_bytes(self, root: RemotePath) -> int | None:
        return None


def _is_shard_file(name: str) -> bool:
    return name.startswith("rank-") and name.endswith(".safetensors")


def _list_folder(folder: RemotePath) -> list[dict[str, Any]]:
    """Return fsspec's description of each entry of a folder; empty if there is no such folder."""
    system, path = open_filesystem(folder)

    def list_once() -> list[dict[str, Any]]:
        system.invalidate_cache()
        entries: list[dict[str, Any]] = system.ls(path, detail=True)
        # Some stores list the folder itself, or a file of the same name.
        return [entry for entry in entries if str(entry["name"]).strip("/") != path.strip("/")]

    try:
        return retry_request(folder, list_once)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read_file_size(file: RemotePath) -> int:
    system, path = open_filesystem(file)

    def request_info_once() -> dict[str, Any]:
        system.invalidate_cache()
        info: dict[str, Any] = system.info(path)
        return info

    info = retry_request(file, request_info_once)
    if info["type"] != "file" or not isinstance(info.get("size"), int):
        raise OSError(errno.EINVAL, "Not a regular file", str(file))
    return int(info["size"])


def _read_file(file: RemotePath) -> bytes:
    """Read a whole file. Raises OSError if it is larger than a manifest may be."""
    size = _read_file_size(file)
    if size > MAX_MANIFEST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(file))
    content = bytearray(size)
    num_read = ObjectReadHandle(file, size).read_into(0, memoryview(content))
    return bytes(content[:num_read])


def _upload(file: RemotePath, content: bytes) -> None:
    system, path = open_filesystem(file)
    retry_request(file, lambda: _upload_once(system, path, content))


def _upload_once(system: AbstractFileSystem, path: str, content: bytes) -> None:
    if not system.async_impl:
        system.makedirs(system._parent(path), exist_ok=True)
    system.pipe_file(path, content)


def _delete_files(files: list[RemotePath]) -> None:
    """Delete files in the given order. A missing file is not an error."""
    for file in files:
        system, path = open_filesystem(file)
        with suppress(FileNotFoundError):
            retry_request(file, lambda system=system, path=path: system.rm_file(path))  # type: ignore[misc]


OBJECT_STORE = ObjectStore()
