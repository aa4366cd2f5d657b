"""Opens and loads checkpoints, under any layout.

Saved slices are read a few at a time, checked, and copied to every wanted slice that they overlap.
A saved slice is always read completely, even if only a part of it is wanted: the checksum can then
be verified before any byte is used, and the writer's slices are so small that this costs little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from types import TracebackType
from typing import IO

import torch
from pydantic import JsonValue

from megaframe.checkpoint.manifest import (
    DTYPE_NAMES,
    DTYPES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    SavedSlice,
    SavedTensor,
    decode_manifest,
)
from megaframe.checkpoint.shard_reader import ShardReader, SliceRequest, allocate_buffers
from megaframe.checkpoint.slices import Box, Shape, Slice, index_within, intersect
from megaframe.checkpoint.stores.store import CHECKPOINT_NAME, ReadHandle, StorePath, store_of
from megaframe.errors import UserError


class Checkpoint:
    """An open checkpoint. As long as it is open no writer deletes it (if the store has locks).

    Args:
        path: Of the checkpoint.
        manifest: What it contains.
        file: The open manifest, by which writers see that it is in use.
    """

    def __init__(self, path: StorePath, manifest: Manifest, file: ReadHandle | IO[bytes]) -> None:
        self.path = path
        self.manifest = manifest
        self.file = file

    def __str__(self) -> str:
        return str(self.path)

    @property
    def step(self) -> int:
        """The step after which the checkpoint was saved."""
        return self.manifest.step

    @property
    def state(self) -> Mapping[str, JsonValue]:
        """The state of the run, as JSON values."""
        return self.manifest.state

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The saved tensors by name. `.shape` is that of the whole logical tensor; `.dtype` is a
        name such as `F32`."""
        return self.manifest.tensors

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
        """Close the checkpoint; a writer may delete it from now on."""
        self.file.close()

    def load(self, slices: Sequence[Slice], unshared: Collection[tuple[str, Box]] = ()) -> None:
        """Fill the slices' tensors in place, converting to their dtypes.

        Extra memory is only needed for a few saved slices at a time.

        Args:
            slices: What to load, under any division of the tensors.
            unshared: Names and boxes of the slices that no other rank of this machine loads.

        Raises:
            UserError: If a tensor is not in the checkpoint or has another shape there (then nothing
                has been filled), or if a file is damaged (then some tensors may have been filled).
        """
        self._require(slices)
        targets_by_name: defaultdict[str, list[Slice]] = defaultdict(list)
        for target in slices:
            targets_by_name[target.name].append(target)
        overlapping: dict[str, list[SavedSlice]] = {}
        shared: set[tuple[str, SavedSlice]] = set()
        for name, targets in targets_by_name.items():
            overlapping[name] = []
            for saved_slice in self.tensors[name].slices:
                boxes = [target.box for target in targets if intersect(saved_slice.box, target.box)]
                if boxes:
                    overlapping[name].append(saved_slice)
                if any((name, box) not in unshared for box in boxes):
                    shared.add((name, saved_slice))
        for name, saved_slice, contents in self.read(overlapping, shared):
            _copy_overlaps(contents, saved_slice, targets_by_name[name])

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor, in the type in which it was saved.

        Raises:
            UserError: It is not in the checkpoint, or a file is damaged.
        """
        if name not in self.tensors:
            near = " or ".join(get_close_matches(name, self.tensors, 2, 0.0))
            raise UserError(f"{self} has no tensor {name}; the nearest are {near}")
        saved = self.tensors[name]
        value = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
        self.load([Slice(name, saved.shape, (0,) * len(saved.shape), value)])
        return value

    def read(
        self,
        requested: Mapping[str, Sequence[SavedSlice]],
        shared: Collection[tuple[str, SavedSlice]] = (),
    ) -> Iterator[tuple[str, SavedSlice, torch.Tensor]]:
        """Read the given saved slices, file by file, and check each.

        Args:
            requested: Slices by the name of their tensor.
            shared: Those that other ranks of this machine may read too.

        Yields:
            Name, slice and contents. The contents are valid until the next iteration.

        Raises:
            UserError: If a file is damaged.
        """
        requests: defaultdict[tuple[str, bool], list[SliceRequest]] = defaultdict(list)
        for name, saved_slices in requested.items():
            for saved_slice in saved_slices:
                sole_reader = (name, saved_slice) not in shared
                requests[saved_slice.file, sole_reader].append(
                    (name, self.tensors[name], saved_slice)
                )
        buffers = allocate_buffers(chain.from_iterable(requests.values()))
        for (file, sole_reader), slices in requests.items():
            with ShardReader(
                self.path / file, self.manifest.files[file], sole_reader=sole_reader
            ) as reader:
                for (name, _, saved_slice), contents in reader.read_slices(slices, buffers):
                    yield name, saved_slice, contents

    def _require(self, slices: Sequence[Slice]) -> None:
        for target in slices:
            if target.tensor.dtype not in DTYPE_NAMES:
                raise ValueError(f"{target.name}: dtype {target.tensor.dtype} cannot be loaded")
        self.require_shapes({target.name: target.shape for target in slices})

    def require_shapes(self, shapes: Mapping[str, Shape]) -> None:
        """Check that the checkpoint has these tensors, before memory is taken for them: their bytes
        are then in its files.

        Args:
            shapes: Shapes of whole tensors, by name.

        Raises:
            UserError: If a tensor is not in the checkpoint or has another shape there.
        """
        mismatches = []
        for name, shape in shapes.items():
            tensor = self.tensors.get(name)
            if tensor is None:
                mismatches.append(f"{name} {shape} is not in it")
            elif tensor.shape != shape:
                mismatches.append(f"{name} is {tensor.shape} in it, and {shape} here")
        if mismatches:
            listed = "\n  ".join(mismatches[:5])
            omitted = f"\n  and {len(mismatches) - 5} more" if len(mismatches) > 5 else ""
            raise UserError(
                f"checkpoint {self.path} is of another model; {len(mismatches)} tensors differ:\n"
                f"  {listed}{omitted}"
            )


@torch.no_grad()
def _copy_overlaps(saved: torch.Tensor, saved_slice: SavedSlice, targets: Sequence[Slice]) -> None:
    for target in targets:
        overlap = intersect(saved_slice.box, target.box)
        if overlap is not None:
            source = saved[index_within(saved_slice.box, overlap)]
            target.tensor[index_within(target.box, overlap)].copy_(source)


def open_checkpoint(path: StorePath) -> Checkpoint:
    """Open a checkpoint: check its manifest, and that its files exist and have the right sizes.

    Raises:
        UserError: With the file and what is wrong with it.
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
    """Read and check a checkpoint's manifest without looking at its files.

    Raises:
        UserError: If it is missing, damaged or of another version.
    """
    manifest, file = _open_manifest(path)
    file.close()
    return manifest


