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
    compute_checksum,
)
from megaframe.checkpoint.slices import Shape, Slice, index_within, split_into_tiles
from megaframe.checkpoint.stores.direct_io import ALIGNMENT
from megaframe.checkpoint.stores.store import StorePath, store_of

MAX_ENTRY_BYTES = 8 << 20
"""Largest box, in bytes, that a slice is cut into. Only a few boxes are held in memory and checked
at a time."""
_MIN_ENTRY_BYTES, _ENTRIES_PER_SLICE = 1 << 20, 4
"""A smaller slice is also cut into about `_ENTRIES_PER_SLICE` boxes, unless these would be smaller
than `_MIN_ENTRY_BYTES`."""
CHUNK_BYTES = 8 << 20
"""Bytes hashed and written at a time; other threads can run between two chunks."""
MAX_HEADER_BYTES = 100_000_000
"""Largest header that the safetensors library accepts."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a logical tensor to be saved, without a position in a file.

    Attributes:
        name: Name of the logical tensor.
        full_shape: Shape of the whole tensor.
        offset: Where the box starts in the tensor.
        shape: Shape of the box.
        dtype: Name of the dtype in safetensors.
    """

    name: str
    full_shape: Shape
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
    entries, start = [], 0
    for box in boxes:
        stop = start + box.bytes
        entries.append(
            FileEntry(box.name, box.full_shape, box.offset, box.shape, box.dtype, start, stop)
        )
        start = stop
    return entries


def sort_by_alignment(slices: Sequence[Slice]) -> list[Slice]:
    """Return the non-empty slices, largest element size first, so that each starts aligned to its
    element size.

    Raises:
        ValueError: For a dtype that cannot be saved.
    """
    nonempty = [tensor_slice for tensor_slice in slices if tensor_slice.tensor.numel()]
    for tensor_slice in nonempty:
        if tensor_slice.tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{tensor_slice.name}: dtype {tensor_slice.tensor.dtype} cannot be saved"
            )
    return sorted(nonempty, key=lambda tensor_slice: -tensor_slice.tensor.element_size())


def plan_entries(slices: Sequence[Slice]) -> tuple[list[FileEntry], list[Tensor]]:
    """Cut slices into entries of a file.

    Returns:
        The entries with their byte ranges (see `assign_byte_ranges`) and, for each entry, the view
        of the slice's tensor that it covers.

    Raises:
        ValueError: If two slices of one tensor disagree about its shape or dtype.
    """
    boxes: list[TensorBox] = []
    tensors: list[Tensor] = []
    declared: dict[str, tuple[Shape, DTypeName]] = {}
    for tensor_slice in slices:
        name, tensor = tensor_slice.name, tensor_slice.tensor
        size, dtype = tensor.element_size(), DTYPE_NAMES[tensor.dtype]
        kind = tensor_slice.shape, dtype
        if declared.setdefault(name, kind) != kind:
            raise ValueError(f"{name} is both {declared[name]} and {kind}")
        limit = min(
            MAX_ENTRY_BYTES, max(_MIN_ENTRY_BYTES, tensor_slice.tensor.nbytes // _ENTRIES_PER_SLICE)
        )
        for offset, shape in split_into_tiles(tensor_slice.box, max(1, limit // size)):
            boxes.append(TensorBox(tensor_slice.name, tensor_slice.shape, offset, shape, dtype))
            tensors.append(
                tensor_slice.tensor.detach()[index_within(tensor_slice.box, (offset, shape))]
            )
    return assign_byte_ranges(boxes), tensors


def make_entry_name(name: str, offset: Shape, shape: Shape) -> str:
    """Return the name of a header entry, such as `head.weight[0:512,64:128]`.

    Args:
        name: Of the logical tensor.
        offset: Of the slice in the tensor.
        shape: Of the slice.
    """
    spans = (f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True))
    return f"{name}[{','.join(spans)}]"


def split_into_files(entries: Sequence[FileEntry], limit: int | None) -> list[list[FileEntry]]:
    """Group consecutive entries into runs of at most `limit` bytes, with at least one entry each.
    Without a limit there is one run."""
    groups: list[list[FileEntry]] = []
    for entry in entries:
        if not groups or (limit is not None and entry.stop - groups[-1][0].start > limit):
            groups.append([])
        groups[-1].append(entry)
    return groups


def write_shard_file(
    path: StorePath,
    entries: Sequence[FileEntry],
    read_bytes: Callable[[FileEntry], memoryview],
    aligned_data: memoryview | None = None,
) -> SavedFile:
    """Write the bytes of entries, back to back, to a new file.

    Args:
        path: Where to write the file.
        entries: The boxes to write; their byte ranges are assigned anew.
        read_bytes: Returns the bytes of an entry.
        aligned_data: See `Store.create_file`.

    Returns:
        The size of the file and the checksum of its header.

    Raises:
        OSError: If the file exists or cannot be written.
    """
    placed_entries = assign_byte_ranges(entries)
    checksums = ["0" * 16] * len(placed_entries)
    reserved = len(_encode_header(path.name, placed_entries, checksums))
    size = reserved + sum(entry.bytes for entry in placed_entries)
    with store_of(path).create_file(path, size, reserved, aligned_data) as file:
        for index, entry in enumerate(entries):
            digest = xxhash.xxh3_64()
            data = read_bytes(entry)
            for begin in range(0, len(data), CHUNK_BYTES):
                chunk = data[begin : begin + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
            checksums[index] = digest.hexdigest()
        header = _encode_header(path.name, placed_entries, checksums)
        file.finish(header)
    return SavedFile(bytes=size, header=compute_checksum(header))


def _encode_header(file: str, entries: Sequence[FileEntry], checksums: Sequence[str]) -> bytes:
    """Return the header's length and its JSON as bytes. Their size does not depend on the values of
    the checksums."""
    fields = {
        make_entry_name(entry.name, entry.offset, entry.shape): {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (entry.start, entry.stop),
        }
        for entry in entries
    }
    tensors_json = SAVED_TENSORS.dump_json(_describe_contents(file, entries, checksums)).decode()
    metadata = {"format": "megaframe-checkpoint", "tensors": tensors_json}
    text = json.dumps({"__metadata__": metadata, **fields}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {file} is {len(text)} bytes, over {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def _describe_contents(
    file: str, entries: Sequence[FileEntry], checksums: Sequence[str]
) -> dict[str, SavedTensor]:
    """Return the part of the manifest that describes this file."""
    slices: dict[str, list[SavedSlice]] = {}
    first_entries: dict[str, FileEntry] = {}
    for entry, digest in zip(entries, checksums, strict=True):
        saved = SavedSlice(file=file, offset=entry.offset, shape=entry.shape, checksum=digest)
        slices.setdefault(entry.name, []).append(saved)
        first_entries.setdefault(entry.name, entry)
    return {
        name: SavedTensor(shape=entry.full_shape, dtype=entry.dtype, slices=tuple(slices[name]))
        for name, entry in first_entries.items()
    }
