"""Mesh: a layout realised in this process; the only object that holds process groups.

The groups of all axis sets are made at once and in the same order on every rank, because making a
process group is itself a collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from megaframe.distributed import gloo_sockets, open_files
from megaframe.distributed.collectives import Group, Ring, Waits
from megaframe.distributed.desync_check import Order
from megaframe.distributed.device import (
    device_of,
    finish_before_others,
    launched,
    tune_host_allocator,
)
from megaframe.distributed.device_time import Mark
from megaframe.distributed.fake_group import Alike
from megaframe.distributed.flight_recorder import forget_flights, write_flight_record
from megaframe.distributed.graph_capture import Recording, recording
from megaframe.distributed.host_staged_group import Ferry
from megaframe.distributed.nccl_communicators import Communicators, abortable
from megaframe.distributed.nccl_settings import (
    Settings,
    allocate,
    connect_link,
    connect_pairs,
    connect_ring,
)
from megaframe.distributed.rank_progress import Place
from megaframe.distributed.rendezvous import agent_has_store, fresh_store, launcher_store
from megaframe.distributed.watchdog import Watch
from megaframe.errors import LostRanks
from megaframe.layout import (
    AXIS_SETS,
    Layout,
    exchange_groups,
    exchange_steps,
    ranks_per_node,
)

Ranks = tuple[int, ...]
_WATCHED = 60.0
"""Seconds by which NCCL's timeout exceeds ours, so that the watch reports who is at fault before
NCCL ends the process without a message."""


def world_size() -> int:
    """Return the number of ranks of this launch as given by the launcher (`torchrun`), 1 without a
    launcher."""
    return launched("WORLD_SIZE", 1, least=1)


def ranks_on_this_node() -> int:
    """Return the number of ranks that the launcher has started on this machine; the world size if
    it does not say."""
    return launched("LOCAL_WORLD_SIZE", world_size(), least=1)


def global_rank() -> int:
    """Return this process's rank as given by the launcher, 0 without a launcher."""
    return launched("RANK", 0)