def _open_manifest(path: StorePath) -> tuple[Manifest, ReadHandle]:
    """Read and check the manifest. Returns it with its open file, which marks the checkpoint as in
    use so that it is not deleted."""
    manifest_path = path / MANIFEST
    try:
        file = store_of(path).open(manifest_path, lock=True)
    except OSError as error:
        raise UserError(f"{path} is not a checkpoint: {MANIFEST}: {error.strerror}") from None
    try:
        if file.size > MAX_MANIFEST_BYTES:
            raise UserError(
                f"{manifest_path} is larger than the {MAX_MANIFEST_BYTES} bytes of any manifest"
            )
        content = bytearray(file.size)
        num_read = file.read_into(0, memoryview(content))
        return decode_manifest(bytes(content[:num_read]), manifest_path), file
    except OSError as error:
        file.close()
        raise UserError(f"cannot read {manifest_path}: {error.strerror}") from None
    except BaseException:
        file.close()
        raise


def _check_step(path: StorePath, manifest: Manifest) -> None:
    match = CHECKPOINT_NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest.step:
        raise UserError(
            f"checkpoint {path} is of step {manifest.step} by its manifest, and its name says "
            f"{int(match[1])}; it was renamed or changed"
        )


def _check_files(path: StorePath, manifest: Manifest) -> None:
    try:
        sizes = store_of(path).list_entries(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    for name, saved in manifest.files.items():
        size = sizes.get(name)
        if size is None:
            reason = "Not a regular file" if name in sizes else "No such file or directory"
            raise UserError(f"checkpoint file {path / name} cannot be read: {reason}")
        if size != saved.bytes:
            raise UserError(
                f"checkpoint file {path / name} is damaged: {size} bytes instead of {saved.bytes}"
            )
