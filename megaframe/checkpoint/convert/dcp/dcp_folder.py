"""Exports checkpoints to folders of torch.distributed.checkpoint (DCP) and imports such folders.

Tensors keep their names: weights have those of their parameters, optimizer state is
`optimizer.KIND/PARAMETER`. The rest of a checkpoint, step and run state, is stored in the folder as
one text, so exporting and importing gives the same checkpoint. Tensors are streamed, a few boxes
in memory at a time, so any machine can do it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import JsonValue

from megaframe.architecture.spec import ParamSpec
from megaframe.checkpoint import Checkpoint, StorePath
from megaframe.checkpoint.convert.dcp.metadata import (
    METADATA,
    DCPContents,
    StoredChunk,
    read_metadata,
)
from megaframe.checkpoint.convert.dcp.payload import DCPDataFile
from megaframe.checkpoint.manifest import DTYPES, SavedSlice, SavedTensor
from megaframe.checkpoint.reshard import assemble_checkpoint, group_by_bytes, refuse_secrets
from megaframe.checkpoint.shard_file import MAX_ENTRY_BYTES, FileEntry, TensorBox
from megaframe.checkpoint.slices import Shape, split_into_runs
from megaframe.checkpoint.train_state import make_initial_train_state
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.io.regular_file import open_append
from megaframe.io.untrusted import parse_json
from megaframe.model.model_chunk import list_model_specs

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

RUN_STATE_NAME = "megaframe.state"
"""Name of the entry whose text contains the step and the state of a run."""
FILE_BYTES = 2 << 30
"""Bytes of tensors after which a new file is begun."""
_MAX_STATE_BYTES = 64 << 20
_VERSION = "1.0.0"


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint as a folder that `torch.distributed.checkpoint.load` can read.

    Raises:
        UserError: If the folder exists or cannot be written, or holds a secret.
    """
    refuse_secrets(checkpoint, [*checkpoint.tensors], checkpoint.state)
    if folder.exists():
        raise UserError(f"{folder} already exists; remove it or give another folder")
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir(parents=True)
        places = _write_files(checkpoint, temporary)
        state = json.dumps({"step": checkpoint.step, "state": dict(checkpoint.state)})
        with open_append(last := temporary / "__0_0.distcp") as file:
            places[RUN_STATE_NAME, None] = _append_value(file, last, state)
        with open(temporary / METADATA, "xb") as file:
            pickle.dump(_build_metadata(checkpoint.tensors, places), file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, folder)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or temporary}: {error.strerror}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


_Place = tuple[str, int, int]
"""Name of a file, and where in it a value begins and how many bytes it has."""
_Places = dict[tuple[str, Shape | None], _Place]
"""Of each value, by the name of its tensor and the offset of its box in it."""


def _write_files(checkpoint: Checkpoint, folder: Path) -> _Places:
    """Write each saved slice as one DCP chunk of its tensor. Returns where each was stored."""
    slices = [
        (name, tensor.count_bytes(saved_slice.shape), saved_slice)
        for name, tensor in checkpoint.tensors.items()
        for saved_slice in tensor.slices
    ]
    places: _Places = {}
    for number, group in enumerate(
        group_by_bytes(slices, lambda sized_slice: sized_slice[1], FILE_BYTES)
    ):
        requested: dict[str, list[SavedSlice]] = {}
        for name, _, saved_slice in group:
            requested.setdefault(name, []).append(saved_slice)
        path = folder / f"__{number}_0.distcp"
        with open(path, "xb") as file:
            for name, saved_slice, contents in checkpoint.read(requested):
                # Cloned, because torch.save writes the whole storage that a tensor is a view of.
                places[name, saved_slice.offset] = _append_value(file, path, contents.clone())
            file.flush()
            os.fsync(file.fileno())
    return places


def _append_value(file: Any, path: Path, value: Any) -> _Place:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    start = file.tell()
    file.write(buffer.getbuffer())
    return path.name, start, file.tell() - start


def _build_metadata(tensors: Mapping[str, SavedTensor], places: _Places) -> Metadata:
    # Importing it takes a second, which only an export needs.
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    state_dict_metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=DTYPES[tensor.dtype]),
            torch.Size(tensor.shape),
            [
                ChunkStorageMetadata(torch.Size(saved_slice.offset), torch.Size(saved_slice.shape))
                for saved_slice in tensor.slices
            ],
        )
        for name, tensor in tensors.items()
    }
    state_dict_metadata[RUN_STATE_NAME] = BytesStorageMetadata()
    planner_data = {name: (name,) for name in state_dict_metadata}
    storage_data = {
        MetadataIndex(name, offset): _StorageInfo(*place)
        for (name, offset), place in places.items()
    }
    return Metadata(
        state_dict_metadata, planner_data=planner_data, storage_data=storage_data, version=_VERSION
    )


