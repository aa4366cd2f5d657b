"""Checkpoints: slices of logical tensors, saved under one layout and loaded under any other."""

from megaframe.checkpoint.folder import WHAT_IS_TAKEN, find, home_of, locate
from megaframe.checkpoint.load import Checkpoint, open_checkpoint
from megaframe.checkpoint.save import Writer
from megaframe.checkpoint.slices import Slice
from megaframe.checkpoint.stores.store import Place, place

__all__ = [
    "WHAT_IS_TAKEN",
    "Checkpoint",
    "Place",
    "Slice",
    "Writer",
    "find",
    "home_of",
    "locate",
    "open_checkpoint",
    "place",
]
