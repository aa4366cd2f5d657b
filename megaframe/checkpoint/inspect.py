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

from megaframe.checkpoint.load import Checkpoint, read_manifest
from megaframe.checkpoint.manifest import Manifest, SavedSlice
from megaframe.checkpoint.shard_reader import ShardReader, SliceRequest, allocate_buffers
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.stores.store import StorePath
from megaframe.errors import UserError

_THREADS = min(8, os.cpu_count() or 1)
"""Files verified at the same time. Reads and checksums release the GIL."""
_MAX_NAMED_TENSORS = 3
"""Number of tensors named for a file that cannot be read at all."""


def find_damage(path: StorePath) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with a checkpoint, with file and tensor."""
    try:
        manifest = read_manifest(path)
    except UserError as error:
        yield str(error)
        return
    held: dict[str, _SlicesByTensor] = {file: defaultdict(list) for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.slices:
            held[piece.file][name].append(piece)
    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(lambda one: _find_file_damage(path, manifest, *one), held.items()):
            yield from found


_SlicesByTensor = defaultdict[str, list[SavedSlice]]
"""The slices in one file, by name of the tensor."""


def _find_file_damage(
    path: StorePath, manifest: Manifest, file: str, held: _SlicesByTensor
) -> list[str]:
    names, found = list(held), []
    try:
        with ShardReader(path / file, manifest.files[file]) as reader:
            slices: list[SliceRequest] = [
                (name, manifest.tensors[name], one) for name in names for one in held[name]
            ]
            (room,) = allocate_buffers(slices)[:1]
            for one in slices:
                try:
                    reader.read(*one, room)
                except UserError as error:
                    found.append(str(error))
    except UserError as error:
        more = (
            f" and {len(names) - _MAX_NAMED_TENSORS} more"
            if len(names) > _MAX_NAMED_TENSORS
            else ""
        )
        found.append(f"{error}; it holds {', '.join(names[:_MAX_NAMED_TENSORS])}{more}")
    return found


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor differs between two checkpoints.

    distance: largest absolute difference of two elements. largest: largest magnitude in the first
    checkpoint. what: why the two cannot be compared, or None.
    """

    name: str
    distance: float = 0.0
    largest: float = 0.0
    what: str | None = None


def compare_checkpoints(one: Checkpoint, other: Checkpoint) -> Iterator[TensorDifference]:
    """Yield a `TensorDifference` for each tensor of either checkpoint, also for equal ones."""
    for name in sorted({*one.tensors, *other.tensors}):
        here, there = one.tensors.get(name), other.tensors.get(name)
        if here is None or there is None:
            which = one if there is None else other
            yield TensorDifference(name, what=f"only in {which.path}")
        elif here.shape != there.shape:
            yield TensorDifference(name, what=f"{here.shape} and {there.shape}")
        else:
            yield _compare_tensor(name, one, other)


def _compare_tensor(name: str, one: Checkpoint, other: Checkpoint) -> TensorDifference:
    distance = largest = 0.0
    shape = one.tensors[name].shape
    for _, piece, saved in one.read({name: one.tensors[name].slices}):
        theirs = torch.empty(piece.shape, dtype=torch.float64)
        other.load([Slice(name, shape, piece.offset, theirs)])
        ours = saved.double()
        apart = (ours - theirs).abs()
        # If only one of two elements is NaN, their distance is infinite.
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        apart = torch.where(same, 0.0, apart.nan_to_num(torch.inf))
        distance = max(distance, float(apart.max()))
        largest = max(largest, float(ours.nan_to_num().abs().max()))
    return TensorDifference(name, distance, largest)
