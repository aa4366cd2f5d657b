"""Offload of optimizer state and master weights on a CPU, as for a GPU whose streams copy as late
as they may: only when something waits for the copy, and nothing that was queued after it.
"""

from collections import deque
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

from megaframe.optim import optimizer_state, parameter_groups, state_offload
from megaframe.optim.state_dtype import BLOCK
from megaframe.optim.state_offload import NO_OFFLOAD, GpuHostOffload, HostOffload

PLAIN_COPY = state_offload.copy_parts


class Stream:
    """A queue of work that is done in order, and only when something waits for it."""

    def __init__(self, device=None):
        self._work = deque()

    def give(self, work):
        self._work.append(work)

    def record_event(self):
        event = Event(self)
        self.give(event.happen)
        return event

    def wait_event(self, event):
        self.give(event.wait)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def synchronize(self):
        self.record_event().wait()

    def advance(self):
        self._work.popleft()()


class Event:
    def __init__(self, stream):
        self._stream, self._happened = stream, False

    def happen(self):
        self._happened = True

    def wait(self):
        while not self._happened:
            self._stream.advance()


class Computing(Stream):
    """The CPU's own stream, which does all work immediately."""

    def give(self, work):
        work()


HERE = Computing()


class LateOffload(GpuHostOffload):
    """The offload of a GPU, with memory of the CPU."""

    def store(self, tensors):
        return HostOffload.store(self, tensors)

    def _allocate(self, size):
        return HostOffload._allocate(self, size)


@contextmanager
def delay_streams():
    """Replace CUDA's streams by `Stream`, and copy within them."""
    at = [HERE]

    @contextmanager
    def within(stream):
        at.append(stream)
        yield
        at.pop()

    def copy(sources, targets):
        at[-1].give(partial(PLAIN_COPY, sources, targets))

    with (
        patch.multiple(
            torch.cuda, Stream=Stream, stream=within, current_stream=lambda device: HERE
        ),
        patch.object(state_offload, "copy_parts", copy),
    ):
        yield


@contextmanager
def offload_on_cpu():
    """Make `optim.offload=true` work on a CPU, with chunks so small that a bucket has many."""

    def make_state_offload(optim, device):
        return LateOffload(device) if optim.offload else NO_OFFLOAD

    with (
        delay_streams(),
        patch.object(parameter_groups, "make_state_offload", make_state_offload),
        patch.object(optimizer_state, "_CHUNK", BLOCK),
    ):
        yield
