"""Communicators: the NCCL communicators of one mesh, how a rank learns that one has failed, and the
way to end their transfers so that the ranks can restart in their processes.

Over NCCL the device waits for other ranks and not the host. `abort` makes the kernels that wait
return, whatever they have not received yet. Nothing tells the host that what follows them is
computed from it. Therefore `Place.ended` is set before, and ends the work of the host at its next
transfer.

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
from collections.abc import Callable
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

_SECONDS = 20.0
"""Within which NCCL must have aborted all communicators, and the device must have finished what is
in its queue. NCCL's proxy threads look for an abort every few milliseconds."""
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
}
"""What torch's own watchdogs would do when a communicator fails: end the process, write the flight
record (and end the process afterwards, or keep its group for 8 minutes), and block the group for
four times the last of these. The watch does the first two (torch 2.13, `Watchdog::runLoop` and
`HeartbeatMonitor::runLoop` in ProcessGroupNCCL.cpp)."""


def allow_abort() -> None:
    """Tell torch to leave it to this process what happens when a communicator fails. Call this
    before process groups are made. Values that the environment already has are kept."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def abortable() -> bool:
    """Return whether torch leaves failed communicators to this process."""
    return all(
        os.environ.get(name) == value
        for name, value in _SETTINGS.items()
        if name != "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    )


class Communicators:
    """The NCCL communicators of a mesh on one device, in the order in which they were made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handles: list[dist.ProcessGroup] = []
        self._aborting = threading.Lock()
        self._wrong: str | None = None

    def add(self, handle: dist.ProcessGroup) -> None:
        """Add a process group over NCCL."""
        self._handles.append(handle)

    def error(self) -> str:
        """Return what NCCL reports about the first communicator that has failed, such as
        `COMM_ERROR in group 5`; empty if none has."""
        for handle in self._handles:
            asked = getattr(handle._get_backend(self._device), "get_error", None)
            if asked is not None and (found := asked()).name != "SUCCESS":
                return f"{found.name} in group {handle.group_name}"
        return ""

    def usable(self) -> bool:
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
            if self._wrong is None:
                self._wrong = self._abort()
        return self._wrong

    def _abort(self) -> str:
        deadline = time.monotonic() + _SECONDS
        results: SimpleQueue[str] = SimpleQueue()

        def call(what: str, end: Callable[[], object]) -> None:
            try:
                end()
            except RuntimeError as error:
                results.put(f"{what}: {(str(error).splitlines() or [''])[0]}")
            else:
                results.put("")

        def run(what: str, *ends: Callable[[], object]) -> str:
            for end in ends:
                threading.Thread(target=call, args=(what, end), daemon=True).start()
            try:
                found = [results.get(timeout=max(0.0, deadline - time.monotonic())) for _ in ends]
            except Empty:
                return f"{what} takes more than {_SECONDS:g} s"
            return next(filter(None, found), "")

        every = [*self._handles, dist.group.WORLD]  # the default group, from which they are split
        aborts = [one.abort for one in every if one is not None]
        return run("the abort of its communicators", *aborts) or run(
            "its device", lambda: torch.cuda.synchronize(self._device)
        )
