"""Check that all ranks have loaded the same extensions."""

from __future__ import annotations

import hashlib

import torch

from megaframe.checkpoint.train_state import list_loaded_extensions
from megaframe.config import RunSection
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
    number = int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
    pair = torch.tensor([number, -number], device=mesh.device)
    largest, smallest = all_reduce(pair, mesh.world, "max").wait().tolist()
    if largest != -smallest:
        own_sources = ", ".join(
            f"{name} with SHA-256 {digest[:12]}" for name, digest in loaded.items()
        )
        raise UserError(
            f"run.extensions: ranks have loaded different sources; rank {mesh.rank} has "
            f"{own_sources or 'none'}; give all nodes the same files"
        )
