"""Checkpoints: slices of logical tensors, saved under one layout and loaded under any other."""

from megaframe.checkpoint.load import Checkpoint, find, given, locate, open_checkpoint
from megaframe.checkpoint.save import Writer
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.storage import Place, place

__all__ = [
    "Checkpoint",
    "Place",
    "Slice",
    "Writer",
    "find",
    "given",
    "locate",
    "open_checkpoint",
    "place",
]
