"""Recording: reports the transfers of work that is recorded once and run many times.

Normally the host reports each transfer when it starts it, to the counters of bytes and to the
watch. When recorded work runs, the host starts no transfers. It then reports all transfers that
were started while the work was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megaframe.comm.place import Place, Waiting
from megaframe.comm.traffic import Traffic


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
