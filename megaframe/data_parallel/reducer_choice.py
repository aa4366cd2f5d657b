"""Wiring: which wire the config selects for the gradients of a bucket over a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from megaframe.config.parallel import ParallelConfig
from megaframe.data_parallel.buffers import Buffers
from megaframe.data_parallel.compression import Half, Int8, TopK
from megaframe.data_parallel.gradient_reducer import CodedWire, Wire, part_length
from megaframe.data_parallel.powersgd import PowerWire, Views
from megaframe.distributed.collectives import Group


@dataclass(frozen=True)
class Wiring:
    """precision: of gradients that are not compressed. compress: how gradients are compressed that
    travel over slow links. share: for topk. rank: for powersgd."""

    precision: Literal["master", "bf16"] = "master"
    compress: Literal["none", "int8", "topk", "powersgd"] = "none"
    share: float = 0.01
    rank: int = 4

    @classmethod
    def of(cls, parallel: ParallelConfig, *, compress: bool) -> Wiring:
        """Return the wiring of a config. compress: False if compression is not worth it."""
        made = cls(parallel.reduce_precision, parallel.compress if compress else "none")
        keep = parallel.compress_keep
        if keep is None:
            return made
        if parallel.compress == "powersgd":
            return replace(made, rank=int(keep))
        return replace(made, share=keep)

    @property
    def plain(self) -> bool:
        """Whether all gradients travel unchanged."""
        return self.precision == "master" and self.compress == "none"

    def wire(
        self,
        group: Group,
        length: int,
        dtype: torch.dtype,
        buffers: Buffers,
        slow: Views | None = None,
    ) -> Wire:
        """Return the wire over the group for spans of `length` elements. slow: given if the group's
        links are slow; returns what a span has of each parameter."""
        if group.size == 1:
            return Wire(group)
        if slow is None or self.compress == "none":
            plain = self.precision == "master"
            return Wire(group, buffers) if plain else CodedWire(group, Half())
        if self.compress == "powersgd":
            return PowerWire(group, buffers.take(length, dtype).zero_(), slow, self.rank)
        residual = buffers.take(group.size * part_length(length, group.size), dtype).zero_()
        codec = Int8() if self.compress == "int8" else TopK(self.share)
        return CodedWire(group, codec, residual)


PLAIN = Wiring()
"""All gradients travel unchanged."""
