"""Checkpoints: slices of logical tensors, saved under one layout and loaded under any other."""

from megaframe.checkpoint.folder import (
    ACCEPTED_PATHS,
    checkpoint_folder,
    find_checkpoint,
    locate_checkpoint,
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
    "checkpoint_folder",
    "find_checkpoint",
    "locate_checkpoint",
    "open_checkpoint",
    "parse_path",
]
