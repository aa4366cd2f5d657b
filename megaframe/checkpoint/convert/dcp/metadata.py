"""Reads the `.metadata` of a torch.distributed.checkpoint folder: where each box of a tensor is.

The file is a pickle, but it is parsed without executing it (see `pickle_parser`), and everything in
it is validated before use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from megaframe.checkpoint.convert.dcp.pickle_parser import Name, Record, describe
from megaframe.checkpoint.manifest import DTYPES, DTypeName
from megaframe.checkpoint.slices import Shape, find_tiling_problem, is_inside
from megaframe.errors import UserError
from megaframe.io.untrusted import read_file

METADATA = ".metadata"
MAX_METADATA = 128 << 20
"""Largest metadata file that is read."""
_MAX_CHUNKS = 1 << 20
"""Most chunks of all tensors together. The size of the file does not limit their number, because
many tensors can refer to one list of chunks."""
_MAX_SIZE = 1 << 48
_MAX_DIMS = 8
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)

_CLASSES = "torch.distributed.checkpoint.metadata"
_METADATA = Name(_CLASSES, "Metadata")
_TENSOR = Name(_CLASSES, "TensorStorageMetadata")
_BYTES = Name(_CLASSES, "BytesStorageMetadata")
_PROPERTIES = Name(_CLASSES, "TensorProperties")
_CHUNK = Name(_CLASSES, "ChunkStorageMetadata")
_INDEX = Name(_CLASSES, "MetadataIndex")
_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = Name("torch", "Size")
DTYPE_OF: dict[Name, DTypeName] = {
    Name("torch", str(dtype).removeprefix("torch.")): name for name, dtype in DTYPES.items()
}
_OTHER_DTYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64",
    "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_EXPECTED = {
    *(_METADATA, _TENSOR, _BYTES, _PROPERTIES, _CHUNK, _INDEX, _INFO, _SIZE, *DTYPE_OF),
    *(Name("torch", name) for name in _OTHER_DTYPES),
    Name(_CLASSES, "StorageMeta"),
    Name(_CLASSES, "_MEM_FORMAT_ENCODING"),
    Name("torch.serialization", "_get_layout"),
    Name("collections", "OrderedDict"),
    *(Name(module, f"{kind}Path") for module in ("pathlib", "pathlib._local")
      for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """A byte range of a file in the folder."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where it is stored."""

    offset: Shape
    shape: Shape
    extent: Extent


@dataclass(frozen=True)
class Stored:
    """A stored tensor. dtype: None if checkpoints of this project cannot contain the dtype."""

    shape: Shape
    dtype: DTypeName | None
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """Everything in a folder, by name. others: where values that are not tensors are stored."""

    tensors: Mapping[str, Stored]
    others: Mapping[str, Extent]


def read_metadata(folder: Path) -> Contents:
    """Read what a folder contains. Raises UserError if its metadata is damaged or malicious."""
    path = folder / METADATA
    try:
        data = read_file(path, MAX_METADATA)
    except OSError as error:
        raise UserError(
            f"{folder} is not a torch.distributed.checkpoint folder: {METADATA}: {error.strerror}"
        ) from None
    try:
        contents = _contents(describe(data, _EXPECTED))
        _check_sizes(folder, contents)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return contents


def _check_sizes(folder: Path, contents: Contents) -> None:
    """Check that the files are large enough for the tensors. Raises ValueError if one is not."""
    sizes: dict[str, int] = {}
    needed: Counter[str] = Counter()
    for name, stored in contents.tensors.items():
        for chunk in stored.chunks if stored.dtype is not None else ():
            file, start, length = chunk.extent.file, chunk.extent.start, chunk.extent.length
            if file not in sizes:
                try:
                    sizes[file] = (folder / file).stat().st_size
                except OSError as error:
                    raise ValueError(f"{name!r} is in {file}: {error.strerror}") from None
            size = prod(chunk.shape) * DTYPES[stored.dtype].itemsize if stored.dtype else 0
            if size > length or start + length > sizes[file]:
                raise ValueError(
                    f"{name!r} at {chunk.offset} needs {size} bytes, which should be in {length} "
                    f"from {start} on of {file}, and that has {sizes[file]}"
                )
            needed[file] += length
    for file, length in needed.items():
        if length > sizes[file]:
            raise ValueError(f"{file} of {sizes[file]} bytes should hold {length}")


