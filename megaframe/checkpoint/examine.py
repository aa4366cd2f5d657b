"""What tools ask of checkpoints: what is damaged, how two differ, the same in other files.

All of it streams: one saved slice of each checkpoint is in memory at a time.
"""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor

from megaframe.checkpoint.container import (
    Piece,
    Unplaced,
    divided,
    placed,
    write,
)
from megaframe.checkpoint.folder import checkpoints
from megaframe.checkpoint.load import Checkpoint, read_manifest
from megaframe.checkpoint.manifest import DTYPES, Manifest, SavedSlice
from megaframe.checkpoint.names import final_name
from megaframe.checkpoint.reader import Reader, Wanted, rooms_for, verify
from megaframe.checkpoint.save import commit
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.storage import Place, store_of
from megaframe.errors import UserError

T = TypeVar("T")
_THREADS = min(8, os.cpu_count() or 1)
"""Files that are verified at a time; checksums and reads let other threads run."""
_FEW = 3
"""Tensors that are named of a file that cannot be read at all."""


def damage(path: Place) -> Iterator[str]:
    """Everything that is wrong with a checkpoint: a sentence each, with file and tensor."""
    try:
        manifest = read_manifest(path)
    except UserError as error:
        yield str(error)
        return
    held: dict[str, _Held] = {file: defaultdict(list) for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        for piece in tensor.slices:
            held[piece.file][name].append(piece)
    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(lambda one: _damage_of(path, manifest, *one), held.items()):
            yield from found


_Held = defaultdict[str, list[SavedSlice]]
"""Slices of one file, by tensor."""


def _damage_of(path: Place, manifest: Manifest, file: str, held: _Held) -> list[str]:
    names, found = list(held), []
    try:
        with Reader(path / file, manifest.files[file]) as reader:
            slices: list[Wanted] = [
                (name, manifest.tensors[name], one) for name in names for one in held[name]
            ]
            (room,) = rooms_for(slices)[:1]
            for one in slices:
                try:
                    reader.read(*one, room)
                except UserError as error:
                    found.append(str(error))
    except UserError as error:
        more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
        found.append(f"{error}; it holds {', '.join(names[:_FEW])}{more}")
    return found


@dataclass(frozen=True)
class Difference:
    """Of a tensor of two checkpoints: the largest distance of two elements, and the largest
    magnitude in the first. what: None, or what keeps them from being compared."""

    name: str
    distance: float = 0.0
    largest: float = 0.0
    what: str | None = None


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[Difference]:
    """A line for each tensor of either, equal ones too."""
    for name in sorted({*one.tensors, *other.tensors}):
        here, there = one.tensors.get(name), other.tensors.get(name)
        if here is None or there is None:
            which = one if there is None else other
            yield Difference(name, what=f"only in {which.path}")
        elif here.shape != there.shape:
            yield Difference(name, what=f"{here.shape} and {there.shape}")
        else:
            yield _distance(name, one, other)


def _distance(name: str, one: Checkpoint, other: Checkpoint) -> Difference:
    distance = largest = 0.0
    shape = one.tensors[name].shape
    for _, piece, saved in one.read({name: one.tensors[name].slices}):
        theirs = torch.empty(piece.shape, dtype=torch.float64)
        other.load([Slice(name, shape, piece.offset, theirs)])
        ours = saved.double()
        apart = (ours - theirs).abs()
        # A NaN on one side only is infinitely far from any number.
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        apart = torch.where(same, 0.0, apart.nan_to_num(torch.inf))
        distance = max(distance, float(apart.max()))
        largest = max(largest, float(ours.nan_to_num().abs().max()))
    return Difference(name, distance, largest)


def regroup(source: Checkpoint, folder: Place, files: int) -> Place:
    """The same checkpoint in so many files of about one size, as `folder`/step-...; see
    `assemble`."""
    saved = {
        (name, piece.offset): piece
        for name, tensor in source.tensors.items()
        for piece in tensor.slices
    }
    boxes = [
        Unplaced(name, tensor.shape, piece.offset, piece.shape, tensor.dtype)
        for name, tensor in source.tensors.items()
        for piece in tensor.slices
    ]
    boxes.sort(key=lambda box: -DTYPES[box.dtype].itemsize)  # so that each starts aligned

    def bytes_of(piece: Piece) -> memoryview:
        wanted = saved[piece.name, piece.offset]
        ((_, _, found),) = source.read({piece.name: [wanted]})
        return as_bytes(found)

    total = sum(box.bytes for box in boxes)
    groups = grouped(boxes, lambda box: box.bytes, -(-total // files))
    return assemble(folder, source.step, source.state, groups, bytes_of)


def grouped(items: Iterable[T], bytes_of: Callable[[T], int], size: int) -> list[list[T]]:
    """Items in runs that end once all so far have come to another multiple of `size` bytes."""
    groups: list[list[T]] = []
    done = 0
    for one in items:
        if done >= size * len(groups):
            groups.append([])
        groups[-1].append(one)
        done += bytes_of(one)
    return groups


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in the host's memory."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def assemble(
    folder: Place,
    step: int,
    state: Mapping[str, JsonValue],
    groups: Sequence[Sequence[Unplaced]],
    bytes_of: Callable[[Piece], memoryview],
) -> Place:
    """Write a checkpoint, a file (where the store takes only small ones, several) for each group,
    as `folder`/step-...

    It is verified before it gets its name; nothing is left of one that fails. Raises UserError
    where there is one already.
    """
    store, final = store_of(folder), folder / final_name(step)
    attempt = secrets.token_hex(4)
    draft = store.draft(folder, step, attempt)
    try:
        if final in checkpoints(folder):
            raise UserError(f"{final} already exists; remove it or give another folder")
        store.begin(draft)
        saved = {}
        for number, group in enumerate(groups):
            for part, planned in enumerate(divided(placed(group), store.file_bytes)):
                name = store.file_name(number, part, attempt)
                saved[name] = write(draft / name, planned, bytes_of)
                verify(draft / name, saved[name])
        return commit(draft, folder, step, state, saved, attempt)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or draft}: {error.strerror}") from None
    finally:
        store.discard(draft, attempt)
