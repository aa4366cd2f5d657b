"""How NCCL's communicators fail and end: transfers that hang, errors, aborts.

A kernel that waits for another rank waits for ever, also if that rank or its connection is gone:
the host is told nothing, only the communicator knows. An abort makes the kernels of a communicator
return. What they have not received by then is whatever was in memory, here NaN, and the host goes
on with it. An abort also frees memory of the device, which waits for all of its kernels, so that
communicators that are aborted one after the other wait for each other for ever.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from fake_cuda import flight_records
from fake_cuda.machine import library, report, take_calls

_PAUSE = 0.01
_GIVEN_UP = 2.0
"""Seconds after which a wait for the kernels of others is reported, which would never end."""
communicators = []
"""Those of this process that have not been destroyed."""
hangs = {}
"""By kind of transfer, `any` for all: in how many more transfers it hangs from then on."""
when_hung = []
"""What to call when a transfer begins to hang."""


class GlooSockets:
    """The sockets that appear between the start and `take`: those of a gloo group."""

    def __init__(self):
        self._before = _sockets()

    def take(self):
        self._own = _sockets() - self._before

    def cut(self):
        for number, _ in self._own & _sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as descriptor:
                if not descriptor.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    descriptor.shutdown(socket.SHUT_RDWR)


def _sockets():
    sockets = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = os.readlink(path)
            if name.startswith("socket:"):
                sockets.add((int(path.name), name))
    return sockets


class HungTransfer:
    """A transfer whose kernel waits for ever."""

    def is_completed(self):
        return False

    def wait(self):
        raise RuntimeError("it waits for ever")


class TransferInFlight:
    """A transfer of a communicator, on whose device the host waits for it. lost: it was aborted.
    began: when the last rank came to it, in the time of the devices, if they have a pace."""

    def __init__(self, work, communicator, clock=None):
        self._work, self._communicator, self._clock = work, communicator, clock
        self.lost, self.began = False, 0.0

    def is_completed(self):
        return self.lost or self._work.is_completed()

    def wait(self):
        try:
            self._work.wait()
            if self._clock is not None:
                began, arrived = self._clock
                arrived.wait()
                self.began = began.item()
        except RuntimeError:
            self.lost = self._communicator.wait_for_abort()


class AbortableCommunicator:
    """What can go wrong with a communicator. sockets: its connections, whose `cut` ends waits."""

    def start_life(self, sockets):
        self._sockets, self._flights = sockets, []
        self._aborted = threading.Event()
        self._hung = self._failed = False
        communicators.append(self)

    def check_alive(self):
        if self._aborted.is_set():
            raise RuntimeError(f"NCCL communicator was aborted on rank {self.rank()}.")

    def wrap_launch(self, parts, launch):
        """Return what launches a call unless it hangs, as all after it on this communicator then
        do. What an aborted one brings is garbage. parts: kind and peer of each of its transfers."""

        def launched(reads, writes):
            self.check_alive()
            for kind in {kind for kind, _ in parts} | {"any"}:
                if kind in hangs:
                    self._count_down(kind)
            works, on_done = ([HungTransfer()], None) if self._hung else launch(reads, writes)
            clock = None
            if library.has_pace() and parts[0][1] is None and not self._hung:
                began = torch.tensor(library.stream_time(self._stream), dtype=torch.float64)
                clock = began, dist.all_reduce(began, dist.ReduceOp.MAX, self.gloo, async_op=True)
            flights = [TransferInFlight(work, self, clock) for work in works]
            self._flights = [
                transfer for transfer in self._flights if not transfer.is_completed()
            ] + flights
            flight_records.note(self, parts, reads, writes, flights)

            def land_or_not():
                lost = any(transfer.lost for transfer in flights)
                for x in writes if lost else ():
                    x.fill_(torch.nan if x.is_floating_point() else -1)
                if not lost:
                    on_done()

            return flights, land_or_not

        return launched

    def _count_down(self, kind):
        hangs[kind] -= 1
        if hangs[kind] == 0:
            self._hung = True
            for call in when_hung:
                call()

    def wait_for_abort(self):
        self._failed = self._failed or not self._hung
        return self._aborted.wait()

    def _get_backend(self, device):
        assert device.type == "cuda", f"No backend type associated with device type {device.type}"
        return self

    def get_error(self):
        return ErrorType.COMM_ERROR if self._failed else ErrorType.SUCCESS

    def is_aborted(self):
        return self._aborted.is_set()

    def waits(self):
        """Return whether a kernel of it waits and is not going to return."""
        if self._aborted.is_set():
            return False
        return not all(transfer.is_completed() for transfer in self._flights)

    def abort(self):
        self._aborted.set()
        self._sockets.cut()
        deadline = time.monotonic() + _GIVEN_UP
        while any(communicator.waits() for communicator in communicators):
            if time.monotonic() > deadline:
                report("abort", "an abort waits for the kernels of another communicator")
                raise RuntimeError("it would wait for ever")
            time.sleep(_PAUSE)


def destroy():
    """Called when all communicators are destroyed, which waits for what they have in flight."""
    if any(communicator.waits() for communicator in communicators):
        report("abort", "a communicator is destroyed while a transfer waits, and waits with it")
    if any(communicator.is_aborted() for communicator in communicators):
        take_calls()  # rules are for calls that come to an end
    communicators.clear()
