"""Opens and loads checkpoints, under any layout.

Saved slices are read a few at a time, checked, and copied to every wanted slice that they overlap.
A saved slice is always read completely, even if only a part of it is wanted: the checksum can then
be verified before any byte is used, and the writer's slices are so small that this costs little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import IO

import torch
from pydantic import JsonValue

from megaframe.checkpoint.manifest import (
    DTYPE_NAMES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    SavedSlice,
    SavedTensor,
    decode_manifest,
)
from megaframe.checkpoint.shard_reader import ShardReader, SliceRequest, allocate_buffers
from megaframe.checkpoint.slices import Box, Slice, index_within, intersect
from megaframe.checkpoint.stores.store import (
    CHECKPOINT_NAME,
    ReadHandle,
    StorePath,
    store_of,
)
from megaframe.errors import UserError


class Checkpoint:
    """An open checkpoint. As long as it is open no writer deletes it (if the store has locks)."""

    def __init__(self, path: StorePath, manifest: Manifest, file: ReadHandle | IO[bytes]) -> None:
        self.path = path
        self._manifest = manifest
        self._file = file

    def __str__(self) -> str:
        return str(self.path)

    @property
    def step(self) -> int:
        return self._manifest.step

    @property
    def state(self) -> Mapping[str, JsonValue]:
        return self._manifest.state

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The saved tensors by name. `.shape` is that of the whole logical tensor; `.dtype` is a
        name such as `F32`."""
        return self._manifest.tensors

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def load(self, slices: Sequence[Slice], unshared: Collection[tuple[str, Box]] = ()) -> None:
        """Fill the slices' tensors in place, converting to their dtypes.

        unshared: names and boxes of the slices that no other rank of this machine loads. Extra
        memory is only needed for a few saved slices at a time. Raises UserError if a tensor is not
        in the checkpoint or has another shape there (then nothing has been filled), or if a file is
        damaged (then some tensors may have been filled).
        """
        self._require(slices)
        wanted: defaultdict[str, list[Slice]] = defaultdict(list)
        for part in slices:
            wanted[part.name].append(part)
        met: dict[str, list[SavedSlice]] = {}
        shared: set[tuple[str, SavedSlice]] = set()
        for name, parts in wanted.items():
            met[name] = []
            for piece in self.tensors[name].slices:
                boxes = [part.box for part in parts if intersect(piece.box, part.box)]
                if boxes:
                    met[name].append(piece)
                if any((name, box) not in unshared for box in boxes):
                    shared.add((name, piece))
        for name, piece, saved in self.read(met, shared):
            _copy_overlaps(saved, piece, wanted[name])

    def read(
        self,
        wanted: Mapping[str, Sequence[SavedSlice]],
        shared: Collection[tuple[str, SavedSlice]] = (),
    ) -> Iterator[tuple[str, SavedSlice, torch.Tensor]]:
        """Read the given saved slices, file by file, and check each.

        wanted: slices by the name of their tensor. shared: those that other ranks of this machine
        may read too. Yields name, slice and contents; the contents are valid until the next
        iteration. Raises UserError if a file is damaged.
        """
        reads: defaultdict[tuple[str, bool], list[SliceRequest]] = defaultdict(list)
        for name, pieces in wanted.items():
            for piece in pieces:
                sole_reader = (name, piece) not in shared
                reads[piece.file, sole_reader].append((name, self.tensors[name], piece))
        rooms = allocate_buffers(chain.from_iterable(reads.values()))
        for (file, sole_reader), slices in reads.items():
            with ShardReader(
                self.path / file, self._manifest.files[file], sole_reader=sole_reader
            ) as reader:
                for (name, _, piece), saved in reader.read_all(slices, rooms):
                    yield name, piece, saved

    def _require(self, slices: Sequence[Slice]) -> None:
        wrong = {}
        for part in slices:
            tensor = self.tensors.get(part.name)
            if tensor is None:
                wrong[part.name] = f"{part.name} {part.shape} is not in it"
            elif tensor.shape != part.shape:
                wrong[part.name] = f"{part.name} is {tensor.shape} in it, and {part.shape} here"
            if part.tensor.dtype not in DTYPE_NAMES:
                raise ValueError(f"{part.name}: dtype {part.tensor.dtype} cannot be loaded")
        if wrong:
            shown = "\n  ".join(list(wrong.values())[:5])
            more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise UserError(
                f"checkpoint {self.path} is of another model; {len(wrong)} tensors differ:\n"
                f"  {shown}{more}"
            )


@torch.no_grad()
def _copy_overlaps(saved: torch.Tensor, piece: SavedSlice, wanted: Sequence[Slice]) -> None:
    for part in wanted:
        shared = intersect(piece.box, part.box)
        if shared is not None:
            source = saved[index_within(piece.box, shared)]
            part.tensor[index_within(part.box, shared)].copy_(source)


def open_checkpoint(path: StorePath) -> Checkpoint:
    """Open a checkpoint: check its manifest, and that its files exist and have the right sizes.

    Raises UserError that names the file and what is wrong with it.
    """
    manifest, file = _open_manifest(path)
    try:
        _check_step(path, manifest)
        _check_files(path, manifest)
    except BaseException:
        file.close()
        raise
    return Checkpoint(path, manifest, file)


def read_manifest(path: StorePath) -> Manifest:
    """Read and check a checkpoint's manifest without looking at its files. Raises UserError."""
    manifest, file = _open_manifest(path)
    file.close()
    return manifest


def _open_manifest(path: StorePath) -> tuple[Manifest, ReadHandle]:
    """Read and check the manifest. Returns it with its open file, which marks the checkpoint as in
    use so that it is not deleted."""
    source = path / MANIFEST
    try:
        file = store_of(path).open(source, lock=True)
    except OSError as error:
        raise UserError(f"{path} is not a checkpoint: {MANIFEST}: {error.strerror}") from None
    try:
        if file.size > MAX_MANIFEST_BYTES:
            raise UserError(
                f"{source} is larger than the {MAX_MANIFEST_BYTES} bytes of any manifest"
            )
        content = bytearray(file.size)
        got = file.read_into(0, memoryview(content))
        return decode_manifest(bytes(content[:got]), source), file
    except OSError as error:
        file.close()
        raise UserError(f"cannot read {source}: {error.strerror}") from None
    except BaseException:
        file.close()
        raise


def _check_step(path: StorePath, manifest: Manifest) -> None:
    named = CHECKPOINT_NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise UserError(
            f"checkpoint {path} is of step {manifest.step} by its manifest, and its name says "
            f"{int(named[1])}; it was renamed or changed"
        )


def _check_files(path: StorePath, manifest: Manifest) -> None:
    try:
        sizes = store_of(path).list_entries(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    for name, saved in manifest.files.items():
        size = sizes.get(name)
        if size is None:
            wrong = "Not a regular file" if name in sizes else "No such file or directory"
            raise UserError(f"checkpoint file {path / name} cannot be read: {wrong}")
        if size != saved.bytes:
            raise UserError(
                f"checkpoint file {path / name} is damaged: {size} bytes instead of {saved.bytes}"
            )
