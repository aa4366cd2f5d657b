"""Interleaving: two pieces of work, one of which computes while the other waits for a transfer.

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


class InterleaveHook:
    """Called by layers before they wait for a transfer. Does nothing unless other work is
    interleaved with theirs.

    Attributes:
        switch: Lets the other piece of work continue; None if there is none.
    """

    def __init__(self) -> None:
        self.switch: HandOver | None = None

    def hand_over(self) -> None:
        """Let the other piece of work continue, if there is one."""
        if self.switch is not None:
            self.switch()


class InterleavedRunner:
    """Runs two pieces of work in turns, the second one in a thread of its own, which is reused."""

    def run(self, first: Callable[[HandOver], None], second: Callable[[HandOver], None]) -> None:
        """Return when both are done. Raises what either raises, once the other has ended.

        Args:
            first: Runs in this thread. It gets the function that hands over to the other.
            second: Runs in the other thread, and waits until `first` hands over
                or is done.
        """
        turns = _Alternation()
        result = self._thread.submit(turns.run, 1, second)
        try:
            turns.run(0, first)
        finally:
            result.result()

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        # Two settings belong to each thread: how many threads an operator uses, which determines
        # the order of sums, and the GPU that is used if none is named.
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        settings = torch.get_num_threads(), gpu
        return ThreadPoolExecutor(
            1, "interleaved", initializer=_set_thread_settings, initargs=settings
        )


def _set_thread_settings(threads: int, gpu: int | None) -> None:
    """Set the number of operator threads and the current GPU of this thread."""
    torch.set_num_threads(threads)
    if gpu is not None:
        torch.cuda.set_device(gpu)


class _Alternation:
    """Only one of two threads, 0 and 1, works at a time; 0 begins."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._turn = 0
        self._working = {0, 1}

    def run(self, thread: int, work: Callable[[HandOver], None]) -> None:
        """Do the work of a thread in its turns; `work` gets what hands over to the other one."""
        self._await_turn(thread)
        try:
            work(lambda: self._hand_over(thread))
        finally:
            with self._changed:
                # Also after an error: the other thread must get its turn, or it would wait forever.
                self._working.discard(thread)
                self._turn = 1 - thread
                self._changed.notify_all()

    def _hand_over(self, thread: int) -> None:
        # The other is done, so there is nobody to hand over to.
        if 1 - thread not in self._working:
            return
        with self._changed:
            self._turn = 1 - thread
            self._changed.notify_all()
        self._await_turn(thread)

    def _await_turn(self, thread: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == thread)
