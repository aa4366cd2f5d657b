"""Host memory for reads and writes that bypass the page cache.

The memory is aligned, which direct I/O requires, and uses huge pages where the kernel offers them:
a disk transfers a few large runs of memory up to three times as fast as many small ones
(docs/log.md).
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

ALIGNMENT = 4096
"""Direct I/O requires memory address, file offset and length to be multiples of this many bytes."""
_HUGE = 2 << 20


def aligned(size: int) -> np.ndarray:
    """Return `size` bytes that start at a multiple of `ALIGNMENT` (in fact, of a huge page).
    Physical memory is only taken when they are first used."""
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(memory, np.uint8)
    start = -room.ctypes.data % _HUGE
    return room[start : start + size]
