"""Commits a checkpoint: its manifest, its name, and last the pointer."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from pydantic import JsonValue

from megaframe.checkpoint.folder import move_pointer
from megaframe.checkpoint.manifest import (
    Manifest,
    SavedFile,
    SavedTensor,
    encode_manifest,
    merge_tensors,
)
from megaframe.checkpoint.shard_reader import ShardReader
from megaframe.checkpoint.stores.store import StorePath, store_of

_HEADER_THREADS = 16
"""Number of files whose headers rank 0 reads at the same time."""


def commit_checkpoint(
    draft: StorePath,
    root: StorePath,
    step: int,
    state: Mapping[str, JsonValue],
    files: Mapping[str, SavedFile],
    attempt: str,
) -> StorePath:
    """Make the files of a draft the newest checkpoint of `root`: write the manifest, publish the
    draft, and last move the pointer.

    Args:
        draft: Folder with the files.
        root: The folder of checkpoints.
        step: The step of the checkpoint.
        state: The state of the run, as JSON values.
        files: By name, the size and the header's checksum of each file.
        attempt: Id of the save.

    Returns:
        The path of the checkpoint.

    Raises:
        OSError: If something cannot be written.
    """

    def read_tensors(name: str) -> dict[str, SavedTensor]:
        with ShardReader(draft / name, files[name]) as reader:
            return reader.read_tensors()

    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        tensors_per_file = list(pool.map(read_tensors, files))
    manifest = Manifest(
        step=step, state=dict(state), files=dict(files), tensors=merge_tensors(tensors_per_file)
    )
    checkpoint = store_of(root).publish(
        draft, step, attempt, encode_manifest(manifest), files.keys()
    )
    move_pointer(root, checkpoint.name, attempt)
    return checkpoint
