"""Checks that all ranks have loaded the same extensions, and have listed the same files."""

from __future__ import annotations

import hashlib

import torch

from megaframe.checkpoint.train_state import list_loaded_extensions
from megaframe.config import RunSection
from megaframe.data.loader import Loader
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError


def check_same_extensions(run: RunSection, mesh: Mesh) -> None:
    """Raise `UserError` on all ranks if the sources of extensions differ between ranks. All ranks
    call it."""
    if not run.extensions:
        return
    loaded = list_loaded_extensions()
    text = "".join(f"{name} {digest}\n" for name, digest in loaded.items())
    if not _is_same(text, mesh):
        own_sources = ", ".join(
            f"{name} with SHA-256 {digest[:12]}" for name, digest in loaded.items()
        )
        raise UserError(
            f"run.extensions: ranks have loaded different sources; rank {mesh.rank} has "
            f"{own_sources or 'none'}; give all nodes the same files"
        )


def check_same_streams(loader: Loader, mesh: Mesh) -> None:
    """Raise `UserError` on all ranks if a source that is read as a stream has other files on some
    of them: files that were added while the ranks listed them. All ranks call it."""
    digests = loader.stream_digests
    if digests and not _is_same(repr(digests), mesh):
        own = ", ".join(f"{path} {digest[:12]}" for path, digest in digests.items())
        raise UserError(
            "data.sources: ranks have found different files, sizes or keys of reading below "
            f"{', '.join(digests)}; rank {mesh.rank} has {own}; start again when nothing is added "
            "to them any more, or name the files (data.sources, files)"
        )


def _is_same(text: str, mesh: Mesh) -> bool:
    number = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    pair = torch.tensor([number, -number], device=mesh.device)
    largest, smallest = all_reduce(pair, mesh.world, "max").wait().tolist()
    return bool(largest == -smallest)
