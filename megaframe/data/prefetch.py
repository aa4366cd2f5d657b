"""Prefetch: what a thread makes ahead of its use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `make` repeatedly in a thread, at most `depth` results ahead of `next`.

    Permits limit how far the thread runs ahead, not a bounded queue. The thread only ever waits for
    a permit, so `close` can always wake it, and exactly `depth` results are made beyond the last
    one taken.
    """

    def __init__(self, make: Callable[[], T], depth: int) -> None:
        self._make = make
        self._permits = threading.Semaphore(depth)
        self._ready: SimpleQueue[tuple[T] | BaseException] = SimpleQueue()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._fill, name="megaframe-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> T:
        """Return the next result, in order. An exception of `make` is raised here and by each later
        call."""
        if self._failure is None:
            result = self._ready.get()
            self._permits.release()
            if isinstance(result, tuple):
                return result[0]
            self._failure = result
        raise self._failure

    def close(self) -> None:
        """End the thread and drop the results that were made ahead."""
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
            except BaseException as error:  # whatever it is, `next` raises it
                self._ready.put(error)
                return
