"""Checkpoints: slices of logical tensors, saved under one layout and loaded under any other."""

from megaframe.checkpoint.load import Checkpoint, find, given, open_checkpoint
from megaframe.checkpoint.save import Writer
from megaframe.checkpoint.slices import Slice

__all__ = ["Checkpoint", "Slice", "Writer", "find", "given", "open_checkpoint"]
