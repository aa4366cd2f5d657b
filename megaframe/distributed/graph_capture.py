"""Recording: reports the transfers of work that is recorded once and run many times.

Normally the host reports each transfer when it starts it, to the counters of bytes and to the
watch. When recorded work runs, the host starts no transfers. It then reports all transfers that
were started while the work was recorded.

Ranks that start transfers of several communicators in different orders can wait for each other
forever. All ranks here start theirs in the same order, but in a graph NCCL keeps the order of each
communicator only, unless it is told to keep that of the host (NCCL's user guide, "Using multiple
NCCL communicators concurrently").
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megaframe.distributed.rank_progress import Place, Waiting
from megaframe.distributed.traffic import Traffic

_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_OLDEST = (2, 26)


@dataclass
class Recording:
    """The transfers of recorded work.

    name: name of the work, for the watch.
    waits: its waits for other ranks.
    moved: bytes and calls of each traffic.
    """

    name: str
    place: Place
    waits: Sequence[Waiting]
    moved: Sequence[tuple[Traffic, int, int]] = ()

    def run(self, launch: Callable[[], None]) -> None:
        """Run the work by calling `launch`, and report its transfers."""
        self.place.act(self.name, None, "F")
        launch()
        for waiting in self.waits:
            self.place.left(waiting)
        for traffic, size, calls in self.moved:
            traffic.add(size, calls)


@contextmanager
def recording(name: str, place: Place, traffics: Sequence[Traffic]) -> Iterator[Recording]:
    """Return a context in which transfers over these traffics are recorded and not counted; each
    call of `Recording.run` reports them."""
    before = [(traffic.bytes, traffic.calls) for traffic in traffics]
    with place.recording() as waits:
        made = Recording(name, place, waits)
        yield made
    made.moved = [
        (traffic, traffic.bytes - size, traffic.calls - calls)
        for traffic, (size, calls) in zip(traffics, before, strict=True)
    ]
    for traffic, size, calls in made.moved:
        traffic.add(-size, -calls)


def keep_order() -> None:
    """Tell NCCL to start transfers in the order in which this process does, whatever their
    communicator. Call this before process groups are made. A value that the environment already has
    is kept."""
    os.environ.setdefault(_ORDER, "1")


def unordered() -> str | None:
    """Return why NCCL does not keep the order of several communicators, or None if it does."""
    if (value := os.environ.get(_ORDER)) != "1":
        return f"NCCL keeps no order among them with {_ORDER}={value or ''}; use {_ORDER}=1"
    version = torch.cuda.nccl.version()
    if version < _OLDEST:
        given, least = (".".join(map(str, one)) for one in (version, _OLDEST))
        return f"NCCL {given} keeps no order among them; use NCCL {least} or later"
    return None
