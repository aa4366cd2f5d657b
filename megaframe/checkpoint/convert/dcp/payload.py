"""Reads tensors that torch.save wrote into parts of a file, box by box.

Each part is a zip archive with the tensor's storage, uncompressed, and a pickle that describes how
the tensor is laid out in the storage. The pickle is parsed, not executed (see `pickle_parser`), and
only the requested bytes of the storage are read.
"""

from __future__ import annotations

import io
import mmap
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaframe.checkpoint.convert.dcp.metadata import ByteRange, StoredChunk
from megaframe.checkpoint.convert.dcp.pickle_parser import (
    PERSISTENT_ID,
    GlobalName,
    PickledCall,
    parse_pickle,
)
from megaframe.checkpoint.manifest import DTYPES, DTypeName
from megaframe.checkpoint.slices import Box, Shape, index_within
from megaframe.errors import UserError
from megaframe.io.untrusted import open_file

_MAX_READ_BYTES = 1 << 20
"""Largest size of an archive's directory, and of the pickle that describes a tensor, in bytes."""
_LOCAL_HEADER = 30
_STORAGES: dict[DTypeName, str] = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
}
_REBUILD_V2, _REBUILD_V3 = (GlobalName("torch._utils", f"_rebuild_tensor_v{v}") for v in (2, 3))
_ORDERED_DICT = GlobalName("collections", "OrderedDict")


