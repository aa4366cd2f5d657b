"""Operations of tools on checkpoints: find damage, compare two.

Tensors are streamed: only a few saved slices of each checkpoint are in memory at a time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from megaframe.checkpoint.best import read_evaluation_loss
from megaframe.checkpoint.folder import list_checkpoints, read_pointer
from megaframe.checkpoint.load import Checkpoint, open_checkpoint, read_manifest
from megaframe.checkpoint.manifest import Manifest, SavedSlice
from megaframe.checkpoint.shard_reader import ShardReader, SliceRequest, allocate_buffers
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.stores.store import BEST, POINTER, StorePath
from megaframe.errors import UserError

_THREADS = min(8, os.cpu_count() or 1)
"""Files verified at the same time. Reads and checksums release the GIL."""
_MAX_NAMED_TENSORS = 3
"""Number of tensors named for a file that cannot be read at all."""


def describe_folder(root: StorePath) -> Iterator[str]:
    """Yield a line for each checkpoint in a folder whose step was evaluated: its loss, and what
    points to it."""
    try:
        paths = list_checkpoints(root)
        names = {pointer: read_pointer(root, pointer) for pointer in (POINTER, BEST)}
    except OSError:  # a checkpoint that lies alone where nothing can be listed
        return
    for path in paths:
        try:
            with open_checkpoint(path) as checkpoint:
                loss = read_evaluation_loss(checkpoint.state)
        except UserError:
            continue
        marks = ", ".join(pointer for pointer, name in names.items() if name == path.name)
        if loss is not None:
            yield f"  {path.name}: evaluation loss {loss:.4f}{f' ({marks})' if marks else ''}"


def find_damage(path: StorePath) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with a checkpoint, with file and tensor."""
    try:
        manifest = read_manifest(path)
    except UserError as error:
        yield str(error)
        return
    slices_per_file: dict[str, _SlicesByTensor] = {
        file: defaultdict(list) for file in manifest.files
    }
    for name, tensor in manifest.tensors.items():
        for saved_slice in tensor.slices:
            slices_per_file[saved_slice.file][name].append(saved_slice)
    with ThreadPoolExecutor(_THREADS) as pool:
        for problems in pool.map(
            lambda item: _find_file_damage(path, manifest, *item), slices_per_file.items()
        ):
            yield from problems


_SlicesByTensor = defaultdict[str, list[SavedSlice]]
"""The slices in one file, by name of the tensor."""


def _find_file_damage(
    path: StorePath, manifest: Manifest, file: str, slices: _SlicesByTensor
) -> list[str]:
    names, problems = list(slices), []
    try:
        with ShardReader(path / file, manifest.files[file]) as reader:
            requests: list[SliceRequest] = [
                (name, manifest.tensors[name], request)
                for name in names
                for request in slices[name]
            ]
            (buffer,) = allocate_buffers(requests)[:1]
            for request in requests:
                try:
                    reader.read(*request, buffer)
                except UserError as error:
                    problems.append(str(error))
    except UserError as error:
        omitted = (
            f" and {len(names) - _MAX_NAMED_TENSORS} more"
            if len(names) > _MAX_NAMED_TENSORS
            else ""
        )
        problems.append(f"{error}; it holds {', '.join(names[:_MAX_NAMED_TENSORS])}{omitted}")
    return problems


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor differs between two checkpoints.

    Attributes:
        distance: Largest absolute difference of two elements.
        largest: Largest magnitude in the first checkpoint.
        problem: Why the two cannot be compared, or None.
    """

    name: str
    distance: float = 0.0
    largest: float = 0.0
    problem: str | None = None


def compare_checkpoints(first: Checkpoint, second: Checkpoint) -> Iterator[TensorDifference]:
    """Yield a `TensorDifference` for each tensor of either checkpoint, also for equal ones."""
    for name in sorted({*first.tensors, *second.tensors}):
        first_tensor, second_tensor = first.tensors.get(name), second.tensors.get(name)
        if first_tensor is None or second_tensor is None:
            holder = first if second_tensor is None else second
            yield TensorDifference(name, problem=f"only in {holder.path}")
        elif first_tensor.shape != second_tensor.shape:
            yield TensorDifference(name, problem=f"{first_tensor.shape} and {second_tensor.shape}")
        else:
            yield _compare_tensor(name, first, second)


def _compare_tensor(name: str, first: Checkpoint, second: Checkpoint) -> TensorDifference:
    distance = largest = 0.0
    shape = first.tensors[name].shape
    for _, saved_slice, contents in first.read({name: first.tensors[name].slices}):
        second_values = torch.empty(saved_slice.shape, dtype=torch.float64)
        second.load([Slice(name, shape, saved_slice.offset, second_values)])
        first_values = contents.double()
        distances = (first_values - second_values).abs()
        # If only one of two elements is NaN, their distance is infinite.
        equal = (first_values == second_values) | (first_values.isnan() & second_values.isnan())
        distances = torch.where(equal, 0.0, distances.nan_to_num(torch.inf))
        distance = max(distance, float(distances.max()))
        largest = max(largest, float(first_values.nan_to_num().abs().max()))
    return TensorDifference(name, distance, largest)
