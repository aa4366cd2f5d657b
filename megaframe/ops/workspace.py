"""Memory for tensors that are no longer needed when the layer that makes them returns.

On a CPU a large new tensor costs a page fault every 4 KiB, which can take twice as long as
computing its content (docs/log.md). On a GPU torch itself keeps freed memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """The workspace of one stage. Its layers run one after the other, so all of them use the same
    memory."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def allocate_rows(self, count: int, like: Tensor) -> Tensor:
        """Return an uninitialised tensor [count, columns of `like`] of the type and device of
        `like`. It is valid until the next call."""
        shape = (count, like.shape[1])
        if like.device.type != "cpu":
            return like.new_empty(shape)
        # The same memory for every layer: what an earlier call returned is overwritten.
        buffer, size = self._buffers.get(like.dtype), count * like.shape[1]
        if buffer is None or len(buffer) < size:
            # The old buffer lives on as long as a view of it does.
            buffer = self._buffers[like.dtype] = like.new_empty(size)
        return buffer[:size].view(shape)

    def clear(self) -> None:
        """Release the memory, at the end of a pass over the layers."""
        self._buffers.clear()
