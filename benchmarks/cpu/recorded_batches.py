"""The batches of our loader in a file, from which a peer trains on the same ones."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megaframe.config import RunConfig
from megaframe.data.loader import Loader


def write_batches(config: RunConfig, steps: int, path: Path) -> dict[str, Tensor]:
    """Write the tokens and labels of the first steps of a run on one rank, int64 [steps, batch,
    seq] each, by these names. Returns them."""
    loader = Loader(config, 0, 1)
    batches = [loader.next().microbatches for _ in range(steps)]
    loader.close()
    tensors = {
        name: torch.stack([torch.cat([getattr(m, f"{name}_BS") for m in step]) for step in batches])
        for name in ("tokens", "labels")
    }
    save_file(tensors, path)
    return tensors
