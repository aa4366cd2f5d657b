"""Writes checkpoints from other sources than a run: one with other files, or an imported one."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import JsonValue
from torch import Tensor

from megaframe.checkpoint.commit import commit_checkpoint
from megaframe.checkpoint.folder import list_checkpoints
from megaframe.checkpoint.load import Checkpoint
from megaframe.checkpoint.manifest import DTYPES
from megaframe.checkpoint.shard_file import (
    FileEntry,
    TensorBox,
    assign_byte_ranges,
    split_into_files,
    write_shard_file,
)
from megaframe.checkpoint.shard_reader import verify_shard_file
from megaframe.checkpoint.stores.store import StorePath, format_checkpoint_name, store_of
from megaframe.errors import UserError
from megaframe.io.untrusted import mask_secrets

T = TypeVar("T")


def reshard_checkpoint(source: Checkpoint, folder: StorePath, files: int) -> StorePath:
    """Rewrite a checkpoint into files of about equal size, as `folder`/step-... (see
    `assemble_checkpoint`).

    Args:
        source: The checkpoint.
        folder: The folder of the new one.
        files: Number of its files.

    Raises:
        UserError: As `refuse_secrets` does.
    """
    refuse_secrets(source, [*source.tensors], source.state)
    saved_slices = {
        (name, saved_slice.offset): saved_slice
        for name, tensor in source.tensors.items()
        for saved_slice in tensor.slices
    }
    boxes = [
        TensorBox(name, tensor.shape, saved_slice.offset, saved_slice.shape, tensor.dtype)
        for name, tensor in source.tensors.items()
        for saved_slice in tensor.slices
    ]
    boxes.sort(key=lambda box: -DTYPES[box.dtype].itemsize)  # so that each starts aligned

    def read_bytes(entry: FileEntry) -> memoryview:
        saved_slice = saved_slices[entry.name, entry.offset]
        ((_, _, contents),) = source.read({entry.name: [saved_slice]})
        return as_bytes(contents)

    total = sum(box.bytes for box in boxes)
    groups = group_by_bytes(boxes, lambda box: box.bytes, -(-total // files))
    return assemble_checkpoint(folder, source.step, source.state, groups, read_bytes)


def refuse_secrets(source: object, names: Sequence[str], state: Mapping[str, JsonValue]) -> None:
    """Refuse to copy a secret. No run saves one.

    Args:
        source: What is copied, for the message.
        names: Names of its tensors.
        state: Its state.

    Raises:
        UserError: If there is a secret in the names or the state.
    """
    text = json.dumps([names, dict(state)])
    if mask_secrets(text) != text:
        raise UserError(f"{source} has a password or key in its state; it is not copied")


def group_by_bytes(items: Iterable[T], count_bytes: Callable[[T], int], size: int) -> list[list[T]]:
    """Group consecutive items. Group n ends with the item whose end reaches n * `size` bytes,
    counted from the first item.

    Args:
        items: The items, in order.
        count_bytes: Returns the bytes of an item.
        size: Bytes of a group.
    """
    groups: list[list[T]] = []
    num_bytes = 0
    for item in items:
        if num_bytes >= size * len(groups):
            groups.append([])
        groups[-1].append(item)
        num_bytes += count_bytes(item)
    return groups


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor that is in host memory."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def assemble_checkpoint(
    folder: StorePath,
    step: int,
    state: Mapping[str, JsonValue],
    groups: Sequence[Sequence[TensorBox]],
    read_bytes: Callable[[FileEntry], memoryview],
) -> StorePath:
    """Write a checkpoint as `folder`/step-... with one file per group, or several if the store
    limits the size of files.

    Every file is verified before the checkpoint is committed, and nothing remains of one that
    fails.

    Args:
        folder: The folder of checkpoints.
        step: Step of the checkpoint.
        state: Run state of the checkpoint.
        groups: The boxes of each file.
        read_bytes: Returns the bytes of an entry.

    Returns:
        The path of the checkpoint.

    Raises:
        UserError: If it already exists or cannot be written.
    """
    store, checkpoint = store_of(folder), folder / format_checkpoint_name(step)
    attempt = secrets.token_hex(4)
    draft = store.make_draft_path(folder, step, attempt)
    new_folders = _list_missing_folders(folder)
    try:
        if checkpoint in list_checkpoints(folder):
            raise UserError(f"{checkpoint} already exists; remove it or give another folder")
        store.create_draft(draft)
        files = {}
        for number, group in enumerate(groups):
            for part, entries in enumerate(
                split_into_files(assign_byte_ranges(group), store.max_file_bytes)
            ):
                name = store.make_file_name(number, part, attempt)
                files[name] = write_shard_file(draft / name, entries, read_bytes)
                verify_shard_file(draft / name, files[name])
        return commit_checkpoint(draft, folder, step, state, files, attempt)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or draft}: {error.strerror}") from None
    finally:
        store.discard_draft(draft, attempt)
        with suppress(OSError):  # those of a checkpoint that was committed are not empty
            for new_folder in new_folders:
                new_folder.rmdir()


def _list_missing_folders(folder: StorePath) -> list[Path]:
    """Return the folders that are made with a local one, the innermost first."""
    if not isinstance(folder, Path):
        return []
    return [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
