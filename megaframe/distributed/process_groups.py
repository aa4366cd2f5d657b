"""Process groups of one rank: over sets of axes, parts of an axis, links of the pipeline, and
control groups on the host.

The groups of all axis sets are made at once and in the same order on every rank, because making a
process group is itself a collective.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist

from megaframe.distributed import gloo_sockets
from megaframe.distributed.collectives import Group, Ring
from megaframe.distributed.connections import connect_link, connect_pairs, connect_ring
from megaframe.distributed.desync_check import DesyncCheck
from megaframe.distributed.fake_group import FakeGroup
from megaframe.distributed.host_staged_group import HostStagedGroup
from megaframe.distributed.nccl_communicators import NcclCommunicators
from megaframe.distributed.rank_progress import RankProgress
from megaframe.errors import LostRanks
from megaframe.layout import Layout, count_ranks_per_node, exchange_groups, exchange_steps

Ranks = tuple[int, ...]
WORLD_AXES = ("pipeline", "data", "context", "tensor")
ISLAND_AXES = ("pipeline", "data_shard", "data_replicate", "context", "tensor")


class ProcessGroups:
    """This rank's coordinate in the layout and the groups that it is in.

    Attributes:
        layout: The shape of the world.
        rank: This rank.
        device: Where the tensors of transfers are.
        progress: Records the waits of all groups.
        coordinate: This rank's coordinate on each axis.
        nccl: The communicators over NCCL; None if groups on the device use another backend.
        num_communicators: Number of process groups on the device's backend that include this rank.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: torch.device,
        nccl: NcclCommunicators | None,
        *,
        timeout: float,
        serial: bool = False,
        host_staged: bool = False,
        fake: bool = False,
    ) -> None:
        """Prepare to make groups.

        Args:
            layout: The shape of the world.
            rank: This rank.
            device: Where the tensors of transfers are.
            nccl: Makes the groups on the device; None to use torch's gloo groups.
            timeout: Seconds that a rank waits for others.
            serial: Finish every collective before its call returns.
            host_staged: Groups on the device transfer through host memory.
            fake: Groups pretend that all ranks do the same as this one.
        """
        self.layout, self.rank, self.device = layout, rank, device
        self.nccl = nccl
        self.progress = RankProgress()
        self.coordinate = layout.get_full_coordinate(rank)
        self.num_communicators = 0
        self._timeout, self._serial = timeout, serial
        self._host_staged, self._fake = host_staged, fake
        self._desync_check: DesyncCheck | None = None
        self._groups: dict[frozenset[str], Group] = {}
        self._members: dict[frozenset[str], Sequence[Ranks]] = {}
        self._handles: dict[Ranks, dist.ProcessGroup | None] = {}
        self._links: dict[tuple[int, int], Group] = {}
        self._counted: list[tuple[str, Group]] = []

    def group(self, *axes: str) -> Group:
        """Return this rank's group over `axes`."""
        return self._groups[self._make_key(axes)]

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.group(*WORLD_AXES)

    @property
    def island(self) -> Group:
        """All ranks of this rank's island."""
        return self.group(*ISLAND_AXES)

    def _make_key(self, axes: Iterable[str]) -> frozenset[str]:
        """Return the key of the group over `axes`, the same for axis sets that give the same ranks:
        `data_shard` without replicas and islands is `data`, with `data_replicate` it is so without
        islands, and `context` with one rank is left out."""
        names = set(axes)
        if self.layout.islands == 1:
            copies = {"data_replicate"} if self.layout.data_replicate > 1 else set()
            if names >= {"data_shard"} | copies:
                names = names - {"data_shard", "data_replicate"} | {"data"}
        return frozenset(names) - (set() if self.layout.context > 1 else {"context"})

    def add_groups(self, axis_sets: Iterable[tuple[str, ...]]) -> None:
        """Make the groups over these axis sets that do not exist yet. All ranks of the world must
        call this."""
        for axes in axis_sets:
            if self._make_key(axes) not in self._groups:
                self._add_group(axes, self.layout.list_groups(*axes))

    def count_exchanges_of_runs(self, axis: str) -> None:
        """Count what this rank, alone on an axis, exchanges with other runs."""
        self._counted.append((axis, self.group(axis)))

    def _add_group(self, axes: tuple[str, ...], members: Sequence[Ranks]) -> None:
        key = self._make_key(axes)
        self._groups[key] = self._make_group(axes, members, shared=True)
        self._members[key] = members

    def find_indices(self, ranks: Iterable[int], *axes: str) -> list[int]:
        """Return the index of each of `ranks` in its own group over `axes`."""
        groups = self._members[self._make_key(axes)]
        index_of = {rank: index for members in groups for index, rank in enumerate(members)}
        return [index_of[rank] for rank in ranks]

    # ------------------------------------------------------------------ parts of an axis

    def divide_experts(self, neighbours: int) -> tuple[Group, Group]:
        """Make two groups on the expert axis: one of this rank and its neighbours, and one of the
        ranks with the same index among their own neighbours. All ranks of the world must call this.

        Args:
            neighbours: The number of ranks of the first group.
        """
        rows = self.layout.list_groups("expert")
        starts = range(0, self.layout.expert, neighbours)
        near = [row[start : start + neighbours] for row in rows for start in starts]
        far = [row[offset::neighbours] for row in rows for offset in range(neighbours)]
        groups = self._make_group(("expert",), near), self._make_group(("expert",), far)
        for group in (self.group("expert"), *groups):
            connect_pairs(group, self.device)
        return groups

    def divide_context(self, neighbours: int) -> tuple[Group, Ring]:
        """Make groups of `neighbours` ranks on the context axis, and rings of the ranks with the
        same index among their neighbours. All ranks of the world must call this.

        Returns:
            This rank's group and ring.
        """
        rows = self.layout.list_groups("context")
        starts = range(0, self.layout.context, neighbours)
        near = [row[start : start + neighbours] for row in rows for start in starts]
        group = self._make_group(("context",), near)
        connect_pairs(group, self.device)
        size, index = self.layout.context // neighbours, self.coordinate["context"] // neighbours
        if size == 1:
            return group, Ring()
        rings = [row[offset::neighbours] for row in rows for offset in range(neighbours)]
        ring = Ring(index, size, self._make_group(("context",), rings))
        connect_ring(ring, self.device)
        return group, ring

    def add_tensor_copies_group(self, copies: int) -> None:
        """Make the group over ("data_shard", "context", "tensor_copies"): `copies` neighbours on
        the tensor axis, which hold the same piece of a parameter, and the ranks along data_shard
        and context with the same tensor indices. All ranks of the world must call this."""
        members = [
            tuple(r for r in ranks if self.layout.get_coordinate(r)["tensor"] // copies == part)
            for ranks in self.layout.list_groups("data_shard", "context", "tensor")
            for part in range(self.layout.tensor // copies)
        ]
        self._add_group(("data_shard", "context", "tensor_copies"), members)

    def divide_group(self, axes: tuple[str, ...], size: int) -> Group:
        """Make groups of those ranks of the groups over `axes` that are in the same part of the
        world, which is cut into parts of `size` consecutive ranks. All ranks of the world must call
        this for groups that exist."""
        members: list[Ranks] = []
        for ranks in self._members[self._make_key(axes)]:
            parts: dict[int, list[int]] = {}
            for rank in ranks:
                parts.setdefault(rank // size, []).append(rank)
            members += map(tuple, parts.values())
        return self._make_group(axes, members, shared=True)

    def divide_exchanges(self, axis_sets: Iterable[tuple[str, ...]], node_size: int) -> None:
        """Let the groups over these axis sets exchange in steps (`Group.steps`), if they have so
        many ranks, or ranks in several nodes of `node_size`, that `exchange_steps` divides them.
        All ranks of the world must call this."""
        for axes in axis_sets:
            key = self._make_key(axes)
            rows, group = self._members[key], self._groups[key]
            inside = count_ranks_per_node(rows, node_size)
            sizes = [size for size in exchange_steps(group.size, inside) if size > 1]
            if group.steps or len(sizes) < 2:
                continue
            # For each row of ranks, the groups of every step; then for each step, the groups of all
            # rows, because all ranks make a process group together.
            by_row = [exchange_groups(row, sizes) for row in rows]
            by_step = ([*chain.from_iterable(of)] for of in zip(*by_row, strict=True))
            steps = tuple(self._make_group(axes, members) for members in by_step)
            self._groups[key] = replace(group, steps=steps)

    # ------------------------------------------------------------------ links of the pipeline

    def connect(self, links: Iterable[tuple[int, int]]) -> None:
        """Make a link for each (from, to) pair of pipeline coordinates, one per direction, and
        connect it.

        All ranks of the world must call this with the same links. They make and connect them in the
        same order, because in either a rank waits for others.
        """
        columns = self.layout.list_groups("pipeline")
        own_index = self.coordinate["pipeline"]
        # Sorted: making and connecting a link waits for others, so all ranks go through them in one
        # order.
        for source, target in sorted(set(links)):
            low, high = sorted((source, target))
            pairs = [(column[low], column[high]) for column in columns]
            link = self._make_group(("pipeline",), pairs, link=True)
            if own_index in (source, target):
                self._links[source, target] = link
                connect_link(link, self.device, sends=own_index == source)

    def link(self, source: int, target: int) -> Group:
        """Return the link from pipeline coordinate `source` to `target`, one of which must be this
        rank's own."""
        return self._links[source, target]

    @property
    def links(self) -> Mapping[tuple[int, int], Group]:
        """The links of this rank that `connect` made, by (from, to)."""
        return self._links

    # ------------------------------------------------------------------ control groups

    def make_control_group(self, *, watched: bool = False) -> Group:
        """Make a new group of all ranks over separate connections between hosts, for small values.
        Its bytes are not counted. All ranks of the world must call this.

        Args:
            watched: Whether the thread that trains waits in it, as the watchdog then sees; else it
                is for work in parallel with training.
        """
        (ranks,) = self.layout.list_groups(*WORLD_AXES)
        handle = self._make_handle(ranks, "gloo") if len(ranks) > 1 else None
        progress = self.progress if watched else RankProgress()
        return Group(WORLD_AXES, ranks, self.rank, handle, progress=progress, control=True)

    # ------------------------------------------------------------------ making groups

    def _make_group(
        self,
        axes: tuple[str, ...],
        members: Sequence[Ranks],
        *,
        shared: bool = False,
        link: bool = False,
        backend: str | None = None,
        label: str | None = None,
    ) -> Group:
        """Make a process group for each tuple of ranks in `members`, which must be the same on all
        ranks.

        Args:
            axes: The axes, for messages and for counting bytes.
            members: The ranks of each group.
            shared: Reuse a group that was made before for the same ranks.
            link: The groups are pipeline links.
            backend: Use this backend instead of the device's, for control.
            label: Count bytes and waits under this label instead of the axes.

        Returns:
            The group with this rank, or a group of this rank alone if there is none.
        """
        new_members = [r for r in members if len(r) > 1 and not (shared and r in self._handles)]
        handles = self._make_handles(new_members, backend, "+".join(axes), link=link)
        if shared:
            self._handles.update(handles)
        # Stays as it is if no group has this rank.
        own_group = Group(axes, (self.rank,), 0, None, progress=self.progress)
        for ranks in members:
            if self.rank in ranks:
                handle = handles.get(ranks) or (self._handles.get(ranks) if shared else None)
                own_group = Group(
                    axes,
                    ranks,
                    ranks.index(self.rank),
                    handle,
                    self._serial,
                    progress=self.progress,
                    desync_check=self._desync_check,
                    host_staged=isinstance(handle, HostStagedGroup),
                    control=backend is not None,
                )
        # Counted on all ranks or on none, so that every rank reports the same axes.
        if any(len(ranks) > 1 for ranks in members):
            self._counted.append((label or self._format_traffic_label(axes), own_group))
        return own_group

    def _make_handles(
        self, members: Sequence[Ranks], backend: str | None, name: str, *, link: bool = False
    ) -> dict[Ranks, dist.ProcessGroup | None]:
        """Make a process group for each tuple of ranks, of which no two have a rank in common.

        Args:
            members: The ranks of each group.
            backend: As in `_make_group`.
            name: For NCCL's flight recorder.
            link: As in `_make_group`.
        """
        self.num_communicators += backend is None and any(self.rank in ranks for ranks in members)
        if self.nccl is None or backend is not None or link:
            return {ranks: self._make_handle(ranks, backend) for ranks in members}
        with self._report_missing_ranks():
            own_handle = self.nccl.split(members, name)
        return {ranks: own_handle if self.rank in ranks else None for ranks in members}

    def _make_handle(self, ranks: Ranks, backend: str | None) -> dist.ProcessGroup | None:
        """Make a process group, or return None if this rank is not in it. Fake groups are made only
        with this rank."""
        if self._fake:
            return FakeGroup(ranks.index(self.rank), len(ranks)) if self.rank in ranks else None
        connects_lazily = nullcontext() if backend is None else gloo_sockets.connect_lazily()
        with self._report_missing_ranks(), connects_lazily:
            if self.nccl is not None and backend is None:
                return self.nccl.make_link(self.rank, ranks)
            limit = timedelta(seconds=self._timeout)
            handle = dist.new_group(ranks, timeout=limit, backend=backend)
        if self.rank not in ranks:
            return None  # torch returns a number
        return HostStagedGroup(handle) if self._host_staged and not backend else handle

    @contextmanager
    def _report_missing_ranks(self) -> Iterator[None]:
        """Turn the error that torch raises when ranks do not join a new group into `LostRanks`."""
        try:
            yield
        except RuntimeError as error:
            other_ranks = set(range(self.layout.world)) - {self.rank}
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise LostRanks(
                f"the {self.layout.world} ranks did not all meet at {address} within "
                f"parallel.timeout={self._timeout:g} s: {str(error).splitlines()[0]}",
                other_ranks,
            ) from error

    def _format_traffic_label(self, axes: tuple[str, ...]) -> str:
        """Return the label under which traffic is counted: the axes with more than one rank, or
        `world` for the groups of all ranks and of all ranks of an island."""
        names, sizes = self._make_key(axes), self.layout.sizes
        if names in (self._make_key(WORLD_AXES), self._make_key(ISLAND_AXES)):
            return "world"
        return "+".join(sorted(name for name in names if sizes.get(name, 2) > 1))
