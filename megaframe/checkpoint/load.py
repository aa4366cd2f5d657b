"""Finds, opens and loads checkpoints, under any layout.

Saved slices are read a few at a time, checked, and copied to every wanted slice that they overlap.
A saved slice is always read completely, even if only a part of it is wanted: the checksum can then
be verified before any byte is used, and the writer's slices are so small that this costs little.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from pydantic import JsonValue

from megaframe.checkpoint.folder import checkpoints, read_pointer
from megaframe.checkpoint.manifest import (
    DTYPE_NAMES,
    MANIFEST,
    MAX_BYTES,
    Manifest,
    SavedSlice,
    SavedTensor,
    decode,
)
from megaframe.checkpoint.names import FINAL, POINTER, final_name, is_temporary
from megaframe.checkpoint.reader import Reader, Wanted, rooms_for
from megaframe.checkpoint.slices import Box, Slice, intersection, region
from megaframe.checkpoint.stores.store import Place, Source, place, store_of
from megaframe.config import RunConfig
from megaframe.config import load as load_config
from megaframe.errors import UserError

WHAT_IS_TAKEN = (
    "a checkpoint, or a folder of checkpoints or a run folder, whose latest is used; path or URL"
)
"""What `locate` takes, in words for help and messages."""
_HOME = "checkpoints"
"""Folder of checkpoints in a run folder."""


class Checkpoint:
    """An open checkpoint. As long as it is open no writer deletes it (if the store has locks)."""

    def __init__(self, path: Place, manifest: Manifest, file: Source | IO[bytes]) -> None:
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

    def load(self, slices: Sequence[Slice], alone: Collection[tuple[str, Box]] = ()) -> None:
        """Fill the slices' tensors in place, converting to their dtypes.

        alone: names and boxes of the slices that no other rank of this machine loads. Extra memory
        is only needed for a few saved slices at a time. Raises UserError if a tensor is not in the
        checkpoint or has another shape there (then nothing has been filled), or if a file is
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
                boxes = [part.box for part in parts if intersection(piece.box, part.box)]
                if boxes:
                    met[name].append(piece)
                if any((name, box) not in alone for box in boxes):
                    shared.add((name, piece))
        for name, piece, saved in self.read(met, shared):
            _scatter(saved, piece, wanted[name])

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
        reads: defaultdict[tuple[str, bool], list[Wanted]] = defaultdict(list)
        for name, pieces in wanted.items():
            for piece in pieces:
                alone = (name, piece) not in shared
                reads[piece.file, alone].append((name, self.tensors[name], piece))
        rooms = rooms_for(chain.from_iterable(reads.values()))
        for (file, alone), slices in reads.items():
            with Reader(self.path / file, self._manifest.files[file], alone=alone) as reader:
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
def _scatter(saved: torch.Tensor, piece: SavedSlice, wanted: Sequence[Slice]) -> None:
    for part in wanted:
        shared = intersection(piece.box, part.box)
        if shared is not None:
            source = saved[region(piece.box, shared)]
            part.tensor[region(part.box, shared)].copy_(source)


def open_checkpoint(path: Place) -> Checkpoint:
    """Open a checkpoint: check its manifest, and that its files exist and have the right sizes.

    Raises UserError that names the file and what is wrong with it.
    """
    manifest, file = _opened(path)
    try:
        _require_step(path, manifest)
        _require_files(path, manifest)
    except BaseException:
        file.close()
        raise
    return Checkpoint(path, manifest, file)


def read_manifest(path: Place) -> Manifest:
    """Read and check a checkpoint's manifest without looking at its files. Raises UserError."""
    manifest, file = _opened(path)
    file.close()
    return manifest


def _opened(path: Place) -> tuple[Manifest, Source]:
    """Read and check the manifest. Returns it with its open file, which marks the checkpoint as in
    use so that it is not deleted."""
    source = path / MANIFEST
    try:
        file = store_of(path).open(source, hold=True)
    except OSError as error:
        raise UserError(f"{path} is not a checkpoint: {MANIFEST}: {error.strerror}") from None
    try:
        if file.size > MAX_BYTES:
            raise UserError(f"{source} is larger than the {MAX_BYTES} bytes of any manifest")
        content = bytearray(file.size)
        got = file.read_into(0, memoryview(content))
        return decode(bytes(content[:got]), source), file
    except OSError as error:
        file.close()
        raise UserError(f"cannot read {source}: {error.strerror}") from None
    except BaseException:
        file.close()
        raise


