"""Recording: work that is recorded once and run again and again, as far as others are told of it.

The host tells of every transfer that it starts: who counts bytes, and the watch. Of recorded work
it starts none again, so it tells all at once of what was started while it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megaframe.comm.place import Place, Waiting
from megaframe.comm.traffic import Traffic


@dataclass
class Recording:
    """name: of the work, for the watch. waits: for other ranks. moved: bytes and calls of each
    traffic."""

    name: str
    place: Place
    waits: Sequence[Waiting]
    moved: Sequence[tuple[Traffic, int, int]] = ()

    def run(self, launch: Callable[[], None]) -> None:
        """Tell of the work that `launch` starts."""
        self.place.act(self.name, None, "F")
        launch()
        for waiting in self.waits:
            self.place.left(waiting)
        for traffic, size, calls in self.moved:
            traffic.add(size, calls)


@contextmanager
def recording(name: str, place: Place, traffics: Sequence[Traffic]) -> Iterator[Recording]:
    """What is started in it over these is recorded, and told of by `Recording.run` alone."""
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
