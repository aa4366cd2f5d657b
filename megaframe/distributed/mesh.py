"""Mesh: a layout realised in this process: its process groups, store, device and watchdog."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megaframe.distributed import gloo_sockets
from megaframe.distributed.collectives import WaitTimer, barrier
from megaframe.distributed.desync_check import DesyncCheck
from megaframe.distributed.device import (
    read_launcher_number,
    select_device,
    tune_host_allocator,
    use_batch_scheduling,
)
from megaframe.distributed.fault_records import reset_flight_recorder, write_flight_record
from megaframe.distributed.nccl_communicators import NcclCommunicators, allocate
from megaframe.distributed.nccl_settings import NcclSettings, can_abort
from megaframe.distributed.process_groups import ProcessGroups
from megaframe.distributed.rank_progress import DeviceEvent
from megaframe.distributed.rendezvous import find_fresh_store, get_launcher_store, is_store_at_agent
from megaframe.distributed.traffic import CapturedTransfers, capture_transfers
from megaframe.distributed.watchdog import Watchdog
from megaframe.errors import LostRanks
from megaframe.layout import AXIS_SETS, Layout

_NCCL_EXTRA_SECONDS = 60.0
"""Seconds by which NCCL's timeout exceeds ours, so that the watchdog reports who is at fault before
NCCL ends the process without a message."""


def read_world_size() -> int:
    """Return the number of ranks of this launch as given by the launcher (`torchrun`), 1 without a
    launcher."""
    return read_launcher_number("WORLD_SIZE", 1, least=1)


def read_local_world_size() -> int:
    """Return the number of ranks that the launcher has started on this machine; the world size if
    it does not say."""
    return read_launcher_number("LOCAL_WORLD_SIZE", read_world_size(), least=1)


def read_global_rank() -> int:
    """Return this process's rank as given by the launcher, 0 without a launcher."""
    return read_launcher_number("RANK", 0)


