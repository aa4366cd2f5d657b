"""Turns: two pieces of work of which one computes while the other waits for what travels.

They never run at the same time, and each hands over at the same places of its work whatever has
arrived: so all ranks start their transfers in one order, and no number depends on the time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Condition

import torch

HandOver = Callable[[], None]
"""Lets the other piece of work go on; returns when that hands over in turn, or is done."""


class Turn:
    """What layers call before they wait for a transfer. It does nothing until somebody works beside
    them."""

    def __init__(self) -> None:
        self.hand_over: HandOver | None = None

    def pass_on(self) -> None:
        """Let the other one go on, if there is one."""
        if self.hand_over is not None:
            self.hand_over()


class Pair:
    """Runs two pieces of work by turns, the second one in a thread of its own, which stays."""

    def run(self, first: Callable[[HandOver], None], second: Callable[[HandOver], None]) -> None:
        """Return when both are done. Raises what either raises, once the other has ended."""
        baton = _Baton()
        beside = self._thread.submit(baton.work, 1, second)
        try:
            baton.work(0, first)
        finally:
            beside.result()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        # Each thread's own are the number of threads of an operator, which is part of the order of
        # sums, and the GPU that is used unless another is named.
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        given = torch.get_num_threads(), gpu
        return ThreadPoolExecutor(1, "beside", initializer=_like_another, initargs=given)


def _like_another(threads: int, gpu: int | None) -> None:
    """Let this thread compute as one with these does."""
    torch.set_num_threads(threads)
    if gpu is not None:
        torch.cuda.set_device(gpu)


class _Baton:
    """Who has it works."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._holder = 0
        self._working = {0, 1}

    def work(self, me: int, what: Callable[[HandOver], None]) -> None:
        self._wait(me)
        try:
            what(lambda: self._hand_over(me))
        finally:
            with self._changed:
                self._working.discard(me)
                self._holder = 1 - me
                self._changed.notify_all()

    def _hand_over(self, me: int) -> None:
        if 1 - me not in self._working:
            return
        with self._changed:
            self._holder = 1 - me
            self._changed.notify_all()
        self._wait(me)

    def _wait(self, me: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._holder == me)
