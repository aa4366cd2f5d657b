"""ReducerConfig: which reducer the config selects for the gradients of a bucket over a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from megaframe.config.parallel import ParallelConfig
from megaframe.data_parallel.buffers import BufferPool
from megaframe.data_parallel.compression import DEFAULT_SHARE, Bf16Codec, make_codec
from megaframe.data_parallel.gradient_reducer import (
    CompressedReducer,
    GradientReducer,
    compute_part_length,
)
from megaframe.data_parallel.powersgd import PowerSGDReducer, Views
from megaframe.distributed.collectives import Group


@dataclass(frozen=True)
class ReducerConfig:
    """How gradients travel while they are summed.

    Attributes:
        precision: Type of gradients that are not compressed.
        compress: How gradients are compressed that travel over slow links.
        share: Share of elements that topk, randomk and threshold send.
        rank: Columns of the factors of powersgd.
    """

    precision: Literal["master", "bf16"] = "master"
    compress: str = "none"
    share: float = DEFAULT_SHARE
    rank: int = 4

    @classmethod
    def from_parallel(cls, parallel: ParallelConfig, *, compress: bool) -> ReducerConfig:
        """Return the reduction that a config selects.

        Args:
            parallel: The section of the config.
            compress: False if compression is not worth it.
        """
        reducer = cls(parallel.reduce_precision, parallel.compress if compress else "none")
        keep = parallel.compress_keep
        if keep is None:
            return reducer
        if parallel.compress == "powersgd":
            return replace(reducer, rank=int(keep))
        return replace(reducer, share=keep)

    @property
    def uncompressed(self) -> bool:
        """Whether all gradients travel unchanged."""
        return self.precision == "master" and self.compress == "none"

    @property
    def fingerprint(self) -> str:
        """Text that goes into the names of residuals in checkpoints, so it must never change."""
        return (
            f"Wiring(precision={self.precision!r}, compress={self.compress!r}, "
            f"share={self.share!r}, rank={self.rank!r})"
        )

    def build(
        self,
        group: Group,
        length: int,
        dtype: torch.dtype,
        buffers: BufferPool,
        slow_views: Views | None = None,
    ) -> GradientReducer:
        """Return the reducer of spans of gradients over a group.

        Args:
            group: The ranks that sum.
            length: Elements of a span.
            dtype: Type of gradients and of residuals.
            buffers: Lends memory for residuals and for what arrives.
            slow_views: Given if the group's links are slow. Returns what a span has of each
                parameter.
        """
        if group.size == 1:
            return GradientReducer(group)
        if slow_views is None or self.compress == "none":
            if self.precision == "master":
                return GradientReducer(group, buffers)
            # No residual: bf16 has no error feedback, so it may take several steps.
            return CompressedReducer(group, Bf16Codec())
        if self.compress == "powersgd":
            residual = buffers.borrow(length, dtype).zero_()
            return PowerSGDReducer(group, residual, slow_views, self.rank)
        # One row per rank: the residual doubles as the padded send buffer.
        padded = group.size * compute_part_length(length, group.size)
        residual = buffers.borrow(padded, dtype).zero_()
        return CompressedReducer(group, make_codec(self.compress, self.share), residual)


UNCOMPRESSED = ReducerConfig()
"""All gradients travel unchanged."""
