"""Operations of tools on checkpoints: find damage, compare two, rewrite one into other files.

Tensors are streamed: only a few saved slices of each checkpoint are in memory at a time.
"""

from __future__ import annotations

import json
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

from megaframe.checkpoint.folder import checkpoints
from megaframe.checkpoint.load import Checkpoint, read_manifest
from megaframe.checkpoint.manifest import DTYPES, Manifest, SavedSlice
from megaframe.checkpoint.names import final_name
from megaframe.checkpoint.reader import Reader, Wanted, rooms_for, verify
from megaframe.checkpoint.save import commit
from megaframe.checkpoint.shard_file import (
    Piece,
    Unplaced,
    divided,
    placed,
    write,
)
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.stores.store import Place, store_of
from megaframe.errors import UserError
from megaframe.io.untrusted import without_secrets

T = TypeVar("T")
_THREADS = min(8, os.cpu_count() or 1)
"""Files verified at the same time. Reads and checksums release the GIL."""
_FEW = 3
"""Number of tensors named for a file that cannot be read at all."""


def damage(path: Place) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with a checkpoint, with file and tensor."""
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
"""The slices in one file, by name of the tensor."""


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
    """How a tensor differs between two checkpoints.

    distance: largest absolute difference of two elements. largest: largest magnitude in the first
    checkpoint. what: why the two cannot be compared, or None.
    """

    name: str
    distance: float = 0.0
    largest: float = 0.0
    what: str | None = None


def differences(one: Checkpoint, other: Checkpoint) -> Iterator[Difference]:
    """Yield a `Difference` for each tensor of either checkpoint, also for equal ones."""
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
        # If only one of two elements is NaN, their distance is infinite.
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        apart = torch.where(same, 0.0, apart.nan_to_num(torch.inf))
        distance = max(distance, float(apart.max()))
        largest = max(largest, float(ours.nan_to_num().abs().max()))
    return Difference(name, distance, largest)


def regroup(source: Checkpoint, folder: Place, files: int) -> Place:
    """Rewrite a checkpoint into `files` files of about equal size, as `folder`/step-... (see
    `assemble`). Raises `UserError` as `refuse_secrets` does."""
    refuse_secrets(source, [*source.tensors], source.state)
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


def refuse_secrets(source: object, names: Sequence[str], state: Mapping[str, JsonValue]) -> None:
    """Raise `UserError` if there is a secret in what would be copied from a source: the names of
    its tensors and its state. No run saves one."""
    text = json.dumps([names, dict(state)])
    if without_secrets(text) != text:
        raise UserError(f"{source} has a password or key in its state; it is not copied")


def grouped(items: Iterable[T], bytes_of: Callable[[T], int], size: int) -> list[list[T]]:
    """Group consecutive items. Group n ends with the item whose end reaches n * `size` bytes,
    counted from the first item."""
    groups: list[list[T]] = []
    done = 0
    for one in items:
        if done >= size * len(groups):
            groups.append([])
        groups[-1].append(one)
        done += bytes_of(one)
    return groups


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor that is in host memory."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def assemble(
    folder: Place,
    step: int,
    state: Mapping[str, JsonValue],
    groups: Sequence[Sequence[Unplaced]],
    bytes_of: Callable[[Piece], memoryview],
) -> Place:
    """Write a checkpoint as `folder`/step-... with one file per group, or several if the store
    limits the size of files.

    bytes_of: returns the bytes of a piece. Every file is verified before the checkpoint is
    committed, and nothing remains of one that fails. Returns the checkpoint's place. Raises
    UserError if it already exists or cannot be written.
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
