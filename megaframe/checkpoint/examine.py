"""What tools ask of checkpoints: what is damaged, how two differ, the same in other files.

All of it streams: one saved slice of each checkpoint is in memory at a time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor

from megaframe.checkpoint.container import Piece, Reader, buffer_for, verify, write
from megaframe.checkpoint.folder import final_name, flush, move_pointer, publish, remove
from megaframe.checkpoint.load import Checkpoint, read_manifest
from megaframe.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    DTypeName,
    Manifest,
    encode,
    merged,
)
from megaframe.checkpoint.slices import Shape, Slice
from megaframe.errors import UserError

_THREADS = min(8, os.cpu_count() or 1)
"""Files that are verified at a time; checksums and reads let other threads run."""
_FEW = 3
"""Tensors that are named of a file that cannot be read at all."""


def damage(path: Path) -> Iterator[str]:
    """Everything that is wrong with a checkpoint: a sentence each, with file and tensor."""
    try:
        manifest = read_manifest(path)
    except UserError as error:
        yield str(error)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        for found in pool.map(lambda name: _damage_of(path, manifest, name), manifest.files):
            yield from found


def _damage_of(path: Path, manifest: Manifest, file: str) -> list[str]:
    held = {
        name: [piece for piece in tensor.slices if piece.file == file]
        for name, tensor in manifest.tensors.items()
    }
    names = [name for name, pieces in held.items() if pieces]
    found = []
    try:
        with Reader(path / file, manifest.files[file]) as reader:
            buffer = buffer_for({name: manifest.tensors[name] for name in names})
            for name in names:
                for piece in held[name]:
                    try:
                        reader.read(name, manifest.tensors[name], piece, buffer)
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


def regroup(source: Checkpoint, folder: Path, files: int) -> Path:
    """The same checkpoint in so many files of about one size, as `folder`/step-...; see
    `assemble`."""
    everything = [
        (Unplaced(name, tensor.shape, piece.offset, piece.shape, tensor.dtype), piece)
        for name, tensor in source.tensors.items()
        for piece in tensor.slices
    ]
    saved = {(one.name, one.offset): piece for one, piece in everything}

    def bytes_of(piece: Piece) -> memoryview:
        wanted = saved[piece.name, piece.offset]
        ((_, _, found),) = source.read({piece.name: [wanted]})
        return as_bytes(found)

    total = sum(one.bytes for one, _ in everything)
    groups = grouped([one for one, _ in everything], -(-total // files))
    return assemble(folder, source.step, source.state, groups, bytes_of)


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


def grouped(boxes: Iterable[Unplaced], size: int) -> list[list[Unplaced]]:
    """Boxes, wide types first so that each starts aligned, in runs that end once they have come to
    another multiple of `size` bytes."""
    groups: list[list[Unplaced]] = []
    done = 0
    for one in sorted(boxes, key=lambda one: -DTYPES[one.dtype].itemsize):
        if done >= size * len(groups):
            groups.append([])
        groups[-1].append(one)
        done += one.bytes
    return groups


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in the host's memory."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def assemble(
    folder: Path,
    step: int,
    state: Mapping[str, JsonValue],
    groups: Sequence[Sequence[Unplaced]],
    bytes_of: Callable[[Piece], memoryview],
) -> Path:
    """Write a checkpoint, a file for each group, as `folder`/step-...

    It is verified before it gets its name; nothing is left of one that fails. Raises UserError
    where there is one already.
    """
    final = folder / final_name(step)
    if final.exists():
        raise UserError(f"{final} is there already; remove it or give another folder")
    attempt = secrets.token_hex(4)
    temporary = folder / f"{final.name}.{attempt}.tmp"
    try:
        temporary.mkdir(parents=True)
        saved, parts = {}, []
        for number, group in enumerate(groups):
            name = f"rank-{number:05d}.safetensors"
            saved[name] = write(temporary / name, _placed(group), bytes_of)
            parts.append(verify(temporary / name, saved[name]))
        manifest = Manifest(step=step, state=dict(state), files=saved, tensors=merged(parts))
        with open(temporary / MANIFEST, "xb") as file:
            file.write(encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        flush(temporary)
        publish(temporary, step, attempt)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or temporary}: {error.strerror}") from None
    finally:
        remove(temporary, attempt)
    move_pointer(folder, final.name, attempt)
    return final


def _placed(group: Sequence[Unplaced]) -> list[Piece]:
    planned, start = [], 0
    for one in group:
        stop = start + one.bytes
        planned.append(Piece(one.name, one.whole, one.offset, one.shape, one.dtype, start, stop))
        start = stop
    return planned
