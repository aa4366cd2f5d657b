"""Weights from elsewhere that new runs start from: a checkpoint of step 0 without optimizer state,
and a config beside it that trains on from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from torch import Tensor

from megaframe.architecture.spec import ParamSpec
from megaframe.checkpoint.manifest import DTYPES, DTypeName
from megaframe.checkpoint.reshard import as_bytes, assemble_checkpoint, group_by_bytes
from megaframe.checkpoint.shard_file import MAX_ENTRY_BYTES, FileEntry, TensorBox
from megaframe.checkpoint.slices import index_within, split_into_runs
from megaframe.checkpoint.stores.store import StorePath
from megaframe.checkpoint.train_state import make_initial_train_state
from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.io.regular_file import write_file
from megaframe.io.run_files import CONFIG_FILE
from megaframe.io.untrusted import make_printable

FILE_BYTES = 2 << 30
"""Bytes of tensors after which a new file is begun."""


@dataclass(frozen=True)
class StartingWeights:
    """What was written.

    Attributes:
        checkpoint: Path of the checkpoint.
        config_file: A config that trains on from it, beside it; None in an object store, where a
            run reads no config.
        notes: A line for each thing that is not as it was.
    """

    checkpoint: StorePath
    config_file: Path | None
    notes: tuple[str, ...] = ()


def find_config_file(target: StorePath) -> Path | None:
    """Return where the config beside a new checkpoint will be, or None in an object store.

    Raises:
        UserError: A file is there.
    """
    config_file = target / CONFIG_FILE if isinstance(target, Path) else None
    if config_file is not None and os.path.lexists(config_file):
        raise UserError(f"{config_file} already exists; remove it or give another folder")
    return config_file


def write_run_config(path: Path, origin: object, config: RunConfig, checkpoint: StorePath) -> None:
    """Write a config of a new run that starts with the weights of a checkpoint.

    Args:
        path: The file.
        origin: Where the weights come from, for its first line.
        config: Its sections `model`, `data` and `train` are written.
        checkpoint: The checkpoint.
    """
    sections = config.model_dump(
        mode="json", include={"model", "data", "train"}, exclude_unset=True, exclude_none=True
    )
    sections["checkpoint"] = {"weights": os.path.abspath(str(checkpoint))}
    header = (
        f"# Trains on from the weights of {make_printable(origin)}: add data.sources, and run.dir\n"
        "# and optim.lr as you like. train.seq is the longest that the model was made for.\n"
    )
    try:
        write_file(path, header + yaml.safe_dump(sections, sort_keys=False), inside=path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def write_starting_weights(
    target: StorePath,
    config: RunConfig,
    origin: object,
    tensors: Sequence[tuple[ParamSpec, DTypeName]],
    read: Callable[[str], Tensor],
) -> StartingWeights:
    """Write a checkpoint of step 0 in the folder `target`, with one tensor at a time in memory.

    Args:
        target: The folder of the new checkpoint.
        config: Of the model.
        origin: Where the weights come from.
        tensors: Spec and saved type (such as `F32`) of each.
        read: Returns a whole tensor by name.

    Raises:
        UserError: If it already exists or cannot be written.
    """
    config_file = find_config_file(target)
    last: list[tuple[str, Tensor]] = []

    def read_bytes(entry: FileEntry) -> memoryview:
        if not last or last[0][0] != entry.name:
            last[:] = [(entry.name, read(entry.name).to(DTYPES[entry.dtype]))]
        whole = last[0][1]
        index = index_within(((0,) * whole.ndim, tuple(whole.shape)), (entry.offset, entry.shape))
        return as_bytes(whole[index])

    boxes = [*_cut(tensors)]
    groups = group_by_bytes(boxes, lambda box: box.bytes, FILE_BYTES)
    state = make_initial_train_state(config).model_dump(mode="json")
    checkpoint = assemble_checkpoint(target, 0, state, groups, read_bytes)
    if config_file is not None:
        write_run_config(config_file, origin, config, checkpoint)
    return StartingWeights(checkpoint, config_file)


def _cut(tensors: Sequence[tuple[ParamSpec, DTypeName]]) -> Iterator[TensorBox]:
    for spec, dtype in tensors:
        for offset, shape in split_into_runs(
            ((0,) * len(spec.shape), spec.shape), MAX_ENTRY_BYTES // 8
        ):
            yield TensorBox(spec.name, spec.shape, offset, shape, dtype)
