"""What tools ask of checkpoints: what is damaged, how two differ, the same in other files.

All of it streams: one saved slice of each checkpoint is in memory at a time.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from megaframe.checkpoint.container import Piece, Reader, buffer_for, verify, write
from megaframe.checkpoint.folder import final_name, flush, move_pointer, publish, remove
from megaframe.checkpoint.load import Checkpoint, read_manifest
from megaframe.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    SavedFile,
    SavedSlice,
    SavedTensor,
    encode,
    merged,
)
from megaframe.checkpoint.slices import Slice
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
    """The same checkpoint in so many files of about one size, as `folder`/step-...

    It is verified before it gets its name; nothing is left of one that fails. Raises UserError
    where there is one already.
    """
    final = folder / final_name(source.step)
    if final.exists():
        raise UserError(f"{final} is there already; remove it or give another folder")
    attempt = secrets.token_hex(4)
    temporary = folder / f"{final.name}.{attempt}.tmp"
    try:
        temporary.mkdir(parents=True)
        saved, parts = {}, []
        for number, group in enumerate(_groups(source, files)):
            name = f"rank-{number:05d}.safetensors"
            saved[name] = _write(source, temporary / name, group)
            parts.append(verify(temporary / name, saved[name]))
        manifest = Manifest(
            step=source.step, state=dict(source.state), files=saved, tensors=merged(parts)
        )
        with open(temporary / MANIFEST, "xb") as file:
            file.write(encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        flush(temporary)
        publish(temporary, source.step, attempt)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or temporary}: {error.strerror}") from None
    finally:
        remove(temporary, attempt)
    move_pointer(folder, final.name, attempt)
    return final


_Group = list[tuple[str, SavedTensor, SavedSlice]]


def _groups(source: Checkpoint, files: int) -> Iterator[_Group]:
    """Saved slices, wide types first so that each starts aligned, in runs of about one size."""
    everything = [
        (name, tensor, piece) for name, tensor in source.tensors.items() for piece in tensor.slices
    ]
    everything.sort(key=lambda one: -one[1].bytes_of(()))
    total = sum(tensor.bytes_of(piece.shape) for _, tensor, piece in everything)
    group: _Group = []
    done = number = 0
    for one in everything:
        if group and done * files >= total * (number + 1):
            yield group
            group, number = [], number + 1
        group.append(one)
        done += one[1].bytes_of(one[2].shape)
    if group:
        yield group


def _write(source: Checkpoint, path: Path, group: _Group) -> SavedFile:
    planned, start = [], 0
    for name, tensor, piece in group:
        stop = start + tensor.bytes_of(piece.shape)
        planned.append(
            Piece(name, tensor.shape, piece.offset, piece.shape, tensor.dtype, start, stop)
        )
        start = stop

    def bytes_of(piece: Piece) -> memoryview:
        (wanted,) = (
            one
            for one in source.tensors[piece.name].slices
            if (one.offset, one.shape) == (piece.offset, piece.shape)
        )
        ((_, _, saved),) = source.read({piece.name: [wanted]})
        return saved.contiguous().view(-1).view(torch.uint8).numpy().data

    return write(path, planned, bytes_of)
