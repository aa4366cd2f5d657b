"""Turns: two pieces of work, one of which computes while the other waits for a transfer.

They never run at the same time, and each hands over at fixed points of its work, whatever has
arrived. All ranks therefore start their transfers in the same order, and results do not depend on
timing.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import Condition

import torch

HandOver = Callable[[], None]
"""Lets the other piece of work continue. Returns when that hands over in turn or is done."""


class Turn:
    """Called by layers before they wait for a transfer. Does nothing unless other work runs beside
    them."""

    def __init__(self) -> None:
        self.hand_over: HandOver | None = None

    def pass_on(self) -> None:
        """Let the other piece of work continue, if there is one."""
        if self.hand_over is not None:
            self.hand_over()


class Pair:
    """Runs two pieces of work in turns, the second one in a thread of its own, which is reused."""

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
        # Two settings belong to each thread: how many threads an operator uses, which determines
        # the order of sums, and the GPU that is used if none is named.
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        given = torch.get_num_threads(), gpu
        return ThreadPoolExecutor(1, "beside", initializer=_like_another, initargs=given)


def _like_another(threads: int, gpu: int | None) -> None:
    """Give this thread the same number of operator threads and current GPU as another one."""
    torch.set_num_threads(threads)
    if gpu is not None:
        torch.cuda.set_device(gpu)


class _Baton:
    """Only the holder of the baton works."""

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
