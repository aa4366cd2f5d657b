"""Writes one rank's file in the safetensors format (header length, JSON header, raw data).

The safetensors library is not used for writing: it would need a second pass for the checksums, and
reports a full disk without an error number. Here each chunk is hashed and written in one pass. The
header, which contains the checksums, is written last; until then the file cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import xxhash
from torch import Tensor

from megaframe.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    SAVED_TENSORS,
    DTypeName,
    SavedFile,
    SavedSlice,
    SavedTensor,
    checksum,
)
from megaframe.checkpoint.slices import Shape, Slice, index_within, split_into_tiles
from megaframe.checkpoint.stores.direct_io import ALIGNMENT
from megaframe.checkpoint.stores.store import StorePath, store_of

MAX_ENTRY_BYTES = 8 << 20
"""Largest piece that a slice is cut into. Only a few pieces are held in memory and checked at a
time."""
_MIN_ENTRY_BYTES, _ENTRIES_PER_SLICE = 1 << 20, 4
"""A smaller slice is also cut into about `_ENTRIES_PER_SLICE` pieces, unless these would be smaller
than `_MIN_ENTRY_BYTES`."""
CHUNK_BYTES = 8 << 20
"""Bytes hashed and written at a time; other threads can run between two chunks."""
MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors library accepts."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a logical tensor to be saved, without a position in a file.

    whole: shape of the whole tensor. offset, shape: the box in it.
    """

    name: str
    whole: Shape
    offset: Shape
    shape: Shape
    dtype: DTypeName

    @property
    def bytes(self) -> int:
        """Size of the box in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class FileEntry(TensorBox):
    """A box and its byte range [start, stop) in a rank's data: one entry of the file's header."""

    start: int
    stop: int


def assign_byte_ranges(boxes: Iterable[TensorBox]) -> list[FileEntry]:
    """Assign byte ranges to boxes, back to back in the given order."""
    found, start = [], 0
    for one in boxes:
        stop = start + one.bytes
        found.append(FileEntry(one.name, one.whole, one.offset, one.shape, one.dtype, start, stop))
        start = stop
    return found


def sort_by_alignment(slices: Sequence[Slice]) -> list[Slice]:
    """Return the non-empty slices, largest element size first, so that each starts aligned to its
    element size. Raises ValueError for a dtype that cannot be saved."""
    held = [part for part in slices if part.tensor.numel()]
    for part in held:
        if part.tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{part.name}: dtype {part.tensor.dtype} cannot be saved")
    return sorted(held, key=lambda part: -part.tensor.element_size())


def plan_entries(slices: Sequence[Slice]) -> tuple[list[FileEntry], list[Tensor]]:
    """Cut slices into pieces. Returns the pieces with their byte ranges (see `assign_byte_ranges`)
    and, for each piece, the view of the slice's tensor that it covers. Raises ValueError if two
    slices of one tensor disagree about its shape or dtype."""
    boxes: list[TensorBox] = []
    parts: list[Tensor] = []
    declared: dict[str, tuple[Shape, DTypeName]] = {}
    for part in slices:
        size, dtype = part.tensor.element_size(), DTYPE_NAMES[part.tensor.dtype]
        if declared.setdefault(part.name, (part.shape, dtype)) != (part.shape, dtype):
            raise ValueError(f"{part.name} is both {declared[part.name]} and {(part.shape, dtype)}")
        limit = min(
            MAX_ENTRY_BYTES, max(_MIN_ENTRY_BYTES, part.tensor.nbytes // _ENTRIES_PER_SLICE)
        )
        for offset, shape in split_into_tiles(part.box, max(1, limit // size)):
            boxes.append(TensorBox(part.name, part.shape, offset, shape, dtype))
            parts.append(part.tensor.detach()[index_within(part.box, (offset, shape))])
    return assign_byte_ranges(boxes), parts


def entry_name(name: str, offset: Shape, shape: Shape) -> str:
    """Return the name of a header entry, such as `head.weight[0:512,64:128]`."""
    spans = (f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True))
    return f"{name}[{','.join(spans)}]"


def split_into_files(planned: Sequence[FileEntry], limit: int | None) -> list[list[FileEntry]]:
    """Group consecutive pieces into runs of at most `limit` bytes, with at least one piece each.
    Without a limit there is one run."""
    groups: list[list[FileEntry]] = []
    for piece in planned:
        if not groups or (limit is not None and piece.stop - groups[-1][0].start > limit):
            groups.append([])
        groups[-1].append(piece)
    return groups


def write_shard_file(
    path: StorePath,
    given: Sequence[FileEntry],
    bytes_of: Callable[[FileEntry], memoryview],
    held: memoryview | None = None,
) -> SavedFile:
    """Write the bytes of the given pieces, back to back, to a new file. Returns its size and the
    checksum of its header.

    given: the pieces; their byte ranges are assigned anew. bytes_of: returns the bytes of a piece.
    held: see `Store.create`. Raises OSError.
    """
    planned = assign_byte_ranges(given)
    checksums = ["0" * 16] * len(planned)
    reserved = len(_encode_header(path.name, planned, checksums))
    size = reserved + sum(piece.bytes for piece in planned)
    with store_of(path).create_file(path, size, reserved, held) as file:
        for index, piece in enumerate(given):
            digest = xxhash.xxh3_64()
            data = bytes_of(piece)
            for begin in range(0, len(data), CHUNK_BYTES):
                chunk = data[begin : begin + CHUNK_BYTES]
                digest.update(chunk)
                file.put(chunk)
            checksums[index] = digest.hexdigest()
        header = _encode_header(path.name, planned, checksums)
        file.finish(header)
    return SavedFile(bytes=size, header=checksum(header))


def _encode_header(file: str, planned: Sequence[FileEntry], checksums: Sequence[str]) -> bytes:
    """Return the header's length and its JSON as bytes. Their size does not depend on the values of
    the checksums."""
    entries = {
        entry_name(piece.name, piece.offset, piece.shape): {
            "dtype": piece.dtype,
            "shape": piece.shape,
            "data_offsets": (piece.start, piece.stop),
        }
        for piece in planned
    }
    part = SAVED_TENSORS.dump_json(_describe_contents(file, planned, checksums)).decode()
    metadata = {"format": "megaframe-checkpoint", "tensors": part}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {file} is {len(text)} bytes, over {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def _describe_contents(
    file: str, planned: Sequence[FileEntry], checksums: Sequence[str]
) -> dict[str, SavedTensor]:
    """Return the part of the manifest that describes this file."""
    slices: dict[str, list[SavedSlice]] = {}
    first: dict[str, FileEntry] = {}
    for piece, digest in zip(planned, checksums, strict=True):
        saved = SavedSlice(file=file, offset=piece.offset, shape=piece.shape, checksum=digest)
        slices.setdefault(piece.name, []).append(saved)
        first.setdefault(piece.name, piece)
    return {
        name: SavedTensor(shape=piece.whole, dtype=piece.dtype, slices=tuple(slices[name]))
        for name, piece in first.items()
    }
