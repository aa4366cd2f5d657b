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

from megaframe.checkpoint.convert.dcp.pickle_parser import GlobalName, PickledCall, parse_pickle
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
_METADATA = GlobalName(_CLASSES, "Metadata")
_TENSOR = GlobalName(_CLASSES, "TensorStorageMetadata")
_BYTES = GlobalName(_CLASSES, "BytesStorageMetadata")
_PROPERTIES = GlobalName(_CLASSES, "TensorProperties")
_CHUNK = GlobalName(_CLASSES, "ChunkStorageMetadata")
_INDEX = GlobalName(_CLASSES, "MetadataIndex")
_INFO = GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = GlobalName("torch", "Size")
DTYPE_OF: dict[GlobalName, DTypeName] = {
    GlobalName("torch", str(dtype).removeprefix("torch.")): name for name, dtype in DTYPES.items()
}
_OTHER_DTYPES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool", "complex64",
    "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
_EXPECTED = {
    *(_METADATA, _TENSOR, _BYTES, _PROPERTIES, _CHUNK, _INDEX, _INFO, _SIZE, *DTYPE_OF),
    *(GlobalName("torch", name) for name in _OTHER_DTYPES),
    GlobalName(_CLASSES, "StorageMeta"),
    GlobalName(_CLASSES, "_MEM_FORMAT_ENCODING"),
    GlobalName("torch.serialization", "_get_layout"),
    GlobalName("collections", "OrderedDict"),
    *(GlobalName(module, f"{kind}Path") for module in ("pathlib", "pathlib._local")
      for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
}  # fmt: skip


@dataclass(frozen=True)
class ByteRange:
    """A byte range of a file in the folder."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, and where it is stored."""

    offset: Shape
    shape: Shape
    extent: ByteRange


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor.

    Attributes:
        dtype: None if checkpoints of this project cannot contain the dtype.
    """

    shape: Shape
    dtype: DTypeName | None
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class DCPContents:
    """Everything in a folder, by name.

    Attributes:
        other_values: Where values that are not tensors are stored.
    """

    tensors: Mapping[str, StoredTensor]
    other_values: Mapping[str, ByteRange]


def read_metadata(folder: Path) -> DCPContents:
    """Read what a folder contains.

    Raises:
        UserError: If its metadata is damaged or malicious.
    """
    path = folder / METADATA
    try:
        data = read_file(path, MAX_METADATA)
    except OSError as error:
        raise UserError(
            f"{folder} is not a torch.distributed.checkpoint folder: {METADATA}: {error.strerror}"
        ) from None
    try:
        contents = _parse_contents(parse_pickle(data, _EXPECTED))
        _check_sizes(folder, contents)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return contents


def _check_sizes(folder: Path, contents: DCPContents) -> None:
    """Check that the files are large enough for the tensors. Raises ValueError if one is not."""
    sizes: dict[str, int] = {}
    bytes_per_file: Counter[str] = Counter()
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
            bytes_per_file[file] += length
    for file, length in bytes_per_file.items():
        if length > sizes[file]:
            raise ValueError(f"{file} of {sizes[file]} bytes should hold {length}")


def _parse_contents(root: Any) -> DCPContents:
    state = _get_fields(root, _METADATA)
    byte_ranges = _parse_storage_data(_check_type(state.get("storage_data"), dict, "storage_data"))
    tensors: dict[str, StoredTensor] = {}
    other_values: dict[str, ByteRange] = {}
    chunks_left = _MAX_CHUNKS
    for name, entry in _check_type(state.get("state_dict_metadata"), dict, "names").items():
        if not isinstance(name, str) or not name.isprintable():
            raise ValueError("it has a name that is not text, or not printable")
        if isinstance(entry, PickledCall) and entry.function == _BYTES:
            if (name, None) in byte_ranges:
                other_values[name] = byte_ranges[name, None]
            continue
        chunks = _check_type(_get_fields(entry, _TENSOR).get("chunks"), list, f"chunks of {name!r}")
        chunks_left -= len(chunks)
        if chunks_left < 0:
            raise ValueError(f"it has more than {_MAX_CHUNKS:,} chunks of tensors")
        tensors[name] = _parse_tensor(name, entry.state, chunks, byte_ranges)
    return DCPContents(tensors, other_values)


def _parse_tensor(
    name: str,
    state: Mapping[str, Any],
    chunks: Iterable[Any],
    byte_ranges: Mapping[tuple[str, Shape | None], ByteRange],
) -> StoredTensor:
    shape = _parse_size(state.get("size"))
    properties = state.get("properties")
    if not isinstance(properties, PickledCall) or properties.function != _PROPERTIES:
        raise ValueError(f"{name!r} has no properties")
    dtype = _check_type(properties.state, tuple, f"properties of {name!r}")[0]
    stored_chunks = []
    for chunk in chunks:
        fields = _get_fields(chunk, _CHUNK)
        box = _parse_size(fields.get("offsets")), _parse_size(fields.get("sizes"))
        if 0 not in shape and not is_inside(shape, box):
            raise ValueError(f"{name!r} of shape {shape} has a chunk outside it: {box}")
        if (name, box[0]) not in byte_ranges:
            raise ValueError(f"{name!r} has a chunk at {box[0]} that is stored nowhere")
        stored_chunks.append(StoredChunk(*box, byte_ranges[name, box[0]]))
    mistake = (
        None
        if 0 in shape
        else find_tiling_problem(shape, [(stored.offset, stored.shape) for stored in stored_chunks])
    )
    if mistake:
        raise ValueError(f"{name!r} of shape {shape}: {mistake}")
    return StoredTensor(
        shape, DTYPE_OF.get(dtype) if isinstance(dtype, GlobalName) else None, tuple(stored_chunks)
    )


def _parse_storage_data(
    storage_data: Mapping[Any, Any],
) -> dict[tuple[str, Shape | None], ByteRange]:
    """Return where each item is stored, by name and offset of its box (None: not a tensor)."""
    byte_ranges: dict[tuple[str, Shape | None], ByteRange] = {}
    for key, value in storage_data.items():
        index, info = _get_fields(key, _INDEX), _get_fields(value, _INFO)
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
        byte_ranges[name, None if offset is None else _parse_size(offset)] = ByteRange(
            file, start, length
        )
    return byte_ranges


def _get_fields(value: Any, class_name: GlobalName) -> dict[str, Any]:
    """Return the fields of a record. Raises ValueError if it is not of the class `class_name`."""
    if not isinstance(value, PickledCall) or value.function != class_name:
        raise ValueError(f"it has something else in place of a {class_name.name}")
    return _check_type({} if value.state is None else value.state, dict, class_name.name)


def _check_type(value: Any, kind: type, label: str) -> Any:
    if type(value) is not kind or (kind is tuple and not value):
        raise ValueError(f"its {label} is not a {kind.__name__}")
    return value


def _parse_size(value: Any) -> Shape:
    """Return the sizes of a described torch.Size."""
    if isinstance(value, PickledCall) and value.function == _SIZE and len(value.arguments) == 1:
        sizes = value.arguments[0]
        is_short = type(sizes) in (tuple, list) and len(sizes) <= _MAX_DIMS
        if is_short and all(_is_count(size) for size in sizes):
            return tuple(sizes)
    raise ValueError("it has an invalid size")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < _MAX_SIZE
