"""Direct: files written and read past the page cache, where the file system lets it.

A checkpoint is large, and nobody reads it soon: in the page cache it would push out what is of use,
and its pages cost more to find than its bytes to write or read. Only what several
ranks of a machine load goes through it, so that it is fetched once.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megaframe.checkpoint.room import ALIGNMENT, aligned

_CHUNK_BYTES = 16 << 20
_UNDER_WAY = 3
"""Chunks that are written at a time, while the next one is filled."""
_DIRECT_BYTES, _CACHED_BYTES = 2 << 20, 512 << 10
"""Read at a time: enough for the disk, and little enough to be in the processor's cache when it is
checked."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_NOT_THERE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What a file system says that cannot take room in advance, or has but one way to write."""


class DirectSource:
    """A regular file that is open for reading, by several threads. fresh, alone: as of
    `Store.open`; neither fills the cache, but what is there is taken from it when not fresh."""

    def __init__(self, file: BinaryIO, *, fresh: bool, alone: bool) -> None:
        self._file, self._fresh = file, fresh
        self._direct: int | None = None
        self.size = os.fstat(file.fileno()).st_size
        if fresh:
            self._forget()
        past = fresh or (alone and not _is_cached(file.fileno(), self.size))
        # The cache reads ahead of one thread, and not of two.
        self.chunk, self.at_once = (_DIRECT_BYTES, 2) if past else (_CACHED_BYTES, 1)
        if past:
            with suppress(OSError, AttributeError):  # another description of the same file
                self._direct = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT)

    def read_into(self, start: int, into: memoryview) -> int:
        done, head = 0, -start % ALIGNMENT
        for read, stop in (
            (self._through_cache, head),
            (self._past_cache, len(into)),
            (self._through_cache, len(into)),
        ):
            rest = into[done:stop]
            while len(rest) and (got := read(start + done, rest)):
                done, rest = done + got, rest[got:]
        return done

    def _past_cache(self, start: int, into: memoryview) -> int:
        """Read from the disk, but for an end that is not aligned."""
        into = into[: len(into) // ALIGNMENT * ALIGNMENT]
        if self._direct is None or not len(into) or start % ALIGNMENT:
            return 0
        if np.frombuffer(into, np.uint8).ctypes.data % ALIGNMENT:
            return 0
        with suppress(OSError):  # what it is, the way that always works will tell
            return os.preadv(self._direct, [into], start)
        return 0

    def _through_cache(self, start: int, into: memoryview) -> int:
        return os.preadv(self._file.fileno(), [into], start)

    def close(self) -> None:
        if self._fresh:
            self._forget()  # nobody reads it soon
        if self._direct is not None:
            os.close(self._direct)
        self._file.close()

    def _forget(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # clean pages


class DirectFile:
    """A file of `size` bytes that did not exist. Room for it is taken at once, so it will not run
    out. Raises OSError; what goes wrong in the background is raised by the next `put` or `finish`.

    start: bytes left out at the start, a multiple of the alignment. held: all that will be put,
    aligned in memory where it stays until the file is closed, so that it is written from there;
    None where what is put may change, and is copied.
    """

    def __init__(self, path: Path, size: int, start: int, held: memoryview | None) -> None:
        self._start = start
        self._file = open(path, "x+b", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._pool = ThreadPoolExecutor(_UNDER_WAY)
        self._writes: deque[tuple[Future[None], np.ndarray]] = deque()
        self._held, self._sent = None if held is None else np.frombuffer(held, np.uint8), 0
        self._size, self._width = size, min(_CHUNK_BYTES, -(-size // ALIGNMENT) * ALIGNMENT)
        self._chunk, self._filled = self._next(), 0
        """What is to be written next, as soon as all of it is there."""
        self._direct = False

    def __enter__(self) -> DirectFile:
        try:
            self._direct = self._bypass(True)
            _reserve(self._file.fileno(), self._size)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()  # the file must not be closed before its writes are done
        self._file.close()

    def put(self, data: memoryview) -> None:
        """Write the next bytes."""
        left = np.frombuffer(data, np.uint8)
        while len(left):
            into = self._chunk[self._filled :]
            room = min(len(left), len(into))
            if self._held is None:
                into[:room] = left[:room]
            self._filled += room
            left = left[room:]
            if room == len(into) and self._filled % ALIGNMENT == 0:  # not the end of what is held
                self._send(self._filled)

    def finish(self, head: bytes) -> None:
        """Write what was left out at the start, and return when all is on the disk."""
        last = self._filled % ALIGNMENT
        tail = self._chunk[self._filled - last : self._filled].copy()
        self._send(self._filled - last)
        while self._writes:
            self._writes.popleft()[0].result()
        if self._direct:
            self._bypass(False)  # the end of a file is as long as it is
        self._write(np.frombuffer(head, np.uint8), 0)
        self._write(tail, self._start)
        os.fsync(self._file.fileno())
        if self._direct:
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _send(self, size: int) -> None:
        sent = self._pool.submit(self._write, self._chunk[:size], self._start)
        self._writes.append((sent, self._chunk))
        self._start, self._sent, self._filled = self._start + size, self._sent + size, 0
        free = None
        if len(self._writes) > _UNDER_WAY:
            done, free = self._writes.popleft()
            done.result()
        self._chunk = self._next(free)

    def _next(self, free: np.ndarray | None = None) -> np.ndarray:
        """The bytes of the next chunk, or where they are to be put: in what is free, if any is."""
        if self._held is not None:
            return self._held[self._sent : self._sent + _CHUNK_BYTES]
        return aligned(self._width) if free is None else free

    def _write(self, data: np.ndarray, start: int) -> None:
        while len(data):
            written = os.pwrite(self._file.fileno(), data.data, start)
            data, start = data[written:], start + written

    def _bypass(self, wanted: bool) -> bool:
        """Have reads and writes bypass the page cache, or not; whether they do."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | flag if wanted else flags & ~flag)
        except OSError:
            return False
        return wanted and bool(flag)


def _is_cached(descriptor: int, size: int) -> bool:
    """Whether the page cache has most of a file, or that cannot be known."""
    with (
        suppress(OSError, ValueError, AttributeError),
        mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory,
    ):
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        found = np.frombuffer(memory, np.uint8)
        address, vector = (ctypes.c_void_p(array.ctypes.data) for array in (found, pages))
        del found  # or the memory cannot be closed
        if not _LIBC.mincore(address, ctypes.c_size_t(size), vector):
            return 2 * int((pages & 1).sum()) > len(pages)
    return True


def _reserve(descriptor: int, size: int) -> None:
    """Take room for a file now. posix_fallocate would write to every page where that cannot be."""
    reserve = getattr(_LIBC, "fallocate64", None)
    if reserve is None:
        return
    given = ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size)
    if reserve(*given) and ctypes.get_errno() not in _NOT_THERE:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
