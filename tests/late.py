"""Runs on a CPU whose optimizer's state and master weights are away, as they are from a GPU, whose
streams copy as late as they may: when something has to wait for the copy, and nothing behind it.
"""

from collections import deque
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

from megaframe.optim import choice, moments, route
from megaframe.optim.codes import BLOCK
from megaframe.optim.route import STAYS, GpuRoute, HostRoute

PLAIN_COPY = route.copy


class Stream:
    """Work in its order, done when somebody waits for it."""

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
    """The CPU, which does at once what it is given."""

    def give(self, work):
        work()


HERE = Computing()


class LateRoute(GpuRoute):
    """That of a GPU, but for its memory."""

    def keep(self, made):
        return HostRoute.keep(self, made)

    def _made(self, size):
        return HostRoute._made(self, size)


@contextmanager
def late():
    """There are streams."""
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
        patch.object(route, "copy", copy),
    ):
        yield


@contextmanager
def kept_away():
    """`optim.offload=true` is heeded, in chunks so small that a bucket has many."""

    def route_of(optim, device):
        return LateRoute(device) if optim.offload else STAYS

    with late(), patch.object(choice, "route_of", route_of), patch.object(moments, "_CHUNK", BLOCK):
        yield
