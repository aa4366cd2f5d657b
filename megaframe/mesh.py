"""Mesh: a layout realised in this process; the only object that holds process groups.

The groups of all axis sets are made at once and in the same order on every rank, because making a
process group is itself a collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaframe.comm import Group, Ring, Waits, connections, open_files
from megaframe.comm.alike import Alike
from megaframe.comm.ferry import Ferry
from megaframe.comm.order import Order
from megaframe.comm.place import Place
from megaframe.comm.recording import Recording, recording
from megaframe.comm.start import agent_has_store, fresh_store, launcher_store
from megaframe.comm.watch import Watch
from megaframe.device import device_of, finish_before_others, launched, tune_host_allocator
from megaframe.errors import LostRanks
from megaframe.layout import Layout

AXIS_SETS: tuple[tuple[str, ...], ...] = (
    ("data",),
    ("tensor",),
    ("data_shard", "context"),
    ("data_shard", "context", "tensor"),
    ("data_replicate",),
    ("pipeline", "data_shard", "context", "tensor"),
    ("pipeline", "data", "context", "tensor"),
)
"""The axis sets over which some part of megaframe communicates. The last is the world."""
EXPERT_SETS: tuple[tuple[str, ...], ...] = (
    ("context", "tensor"),
    ("expert",),
    ("expert_tensor",),
    ("expert", "expert_tensor"),
    ("expert_shard",),
)
"""The axis sets over which experts communicate."""
_WATCHED = 60.0
"""Seconds by which NCCL's timeout exceeds ours, so that the watch can report first."""


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
    check_collectives: compare what the ranks start (`comm/order.py`).
    axis_sets: the sets of axes to make groups for.
    alone: run as this rank without any other, with groups that pretend that all ranks do the same
    (`comm/alike.py`) and tensors without content.
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
        axis_sets: Sequence[tuple[str, ...]] = AXIS_SETS,
        alone: int | None = None,
    ) -> None:
        self.layout = layout
        self.rank = global_rank() if alone is None else alone
        self.device = device_of(device) if alone is None else torch.device("meta")
        self._alone, self._ferried = alone is not None, device == "shared"
        self._over_nccl = self.device.type == "cuda" and not self._ferried
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
        self._handles: dict[tuple[int, ...], dist.ProcessGroup] = {}
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
            if self._over_nccl:
                self.place.mark = lambda: torch.cuda.current_stream(self.device).record_event()

    def _watching(self) -> Watch:
        cut = connections.cut
        return Watch(self.store, self.layout, self.rank, self._timeout, self.place, cut)

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
        return self._make_group(("expert",), near), self._make_group(("expert",), far)

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

    def divide_context(self, neighbours: int) -> tuple[Group, Ring]:
        """Make groups of `neighbours` ranks on the context axis, and rings of the ranks with the
        same index among their neighbours, with a link for each step of a ring. Returns this rank's
        group and ring. All ranks of the world must call this."""
        rows = self.layout.groups("context")
        group = self._make_group(
            ("context",),
            [row[i : i + neighbours] for row in rows for i in range(0, len(row), neighbours)],
        )
        size, here = self.layout.context // neighbours, self.coordinate["context"] // neighbours
        if size == 1:
            return group, Ring()
        rings = [row[i::neighbours] for row in rows for i in range(neighbours)]
        steps = [
            self._make_group(("context",), [_ascending(r[i], r[(i + 1) % size]) for r in rings])
            for i in range(size)
        ]
        return group, Ring(here, size, steps[here], steps[here - 1])

    def connect(self, links: Iterable[tuple[int, int]]) -> None:
        """Make a link for each (from, to) pair of pipeline coordinates, one per direction.

        All ranks of the world must call this with the same links, because all ranks take part in
        making each group.
        """
        columns = self.layout.groups("pipeline")
        here = self.coordinate["pipeline"]
        for source, target in sorted(set(links)):
            low, high = sorted((source, target))
            pairs = [(column[low], column[high]) for column in columns]
            made = self._make_group(("pipeline",), pairs)
            if here in (source, target):
                self._links[source, target] = made

    def link(self, source: int, target: int) -> Group:
        """Return the link from pipeline coordinate `source` to `target`, one of which must be this
        rank's own."""
        return self._links[source, target]

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
        handle = None
        if len(ranks) > 1:
            handle = self._new_handle(ranks, "gloo")
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
        On a GPU this has no effect and ranks leave, because nothing here can end NCCL's
        transfers."""
        if self._watch is not None and self.device.type == "cpu":
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
        return self._over_nccl and self.layout.world > 1

    def close(self) -> None:
        """Stop the watch and end all process groups."""
        for call in self.before_close:
            call()
        self.before_close.clear()
        if self._watch is not None:
            self._watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _rendezvous(self) -> dist.Store:
        limit = timedelta(seconds=self._timeout)
        # The launcher may have started more ranks than the layout uses (`faults.elastic`).
        store, rank, world = launcher_store(self.rank, self.layout.world, self._timeout)
        store = fresh_store(store, rank, world, self._timeout)
        kind = "nccl" if self._over_nccl else "gloo"
        with connections.made_lazily():  # nothing is sent over this group
            dist.init_process_group(kind, store=store, rank=rank, world_size=world, timeout=limit)
        return dist.PrefixStore("megaframe", store)

    def _make_room(self, axis_sets: Iterable[tuple[str, ...]], to_store: int) -> None:
        """Raise the limits of open files if the groups over `axis_sets` need that, or, on the first
        rank, the store. to_store: connections of each rank to it. Raises `UserError` if the system
        does not allow it."""
        world = self.layout.world
        own = {self.layout.members(self.rank, *axes) for axes in axis_sets}
        connected = [] if self._over_nccl else [len(ranks) for ranks in own if len(ranks) > 1]
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
        backend: str | None = None,
    ) -> Group:
        """Make a process group for each tuple of ranks in `members`, which must be the same on all
        ranks. Returns the group with this rank, or a group of this rank alone if there is none.

        shared: reuse a group that was made before for the same ranks.
        backend: use this backend instead of the device's, for control.
        """
        mine = Group(axes, (self.rank,), 0, None, place=self.place)
        for ranks in members:
            handle = self._handles.get(ranks) if shared else None
            if len(ranks) > 1 and handle is None:
                handle = self._new_handle(ranks, backend)
                if shared and handle is not None:
                    self._handles[ranks] = handle
            if self.rank in ranks:
                index = ranks.index(self.rank)
                mine = Group(
                    axes,
                    ranks,
                    index,
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

    def _new_handle(self, ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup | None:
        """Make a process group. A mesh with one rank `alone` makes only groups with that rank, and
        returns None for others."""
        if self._alone:
            return Alike(ranks.index(self.rank), len(ranks)) if self.rank in ranks else None
        self.communicators += backend is None and self.rank in ranks
        lazily = nullcontext() if backend is None else connections.made_lazily()
        with self._gathering(), lazily:
            if backend is None and self._over_nccl:
                made = dist.new_group(ranks, **_of_nccl(self.device, self._timeout))
            else:
                limit = timedelta(seconds=self._timeout)
                made = dist.new_group(ranks, timeout=limit, backend=backend)
        # If this rank is not in the group, torch returns a number instead of a group.
        return Ferry(made) if self._ferried and not backend and self.rank in ranks else made

    def _label(self, axes: tuple[str, ...]) -> str:
        """Return the label under which traffic is counted: the axes with more than one rank, or
        `world` for the group of all ranks."""
        names, sizes = self._key(axes), self.layout.sizes
        if names | {"context"} == {"tensor", "context", "data", "pipeline"}:
            return "world"
        return "+".join(sorted(name for name in names if sizes.get(name, 2) > 1))


def _of_nccl(device: torch.device, timeout: float) -> dict[str, Any]:
    """Return the arguments that make a process group over NCCL.

    The communicator is made at once. Otherwise torch would make one for two ranks at their first
    message and wait for the other rank, which in a ring waits for yet another one. The stream has
    high priority, so transfers start before products that have not begun. The timeout is longer
    than that of the watch, which therefore reports who is at fault before NCCL ends the process
    without a message.
    """
    limit = timedelta(seconds=timeout + _WATCHED)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = limit
    # Do not warn that messages run one after another: a link has one direction, so they should.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    return {"timeout": limit, "pg_options": options, "device_id": device}


def _ascending(one: int, other: int) -> tuple[int, int]:
    """Return two ranks in ascending order, in which torch numbers the ranks of a group."""
    return min(one, other), max(one, other)