class Mesh(ProcessGroups):
    """This rank's coordinate in the layout, its process groups, its store and its device.

    Attributes:
        store: Shared by all ranks.
        data_control_group: The data ranks of this rank's island, over separate connections on the
            host, for small values that must not queue behind large transfers.
        island_control_group: This rank and its counterparts on other islands, likewise.
        before_close: Functions that `close` calls before it ends the groups.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        device: str = "auto",
        timeout: float = 600.0,
        serial: bool = False,
        check_collectives: bool = False,
        nccl: NcclSettings | None = None,
        alone: int | None = None,
    ) -> None:
        """Join the other ranks and make the groups. All ranks of the world must call this.

        Args:
            layout: The shape of the world.
            device: See `select_device`.
            timeout: Seconds that a rank waits for others.
            serial: Finish every collective before its call returns.
            check_collectives: Compare what the ranks start (`distributed/desync_check.py`).
            nccl: What is set for groups over NCCL.
            alone: Run as this rank without any other, with groups that pretend that all ranks do
                the same (`distributed/fake_group.py`) and tensors without content.

        Raises:
            UserError: `device` is not available, or the system allows too few open files.
            LostRanks: Not all ranks join in time.
        """
        torch_device = select_device(device) if alone is None else torch.device("meta")
        host_staged = device == "shared"
        communicators = None
        if torch_device.type == "cuda" and not host_staged:
            limit = timeout + _NCCL_EXTRA_SECONDS
            communicators = NcclCommunicators(nccl or NcclSettings(), torch_device, limit)
        super().__init__(
            layout,
            read_global_rank() if alone is None else alone,
            torch_device,
            communicators,
            timeout=timeout,
            serial=serial,
            host_staged=host_staged,
            fake=alone is not None,
        )
        if self.device.type == "cpu":
            tune_host_allocator()
            use_batch_scheduling()
        self.store: dist.Store = dist.HashStore()
        self.before_close: list[Callable[[], object]] = []
        self._watchdog: Watchdog | None = None
        self._rank_of_stage: tuple[int, ...] = ()
        has_others = layout.world > 1 and alone is None
        if has_others:
            self._reserve_open_files(2 + check_collectives)
            with self._report_missing_ranks():
                self.store = self._join_rendezvous()
        if check_collectives:
            self._desync_check = DesyncCheck(self.store, self.rank, self.progress)
        self.add_groups(AXIS_SETS)
        axes = ("data",) if layout.islands == 1 else ("data_shard", "data_replicate")
        self.data_control_group = self._make_group(axes, layout.list_groups(*axes), backend="gloo")
        self.island_control_group = self._make_group(
            ("islands",), layout.list_groups("islands"), backend="gloo", label="world"
        )
        if has_others:
            self._watchdog = self._make_watchdog()
            if self.nccl is not None:
                stream = torch.cuda.current_stream(self.device)
                self.progress.record_event = partial(_record_timed_event, stream)

    @property
    def nccl_settings(self) -> NcclSettings | None:
        """What is set for NCCL; None if groups on the device use another backend."""
        return self.nccl.settings if self.nccl is not None else None

    def allocate(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros [length] for what the ranks that share parameters divide and sum."""
        group = self.group("data_shard", "context")
        return allocate(length, dtype, self.device, group, self.nccl_settings)

    # ------------------------------------------------------------------ traffic and waits

    def take_traffic(self) -> dict[str, int]:
        """Return the bytes that this rank has handed to collectives and links since the last call,
        by axes. Every rank has the same axes."""
        traffic: dict[str, int] = {}
        for label, group in self._counted:
            traffic[label] = traffic.get(label, 0) + group.traffic.take()[0]
        return traffic

    @property
    def traffic_axes(self) -> list[str]:
        """The keys of `take_traffic`."""
        return sorted({label for label, _ in self._counted})

    def capture_transfers(self, name: str) -> AbstractContextManager[CapturedTransfers]:
        """Return a context that records the transfers started in it over the groups, for
        `CapturedTransfers.replay` to report when the captured work runs."""
        return capture_transfers(name, self.progress, [group.traffic for _, group in self._counted])

    def charge_waits(
        self,
        collective_timer: Callable[[str], WaitTimer],
        message_timer: Callable[[tuple[int, int]], WaitTimer],
    ) -> None:
        """Charge all later waits to timers.

        Args:
            collective_timer: Returns the timer of collectives over these axes, a label of
                `take_traffic`.
            message_timer: Returns the timer of messages over the pipeline link (from, to).
        """
        for label, group in self._counted:
            group.traffic.collective_timer = group.traffic.message_timer = collective_timer(label)
        for ends, link in self._links.items():
            link.traffic.message_timer = message_timer(ends)

    # ------------------------------------------------------------------ faults

    def _make_watchdog(self) -> Watchdog:
        watchdog = Watchdog(
            self.store, self.layout, self.rank, self._timeout, self.progress, self.end_transfers
        )
        if self.nccl is not None:
            self.progress.device_usable = self.nccl.is_device_usable
            watchdog.communicator_error = self.nccl.find_error
            watchdog.write_flight_record = lambda folder: write_flight_record(folder, self.rank)
        return watchdog

    def name_stages(self, rank_of_stage: Sequence[int]) -> None:
        """Set the pipeline coordinate of each stage, by stage number, for messages about lost
        ranks."""
        self._rank_of_stage = tuple(rank_of_stage)
        if self._watchdog is not None:
            self._watchdog.rank_of_stage = self._rank_of_stage

    def watch_steps(self, limit: float, folder: Path) -> None:
        """End the run from now on if an activity takes too long. All ranks must call this.

        Args:
            limit: Seconds that the activity recorded in `progress` may take on any rank, 0 for no
                limit.
            folder: Where verdicts and stacks are written.
        """
        if limit and self._watchdog is None:
            self._watchdog = self._make_watchdog()
        if self._watchdog is not None:
            self._watchdog.rank_of_stage = self._rank_of_stage
            self._watchdog.limit, self._watchdog.folder = limit, folder

    def allow_restart(self, may_restart: Callable[[], bool]) -> None:
        """Allow an in-process restart if only a transfer has failed and `may_restart` then returns
        true. This has no effect if ranks share a GPU, or if torch ends the process when a
        communicator fails (see `allow_abort`): then the ranks leave."""
        able = self.device.type == "cpu" if self.nccl is None else can_abort()
        if self._watchdog is not None and able:
            self._watchdog.may_restart = may_restart

    def call_before_exit(self, call: Callable[[], object]) -> None:
        """Have `call` called before this process ends because ranks were lost."""
        if self._watchdog is not None:
            self._watchdog.before_exit = call

    def leave(self, lost: LostRanks) -> str:
        """Report which rank is at fault and end this process, or, if the ranks restart in their
        processes, return what happened. See `Watchdog.leave`."""
        if self._watchdog is None:
            raise lost
        return self._watchdog.leave(lost)

    def end_transfers(self) -> str:
        """End every wait of this rank for others. Returns why this process cannot go on with its
        device, empty if it can."""
        # Set first: from now on, a wait that returns may have received nothing.
        self.progress.transfers_ended = True
        gloo_sockets.shut_down_sockets()
        return self.nccl.abort() if self.nccl is not None else ""

    # ------------------------------------------------------------------ start and end

    def _join_rendezvous(self) -> dist.Store:
        limit = timedelta(seconds=self._timeout)
        # The launcher may have started more ranks than the layout uses (`resilience.elastic`).
        store, rank, world = get_launcher_store(self.rank, self.layout.world, self._timeout)
        store = find_fresh_store(store, rank, world, self._timeout)
        if self.nccl is not None:
            self.nccl.start(store, rank, world)
        else:
            with gloo_sockets.connect_lazily():  # nothing is sent over this group
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=world, timeout=limit
                )
        return dist.PrefixStore("megaframe", store)

    def _reserve_open_files(self, to_store: int) -> None:
        """Raise the limits of open files where connections need that.

        Args:
            to_store: Connections of each rank to the store, which the first rank may hold.

        Raises:
            UserError: If the system does not allow it.
        """
        world = self.layout.world
        own_groups = {self.layout.list_members(self.rank, *axes) for axes in AXIS_SETS}
        sizes = (
            [] if self.nccl is not None else [len(ranks) for ranks in own_groups if len(ranks) > 1]
        )
        files = sum(map(gloo_sockets.count_files_of_group, sizes)) + to_store
        purpose = f"rank {self.rank}: the connections to other ranks"
        if self.rank == 0:
            store_purpose = f"the connections of {world} ranks to the store ({to_store} each)"
            if is_store_at_agent():
                gloo_sockets.reserve_open_files(world * to_store, store_purpose, os.getppid())
            else:
                files, purpose = files + world * to_store, f"{purpose}, and {store_purpose},"
        gloo_sockets.reserve_open_files(files, purpose)

    @property
    def ends_with_others(self) -> bool:
        """Whether `close` needs the other ranks, as it does with NCCL."""
        return self.nccl is not None and self.layout.world > 1

    def finish(self) -> None:
        """Close after work without errors: first wait for all ranks, so that none closes
        connections on which others still receive or connect.

        Raises:
            LostRanks: Another rank has closed with an error.
        """
        barrier(self.world)
        self.close()

    def close(self) -> None:
        """Stop the watchdog and end all process groups, without a word to other ranks."""
        for call in self.before_close:
            call()
        self.before_close.clear()
        if self._watchdog is not None:
            self._watchdog.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.progress.transfers_ended and self.nccl is not None:
            reset_flight_recorder()


def _record_timed_event(stream: torch.cuda.Stream) -> DeviceEvent:
    """Return an event behind the work that a stream has been given so far, whichever stream the
    caller works on."""
    event: DeviceEvent = stream.record_event(torch.cuda.Event(enable_timing=True))
    return event
