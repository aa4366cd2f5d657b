"""Room: memory of the host for what is read and written past the page cache.

It is aligned, as the kernel asks there, and of huge pages where it has some: a disk takes and gives
few large runs of memory up to three times as fast as many small ones (docs/log.md).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

ALIGNMENT = 4096
"""Of everything that bypasses the page cache: place in memory, place in the file and length."""
_HUGE = 2 << 20


def aligned(size: int) -> np.ndarray:
    """`size` bytes that start at a multiple of the alignment. Memory is taken as they are used."""
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(memory, np.uint8)
    start = -room.ctypes.data % _HUGE
    return room[start : start + size]
