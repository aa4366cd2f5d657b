"""Mesh: a layout made real in this process; the only object that holds process groups.

The groups of all axis sets are made at once, in the same order on every rank, because making a
process group is itself a collective.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megaframe.comm import Group
from megaframe.errors import UserError
from megaframe.layout import Layout

AXIS_SETS: tuple[tuple[str, ...], ...] = (
    ("data",),
    ("pipeline",),
    ("pipeline", "data"),
    ("pipeline", "data", "context", "tensor"),
)
"""The axis sets over which some part of megaframe communicates. The last is the world."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""


def world_size() -> int:
    """Ranks of this launch as told by the launcher (`torchrun`), 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def global_rank() -> int:
    """This process's rank as told by the launcher, 0 without one."""
    return int(os.environ.get("RANK", "0"))


class Mesh:
    """This rank's place in the layout, its process groups, its store and its device.

    Raises `UserError` when `device` is not there.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        device: str = "auto",
        timeout: float = 600.0,
        serial: bool = False,
        axis_sets: Sequence[tuple[str, ...]] = AXIS_SETS,
    ) -> None:
        self.layout = layout
        self.rank = global_rank()
        self.device = _device(device)
        if self.device.type == "cpu":
            _keep_freed_memory()
        self.store = self._rendezvous(timeout)
        self.coordinate = layout.coordinate(self.rank)
        self._timeout = timeout
        self._links: dict[tuple[int, int], Group] = {}
        self._groups = {
            frozenset(axes): self._make_group(axes, serial, timeout) for axes in axis_sets
        }

    def group(self, *axes: str) -> Group:
        """The group of ranks over `axes`."""
        return self._groups[frozenset(axes)]

    def connect(self, links: Iterable[tuple[int, int]]) -> None:
        """Make a group for each (from, to) pair of pipeline coordinates, one link per direction.

        All ranks of the world call it with the same links: like any group, each is made by all.
        """
        columns = self.layout.groups("pipeline")
        for source, target in sorted(set(links) - self._links.keys()):
            for column in columns:
                ranks = sorted((column[source], column[target]))
                handle = dist.new_group(ranks, timeout=timedelta(seconds=self._timeout))
                if self.rank in ranks:
                    index = ranks.index(self.rank)
                    self._links[source, target] = Group(("pipeline",), tuple(ranks), index, handle)

    def link(self, source: int, target: int) -> Group:
        """The group for what pipeline coordinate `source` sends to `target`; one end is here."""
        return self._links[source, target]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.group("pipeline", "data", "context", "tensor")

    def close(self) -> None:
        """End all process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _rendezvous(self, timeout: float) -> dist.Store:
        if self.layout.world == 1:
            return dist.HashStore()
        limit = timedelta(seconds=timeout)
        store, rank, world = next(dist.rendezvous("env://", timeout=limit))
        store.set_timeout(limit)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
        return dist.PrefixStore("megaframe", store)

    def _make_group(self, axes: tuple[str, ...], serial: bool, timeout: float) -> Group:
        mine: Group | None = None
        for ranks in self.layout.groups(*axes):
            handle = None
            if len(ranks) > 1:
                handle = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout))
            if self.rank in ranks:
                mine = Group(axes, ranks, ranks.index(self.rank), handle, serial)
        assert mine is not None, "the groups of an axis set cover the world"
        return mine


def _device(wanted: str) -> torch.device:
    """The torch device of this process; on a GPU machine one per local rank."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("run.device=cuda, but torch sees no GPU here; use run.device=cpu or auto")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= count:
        raise UserError(
            f"local rank {local} has no GPU: this machine has {count}; "
            f"start torchrun with --nproc-per-node {count} or fewer"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def _keep_freed_memory() -> None:
    """Let the C library keep up to 128 MiB of what a step frees, where it is glibc.

    By default it returns the end of the heap to the system and takes it back, page by page, in
    every step: 5 to 10% of a small model's time. Tensors over 10 MiB have pages of their own, which
    leaves no holes in the heap (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 10 << 20)
        mallopt(_TRIM_THRESHOLD, 128 << 20)
