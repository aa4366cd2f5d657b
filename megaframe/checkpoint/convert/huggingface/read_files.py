"""Reads the files of a foreign folder: JSON of bounded size, and tensors in safetensors files.

A folder from elsewhere can contain links, pipes and devices under any name, so a file is opened
only if it is a regular one, possibly behind a link. A safetensors header gives names, shapes and
types; the library checks that they fit the file, and nothing is read or allocated for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megaframe.checkpoint.convert.huggingface.mxfp4 import (
    BLOCKS,
    SCALES,
    dequantize,
    find_matrix_shape,
)
from megaframe.errors import UserError
from megaframe.io.untrusted import make_printable, open_file, parse_json, read_file

CONFIG = "config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS, _INTEGERS = ("F64", "F32", "F16", "BF16"), ("I64", "I32")
PACKED = "packed"
"""The type of a tensor that is computed from others."""
_MAX_JSON = 64 << 20
_MAX_TENSORS = 1 << 18
"""Most tensors of a file; the largest models have 100,000 in hundreds of files."""
_READ_ERRORS = (OSError, MemoryError, RuntimeError, SafetensorError)
"""What the library raises. It maps a whole file, and torch raises RuntimeError if it cannot."""


@dataclass(frozen=True)
class TensorHeader:
    """What a folder says about a tensor, without its elements.

    Attributes:
        name: Its name in the file.
        dtype: A name such as `BF16`, or `PACKED`.
        packed: The tensors of bytes that it is computed from.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    packed: tuple[TensorHeader, ...] = ()


def check_regular_file(path: Path) -> None:
    """Raise `UserError` unless there is a regular file that can be read."""
    try:
        open_file(path).close()
    except OSError as error:
        raise UserError(f"cannot read {make_printable(path)}: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        UserError: If there is none.
    """
    try:
        content = parse_json(read_file(path, _MAX_JSON))
    except OSError as error:
        raise UserError(f"cannot read {make_printable(path)}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{make_printable(path)} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{make_printable(path)} is not a JSON object")
    return content


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return what a folder says about each of its tensors, by name.

    Raises:
        UserError: For files that cannot be read, and for tensors that are in two files or in
            another one than the index says.
    """
    if not (folder / INDEX).exists():
        return read_file_headers(folder / SINGLE)
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in index.values()
    ):
        raise UserError(f"{folder / INDEX} has no weight_map of file names in this folder")
    headers: dict[str, TensorHeader] = {}
    for name in sorted(set(index.values())):
        for tensor, header in read_file_headers(folder / name).items():
            if tensor in headers:
                files = f"{make_printable(headers[tensor].file.name)} and {make_printable(name)}"
                raise UserError(f"{folder}: {make_printable(tensor)} is in two files, {files}")
            headers[tensor] = header
    for tensor, name in index.items():
        if tensor not in headers or headers[tensor].file.name != name:
            raise UserError(
                f"{folder}: {make_printable(tensor)} is not in {make_printable(name)}, as {INDEX} "
                "says"
            )
    return headers


def read_file_headers(path: Path) -> dict[str, TensorHeader]:
    """Return what a file says about each of its tensors, by name.

    Raises:
        UserError: If it cannot be read.
    """
    check_regular_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            headers = {}
            names = file.keys()
            if len(names) > _MAX_TENSORS:
                raise UserError(
                    f"{make_printable(path)} has {len(names)} tensors; the most is {_MAX_TENSORS}"
                )
            for name in names:
                tensor_slice = file.get_slice(name)
                headers[name] = TensorHeader(
                    name, path, tuple(tensor_slice.get_shape()), tensor_slice.get_dtype()
                )
            return headers
    except _READ_ERRORS as error:
        raise UserError(f"cannot read {make_printable(path)}: {error}") from None


def join_packed_headers(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the tensors of a folder with one in place of each two that are its MXFP4 blocks and
    scales."""
    joined = dict(headers)
    for name, blocks in headers.items():
        whole = name.removesuffix(BLOCKS)
        scales = headers.get(f"{whole}{SCALES}")
        if whole == name or scales is None or whole in headers:
            continue
        shape = find_matrix_shape(blocks.shape, scales.shape)
        if shape is not None and {blocks.dtype, scales.dtype} == {"U8"}:
            del joined[name], joined[f"{whole}{SCALES}"]
            joined[whole] = TensorHeader(whole, blocks.file, shape, PACKED, (blocks, scales))
    return joined


def check_type(name: str, header: TensorHeader, *, is_table: bool = False) -> None:
    """Raise `UserError` if a tensor is not one of floating-point numbers of 16 bits or more, or a
    table not one of whole numbers."""
    known, what = (_INTEGERS, "such tables") if is_table else (_FLOATS, "weights")
    if header.dtype not in (known if is_table else (*known, PACKED)):
        raise UserError(
            f"{make_printable(header.file)}: {make_printable(name)} has the type {header.dtype}; "
            f"{what} are {', '.join(known)}"
        )


def read_tensor(header: TensorHeader) -> Tensor:
    """Return a tensor of a folder in fp32.

    Raises:
        UserError: If an element is not finite.
    """
    if header.packed:
        tensor = dequantize(*map(read_stored_tensor, header.packed))
    else:
        tensor = read_stored_tensor(header).float()
    check_finite(header.name, tensor, "fp32")
    return tensor


def read_stored_tensor(header: TensorHeader) -> Tensor:
    """Return a tensor of a folder in its own type.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        with safe_open(header.file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(header.name)
            return tensor
    except _READ_ERRORS as error:
        raise UserError(f"cannot read {header.name} from {header.file}: {error}") from None


def check_finite(name: str, tensor: Tensor, dtype: str) -> None:
    """Raise `UserError` with the number of elements that are NaN or infinite, if there are any.

    Args:
        name: Of the tensor.
        tensor: Its values.
        dtype: Their type, for the message.
    """
    count = tensor.numel()
    wrong = count - int(torch.isfinite(tensor).sum())
    if wrong:
        raise UserError(
            f"{make_printable(name)}: {wrong} of {count} elements are NaN or infinite in {dtype}"
        )
