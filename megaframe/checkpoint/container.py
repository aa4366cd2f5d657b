"""One rank's file, in the container format of safetensors (header length, JSON header, raw data).

The library can write such a file too, but then a checksum needs a pass of its own and a full disk
is an error without a number. Here each chunk is hashed and written in one pass, and the header,
which holds the checksums, is written last: until then the file is not readable as anything.
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
    DTypeName,
    SavedFile,
    SavedSlice,
    SavedTensor,
    Tensors,
    checksum,
)
from megaframe.checkpoint.room import ALIGNMENT
from megaframe.checkpoint.slices import Shape, Slice, region, tiles
from megaframe.checkpoint.storage import Place, store_of

PIECE_BYTES = 8 << 20
"""Slices are cut to this size: few pieces are checked, and held in memory, at a time."""
_LEAST_PIECE_BYTES, _PARTS = 1 << 20, 4
"""Those that are smaller are still cut in so many parts, unless these were too small."""
CHUNK_BYTES = 8 << 20
"""Bytes between two points where another thread can run."""
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


@dataclass(frozen=True)
class Unplaced:
    """A box of a logical tensor that is to be saved."""

    name: str
    whole: Shape
    offset: Shape
    shape: Shape
    dtype: DTypeName

    @property
    def bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Piece(Unplaced):
    """A contiguous run of bytes in a rank's data: one entry of the file's header."""

    start: int
    stop: int


def placed(boxes: Iterable[Unplaced]) -> list[Piece]:
    """Where the bytes of boxes go when they lie back to back in the given order."""
    found, start = [], 0
    for one in boxes:
        stop = start + one.bytes
        found.append(Piece(one.name, one.whole, one.offset, one.shape, one.dtype, start, stop))
        start = stop
    return found


def by_alignment(slices: Sequence[Slice]) -> list[Slice]:
    """The slices that hold anything, in the order in which every one starts aligned."""
    held = [part for part in slices if part.tensor.numel()]
    for part in held:
        if part.tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{part.name}: dtype {part.tensor.dtype} cannot be saved")
    return sorted(held, key=lambda part: -part.tensor.element_size())


def plan(slices: Sequence[Slice]) -> tuple[list[Piece], list[Tensor]]:
    """The pieces into which slices are cut, and where their bytes go (see `placed`); and the part
    of a slice's tensor that is each."""
    boxes: list[Unplaced] = []
    parts: list[Tensor] = []
    declared: dict[str, tuple[Shape, DTypeName]] = {}
    for part in slices:
        size, dtype = part.tensor.element_size(), DTYPE_NAMES[part.tensor.dtype]
        if declared.setdefault(part.name, (part.shape, dtype)) != (part.shape, dtype):
            raise ValueError(f"{part.name} is both {declared[part.name]} and {(part.shape, dtype)}")
        limit = min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, part.tensor.nbytes // _PARTS))
        for offset, shape in tiles(part.box, max(1, limit // size)):
            boxes.append(Unplaced(part.name, part.shape, offset, shape, dtype))
            parts.append(part.tensor.detach()[region(part.box, (offset, shape))])
    return placed(boxes), parts


def key(name: str, offset: Shape, shape: Shape) -> str:
    """Name of an entry, such as `head.weight[0:512,64:128]`."""
    spans = (f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True))
    return f"{name}[{','.join(spans)}]"


def divided(planned: Sequence[Piece], limit: int | None) -> list[list[Piece]]:
    """Pieces in runs of at most `limit` bytes, or of one piece; one run without a limit."""
    groups: list[list[Piece]] = []
    for piece in planned:
        if not groups or (limit is not None and piece.stop - groups[-1][0].start > limit):
            groups.append([])
        groups[-1].append(piece)
    return groups


def write(
    path: Place,
    given: Sequence[Piece],
    bytes_of: Callable[[Piece], memoryview],
    held: memoryview | None = None,
) -> SavedFile:
    """Write the bytes of each piece, back to back, to a new file. held: as of `Store.create`.
    Raises OSError."""
    planned = placed(given)
    checksums = ["0" * 16] * len(planned)
    reserved = len(_header(path.name, planned, checksums))
    size = reserved + sum(piece.bytes for piece in planned)
    with store_of(path).create(path, size, reserved, held) as file:
        for index, piece in enumerate(given):
            digest = xxhash.xxh3_64()
            data = bytes_of(piece)
            for begin in range(0, len(data), CHUNK_BYTES):
                chunk = data[begin : begin + CHUNK_BYTES]
                digest.update(chunk)
                file.put(chunk)
            checksums[index] = digest.hexdigest()
        header = _header(path.name, planned, checksums)
        file.finish(header)
    return SavedFile(bytes=size, header=checksum(header))


def _header(file: str, planned: Sequence[Piece], checksums: Sequence[str]) -> bytes:
    """The length and the JSON header. Its size does not depend on the checksums' values."""
    entries = {
        key(piece.name, piece.offset, piece.shape): {
            "dtype": piece.dtype,
            "shape": piece.shape,
            "data_offsets": (piece.start, piece.stop),
        }
        for piece in planned
    }
    part = Tensors.dump_json(_contents(file, planned, checksums)).decode()
    metadata = {"format": "megaframe-checkpoint", "tensors": part}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {file} is {len(text)} bytes, over {MAX_HEADER_BYTES}")
    return len(text).to_bytes(8, "little") + text


def _contents(
    file: str, planned: Sequence[Piece], checksums: Sequence[str]
) -> dict[str, SavedTensor]:
    """The part of the manifest that describes this file."""
    slices: dict[str, list[SavedSlice]] = {}
    first: dict[str, Piece] = {}
    for piece, digest in zip(planned, checksums, strict=True):
        saved = SavedSlice(file=file, offset=piece.offset, shape=piece.shape, checksum=digest)
        slices.setdefault(piece.name, []).append(saved)
        first.setdefault(piece.name, piece)
    return {
        name: SavedTensor(shape=piece.whole, dtype=piece.dtype, slices=tuple(slices[name]))
        for name, piece in first.items()
    }
