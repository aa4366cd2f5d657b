"""A bounded map over processes: results in order, few tasks in flight, no orphans.

Workers are spawned, not forked, because the parent may have threads (of a progress bar or a
library), and a fork would copy their locks without the threads that release them. Workers end with
their parent however it ends; the standard library's pool alone would leave them waiting after kill
-9.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_object
from typing import Any, TypeVar

from megaframe.errors import UserError

T = TypeVar("T")
_IN_FLIGHT = 2


def map_ordered(
    function: Callable[..., T], tasks: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[T]:
    """Yield `function(*task)` for every task, in order.

    At most two tasks per worker are taken from `tasks` ahead of their results. An exception of a
    task is raised in place of its result, and tasks that have not begun are dropped. Raises
    `UserError` if a worker dies.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    waiting: deque[Future[T]] = deque()
    try:
        for task in tasks:
            if len(waiting) >= _IN_FLIGHT * workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, *task))
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"one of {workers} worker processes died: killed, or out of memory; run the same "
            f"command again to continue, perhaps with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        wait_for_object([parent.sentinel])
        os._exit(1)
