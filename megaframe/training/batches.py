"""Batches: the loader's steps, each with its number of valid tokens over all ranks of an island, or
the sum of the weights of their labels.

All gradients of a step are divided by that number, so it must be known when the step begins. It is
known with the batch: without masks every token of an island's share of the global batch is valid,
and with masks the
ranks sum the count of the next step while one runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megaframe.data.loader import Loader, StepBatch
from megaframe.distributed.collectives import Group, Pending, all_reduce


class Batches:
    """Takes steps from a loader and sums their valid tokens over the data ranks.

    Args:
        loader: That of this data rank.
        data: The data ranks of the island, over a group on the host, so that nothing waits for the
            device.
        masked: Whether some tokens may have no label, so that ranks must count them.
        islands: Number of islands, which divide the samples of a batch.
    """

    def __init__(self, loader: Loader, data: Group, *, masked: bool, islands: int = 1) -> None:
        self._loader, self._data, self._masked, self._islands = loader, data, masked, islands
        self._ahead: tuple[StepBatch, Pending[Tensor]] | None = None
        """The step that was looked at, and the sum of its valid tokens."""

    def take_next(self, is_left_out: Callable[[StepBatch], bool]) -> tuple[StepBatch, float]:
        """Return the next step that is not left out, and its valid tokens over all ranks. Waits for
        other ranks only if it was not looked at before: at the start, after a way back, and after
        data that is left out."""
        progress = self._data.progress
        progress.begin_part("data", None, "data")
        batch = self._loader.next()
        while is_left_out(batch):
            batch = self._loader.next()
        progress.begin_part("counting tokens", None)
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            ahead = batch, self._sum(batch)
        # Also waited for where it turns out to be of another step: no transfer is forgotten.
        valid = ahead[1].wait()
        if ahead[0] is not batch:
            valid = self._sum(batch).wait()
        return batch, float(valid)

    def look_ahead(self) -> None:
        """Read the step that `take_next` will look at first, and start to sum its valid tokens. All
        ranks call this at the same steps."""
        self._data.progress.begin_part("data", None, "data")
        try:
            batch = self._loader.peek()
        except Exception:
            return  # `take_next` raises it again, when the step is due
        self._ahead = batch, self._sum(batch)

    def _sum(self, batch: StepBatch) -> Pending[Tensor]:
        if not self._masked:
            samples = batch.samples // self._islands
            tokens = samples * batch.microbatches[0].tokens_BS.shape[1]
            return Pending(torch.tensor(tokens, dtype=torch.float64))
        # Gloo's ring takes 2 (ranks - 1) messages, one after the other (gloo/allreduce.cc).
        return all_reduce(torch.tensor(batch.valid, dtype=torch.float64), self._data)
