"""One rank's file, in the container format of safetensors (header length, JSON header, raw data).

The library can write such a file too, but then a checksum needs a pass of its own and a full disk
is an error without a number. Here each chunk is hashed and written in one pass, and the header,
which holds the checksums, is written last: until then the file is not readable as anything.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import prod
from types import TracebackType

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
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
from megaframe.checkpoint.room import ALIGNMENT, aligned
from megaframe.checkpoint.slices import Shape, Slice, region, tiles
from megaframe.checkpoint.storage import Place, store_of
from megaframe.errors import Unreadable

PIECE_BYTES = 8 << 20
"""Slices are cut to this size: few pieces are checked, and held in memory, at a time."""
_LEAST_PIECE_BYTES, _PARTS = 1 << 20, 4
"""Those that are smaller are still cut in so many parts, unless these were too small."""
_ROOM_BYTES = 2 * PIECE_BYTES
"""Memory for pieces that are read ahead; one piece, whatever its size, always has room."""
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


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: str
    shape: list[int]
    data_offsets: list[int]


Wanted = tuple[str, SavedTensor, SavedSlice]
"""A slice of a tensor, by its name."""


class Reader:
    """A file of a checkpoint, open for reading. Its header is checked before it is parsed. fresh,
    alone: as of `Store.open`.

    Raises Unreadable that names the file, and the tensor where there is one.
    """

    def __init__(
        self, path: Place, saved: SavedFile, *, fresh: bool = False, alone: bool = False
    ) -> None:
        self.path = path
        try:
            self._file = store_of(path).open(path, fresh=fresh, alone=alone)
        except OSError as error:
            raise Unreadable(f"cannot read {path}: {error.strerror}") from None
        try:
            self._header, self._data_start = self._read_header(saved)
        except BaseException:
            self._file.close()
            raise
        self._data_bytes = saved.bytes - self._data_start

    def __enter__(self) -> Reader:
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
            raise Unreadable(f"{self.path} is damaged: {size} bytes instead of {saved.bytes}")
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
        raise Unreadable(f"{self.path} is damaged: its header is not the one that was saved")

    def _read(self, start: int, length: int) -> bytes:
        buffer = bytearray(length)
        self._read_into(start, memoryview(buffer), "its header")
        return bytes(buffer)

    def _read_into(self, start: int, into: memoryview, what: str) -> None:
        try:
            got = self._file.read_into(start, into)
        except OSError as error:
            raise Unreadable(f"cannot read {what} from {self.path}: {error.strerror}") from None
        if got < len(into):
            raise Unreadable(f"{self.path} is damaged: it ends within {what}")

    def tensors(self) -> dict[str, SavedTensor]:
        """What the file says about itself: the part of the manifest of the rank that wrote it."""
        metadata = self._header.get("__metadata__")
        try:
            text = metadata["tensors"] if isinstance(metadata, dict) else None
            return Tensors.validate_json(text)  # type: ignore[arg-type]
        except (KeyError, ValidationError):
            raise Unreadable(f"{self.path} is damaged: it does not say what it holds") from None

    def read_all(
        self, wanted: Iterable[Wanted], rooms: Sequence[Tensor]
    ) -> Iterator[tuple[Wanted, Tensor]]:
        """Slices in order, each as by `read` in one of the rooms and there until the next one; as
        many as there is room for are read and checked meanwhile."""
        left, ahead = iter(wanted), deque[tuple[Wanted, Tensor, Future[Tensor]]]()
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
        """Read one slice into the bytes of `room`, check it, and return it as a view of them."""
        size = tensor.bytes_of(piece.shape)
        start = self._data_start + self._position(name, tensor, piece, size)
        # As far from a multiple of the alignment in memory as in the file.
        first = 0 if start % DTYPES[tensor.dtype].itemsize else start % ALIGNMENT
        into = room.numpy().data[first : first + size]
        digest = xxhash.xxh3_64()
        for begin in range(0, size, self._file.chunk):
            chunk = into[begin : begin + self._file.chunk]
            self._read_into(start + begin, chunk, f"tensor {name}")
            digest.update(chunk)
        if digest.hexdigest() != piece.checksum:
            raise Unreadable(
                f"{self.path} is damaged: tensor {name} at {piece.offset} has checksum "
                f"{digest.hexdigest()} instead of {piece.checksum}"
            )
        return room[first : first + size].view(DTYPES[tensor.dtype]).view(piece.shape)

    def _position(self, name: str, tensor: SavedTensor, piece: SavedSlice, size: int) -> int:
        try:
            found = self._header[key(name, piece.offset, piece.shape)]
            entry = _Entry.model_validate(found)
            start, stop = entry.data_offsets
        except (KeyError, ValueError):
            raise Unreadable(
                f"{self.path} is damaged: it has no tensor {name} at {piece.offset}"
            ) from None
        if (
            (entry.dtype, tuple(entry.shape)) != (tensor.dtype, piece.shape)
            or stop - start != size
            or not 0 <= start <= stop <= self._data_bytes
        ):
            raise Unreadable(
                f"{self.path} is damaged: tensor {name} at {piece.offset} is {entry.dtype} "
                f"{tuple(entry.shape)} in bytes {start} to {stop}, instead of {tensor.dtype} "
                f"{piece.shape} of {size} bytes"
            )
        return start


def rooms_for(wanted: Iterable[Wanted]) -> list[Tensor]:
    """Memory for slices, of which each has room for any: one at least, and several as long as they
    are small."""
    sizes = [tensor.bytes_of(piece.shape) for _, tensor, piece in wanted]
    count = min(len(sizes), max(1, _ROOM_BYTES // max([1, *sizes])))
    size = ALIGNMENT * (1 + -(-max(sizes, default=0) // ALIGNMENT))
    room = torch.from_numpy(aligned(count * size))
    return list(room.view(count, size)) if count else []


def verify(path: Place, saved: SavedFile) -> dict[str, SavedTensor]:
    """Read all of a file back, by the code that loads it; returns what it holds."""
    # Not from memory, or that alone would be verified.
    with Reader(path, saved, fresh=True) as reader:
        tensors = reader.tensors()
        slices = [(name, one, piece) for name, one in tensors.items() for piece in one.slices]
        for _ in reader.read_all(slices, rooms_for(slices)):
            pass
        return tensors