def _contents(root: Any) -> Contents:
    state = _state(root, _METADATA)
    places = _places(_typed(state.get("storage_data"), dict, "storage_data"))
    tensors: dict[str, Stored] = {}
    others: dict[str, Extent] = {}
    left = _MAX_CHUNKS
    for name, entry in _typed(state.get("state_dict_metadata"), dict, "names").items():
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError("it has a name that is not text, or not printable")
        if isinstance(entry, Record) and entry.what == _BYTES:
            if (name, None) in places:
                others[name] = places[name, None]
            continue
        chunks = _typed(_state(entry, _TENSOR).get("chunks"), list, f"chunks of {name!r}")
        left -= len(chunks)
        if left < 0:
            raise ValueError(f"it has more than {_MAX_CHUNKS:,} chunks of tensors")
        tensors[name] = _stored(name, entry.state, chunks, places)
    return Contents(tensors, others)


def _stored(
    name: str,
    state: Mapping[str, Any],
    chunks: Iterable[Any],
    places: Mapping[tuple[str, Shape | None], Extent],
) -> Stored:
    shape = _size(state.get("size"))
    properties = state.get("properties")
    if not isinstance(properties, Record) or properties.what != _PROPERTIES:
        raise ValueError(f"{name!r} has no properties")
    dtype = _typed(properties.state, tuple, f"properties of {name!r}")[0]
    found = []
    for chunk in chunks:
        inner = _state(chunk, _CHUNK)
        box = _size(inner.get("offsets")), _size(inner.get("sizes"))
        if 0 not in shape and not is_inside(shape, box):
            raise ValueError(f"{name!r} of shape {shape} has a chunk outside it: {box}")
        if (name, box[0]) not in places:
            raise ValueError(f"{name!r} has a chunk at {box[0]} that is stored nowhere")
        found.append(Chunk(*box, places[name, box[0]]))
    wrong = (
        None
        if 0 in shape
        else find_tiling_problem(shape, [(one.offset, one.shape) for one in found])
    )
    if wrong:
        raise ValueError(f"{name!r} of shape {shape}: {wrong}")
    return Stored(shape, DTYPE_OF.get(dtype) if isinstance(dtype, Name) else None, tuple(found))


def _places(given: Mapping[Any, Any]) -> dict[tuple[str, Shape | None], Extent]:
    """Return where each item is stored, by name and offset of its box (None: not a tensor)."""
    places: dict[tuple[str, Shape | None], Extent] = {}
    for key, value in given.items():
        index, info = _state(key, _INDEX), _state(value, _INFO)
        name, offset = index.get("fqn"), index.get("offset")
        file, start, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(name, str):
            raise ValueError("it stores something without a name")
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise ValueError(f"{name!r} is stored in {str(file)[:80]!r}, which is not a file name")
        if not (_is_count(start) and _is_count(length)):
            raise ValueError(f"{name!r} is stored in no part of {file}")
        if info.get("transform_descriptors"):
            raise ValueError(f"{name!r} is stored transformed; save without extensions")
        places[name, None if offset is None else _size(offset)] = Extent(file, start, length)
    return places


def _state(given: Any, what: Name) -> dict[str, Any]:
    """Return the fields of a record. Raises ValueError if it is not of the class `what`."""
    if not isinstance(given, Record) or given.what != what:
        raise ValueError(f"it has something else in place of a {what.name}")
    return _typed({} if given.state is None else given.state, dict, what.name)


def _typed(given: Any, kind: type, what: str) -> Any:
    if type(given) is not kind or (kind is tuple and not given):
        raise ValueError(f"its {what} is not a {kind.__name__}")
    return given


def _size(given: Any) -> Shape:
    """Return the sizes of a described torch.Size."""
    if isinstance(given, Record) and given.what == _SIZE and len(given.arguments) == 1:
        sizes = given.arguments[0]
        few = type(sizes) in (tuple, list) and len(sizes) <= _MAX_DIMS
        if few and all(_is_count(size) for size in sizes):
            return tuple(sizes)
    raise ValueError("it has an invalid size")


def _is_count(given: Any) -> TypeGuard[int]:
    return type(given) is int and 0 <= given < _MAX_SIZE
