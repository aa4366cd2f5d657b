"""Finds, opens and loads checkpoints, at any layout.

Saved slices are read one at a time, each whole and checked, and copied to wherever they meet a
wanted slice. A saved slice that only in part is wanted is read whole too: the writer cuts slices
so small that this costs little, and so no byte is used whose checksum was not seen to match.
"""

from __future__ import annotations

import errno
import stat
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch
from pydantic import JsonValue

from megaframe.checkpoint.container import Reader, buffer_for
from megaframe.checkpoint.folder import (
    POINTER,
    checkpoints,
    final_name,
    hold,
    is_temporary,
    read_pointer,
)
from megaframe.checkpoint.manifest import (
    DTYPE_NAMES,
    MANIFEST,
    MAX_BYTES,
    Manifest,
    SavedSlice,
    SavedTensor,
    decode,
)
from megaframe.checkpoint.slices import Slice, intersection, region
from megaframe.errors import UserError


class Checkpoint:
    """An open checkpoint. While it is open, no writer deletes it."""

    def __init__(self, path: Path, manifest: Manifest, file: BinaryIO) -> None:
        self.path = path
        self._manifest = manifest
        self._file = file

    @property
    def step(self) -> int:
        return self._manifest.step

    @property
    def state(self) -> Mapping[str, JsonValue]:
        return self._manifest.state

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """What is saved, by name: `.shape` is of the whole logical tensor, `.dtype` its name."""
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

    def load(self, slices: Sequence[Slice]) -> None:
        """Fill the slices' tensors in place, converting to their dtypes.

        Beside them, one saved slice is in memory. Raises UserError for tensors that are not saved
        or have another shape (then nothing has been filled), and for damaged files (then some of
        the tensors may have been).
        """
        self._require(slices)
        wanted: defaultdict[str, list[Slice]] = defaultdict(list)
        for part in slices:
            wanted[part.name].append(part)
        met = {
            name: [
                piece
                for piece in self.tensors[name].slices
                if any(intersection(piece.box, part.box) for part in parts)
            ]
            for name, parts in wanted.items()
        }
        for name, piece, saved in self.read(met):
            _scatter(saved, piece, wanted[name])

    def read(
        self, wanted: Mapping[str, Sequence[SavedSlice]]
    ) -> Iterator[tuple[str, SavedSlice, torch.Tensor]]:
        """These saved slices by tensor, file after file, each checked; what is read lasts until the
        next one. Raises UserError for damaged files."""
        reads: defaultdict[str, list[tuple[str, SavedSlice]]] = defaultdict(list)
        for name, pieces in wanted.items():
            for piece in pieces:
                reads[piece.file].append((name, piece))
        buffer = buffer_for({name: self.tensors[name] for name in wanted})
        for file, found in reads.items():
            with Reader(self.path / file, self._manifest.files[file]) as reader:
                for name, piece in found:
                    yield name, piece, reader.read(name, self.tensors[name], piece, buffer)

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
def _scatter(saved: torch.Tensor, piece: SavedSlice, wanted: Sequence[Slice]) -> None:
    for part in wanted:
        shared = intersection(piece.box, part.box)
        if shared is not None:
            source = saved[region(piece.box, shared)]
            part.tensor[region(part.box, shared)].copy_(source)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check a checkpoint's manifest, and that its files are there in their sizes.

    Raises UserError that names the file and what is wrong with it.
    """
    manifest, file = _opened(path)
    try:
        for name, saved in manifest.files.items():
            _require_file(path / name, saved.bytes)
    except BaseException:
        file.close()
        raise
    return Checkpoint(path, manifest, file)


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, checked, whatever its files are. Raises UserError."""
    manifest, file = _opened(path)
    file.close()
    return manifest


def _opened(path: Path) -> tuple[Manifest, BinaryIO]:
    """The manifest and its file, which while it is open keeps the checkpoint from being deleted."""
    source = path / MANIFEST
    try:
        size = _size_of_file(source)
        file = open(source, "rb")  # noqa: SIM115 (closed by the caller)
    except OSError as error:
        raise UserError(f"{path} is not a checkpoint: {MANIFEST}: {error.strerror}") from None
    try:
        hold(file.fileno())
        if size > MAX_BYTES:
            raise UserError(f"{source} is larger than the {MAX_BYTES} bytes of any manifest")
        return decode(file.read(size), source), file
    except OSError as error:
        file.close()
        raise UserError(f"cannot read {source}: {error.strerror}") from None
    except BaseException:
        file.close()
        raise


def _size_of_file(path: Path) -> int:
    """Raises OSError for what is no regular file (opening a pipe might never return)."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return status.st_size


def _require_file(path: Path, saved: int) -> None:
    try:
        size = _size_of_file(path)
    except OSError as error:
        raise UserError(f"checkpoint file {path} cannot be read: {error.strerror}") from None
    if size != saved:
        raise UserError(f"checkpoint file {path} is damaged: {size} bytes instead of {saved}")


def find(folder: Path, resume: str) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for.

    `latest` is the one that the pointer in `folder` names, or else the newest whole one (with a
    warning); None where there is none yet. Anything else is the path of a checkpoint. Raises
    UserError where what was asked for is missing or damaged.
    """
    return _newest(folder) if resume == "latest" else given(Path(resume), "checkpoint.resume")


def given(path: Path, key: str) -> Path:
    """The path of a checkpoint, as a key of the config gives it. Raises UserError where it is none,
    or damaged."""
    if not path.is_dir():
        raise UserError(f"{key}={path}: there is no such folder")
    if is_temporary(path.name):
        raise UserError(f"{key}={path} is a save that was never finished")
    inside = checkpoints(path)
    if inside and not (path / MANIFEST).exists():
        raise UserError(f"{key}={path} holds checkpoints; give one, as {inside[0]}")
    open_checkpoint(path).close()
    return path


def _newest(folder: Path) -> Path | None:
    named = read_pointer(folder)
    found = checkpoints(folder)
    if named is None and not found:
        return None
    # The pointer may name only what a checkpoint of this folder can be called.
    first = [path for path in found if path.name == named]
    problems = [] if first else [f"{folder / POINTER} {_says(named)}"]
    for path in first + [path for path in found if path not in first]:
        try:
            open_checkpoint(path).close()
        except UserError as error:
            problems.append(str(error))
            continue
        if problems:
            warnings.warn(f"resuming from {path}: {'; '.join(problems)}", stacklevel=2)
        return path
    raise UserError(
        f"checkpoint.resume=latest: no whole checkpoint is left in {folder}: "
        f"{'; '.join(problems)}. To begin anew, remove {folder / POINTER} and every "
        f"{final_name(0)[:5]}* there"
    )


def _says(named: str | None) -> str:
    return "is missing" if named is None else f"names {named!r}, which is not there"
