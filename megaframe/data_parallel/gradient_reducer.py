"""GradientReducer: how gradients travel while they are summed over a group of ranks.

The plain reducer sends them unchanged. A compressed reducer sends each part as a message to its
owner, the rank that sums it in master precision, and the sum as a message to all. For any number of
ranks this is 2 (ranks - 1) / ranks of a bucket's messages, and every rank ends with the same bits.
A rank never encodes its own part. What a message leaves out is added to the next one (error
feedback, Seide et al. 2014); for the sum, its owner keeps what was left out.

In a group that exchanges in steps (`Group.steps`), parts are summed among neighbours first and
these sums among the groups of neighbours, in as many bytes and far fewer messages. Each number is
rounded at most once per step.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.compression import GradientCodec
from megaframe.distributed.collectives import (
    Group,
    Pending,
    all_gather_,
    all_reduce,
    exchange_messages,
    get_own_part,
    reduce_scatter_,
)

Transfers = Generator[Pending[Tensor], None, None]
"""Transfers, each of which must be done before the next one is asked for."""


class GradientReducer:
    """Sums over a group in place, and sends gradients unchanged.

    Attributes:
        group: The ranks that sum.
        state: What the next sum depends on, by name: specific to this rank and layout.
    """

    def __init__(self, group: Group, buffers: BufferPool | None = None) -> None:
        """Prepare sums.

        Args:
            group: The ranks that sum.
            buffers: Lends memory for what arrives on a CPU.
        """
        self.group, self._buffers = group, buffers
        self.state: dict[str, Tensor] = {}

    def sum(self, flat: Tensor) -> Transfers:
        """Replace all of `flat` by its sum over the ranks."""
        yield all_reduce(flat, self.group)

    def sum_part(self, flat: Tensor) -> Transfers:
        """Replace this rank's part by its sum; the other parts become undefined."""
        if self._buffers is None or not self.group.should_send_pairwise(flat):
            yield reduce_scatter_(flat, self.group)
            return
        received_elements = len(flat) - len(flat) // self.group.size
        received = self._buffers.borrow_receive_buffer(received_elements, flat.dtype)
        yield reduce_scatter_(flat, self.group, received)
        # Reached when the next transfer is asked for, so this one is done.
        self._buffers.give_back(received)

    def spread(self, flat: Tensor) -> Transfers:
        """Replace every part by that of its rank."""
        yield all_gather_(flat, self.group)


class CompressedReducer(GradientReducer):
    """Sends messages of a codec."""

    def __init__(self, group: Group, codec: GradientCodec, residual: Tensor | None = None) -> None:
        """Prepare sums.

        Args:
            group: The ranks that sum.
            codec: Makes and reads messages.
            residual: Zeros, `compute_part_length` of the span for each rank; without it there is no
                error feedback.
        """
        super().__init__(group)
        self.codec, self.residual = codec, residual
        if residual is not None:
            self.state["residual"] = residual

    def sum(self, flat: Tensor) -> Transfers:
        total = yield from self._scatter(flat)
        yield from self._gather(total, flat)

    def sum_part(self, flat: Tensor) -> Transfers:
        # The owner keeps the sum unrounded: nothing is sent back, so nothing of it is left out.
        total = yield from self._scatter(flat)
        get_own_part(flat, self.group).copy_(total)
        if self.residual is not None:
            total.zero_()

    def spread(self, flat: Tensor) -> Transfers:
        yield from self._gather(get_own_part(flat, self.group), flat)

    def _scatter(self, flat: Tensor) -> Generator[Pending[Tensor], None, Tensor]:
        """Return the sum of this rank's part, padded to the length of a part."""
        rows = self._pad_rows(flat)
        # What a message leaves out has one place to be kept in, so error feedback takes one step.
        steps = self.group.steps if self.residual is None else ()
        # Neighbours first: the parts that leave the node are then already summed within it.
        for group in steps or (self.group,):
            rows = yield from self._exchange(rows.view(-1, group.size, rows.shape[-1]), group)
        return rows[0]

    def _exchange(self, rows: Tensor, group: Group) -> Generator[Pending[Tensor], None, Tensor]:
        """Sum rows [parts, ranks, part] over a group. Returns the sums that this rank gets, [parts,
        part], in the memory of its own rows."""
        own_index, codec = group.index, self.codec
        rows_of_others = [rows[:, rank] for rank in range(group.size) if rank != own_index]
        # All messages are encoded before the exchange starts, since it reads them from one buffer.
        messages = torch.stack([codec.encode(other.reshape(-1)) for other in rows_of_others])
        received = exchange_messages(messages, group)
        # Computed while the exchange is in flight; it reads `messages` only, so `rows` may change.
        for other, message in zip(rows_of_others, messages, strict=True):
            self._save_residual(other, message)
        yield received
        # A view of the own row, which is never encoded. Messages are added in master precision and
        # in the order of ranks, so the sum depends neither on arrival nor on which rank makes it.
        total = rows[:, own_index]
        parts = (
            codec.decode(message, total.numel(), total.dtype).view_as(total)
            for message in received.wait()
        )
        if own_index:
            earlier = next(parts)
            for part in islice(parts, own_index - 1):
                earlier = earlier + part
            total.add_(earlier)
        for part in parts:
            total.add_(part)
        return total

    def _gather(self, total: Tensor, flat: Tensor) -> Transfers:
        message = self.codec.encode(total)
        # The all-gather works in place: this rank's slot has its message, and the others are
        # overwritten.
        messages = message.repeat(self.group.size)
        received = all_gather_(messages, self.group)
        # What the owner's message leaves out stays with the owner and is added to its next sum.
        self._save_residual(total, message)
        yield received
        parts = flat.split(len(total))  # the last one may be shorter, and there may be fewer
        # The owner decodes its own message too, so all ranks end with the same bits.
        for part, message in zip(parts, messages.view(self.group.size, -1), strict=False):
            part.copy_(self.codec.decode(message, len(total), flat.dtype)[: len(part)])

    def _pad_rows(self, flat: Tensor) -> Tensor:
        """Return the parts [ranks, part] of a span, zero-padded, plus what was not sent before."""
        ranks = self.group.size
        if self.residual is None:
            short = ranks * compute_part_length(len(flat), ranks) - len(flat)
            return (F.pad(flat, (0, short)) if short else flat).view(ranks, -1)
        # The residual is the memory of the sum: what was not sent before plus the new gradients.
        self.residual[: len(flat)].add_(flat)
        return self.residual.view(ranks, -1)

    def _save_residual(self, row: Tensor, message: Tensor) -> None:
        """Keep what the message leaves out of `row`, but nothing that is not finite, because a
        skipped step must not pass it on."""
        # `total` is this rank's row of the residual. All of it was used, so nothing is carried
        # over.
        if self.residual is not None:
            row.sub_(self.codec.decode(message, row.numel(), row.dtype).view_as(row))
            row.nan_to_num_(0.0, 0.0, 0.0)


def compute_part_length(length: int, ranks: int) -> int:
    """Return the number of elements of each rank's part of a span."""
    return math.ceil(length / ranks)
