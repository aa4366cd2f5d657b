"""NCCL communicators of one mesh: how they are made, how a rank learns that one has
failed, and how their transfers are ended so that the ranks can restart in their processes.

Over NCCL the device waits for other ranks and not the host. `abort` makes the kernels that wait
return, whatever they have not received yet. Nothing tells the host that what follows them is
computed from it. Therefore `RankProgress.transfers_ended` is set before, and ends the work of the
host at its next transfer.

An abort of one communicator frees device memory, which waits for all kernels of the device, those
of other communicators too (pytorch/pytorch issue 119797). So all must have been told to end before
any of them can return. torch's `_abort_process_group` puts the calls into one NCCL group for this
reason, but a group belongs to a thread, and torch aborts each process group in a thread of its own
(`ProcessGroupNCCL::abort`, ProcessGroupNCCL.cpp). Here each abort has a thread too, and all run at
the same time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

from megaframe.distributed.group import Group
from megaframe.distributed.nccl_settings import NcclSettings
from megaframe.errors import UserError

Ranks = tuple[int, ...]
_ABORT_SECONDS = 20.0
"""Within which NCCL must have aborted all communicators, and the device must have finished what is
in its queue. NCCL's proxy threads look for an abort every few milliseconds."""


class NcclCommunicators:
    """The NCCL communicators of a mesh on one device, in the order in which they were made.

    Attributes:
        settings: What is set for all of them.
    """

    def __init__(self, settings: NcclSettings, device: torch.device, timeout: float) -> None:
        """Prepare to make communicators.

        Args:
            settings: What is set for all of them.
            device: The device of this rank.
            timeout: Seconds that a transfer may take before torch gives it up.
        """
        self.settings = settings
        self._device, self._timeout = device, timeout
        self._handles: list[dist.ProcessGroup] = []
        self._aborting = threading.Lock()
        self._abort_failure: str | None = None

    def start(self, store: dist.Store, rank: int, world: int) -> None:
        """Make torch's default group, from whose communicator the others are split.

        Args:
            store: Shared by all ranks.
            rank: That of this process.
            world: The number of ranks.
        """
        options = self._make_options()
        dist.init_process_group(
            "nccl",
            store=store,
            rank=rank,
            world_size=world,
            timeout=options._timeout,
            pg_options=options,
            device_id=self._device,
        )
        _bind(None)

    def split(self, members: Sequence[Ranks], name: str) -> dist.ProcessGroup | None:
        """Split the default group's communicator into one for each tuple of ranks, of which no two
        have a rank in common. All ranks of the world must call this.

        The name of a group depends on how many groups a rank has (`_hash_ranks_to_str` in torch's
        distributed_c10d.py), so all ranks must be in equally many: those over axes are.

        Args:
            members: The same on all ranks.
            name: For NCCL's flight recorder.

        Returns:
            The group with this rank, if there is one.

        Raises:
            UserError: The communicator has other ranks.
        """
        if not members:
            return None
        options = self._make_options()
        _bind(self._device)
        try:
            # One call of `ncclCommSplit`, where `dist.new_group` would need one for each tuple.
            handle = dist.split_group(
                split_ranks=[list(ranks) for ranks in members],
                timeout=options._timeout,
                pg_options=options,
                group_desc=name,
            )
        finally:
            _bind(None)
        if handle is not None:
            _check_size(handle, handle.size(), self._device)
            self._handles.append(handle)
        return handle

    def make_link(self, rank: int, ranks: Ranks) -> dist.ProcessGroup | None:
        """Make a communicator for the two ranks of a link; see `split`. All ranks of the world must
        call this. Ranks have different numbers of links, so these are not split off."""
        options = self._make_options()
        if self.settings.link_ctas is not None:
            options.config.max_ctas = self.settings.link_ctas
        # The communicator is made at once. Otherwise torch would make it at the first message.
        handle = dist.new_group(
            ranks,
            timeout=options._timeout,
            pg_options=options,
            group_desc="link",
            device_id=self._device,
        )
        if rank not in ranks:
            return None  # torch returns a number
        self._handles.append(handle)
        return handle

    def _make_options(self) -> dist.ProcessGroupNCCL.Options:
        # Do not warn that messages run one after another: a link has one direction, so they should.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.settings.high_priority)
        options._timeout = timedelta(seconds=self._timeout)
        return options

    def find_error(self) -> str:
        """Return what NCCL reports about the first communicator that has failed, such as
        `COMM_ERROR in group 5`; empty if none has."""
        for handle in self._handles:
            get_error = getattr(handle._get_backend(self._device), "get_error", None)
            if get_error is not None and (result := get_error()).name != "SUCCESS":
                return f"{result.name} in group {handle.group_name}"
        return ""

    def is_device_usable(self) -> bool:
        """Return whether the device has no error that only the end of the process clears, such as
        an access to memory that it does not have."""
        try:
            torch.cuda.default_stream(self._device).query()
        except RuntimeError:
            return False
        return True

    def abort(self) -> str:
        """Abort all communicators, and wait until the device has finished its work. May be called
        by several threads; all get the result of the first. Returns why this process cannot go on
        with its device, empty if it can."""
        with self._aborting:
            if self._abort_failure is None:
                self._abort_failure = self._abort()
        return self._abort_failure

    def _abort(self) -> str:
        deadline = time.monotonic() + _ABORT_SECONDS
        results: SimpleQueue[str] = SimpleQueue()

        def report(subject: str, end: Callable[[], object]) -> None:
            try:
                end()
            except RuntimeError as error:
                results.put(f"{subject}: {(str(error).splitlines() or [''])[0]}")
            else:
                results.put("")

        def run(subject: str, *ends: Callable[[], object]) -> str:
            for end in ends:
                threading.Thread(target=report, args=(subject, end), daemon=True).start()
            failures = []
            try:
                for _ in ends:
                    failures.append(results.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                return f"{subject} takes more than {_ABORT_SECONDS:g} s"
            return next(filter(None, failures), "")

        handles = [*self._handles, dist.group.WORLD]  # the default group, from which they are split
        aborts = [handle.abort for handle in handles if handle is not None]
        return run("the abort of its communicators", *aborts) or run(
            "its device", lambda: torch.cuda.synchronize(self._device)
        )


def allocate(
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Group,
    settings: NcclSettings | None,
) -> torch.Tensor:
    """Allocate memory for transfers.

    Args:
        length: Number of elements.
        dtype: Their type.
        device: Where they are.
        group: The group of the transfers.
        settings: Whether to register the memory with the group's communicator, if torch can do it
            on this device; None if the group is not over NCCL.

    Returns:
        Zeros [length].
    """
    if settings is not None and settings.register and group.handle is not None:
        # What a CUDA graph allocates is in the graph's own memory.
        backend, recorded = group.handle._get_backend(device), _is_recording(device)
        if backend.supports_tensor_alloc(device) and not recorded:
            return backend.allocate_tensor(length, dtype=dtype, device=device).zero_()
    return torch.zeros(length, dtype=dtype, device=device)


def _is_recording(device: torch.device) -> bool:
    """Return whether work on the device is recorded as a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _bind(device: torch.device | None) -> None:
    """Bind torch's default group to a device, or to none.

    torch splits only communicators of a group that is bound. While it is, `dist.new_group` splits
    it too, also for a group of gloo, where ranks that are not in the group then wait forever
    (pytorch/pytorch issue 145376).
    """
    default = dist.group.WORLD
    assert default is not None, "there is a default group"
    default.bound_device_id = device


def _check_size(handle: dist.ProcessGroup, size: int, device: torch.device) -> None:
    """Raise `UserError` if a communicator has not `size` ranks."""
    # torch tells the parts of a split apart by a hash of 31 bits, which may be the same for two of
    # thousands of them.
    ones = torch.ones(1, device=device)
    dist.all_reduce(ones, group=handle)
    if int(ones) != size:
        raise UserError(
            f"torch made a communicator of {int(ones)} ranks instead of {size}, as the hashes of "
            "two groups are the same; change the number of ranks or a size in parallel"
        )
