"""Checkpoints in object stores: their objects, and small ones to save."""

import contextlib
import itertools

import torch
from checkpoint_helpers import cut_slice, save

from megaframe.checkpoint import open_checkpoint
from megaframe.errors import UserError
from megaframe.io import remote_requests as retry

PIECE, FILE = 256, 1024
COUNT = itertools.count()


def list_names(home):
    """Return the names of all objects below a URL."""
    system, path = retry.open_filesystem(home)
    system.invalidate_cache()
    return sorted(paths.partition("/checkpoints/")[2] for paths in system.find(path))


def read_content(file):
    system, path = retry.open_filesystem(file)
    return system.cat_file(path)


def put(file, data):
    system, path = retry.open_filesystem(file)
    system.pipe_file(path, data)


def make_weight(value=1.0, size=1000):
    return torch.arange(float(size)) + value


def save_steps(home, *values, **options):
    """Save a checkpoint of two ranks for each value, at steps 1, 2, ...; return the last one."""
    for step, value in enumerate(values, 1):
        full = make_weight(value)
        ranks = [[cut_slice("a", full, ((start,), (500,)))] for start in (0, 500)]
        path = save(home, ranks, step=step, state={"value": value}, **options)
    return path


def list_named_files(home):
    for step in ("step-00000001", "step-00000002", "step-00000003", "step-00000005"):
        with contextlib.suppress(UserError), open_checkpoint(home / step) as checkpoint:
            for tensor in checkpoint.tensors.values():
                yield from (home / step / piece.file for piece in tensor.slices)