def _require_step(path: Place, manifest: Manifest) -> None:
    named = FINAL.fullmatch(path.name)
    if named and int(named[1]) != manifest.step:
        raise UserError(
            f"checkpoint {path} is of step {manifest.step} by its manifest, and its name says "
            f"{int(named[1])}; it was renamed or changed"
        )


def _require_files(path: Place, manifest: Manifest) -> None:
    try:
        sizes = store_of(path).entries(path)
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


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def home_of(config: RunConfig) -> Place:
    """Return the folder in which a run saves its checkpoints."""
    folder = config.checkpoint.folder
    return Path(config.run.dir) / _HOME if folder is None else place(folder)


def find(home: Place, resume: str, note: Callable[[str], None] = _say) -> Place | None:
    """Find the checkpoint that `checkpoint.resume` asks for.

    resume: `latest`, or what `locate` takes. `latest` means the checkpoint that the pointer in
    `home` names. If that is not intact, the newest intact one is returned and `note` is called with
    the reason; if there is none yet, None is returned.

    Raises what `locate` raises.
    """
    if resume != "latest":
        return locate(resume, "checkpoint.resume", note)
    try:
        return _newest(home, note)
    except OSError as error:
        raise _unreachable(home, error) from None


def locate(given: str | Place, key: str, note: Callable[[str], None] = _say) -> Place:
    """Return the checkpoint that a path or URL stands for: `WHAT_IS_TAKEN`.

    key: the config key or the option that gives it, for messages. note: called with a reason if the
    latest checkpoint is not intact, and the newest intact one is returned.

    Raises UserError if there is no checkpoint, none in the folder is intact, or its place cannot be
    reached. Whether a checkpoint that is given itself is intact shows when it is opened.
    """
    path = place(given) if isinstance(given, str) else given
    store = store_of(path)
    try:
        if not store.is_folder(path):
            raise UserError(f"{key}={path}: there is no such folder; it takes {WHAT_IS_TAKEN}")
        if is_temporary(path.name):
            raise UserError(f"{key}={path} is a save that was never finished")
        if FINAL.fullmatch(path.name) or MANIFEST in store.entries(path):
            return path
        for home in _homes(path):
            if (newest := _newest(home, note)) is not None:
                return newest
    except OSError as error:
        raise _unreachable(path, error) from None
    raise UserError(f"{key}={path}: there is no checkpoint in it; it takes {WHAT_IS_TAKEN}")


def _homes(path: Place) -> Iterator[Place]:
    """Yield the folders in which checkpoints may be if `path` is no checkpoint: itself, and if it
    is a run folder, where the run saves."""
    yield path
    config = path / "config.yaml"
    if isinstance(config, Path) and config.is_file():
        run = load_config(str(config))
        if run.checkpoint.folder is not None:
            yield home_of(run)
    yield path / _HOME  # also of a run folder that was moved


def _unreachable(path: Place, error: OSError) -> UserError:
    return UserError(f"cannot look for checkpoints in {path}: {error.strerror}")


def _newest(folder: Place, note: Callable[[str], None]) -> Place | None:
    named = read_pointer(folder)
    found = checkpoints(folder)
    if named is None and not found:
        return None
    # The pointer's contents are not trusted: only a checkpoint found in this folder is used.
    first = [path for path in found if path.name == named]
    problems = [] if first else [f"{folder / POINTER} {_says(named)}"]
    for path in first + [path for path in found if path not in first]:
        try:
            open_checkpoint(path).close()
        except UserError as error:
            problems.append(str(error))
            continue
        if problems:
            note(f"warning: {path} is used instead: {'; '.join(problems)}")
        return path
    raise UserError(
        f"no intact checkpoint is left in {folder}: "
        f"{'; '.join(problems)}. To start from scratch, remove {folder / POINTER} and every "
        f"{final_name(0)[:5]}* there"
    )


def _says(named: str | None) -> str:
    return "is missing" if named is None else f"names {named!r}, which is not there"
