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
    compute_checksum,
)
from megaframe.checkpoint.shard_file import MAX_ENTRY_BYTES, MAX_HEADER_BYTES, make_entry_name
from megaframe.checkpoint.stores.direct_io import ALIGNMENT, allocate_aligned
from megaframe.checkpoint.stores.store import StorePath, store_of
from megaframe.errors import UnreadableFile

_READ_AHEAD_BYTES = 2 * MAX_ENTRY_BYTES
"""Memory for slices that are read ahead. One slice always fits, whatever its size."""


class _HeaderEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: str
    shape: list[int]
    data_offsets: list[int]


SliceRequest = tuple[str, SavedTensor, SavedSlice]
"""A tensor's name, the tensor, and the slice of it to be read."""


class ShardReader:
    """A file of a checkpoint, open for reading.

    Its header is checked before it is parsed.

    Args:
        path: Of the file.
        saved: What the manifest says about the file.
        bypass_cache, sole_reader: See `Store.open`.

    Raises:
        UnreadableFile: If the file is missing or damaged. It names the file and, if one is
            concerned, the tensor.
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
            if compute_checksum(header) == saved.header:
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

    def _read_into(self, start: int, destination: memoryview, content: str) -> None:
        try:
            num_read = self._file.read_into(start, destination)
        except OSError as error:
            raise UnreadableFile(
                f"cannot read {content} from {self.path}: {error.strerror}"
            ) from None
        if num_read < len(destination):
            raise UnreadableFile(f"{self.path} is damaged: it ends within {content}")

    def read_tensors(self) -> dict[str, SavedTensor]:
        """Return the part of the manifest that the rank that wrote the file stored in its
        header.

        Raises:
            UnreadableFile: If the header does not have it.
        """
        metadata = self._header.get("__metadata__")
        try:
            text = metadata["tensors"] if isinstance(metadata, dict) else None
            return SAVED_TENSORS.validate_json(text)  # type: ignore[arg-type]
        except (KeyError, ValidationError):
            raise UnreadableFile(f"{self.path} is damaged: it does not say what it holds") from None

    def read_slices(
        self, requests: Iterable[SliceRequest], buffers: Sequence[Tensor]
    ) -> Iterator[tuple[SliceRequest, Tensor]]:
        """Read slices in order, and later ones ahead, in the other buffers.

        Args:
            requests: The slices to read.
            buffers: Memory to read into, from `allocate_buffers`.

        Yields:
            The request, and its slice as a view of one of the buffers. The view is valid until the
            next iteration, which reads another slice into its buffer.
        """
        pending, in_flight = iter(requests), deque[tuple[SliceRequest, Tensor, Future[Tensor]]]()
        with ThreadPoolExecutor(self._file.num_threads) as pool:

            def start_read(buffer: Tensor) -> None:
                for request in islice(pending, 1):
                    in_flight.append((request, buffer, pool.submit(self.read, *request, buffer)))

            for buffer in buffers:
                start_read(buffer)
            while in_flight:
                request, buffer, reading = in_flight.popleft()
                yield request, reading.result()
                start_read(buffer)

    def check_slices(self, requests: Sequence[SliceRequest]) -> None:
        """Read slices and compare their checksums. Their contents are not kept."""
        deque(self.read_slices(requests, allocate_buffers(requests)), maxlen=0)

    def read(
        self, name: str, tensor: SavedTensor, saved_slice: SavedSlice, buffer: Tensor
    ) -> Tensor:
        """Read one slice and check it.

        Args:
            name: Name of the tensor.
            tensor: Shape and type of the tensor.
            saved_slice: The slice to read, with its checksum.
            buffer: Receives the bytes: a tensor of bytes with room to align them.

        Returns:
            A view of `buffer`, with the shape and the type of the slice.

        Raises:
            UnreadableFile: If the bytes do not have the slice's checksum.
        """
        size = tensor.count_bytes(saved_slice.shape)
        start = self._data_start + self._find_position(name, tensor, saved_slice, size)
        # Use the same offset from a multiple of the alignment in memory as in the file.
        skip = 0 if start % DTYPES[tensor.dtype].itemsize else start % ALIGNMENT
        destination = buffer.numpy().data[skip : skip + size]
        digest = xxhash.xxh3_64()
        for position in range(0, size, self._file.chunk_bytes):
            chunk = destination[position : position + self._file.chunk_bytes]
            self._read_into(start + position, chunk, f"tensor {name}")
            digest.update(chunk)
        if digest.hexdigest() != saved_slice.checksum:
            raise UnreadableFile(
                f"{self.path} is damaged: tensor {name} at {saved_slice.offset} has checksum "
                f"{digest.hexdigest()} instead of {saved_slice.checksum}"
            )
        return buffer[skip : skip + size].view(DTYPES[tensor.dtype]).view(saved_slice.shape)

    def _find_position(
        self, name: str, tensor: SavedTensor, saved_slice: SavedSlice, size: int
    ) -> int:
        try:
            fields = self._header[make_entry_name(name, saved_slice.offset, saved_slice.shape)]
            entry = _HeaderEntry.model_validate(fields)
            start, stop = entry.data_offsets
        except (KeyError, ValueError):
            raise UnreadableFile(
                f"{self.path} is damaged: it has no tensor {name} at {saved_slice.offset}"
            ) from None
        if (
            (entry.dtype, tuple(entry.shape)) != (tensor.dtype, saved_slice.shape)
            or stop - start != size
            or not 0 <= start <= stop <= self._data_bytes
        ):
            raise UnreadableFile(
                f"{self.path} is damaged: tensor {name} at {saved_slice.offset} is {entry.dtype} "
                f"{tuple(entry.shape)} in bytes {start} to {stop}, instead of {tensor.dtype} "
                f"{saved_slice.shape} of {size} bytes"
            )
        return start


def allocate_buffers(requests: Iterable[SliceRequest]) -> list[Tensor]:
    """Allocate buffers (tensors of bytes) for reading slices, each large enough for the largest
    slice: as many as fit into `_READ_AHEAD_BYTES`, at least one, but no more than there are
    slices."""
    sizes = [tensor.count_bytes(saved_slice.shape) for _, tensor, saved_slice in requests]
    count = min(len(sizes), max(1, _READ_AHEAD_BYTES // max([1, *sizes])))
    size = ALIGNMENT * (1 + -(-max(sizes, default=0) // ALIGNMENT))
    memory = torch.from_numpy(allocate_aligned(count * size))
    return list(memory.view(count, size)) if count else []


def verify_shard_file(path: StorePath, saved: SavedFile) -> dict[str, SavedTensor]:
    """Read a whole file back and check it, with the code that loads it.

    Returns:
        The tensors in it.

    Raises:
        UnreadableFile: If it is damaged or cannot be read.
    """
    # Bypass the page cache; otherwise only memory would be verified.
    with ShardReader(path, saved, bypass_cache=True) as reader:
        tensors = reader.read_tensors()
        requests = [
            (name, tensor, saved_slice)
            for name, tensor in tensors.items()
            for saved_slice in tensor.slices
        ]
        reader.check_slices(requests)
        return tensors