@dataclass(frozen=True)
class DCPImportResult:
    """The result of an import.

    Attributes:
        path: The new checkpoint.
        left_out: Names of what a checkpoint cannot contain: tensors of other than floating-point
            dtypes, tensors without elements, values that are not tensors.
        has_state: Whether it has a run state, so that a run can start from it.
    """

    path: StorePath
    left_out: list[str]
    has_state: bool


def import_checkpoint(
    folder: Path, target: StorePath, config: RunConfig | None = None
) -> DCPImportResult:
    """Import a folder of torch.distributed.checkpoint as a checkpoint in the folder `target`.

    Args:
        folder: The folder to import.
        target: The folder for the new checkpoint.
        config: Config of a run that has these weights, for a folder that `export_checkpoint` did
            not write. The result is then a checkpoint of that run at step 0.

    Raises:
        UserError: If the folder is damaged or malicious, or does not fit the config.
    """
    contents = read_metadata(folder)
    if config is None:
        step, state = _read_run_state(folder, contents)
    else:
        _check_fit(folder, contents, list_model_specs(config.model, config.train))
        step, state = 0, make_initial_train_state(config).model_dump(mode="json")
    importable = {
        name: stored
        for name, stored in contents.tensors.items()
        if stored.dtype is not None and 0 not in stored.shape
    }
    if not importable:
        raise UserError(f"{folder} holds no tensors of floating-point numbers")
    refuse_secrets(folder, [*importable], state)
    boxes: list[TensorBox] = []
    origin: dict[tuple[str, Shape], StoredChunk] = {}
    for name, stored in importable.items():
        assert stored.dtype is not None
        limit = max(1, MAX_ENTRY_BYTES // DTYPES[stored.dtype].itemsize)
        for chunk in stored.chunks:
            for offset, shape in split_into_runs((chunk.offset, chunk.shape), limit):
                boxes.append(TensorBox(name, stored.shape, offset, shape, stored.dtype))
                origin[name, offset] = chunk
    boxes.sort(key=lambda box: -DTYPES[box.dtype].itemsize)  # so that each starts aligned
    reader = _ChunkReader(folder, origin)
    try:
        groups = group_by_bytes(boxes, lambda box: box.bytes, FILE_BYTES)
        path = assemble_checkpoint(target, step, state, groups, reader.read_bytes)
    finally:
        reader.close()
    left_out = [
        *(contents.tensors.keys() - importable.keys()),
        *(contents.other_values.keys() - {RUN_STATE_NAME}),
    ]
    return DCPImportResult(path, sorted(left_out), bool(state))


class _ChunkReader:
    """Reads the bytes of file entries.

    One file is open at a time.

    Args:
        origin: The DCP chunk that contains each entry, by tensor name and offset of the entry.
    """

    def __init__(self, folder: Path, origin: Mapping[tuple[str, Shape], StoredChunk]) -> None:
        self._folder, self._origin = folder, origin
        self._file: DCPDataFile | None = None

    def read_bytes(self, entry: FileEntry) -> memoryview:
        """Return the bytes of an entry, in row-major order."""
        chunk = self._origin[entry.name, entry.offset]
        path = self._folder / chunk.extent.file
        if self._file is None or self._file.path != path:
            self.close()
            self._file = DCPDataFile(path)
        return self._file.read(entry.name, entry.dtype, chunk, (entry.offset, entry.shape))

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _read_run_state(folder: Path, contents: DCPContents) -> tuple[int, dict[str, JsonValue]]:
    """Return the step and the run state that `export_checkpoint` stored, or else 0 and an empty
    state. Raises `UserError` if they are damaged."""
    extent = contents.other_values.get(RUN_STATE_NAME)
    if extent is None:
        return 0, {}
    file = DCPDataFile(folder / extent.file)
    try:
        text = file.read_text(RUN_STATE_NAME, extent, _MAX_STATE_BYTES)
    finally:
        file.close()
    with suppress(ValueError):
        run_state = parse_json(text.encode())
        if isinstance(run_state, dict) and run_state.keys() == {"step", "state"}:
            step, state = run_state["step"], run_state["state"]
            if type(step) is int and 0 <= step < 1 << 48 and isinstance(state, dict):
                return step, state
    raise UserError(f"{folder / extent.file} is damaged: {RUN_STATE_NAME} is not a run state")


def _check_fit(folder: Path, contents: DCPContents, specs: Iterable[ParamSpec]) -> None:
    """Raise `UserError` if the tensors are not those of a model."""
    if problems := [*_find_misfits(contents, specs)]:
        omitted = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        listed = "\n  ".join(problems[:5])
        raise UserError(f"{folder} does not fit the config:\n  {listed}{omitted}")


def _find_misfits(contents: DCPContents, specs: Iterable[ParamSpec]) -> Iterator[str]:
    for spec in specs:
        stored = contents.tensors.get(spec.name)
        if stored is None:
            yield f"{spec.name} {spec.shape} is missing"
        elif stored.shape != spec.shape:
            yield f"{spec.name} is {stored.shape}, not {spec.shape}"
        elif stored.dtype is None:
            yield f"{spec.name} is not of floating-point numbers"