class DCPDataFile:
    """A file with tensors, mapped into memory. Errors are UserErrors that name the file and, if one
    is concerned, the tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_file(path) as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is empty"
            raise UserError(f"cannot read {path}: {reason}") from None
        self._last: tuple[ByteRange, NDArray[Any]] | None = None

    def close(self) -> None:
        """Close the file."""
        self._last = None
        self._memory.close()

    def read(self, name: str, dtype: DTypeName, chunk: StoredChunk, box: Box) -> memoryview:
        """Return the bytes of a box within a chunk, in row-major order.

        Args:
            name: Name of the tensor, for messages.
            dtype: Its type.
            chunk: The chunk that contains the box.
            box: Offset and shape within the tensor.

        Raises:
            UserError: If the file is damaged.
        """
        try:
            if self._last is None or self._last[0] != chunk.extent:
                self._last = chunk.extent, self._map_array(dtype, chunk)
        except (ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise UserError(
                f"{self.path} is damaged: tensor {name} at {chunk.offset}: {error}"
            ) from None
        index = index_within((chunk.offset, chunk.shape), box)
        elements = np.ascontiguousarray(self._last[1][index])
        return elements.reshape(-1).view(np.uint8).data

    def read_text(self, name: str, extent: ByteRange, limit: int) -> str:
        """Return a stored text of at most `limit` bytes.

        Args:
            name: Of the value, for messages.
            extent: Where it is stored.
            limit: The most bytes that it may have.

        Raises:
            UserError: If it is damaged, too long, or not text.
        """
        try:
            archive = _TensorArchive(self._open_part(extent), limit)
            content = parse_pickle(archive.read("data.pkl"), ())
        except (ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise UserError(f"{self.path} is damaged: {name}: {error}") from None
        if not isinstance(content, str):
            raise UserError(f"{self.path} is damaged: {name} is not text")
        return content

    def _open_part(self, extent: ByteRange) -> _ByteRangeFile:
        if extent.start + extent.length > len(self._memory):
            raise ValueError(
                f"it should be in bytes {extent.start} to {extent.start + extent.length}, "
                f"and the file has {len(self._memory)}"
            )
        return _ByteRangeFile(self._memory, extent)

    def _map_array(self, dtype: DTypeName, chunk: StoredChunk) -> NDArray[Any]:
        """Return a view of a chunk's elements in the file, as unsigned integers of the dtype's
        size. Raises ValueError for a chunk that is damaged or not as described."""
        archive = _TensorArchive(self._open_part(chunk.extent), _MAX_READ_BYTES)
        if archive.read("byteorder") != b"little":
            raise ValueError("its byte order is not that of this machine")
        size = DTYPES[dtype].itemsize
        key, first, shape, strides = _parse_tensor(archive.read("data.pkl"), dtype)
        if shape != chunk.shape:
            raise ValueError(f"it is of shape {shape} instead of {chunk.shape}")
        start, length = archive.find_entry(f"data/{key}")
        last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if (last + 1) * size > length:
            raise ValueError(f"its {length} bytes end before its last element")
        return np.ndarray(
            shape,
            np.dtype(f"u{size}"),
            buffer=self._memory,
            offset=chunk.extent.start + start + first * size,
            strides=[stride * size for stride in strides],
        )


def _parse_tensor(data: bytes, dtype: DTypeName) -> tuple[str, int, Shape, Shape]:
    """Return what a pickle says about its tensor: key of the storage, index of the first element,
    shape and strides.

    Raises:
        ValueError: If it is not a plain tensor of this dtype.
    """
    torch_name = GlobalName("torch", str(DTYPES[dtype]).removeprefix("torch."))
    expected_storage = GlobalName("torch", _STORAGES[dtype]) if dtype in _STORAGES else None
    untyped = {GlobalName("torch", "UntypedStorage"), GlobalName("torch.storage", "UntypedStorage")}
    allowed = {_REBUILD_V2, _REBUILD_V3, _ORDERED_DICT, torch_name, *untyped}
    tensor = parse_pickle(data, allowed | ({expected_storage} if expected_storage else set()))
    if not isinstance(tensor, PickledCall) or tensor.function not in (_REBUILD_V2, _REBUILD_V3):
        raise ValueError("it is not a plain tensor")
    storage_call, first, shape, strides, *other_arguments = tensor.arguments
    kind, storage_class, key, *_ = (
        storage_call.arguments[0] if _is_storage(storage_call) else (None,) * 3
    )
    dtype_matches = (
        storage_class == expected_storage
        if tensor.function == _REBUILD_V2
        else torch_name in other_arguments
    )
    if kind != "storage" or not dtype_matches or not re.fullmatch(r"[0-9]{1,9}", str(key)):
        raise ValueError(f"it is not stored as {torch_name.name}")
    if not all(map(_are_counts, ((first,), shape, strides))) or len(shape) != len(strides):
        raise ValueError("its shape is invalid")
    return str(key), first, shape, strides


def _is_storage(value: Any) -> bool:
    if not isinstance(value, PickledCall) or value.function != PERSISTENT_ID:
        return False
    return type(value.arguments[0]) is tuple and len(value.arguments[0]) >= 3


def _are_counts(value: Any) -> bool:
    return (
        type(value) is tuple
        and len(value) <= 8
        and all(type(number) is int and 0 <= number < 1 << 48 for number in value)
    )


class _ByteRangeFile(io.RawIOBase):
    """A part of a file as a file object. Reading more than `limit` bytes at once raises
    ValueError."""

    def __init__(self, memory: mmap.mmap, extent: ByteRange) -> None:
        self._memory, self._extent, self._at = memory, extent, 0
        self.limit = _MAX_READ_BYTES

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._extent.length}[whence]
        if base + offset < 0:
            raise ValueError("it is not an archive")
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._extent.length - self._at)
        size = remaining if size is None or size < 0 else min(size, remaining)
        if size > self.limit:
            raise ValueError(f"it has a part of {size} bytes where there are {self.limit} at most")
        start = self._extent.start + self._at
        self._at += size
        return self._memory[start : start + size]

    def view(self, start: int, size: int) -> memoryview:
        """Return bytes of the part without a copy. The view must be released."""
        begin = self._extent.start + start
        with memoryview(self._memory) as view:
            return view[begin : begin + size]


class _TensorArchive:
    """The zip archive in a part of a file.

    Entry names do not include the top folder.

    Args:
        limit: Most bytes to read of one entry.
    """

    def __init__(self, part: _ByteRangeFile, limit: int) -> None:
        part.limit = self._limit = limit
        self._part = part
        self._zip = zipfile.ZipFile(part)
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in self._zip.infolist():
            self._entries.setdefault(entry.filename.partition("/")[2], entry)

    def find_entry(self, name: str) -> tuple[int, int]:
        """Return the start of an entry's bytes within the part, and their number.

        Raises:
            ValueError: If the entry is missing, compressed, encrypted, outside of the part or
                damaged.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError(f"it has no {name}")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"its {name} is compressed or encrypted")
        self._part.seek(entry.header_offset)
        header = self._part.read(_LOCAL_HEADER)
        if len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
            raise ValueError(f"its {name} is not where it should be")
        names, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        start = entry.header_offset + _LOCAL_HEADER + names + extra
        self._part.seek(0, io.SEEK_END)
        if entry.file_size < 0 or start + entry.file_size > self._part.tell():
            raise ValueError(f"its {name} ends after it")
        with self._part.view(start, entry.file_size) as content:
            if zlib.crc32(content) != entry.CRC:
                raise ValueError(
                    f"its {name} does not match its checksum (if it was saved without checksums, "
                    "save it with torch.serialization.set_crc32_options(True))"
                )
        return start, entry.file_size

    def read(self, name: str) -> bytes:
        """Read a whole entry. Raises ValueError if it is larger than `limit`."""
        start, size = self.find_entry(name)
        if size > self._limit:
            raise ValueError(f"its {name} has {size} bytes where there are {self._limit} at most")
        self._part.seek(start)
        return self._part.read(size)