class Mesh:
    """This rank's coordinate in the layout, its process groups, its store and its device.

    device: see `device_of`.
    timeout: seconds that a rank waits for others.
    serial: finish every collective before its call returns.
    check_collectives: compare what the ranks start (`distributed/desync_check.py`).
    nccl: what is set for groups over NCCL.
    axis_sets: the sets of axes to make groups for.
    alone: run as this rank without any other, with groups that pretend that all ranks do the same
    (`distributed/fake_group.py`) and tensors without content.
    Raises `UserError` if `device` is not available or the system allows too few open files, and
    `LostRanks` if not all ranks join in time.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        device: str = "auto",
        timeout: float = 600.0,
        serial: bool = False,
        check_collectives: bool = False,
        nccl: Settings | None = None,
        axis_sets: Sequence[tuple[str, ...]] = AXIS_SETS,
        alone: int | None = None,
    ) -> None:
        self.layout = layout
        self.rank = global_rank() if alone is None else alone
        self.device = device_of(device) if alone is None else torch.device("meta")
        self._alone, self._ferried = alone is not None, device == "shared"
        over_nccl = self.device.type == "cuda" and not self._ferried
        self.nccl = (nccl or Settings()) if over_nccl else None
        """What is set for NCCL; None if groups on the device use another backend."""
        self._over_nccl = Communicators(self.device) if over_nccl else None
        if self.device.type == "cpu":
            tune_host_allocator()
            finish_before_others()
        self.coordinate = layout.place(self.rank)
        self._timeout, self._serial = timeout, serial
        self.store: dist.Store = dist.HashStore()
        self.place = Place()
        """What this rank is doing (see `Place`)."""
        self._order: Order | None = None
        self._watch: Watch | None = None
        self._rank_of: tuple[int, ...] = ()
        self._links: dict[tuple[int, int], Group] = {}
        if layout.world > 1 and not self._alone:
            self._make_room(axis_sets, 2 + check_collectives)
            with self._gathering():
                self.store = self._rendezvous()
        if check_collectives:
            self._order = Order(self.store, self.rank, self.place)
        self._groups: dict[frozenset[str], Group] = {}
        self._members: dict[frozenset[str], Sequence[tuple[int, ...]]] = {}
        self._handles: dict[Ranks, dist.ProcessGroup | None] = {}
        self._counted: list[tuple[str, Group]] = []
        self.communicators = 0
        """Number of process groups on the device's backend that include this rank."""
        self.before_close: list[Callable[[], object]] = []
        """Functions that `close` calls before it ends the groups."""
        self.add_groups(axis_sets)
        self.aside = self._make_group(("data",), layout.groups("data"), backend="gloo")
        """The data ranks, over separate connections on the host, for small values that must not
        queue behind large transfers."""
        if layout.world > 1 and not self._alone:
            self._watch = self._watching()
            if over_nccl:
                self.place.mark = partial(_timed_event, torch.cuda.current_stream(self.device))

    def _watching(self) -> Watch:
        watch = Watch(self.store, self.layout, self.rank, self._timeout, self.place, self.cut)
        if self._over_nccl is not None:
            self.place.usable = self._over_nccl.usable
            watch.error = self._over_nccl.error
            watch.record = lambda folder: write_flight_record(folder, self.rank)
        return watch

    def cut(self) -> str:
        """End every wait of this rank for others. Returns why this process cannot go on with its
        device, empty if it can."""
        self.place.ended = True  # before: from now on, a wait that returns may have brought nothing
        gloo_sockets.cut()
        return self._over_nccl.abort() if self._over_nccl is not None else ""

    def group(self, *axes: str) -> Group:
        """Return this rank's group over `axes`."""
        return self._groups[self._key(axes)]

    def _key(self, axes: Iterable[str]) -> frozenset[str]:
        """Return the key of the group over `axes`, the same for axis sets that give the same ranks:
        `data_shard` without replicas is `data`, and `context` with one rank is left out."""
        names = {"data" if self._whole(axis) else axis for axis in axes}
        return frozenset(names) - (set() if self.layout.context > 1 else {"context"})

    def _whole(self, axis: str) -> bool:
        return axis == "data_shard" and self.layout.data_replicate == 1

    def add_groups(self, axis_sets: Iterable[tuple[str, ...]]) -> None:
        """Make the groups over these axis sets that do not exist yet. All ranks of the world must
        call this."""
        for axes in axis_sets:
            if self._key(axes) not in self._groups:
                self._add_group(axes, self.layout.groups(*axes))

    def _add_group(self, axes: tuple[str, ...], members: Sequence[tuple[int, ...]]) -> None:
        key = self._key(axes)
        self._groups[key] = self._make_group(axes, members, shared=True)
        self._members[key] = members

    def indices(self, ranks: Iterable[int], *axes: str) -> list[int]:
        """Return the index of each of `ranks` in its own group over `axes`."""
        every = self._members[self._key(axes)]
        found = {rank: index for members in every for index, rank in enumerate(members)}
        return [found[rank] for rank in ranks]

    def divide_experts(self, neighbours: int) -> tuple[Group, Group]:
        """Make two groups on the expert axis: one of this rank and its neighbours, with
        `neighbours` ranks, and one of the ranks with the same index among their own neighbours. All
        ranks of the world must call this."""
        rows = self.layout.groups("expert")
        starts = range(0, self.layout.expert, neighbours)
        near = [row[start : start + neighbours] for row in rows for start in starts]
        far = [row[place::neighbours] for row in rows for place in range(neighbours)]
        groups = self._make_group(("expert",), near), self._make_group(("expert",), far)
        for group in (self.group("expert"), *groups):
            connect_pairs(group, self.device)
        return groups

    def share(self, copies: int) -> None:
        """Make the group over ("data_shard", "context", "tensor_copies"): `copies` neighbours on
        the tensor axis, which hold the same piece of a parameter, and the ranks along data_shard
        and context with the same tensor indices. All ranks of the world must call this."""
        alike = [
            tuple(r for r in ranks if self.layout.coordinate(r)["tensor"] // copies == part)
            for ranks in self.layout.groups("data_shard", "context", "tensor")
            for part in range(self.layout.tensor // copies)
        ]
        self._add_group(("data_shard", "context", "tensor_copies"), alike)

    def divide_exchanges(self, axis_sets: Iterable[tuple[str, ...]], node_size: int) -> None:
        """Let the groups over these axis sets exchange in steps (`Group.steps`), if they have so
        many ranks, or ranks in several nodes of `node_size`, that `exchange_steps` divides them.
        All ranks of the world must call this."""
        for axes in axis_sets:
            key = self._key(axes)
            rows, group = self._members[key], self._groups[key]
            inside = ranks_per_node(rows, node_size)
            sizes = [size for size in exchange_steps(group.size, inside) if size > 1]
            if group.steps or len(sizes) < 2:
                continue
            by_row = [exchange_groups(row, sizes) for row in rows]
            by_step = ([*chain.from_iterable(of)] for of in zip(*by_row, strict=True))
            steps = tuple(self._make_group(axes, members) for members in by_step)
            self._groups[key] = replace(group, steps=steps)

    def divide_context(self, neighbours: int) -> tuple[Group, Ring]:
        """Make groups of `neighbours` ranks on the context axis, and rings of the ranks with the
        same index among their neighbours. Returns this rank's group and ring. All ranks of the
        world must call this."""
        rows = self.layout.groups("context")
        group = self._make_group(
            ("context",),
            [row[i : i + neighbours] for row in rows for i in range(0, len(row), neighbours)],
        )
        connect_pairs(group, self.device)
        size, here = self.layout.context // neighbours, self.coordinate["context"] // neighbours
        if size == 1:
            return group, Ring()
        rings = [row[i::neighbours] for row in rows for i in range(neighbours)]
        ring = Ring(here, size, self._make_group(("context",), rings))
        connect_ring(ring, self.device)
        return group, ring

    def connect(self, links: Iterable[tuple[int, int]]) -> None:
        """Make a link for each (from, to) pair of pipeline coordinates, one per direction, and
        connect it.

        All ranks of the world must call this with the same links. They make and connect them in the
        same order, because in either a rank waits for others.
        """
        columns = self.layout.groups("pipeline")
        here = self.coordinate["pipeline"]
        for source, target in sorted(set(links)):
            low, high = sorted((source, target))
            pairs = [(column[low], column[high]) for column in columns]
            made = self._make_group(("pipeline",), pairs, link=True)
            if here in (source, target):
                self._links[source, target] = made
                connect_link(made, self.device, sends=here == source)

    def link(self, source: int, target: int) -> Group:
        """Return the link from pipeline coordinate `source` to `target`, one of which must be this
        rank's own."""
        return self._links[source, target]

    def allocate(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros [length] for what the ranks that share parameters divide and sum."""
        group = self.group("data_shard", "context")
        return allocate(length, dtype, self.device, group, self.nccl)

    @property
    def world(self) -> Group:
        """All ranks."""
        return self.group("pipeline", "data", "context", "tensor")

    def take_traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has handed to collectives and links since the last call,
        by axes. Every rank has the same axes."""
        found: dict[str, int] = {}
        for label, group in self._counted:
            found[label] = found.get(label, 0) + group.traffic.take()[0]
        return found

    def beside(self) -> Group:
        """Make a new group of all ranks over separate connections between hosts, for work in
        parallel with training. Its bytes are not counted. All ranks of the world must call this."""
        axes = ("pipeline", "data", "context", "tensor")
        (ranks,) = self.layout.groups(*axes)
        handle = self._new_handle(ranks, "gloo") if len(ranks) > 1 else None
        return Group(axes, ranks, self.rank, handle, control=True)

    def recording(self, name: str) -> AbstractContextManager[Recording]:
        """Return a context that records the transfers started in it over the groups, for
        `Recording.run` to report when the recorded work runs."""
        return recording(name, self.place, [group.traffic for _, group in self._counted])

    @property
    def counted_axes(self) -> list[str]:
        """The keys of `take_traffic`."""
        return sorted({label for label, _ in self._counted})

    @property
    def links(self) -> Mapping[tuple[int, int], Group]:
        """The links of this rank that `connect` made, by (from, to)."""
        return self._links

    def charge(
        self, waits: Callable[[str], Waits], messages: Callable[[tuple[int, int]], Waits]
    ) -> None:
        """Charge all later waits: for collectives to `waits(axes)`, and for messages over a
        pipeline link to `messages((from, to))`."""
        for label, group in self._counted:
            group.traffic.waits = group.traffic.messages = waits(label)
        for ends, link in self._links.items():
            link.traffic.messages = messages(ends)

    def name_stages(self, rank_of: Sequence[int]) -> None:
        """Set the pipeline coordinate of each stage, by stage number, for messages about lost
        ranks."""
        self._rank_of = tuple(rank_of)
        if self._watch is not None:
            self._watch.rank_of = self._rank_of

    def watch_steps(self, limit: float, folder: Path) -> None:
        """From now on, end the run if the activity recorded in `place` takes more than `limit`
        seconds on any rank (0: no limit), and write stacks into `folder`. All ranks must call
        this."""
        if limit and self._watch is None:
            self._watch = self._watching()
        if self._watch is not None:
            self._watch.rank_of = self._rank_of
            self._watch.limit, self._watch.folder = limit, folder

    def may_begin_again(self, asked: Callable[[], bool]) -> None:
        """Allow an in-process restart if only a transfer has failed and `asked` then returns true.
        This has no effect if ranks share a GPU, or if torch ends the process when a communicator
        fails (see `allow_abort`): then the ranks leave."""
        able = self.device.type == "cpu" if self._over_nccl is None else abortable()
        if self._watch is not None and able:
            self._watch.may_begin_again = asked

    def at_leave(self, call: Callable[[], object]) -> None:
        """Have `call` called before this process ends because ranks were lost."""
        if self._watch is not None:
            self._watch.at_end = call

    def leave(self, lost: LostRanks) -> str:
        """Report which rank is at fault and end this process, or, if the ranks restart in their
        processes, return what happened. See `Watch.leave`."""
        if self._watch is None:
            raise lost
        return self._watch.leave(lost)

    @property
    def ends_with_others(self) -> bool:
        """Whether `close` needs the other ranks, as it does with NCCL."""
        return self.nccl is not None and self.layout.world > 1

    def close(self) -> None:
        """Stop the watch and end all process groups."""
        for call in self.before_close:
            call()
        self.before_close.clear()
        if self._watch is not None:
            self._watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.place.ended and self._over_nccl is not None:
            forget_flights()

    def _rendezvous(self) -> dist.Store:
        limit = timedelta(seconds=self._timeout)
        # The launcher may have started more ranks than the layout uses (`faults.elastic`).
        store, rank, world = launcher_store(self.rank, self.layout.world, self._timeout)
        store = fresh_store(store, rank, world, self._timeout)
        if self.nccl is not None:
            self.nccl.start(store, rank, world, self.device, self._timeout + _WATCHED)
        else:
            with gloo_sockets.made_lazily():  # nothing is sent over this group
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=world, timeout=limit
                )
        return dist.PrefixStore("megaframe", store)

    def _make_room(self, axis_sets: Iterable[tuple[str, ...]], to_store: int) -> None:
        """Raise the limits of open files if the groups over `axis_sets` need that, or, on the first
        rank, the store. to_store: connections of each rank to it. Raises `UserError` if the system
        does not allow it."""
        world = self.layout.world
        own = {self.layout.members(self.rank, *axes) for axes in axis_sets}
        connected = [] if self.nccl is not None else [len(ranks) for ranks in own if len(ranks) > 1]
        files = sum(map(open_files.of_group, connected)) + to_store
        what = f"rank {self.rank}: the connections to other ranks"
        if self.rank == 0:
            what_store = f"the connections of {world} ranks to the store ({to_store} each)"
            if agent_has_store():
                open_files.make_room(world * to_store, what_store, os.getppid())
            else:
                files, what = files + world * to_store, f"{what}, and {what_store},"
        open_files.make_room(files, what)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Turn the error that torch raises when ranks do not join a new group into `LostRanks`."""
        try:
            yield
        except RuntimeError as error:
            others = set(range(self.layout.world)) - {self.rank}
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise LostRanks(
                f"the {self.layout.world} ranks did not all meet at {where} within "
                f"parallel.timeout={self._timeout:g} s: {str(error).splitlines()[0]}",
                others,
            ) from error

    def _make_group(
        self,
        axes: tuple[str, ...],
        members: Sequence[tuple[int, ...]],
        *,
        shared: bool = False,
        link: bool = False,
        backend: str | None = None,
    ) -> Group:
        """Make a process group for each tuple of ranks in `members`, which must be the same on all
        ranks. Returns the group with this rank, or a group of this rank alone if there is none.

        shared: reuse a group that was made before for the same ranks.
        link: the groups are pipeline links.
        backend: use this backend instead of the device's, for control.
        """
        fresh = [r for r in members if len(r) > 1 and not (shared and r in self._handles)]
        made = self._new_handles(fresh, backend, "+".join(axes), link=link)
        if shared:
            self._handles.update(made)
        mine = Group(axes, (self.rank,), 0, None, place=self.place)
        for ranks in members:
            if self.rank in ranks:
                handle = made.get(ranks) or (self._handles.get(ranks) if shared else None)
                mine = Group(
                    axes,
                    ranks,
                    ranks.index(self.rank),
                    handle,
                    self._serial,
                    place=self.place,
                    order=self._order,
                    ferried=isinstance(handle, Ferry),
                    control=backend is not None,
                )
        if any(len(ranks) > 1 for ranks in members):
            self._counted.append((self._label(axes), mine))
        return mine

    def _new_handles(
        self, members: Sequence[Ranks], backend: str | None, name: str, *, link: bool = False
    ) -> dict[Ranks, dist.ProcessGroup | None]:
        """Make a process group for each tuple of ranks, of which no two have a rank in common.

        name: for NCCL's flight recorder. For the other arguments see `_make_group`.
        """
        self.communicators += backend is None and any(self.rank in ranks for ranks in members)
        if self.nccl is None or backend is not None or link:
            return {ranks: self._new_handle(ranks, backend) for ranks in members}
        with self._gathering():
            mine = self.nccl.split(members, self.device, self._timeout + _WATCHED, name)
        if mine is not None and self._over_nccl is not None:
            self._over_nccl.add(mine)
        return {ranks: mine if self.rank in ranks else None for ranks in members}

    def _new_handle(self, ranks: Ranks, backend: str | None) -> dist.ProcessGroup | None:
        """Make a process group, or return None if this rank is not in it. A mesh with one rank
        `alone` makes only groups with that rank."""
        if self._alone:
            return Alike(ranks.index(self.rank), len(ranks)) if self.rank in ranks else None
        lazily = nullcontext() if backend is None else gloo_sockets.made_lazily()
        with self._gathering(), lazily:
            if self.nccl is not None and backend is None:
                seconds = self._timeout + _WATCHED
                made = self.nccl.new_link(ranks, self.device, seconds)
            else:
                limit = timedelta(seconds=self._timeout)
                made = dist.new_group(ranks, timeout=limit, backend=backend)
        if self.rank not in ranks:
            return None  # torch returns a number
        if self._over_nccl is not None and backend is None:
            self._over_nccl.add(made)
        return Ferry(made) if self._ferried and not backend else made

    def _label(self, axes: tuple[str, ...]) -> str:
        """Return the label under which traffic is counted: the axes with more than one rank, or
        `world` for the group of all ranks."""
        names, sizes = self._key(axes), self.layout.sizes
        if names | {"context"} == {"tensor", "context", "data", "pipeline"}:
            return "world"
        return "+".join(sorted(name for name in names if sizes.get(name, 2) > 1))


def _timed_event(stream: torch.cuda.Stream) -> Mark:
    """Return an event behind the work that a stream has been given so far, whichever stream the
    caller works on."""
    event: Mark = stream.record_event(torch.cuda.Event(enable_timing=True))
    return event
