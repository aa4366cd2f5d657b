"""Scratch: memory for what is gone when the layer that makes it returns.

On a CPU a large new tensor costs a page fault every 4 KiB, twice what computing it may take
(docs/log.md); on a GPU torch keeps freed memory itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Of one stage, whose layers run one after the other: in a pass each takes the same memory."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}

    def rows(self, count: int, like: Tensor) -> Tensor:
        """[count, columns of `like`] of its type and device, with anything in it, until the next
        call."""
        shape = (count, like.shape[1])
        if like.device.type != "cpu":
            return like.new_empty(shape)
        kept, size = self._kept.get(like.dtype), count * like.shape[1]
        if kept is None or len(kept) < size:
            kept = self._kept[like.dtype] = like.new_empty(size)
        return kept[:size].view(shape)

    def clear(self) -> None:
        """Let the memory go: a pass over the layers is over."""
        self._kept.clear()
