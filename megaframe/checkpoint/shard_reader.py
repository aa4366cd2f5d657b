"""Reads one file of a checkpoint, to load it or to verify it.

Everything in a file is checked before it is used. While one slice is in use the next ones are read
ahead, into memory with the same alignment as in the file, so that the page cache can be bypassed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from torch import Tensor

from megaframe.checkpoint.manifest import (
    DTYPES,
    SAVED_TENSORS,
    SavedFile,
    SavedSlice,
    SavedTensor,
    checksum,
)
from megaframe.checkpoint.shard_file import MAX_ENTRY_BYTES, MAX_HEADER_BYTES, entry_name
from megaframe.checkpoint.stores.direct_io import ALIGNMENT, allocate_aligned
from megaframe.checkpoint.stores.store import StorePath, store_of
from megaframe.errors import UnreadableFile

_READ_AHEAD_BYTES = 2 * MAX_ENTRY_BYTES
"""Memory for slices that are read ahead. There is always room for one slice, whatever its size."""


class _HeaderEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: str
    shape: list[int]
    data_offsets: list[int]


SliceRequest = tuple[str, SavedTensor, SavedSlice]
"""A tensor's name, the tensor, and the slice of it to be read."""


class ShardReader:
    """A file of a checkpoint, open for reading. Its header is checked before it is parsed.

    bypass_cache, sole_reader: see `Store.open`. Raises UnreadableFile that names the file and, if
        one is concerned,
    the tensor.
    """

    def __init__(
        self,
        path: StorePath,
        saved: SavedFile,
        *,
        bypass_cache: bool = False,
        sole_reader: bool = False,
    ) -> None:
        self.path = path
        try:
            self._file = store_of(path).open(
                path, bypass_cache=bypass_cache, sole_reader=sole_reader
            )
        except OSError as error:
            raise UnreadableFile(f"cannot read {path}: {error.strerror}") from None
        try:
            self._header, self._data_start = self._read_header(saved)
        except BaseException:
            self._file.close()
            raise
        self._data_bytes = saved.bytes - self._data_start

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _read_header(self, saved: SavedFile) -> tuple[Mapping[str, object], int]:
        size = self._file.size
        if size != saved.bytes:
            raise UnreadableFile(f"{self.path} is damaged: {size} bytes instead of {saved.bytes}")
        length = int.from_bytes(self._read(0, min(8, size)), "little")
        if length <= min(MAX_HEADER_BYTES, size - 8):
            header = self._read(0, 8 + length)
            if checksum(header) == saved.header:
                try:
                    parsed = from_json(header[8:])
                except ValueError:
                    parsed = None
                if isinstance(parsed, dict):
                    return parsed, 8 + length
        raise UnreadableFile(f"{self.path} is damaged: its header is not the one that was saved")

    def _read(self, start: int, length: int) -> bytes:
        buffer = bytearray(length)
        self._read_into(start, memoryview(buffer), "its header")
        return bytes(buffer)

    def _read_into(self, start: int, into: memoryview, what: str) -> None:
        try:
            got = self._file.read_into(start, into)
        except OSError as error:
            raise UnreadableFile(f"cannot read {what} from {self.path}: {error.strerror}") from None
        if got < len(into):
            raise UnreadableFile(f"{self.path} is damaged: it ends within {what}")

    def tensors(self) -> dict[str, SavedTensor]:
        """Return the part of the manifest that the rank that wrote the file stored in its
        header."""
        metadata = self._header.get("__metadata__")
        try:
            text = metadata["tensors"] if isinstance(metadata, dict) else None
            return SAVED_TENSORS.validate_json(text)  # type: ignore[arg-type]
        except (KeyError, ValidationError):
            raise UnreadableFile(f"{self.path} is damaged: it does not say what it holds") from None

    def read_all(
        self, wanted: Iterable[SliceRequest], rooms: Sequence[Tensor]
    ) -> Iterator[tuple[SliceRequest, Tensor]]:
        """Read slices in order. Each is yielded as a view of one of the rooms (see `read`) and is
        valid until the next iteration. Meanwhile later slices are read and checked in the other
        rooms."""
        left, ahead = iter(wanted), deque[tuple[SliceRequest, Tensor, Future[Tensor]]]()
        with ThreadPoolExecutor(self._file.at_once) as pool:

            def begin(room: Tensor) -> None:
                for one in islice(left, 1):
                    ahead.append((one, room, pool.submit(self.read, *one, room)))

            for room in rooms:
                begin(room)
            while ahead:
                one, room, reading = ahead.popleft()
                yield one, reading.result()
                begin(room)

    def read(self, name: str, tensor: SavedTensor, piece: SavedSlice, room: Tensor) -> Tensor:
        """Read one slice into `room` (a tensor of bytes) and check it. Returns a view of `room`."""
        size = tensor.bytes_of(piece.shape)
        start = self._data_start + self._position(name, tensor, piece, size)
        # Use the same offset from a multiple of the alignment in memory as in the file.
        first = 0 if start % DTYPES[tensor.dtype].itemsize else start % ALIGNMENT
        into = room.numpy().data[first : first + size]
        digest = xxhash.xxh3_64()
        for begin in range(0, size, self._file.chunk):
            chunk = into[begin : begin + self._file.chunk]
            self._read_into(start + begin, chunk, f"tensor {name}")
            digest.update(chunk)
        if digest.hexdigest() != piece.checksum:
            raise UnreadableFile(
                f"{self.path} is damaged: tensor {name} at {piece.offset} has checksum "
                f"{digest.hexdigest()} instead of {piece.checksum}"
            )
        return room[first : first + size].view(DTYPES[tensor.dtype]).view(piece.shape)

    def _position(self, name: str, tensor: SavedTensor, piece: SavedSlice, size: int) -> int:
        try:
            found = self._header[entry_name(name, piece.offset, piece.shape)]
            entry = _HeaderEntry.model_validate(found)
            start, stop = entry.data_offsets
        except (KeyError, ValueError):
            raise UnreadableFile(
                f"{self.path} is damaged: it has no tensor {name} at {piece.offset}"
            ) from None
        if (
            (entry.dtype, tuple(entry.shape)) != (tensor.dtype, piece.shape)
            or stop - start != size
            or not 0 <= start <= stop <= self._data_bytes
        ):
            raise UnreadableFile(
                f"{self.path} is damaged: tensor {name} at {piece.offset} is {entry.dtype} "
                f"{tuple(entry.shape)} in bytes {start} to {stop}, instead of {tensor.dtype} "
                f"{piece.shape} of {size} bytes"
            )
        return start


def allocate_buffers(wanted: Iterable[SliceRequest]) -> list[Tensor]:
    """Allocate rooms (tensors of bytes) for reading slices, each large enough for the largest
    slice: as many as fit into `_READ_AHEAD_BYTES`, at least one, but no more than there are
    slices."""
    sizes = [tensor.bytes_of(piece.shape) for _, tensor, piece in wanted]
    count = min(len(sizes), max(1, _READ_AHEAD_BYTES // max([1, *sizes])))
    size = ALIGNMENT * (1 + -(-max(sizes, default=0) // ALIGNMENT))
    room = torch.from_numpy(allocate_aligned(count * size))
    return list(room.view(count, size)) if count else []


def verify_shard_file(path: StorePath, saved: SavedFile) -> dict[str, SavedTensor]:
    """Read a whole file back and check it, with the code that loads it. Returns the tensors in it.
    Raises UnreadableFile."""
    # Bypass the page cache; otherwise only memory would be verified.
    with ShardReader(path, saved, bypass_cache=True) as reader:
        tensors = reader.tensors()
        slices = [(name, one, piece) for name, one in tensors.items() for piece in one.slices]
        for _ in reader.read_all(slices, allocate_buffers(slices)):
            pass
        return tensors
