"""Checkpoints: slices of logical tensors, saved under one layout and loaded under any other."""

from megaframe.checkpoint.folder import (
    ACCEPTED_PATHS,
    find_checkpoint,
    list_latest_checkpoints,
    locate_checkpoint,
    resolve_checkpoint_folder,
)
from megaframe.checkpoint.load import Checkpoint, open_checkpoint
from megaframe.checkpoint.save import CheckpointWriter
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.stores.store import StorePath, parse_path

__all__ = [
    "ACCEPTED_PATHS",
    "Checkpoint",
    "CheckpointWriter",
    "Slice",
    "StorePath",
    "find_checkpoint",
    "list_latest_checkpoints",
    "locate_checkpoint",
    "open_checkpoint",
    "parse_path",
    "resolve_checkpoint_folder",
]
