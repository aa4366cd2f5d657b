"""Busy: how long a device works on each kind of action, without its waits for other ranks.

The host launches work long before the device does it, so the times of the device are those between
marks in its queue. They are read steps later, when the device has passed them, and nobody waits for
them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol


class Mark(Protocol):
    """A position in the queue of work of a device, such as a CUDA event with a time."""

    def query(self) -> bool:
        """Return whether the device has passed it."""

    def elapsed_time(self, end: Mark) -> float:
        """Return the milliseconds from here to `end`. The device must have passed both."""


@dataclass
class DeviceTimes:
    """What a device did in finished steps.

    steps: their number.
    busy: seconds of work without waits, by kind of action. If the host launches work later than
    the device could do it, they include what the device waits for the host.
    """

    steps: int = 0
    busy: dict[str, float] = field(default_factory=dict)

    def add(self, other: DeviceTimes) -> None:
        """Add the times of other steps."""
        self.steps += other.steps
        for kind, seconds in other.busy.items():
            self.busy[kind] = self.busy.get(kind, 0.0) + seconds


@dataclass
class _Action:
    kind: str
    begin: Mark
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    end: Mark | None = None

    def seconds(self) -> float:
        assert self.end is not None, "its step is over"
        waited = sum(start.elapsed_time(end) for start, end in self.waits)
        return (self.begin.elapsed_time(self.end) - waited) / 1e3


class DeviceBusy:
    """The actions of one device, as the working thread records them."""

    def __init__(self) -> None:
        self._actions: list[_Action] = []
        self._steps: deque[list[_Action]] = deque()
        self._open: _Action | None = None

    def act(self, kind: str | None, mark: Mark) -> None:
        """Record that the device ends an action at `mark` and begins the next one. kind: what the
        time of the next one is counted under, None not to count it."""
        if self._open is not None:
            self._open.end = mark
            self._actions.append(self._open)
        self._open = None if kind is None else _Action(kind, mark)

    def wait(self, start: Mark, end: Mark) -> None:
        """Record that the device may wait for other ranks between two marks."""
        if self._open is not None:
            self._open.waits.append((start, end))

    def take(self) -> DeviceTimes:
        """End a step. Return the times of all steps that the device has finished since the last
        call."""
        self._steps.append(self._actions)
        self._actions = []
        taken = DeviceTimes()
        while self._steps and _passed(self._steps[0]):
            taken.steps += 1
            for action in self._steps.popleft():
                taken.busy[action.kind] = taken.busy.get(action.kind, 0.0) + action.seconds()
        return taken


def _passed(actions: list[_Action]) -> bool:
    if not actions:
        return True
    last = actions[-1].end
    return last is not None and last.query()
