"""The manifest: records which box of which tensor is stored in which file of a checkpoint.

It begins with a checksum of everything after it, because a flipped digit in a step or an offset is
still valid JSON. Even if the checksum matches, all contents are validated before use, because a
manifest may come from an untrusted source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import Annotated, Literal

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from megaframe.checkpoint.slices import Box, Shape, find_tiling_problem, is_inside
from megaframe.checkpoint.stores.store import StorePath
from megaframe.errors import UserError

MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
"""Largest manifest that is written or read, enough for about two million slices."""

MAX_SLICE_BYTES = 256 << 20
"""Largest slice that is read. Slices that `shard_file` writes are much smaller."""

DTypeName = Literal["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"]
"""The dtype names of safetensors."""
DTYPES: dict[DTypeName, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Size = Annotated[int, Field(ge=1, lt=1 << 48)]
Offset = Annotated[int, Field(ge=0, lt=1 << 48)]
SavedShape = Annotated[tuple[Size, ...], Field(max_length=8)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
FileName = Annotated[
    str, Field(pattern=r"^rank-[0-9]{5,9}(\.[0-9]{5,9}\.[0-9a-f]{8})?\.safetensors$")
]


class JsonRecord(BaseModel):
    """Base of everything that is stored as JSON; strictly validated when it is read."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", ser_json_inf_nan="constants"
    )


class SavedSlice(JsonRecord):
    """A box of a tensor, the file that contains it and the checksum of its bytes."""

    file: FileName
    offset: Annotated[tuple[Offset, ...], Field(max_length=8)]
    shape: SavedShape
    checksum: Checksum

    @property
    def box(self) -> Box:
        """Offset and shape within the tensor."""
        return self.offset, self.shape


class SavedTensor(JsonRecord):
    """A logical tensor. Its slices are disjoint and together cover all of it."""

    shape: SavedShape
    dtype: DTypeName
    slices: tuple[SavedSlice, ...]

    def count_bytes(self, shape: Shape) -> int:
        """Return the bytes of a box of this shape."""
        return prod(shape) * DTYPES[self.dtype].itemsize


class SavedFile(JsonRecord):
    """The expected size of a file and checksum of its header; both are checked before it is
    used."""

    bytes: Annotated[int, Field(ge=1, lt=1 << 60)]
    header: Checksum


class Manifest(JsonRecord):
    """Everything in a checkpoint. `state` is plain data of the caller: counters, the config."""

    format: Literal["megaframe-checkpoint"] = "megaframe-checkpoint"
    version: Literal[1] = 1
    step: Offset
    state: dict[str, JsonValue]
    files: dict[FileName, SavedFile]
    tensors: dict[str, SavedTensor]


SAVED_TENSORS = TypeAdapter(dict[str, SavedTensor])
"""Validates and serialises the part of `Manifest.tensors` that one rank saved."""


def compute_checksum(data: bytes | memoryview) -> str:
    """Return the XXH3 checksum of 64 bits, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def merge_tensors(parts: Iterable[Mapping[str, SavedTensor]]) -> dict[str, SavedTensor]:
    """Merge the parts that the ranks saved.

    Raises:
        ValueError: If two parts disagree about the shape or dtype of a tensor.
    """
    tensors: dict[str, SavedTensor] = {}
    slices: defaultdict[str, list[SavedSlice]] = defaultdict(list)
    for tensors_of_file in parts:
        for name, tensor in tensors_of_file.items():
            first = tensors.setdefault(name, tensor)
            if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"ranks disagree about {name}: {first.dtype} {first.shape} "
                    f"and {tensor.dtype} {tensor.shape}"
                )
            slices[name].extend(tensor.slices)
    return {
        name: tensor.model_copy(update={"slices": tuple(slices[name])})
        for name, tensor in tensors.items()
    }


def find_problem(manifest: Manifest) -> str | None:
    """Check what the types cannot express.

    Returns:
        The first problem of the manifest, or None.
    """
    bytes_per_file: defaultdict[str, int] = defaultdict(int)
    for name, tensor in manifest.tensors.items():
        if not name.isprintable():
            return f"tensor {name} has characters in its name that cannot be shown"
        for saved_slice in tensor.slices:
            if not is_inside(tensor.shape, saved_slice.box):
                return (
                    f"tensor {name} of shape {tensor.shape} has a slice outside it: offset "
                    f"{saved_slice.offset}, shape {saved_slice.shape}"
                )
            if saved_slice.file not in manifest.files:
                return f"tensor {name} is in {saved_slice.file}, which is not in its list of files"
            size = tensor.count_bytes(saved_slice.shape)
            if size > MAX_SLICE_BYTES:
                return (
                    f"tensor {name} has a slice of {size} bytes, larger than any that is read "
                    f"({MAX_SLICE_BYTES})"
                )
            bytes_per_file[saved_slice.file] += size
        untiled = find_tiling_problem(
            tensor.shape, [saved_slice.box for saved_slice in tensor.slices]
        )
        if untiled:
            return f"tensor {name} of shape {tensor.shape}: {untiled}"
    for file, size in bytes_per_file.items():
        if size > manifest.files[file].bytes:
            return f"{file} of {manifest.files[file].bytes} bytes should hold {size} bytes"
    return None


_PREFIX = b'{"checksum":"%s",'


def seal(record: BaseModel) -> bytes:
    """Serialise a record as JSON that begins with a checksum of the rest."""
    body = record.model_dump_json().encode()[1:]
    return _PREFIX % compute_checksum(body).encode() + body


def unseal(data: bytes) -> bytes | None:
    """Return the JSON of a sealed record without its checksum, or None if the checksum differs."""
    start = len(_PREFIX % (b"0" * 16))
    head, body = data[:start], data[start:]
    return b"{" + body if head == _PREFIX % compute_checksum(body).encode() else None


def encode_manifest(manifest: Manifest) -> bytes:
    """Serialise a manifest.

    Raises:
        ValueError: For one that could not be loaded: invalid, or larger than
            `MAX_MANIFEST_BYTES`.
    """
    mistake = find_problem(manifest)
    if mistake:
        raise ValueError(mistake)
    data = seal(manifest)
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    return data


def decode_manifest(data: bytes, source: StorePath) -> Manifest:
    """Parse and validate a manifest.

    Raises:
        UserError: With a message that begins with `source`.
    """
    text = unseal(data)
    if text is None:
        raise UserError(
            f"{source} is damaged or is not a checkpoint manifest: "
            f"its checksum does not match its {len(data)} bytes"
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(key) for key in first_error["loc"]) or "the file"
        raise UserError(
            f"{source} is not a valid manifest: {location}: {first_error['msg']} "
            f"({error.error_count()} errors in all)"
        ) from None
    mistake = find_problem(manifest)
    if mistake:
        raise UserError(f"{source} is not a valid manifest: {mistake}")
    return manifest
