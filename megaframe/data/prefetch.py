"""Results made ahead of their use by one background thread.

Permits, not a bounded queue, keep the thread from running ahead: it waits only for a permit, so
that `close` can always wake it, and exactly `depth` results are made beyond the last one taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `make` over and over in a thread, at most `depth` results ahead of `next`."""

    def __init__(self, make: Callable[[], T], depth: int) -> None:
        self._make = make
        self._permits = threading.Semaphore(depth)
        self._ready: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="megaframe-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> T:
        """The next result, in order. What `make` raised is raised here, and at each later call."""
        if self._failure is None:
            result = self._ready.get()
            self._permits.release()
            if isinstance(result, tuple):
                return result[0]
            self._failure = result
        raise self._failure

    def close(self) -> None:
        """End the thread; results that were made ahead are dropped."""
        self._closed = True
        self._permits.release()
        self._thread.join()

    def _fill(self) -> None:
        while True:
            self._permits.acquire()
            if self._closed:
                return
            try:
                self._ready.put((self._make(),))
            except BaseException as error:  # whatever it is, it belongs to the caller of `next`
                self._ready.put(error)
                return
