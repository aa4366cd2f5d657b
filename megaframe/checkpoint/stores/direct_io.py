"""Reads and writes files bypassing the page cache, if the file system supports it.

A checkpoint is large and is not read again soon. In the page cache it would evict useful data, and
allocating its pages takes longer than reading or writing its bytes. Only data that several ranks of
a machine load goes through the cache, so that it is fetched once.
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

ALIGNMENT = 4096
"""Direct I/O requires memory address, file offset and length to be multiples of this many bytes."""
_HUGE_PAGE_BYTES = 2 << 20


def allocate_aligned(size: int) -> np.ndarray:
    """Return `size` bytes that start at a multiple of `ALIGNMENT` (in fact, of a huge page).
    Physical memory is only taken when they are first used."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    memory_bytes = np.frombuffer(memory, np.uint8)
    start = -memory_bytes.ctypes.data % _HUGE_PAGE_BYTES
    return memory_bytes[start : start + size]


_CHUNK_BYTES = 16 << 20
_WRITES_IN_FLIGHT = 3
"""Chunks that are being written at the same time, while the next one is filled."""
_DIRECT_READ_BYTES, _CACHED_READ_BYTES = 2 << 20, 512 << 10
"""Bytes per read: enough for the disk, and few enough to be still in the CPU's cache when their
checksum is computed."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_UNSUPPORTED_ERRORS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of a file system that cannot reserve space in advance."""


class DirectReadHandle:
    """A regular file open for reading, possibly by several threads.

    Args:
        file: The open file.
        bypass_cache, sole_reader: See `Store.open`. With either of them reads do not fill the
            page cache. With `sole_reader` a file of which most is in the cache is read from
            there; with `bypass_cache` it never is.
    """

    def __init__(self, file: BinaryIO, *, bypass_cache: bool, sole_reader: bool) -> None:
        self._file, self._bypass_cache = file, bypass_cache
        self._direct: int | None = None
        self.size = os.fstat(file.fileno()).st_size
        if bypass_cache:
            self._drop_from_cache()
        direct = bypass_cache or (sole_reader and not _is_cached(file.fileno(), self.size))
        # The kernel reads ahead for one thread that reads through the cache, but not for two.
        self.chunk_bytes, self.num_threads = (
            (_DIRECT_READ_BYTES, 2) if direct else (_CACHED_READ_BYTES, 1)
        )
        if direct:
            with suppress(OSError, AttributeError):  # reopened: O_DIRECT for this one only
                self._direct = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT)

    def read_into(self, start: int, buffer: memoryview) -> int:
        num_done, unaligned_start = 0, -start % ALIGNMENT
        for read, stop in (
            (self._read_cached, unaligned_start),
            (self._read_direct, len(buffer)),
            (self._read_cached, len(buffer)),
        ):
            remaining = buffer[num_done:stop]
            while len(remaining) and (num_read := read(start + num_done, remaining)):
                num_done, remaining = num_done + num_read, remaining[num_read:]
        return num_done

    def _read_direct(self, start: int, buffer: memoryview) -> int:
        """Read from the disk, except for an unaligned end. Returns 0 if that is impossible here."""
        buffer = buffer[: len(buffer) // ALIGNMENT * ALIGNMENT]
        if self._direct is None or not len(buffer) or start % ALIGNMENT:
            return 0
        if np.frombuffer(buffer, np.uint8).ctypes.data % ALIGNMENT:
            return 0
        with suppress(OSError):  # `_read_cached` will report the error
            return os.preadv(self._direct, [buffer], start)
        return 0

    def _read_cached(self, start: int, buffer: memoryview) -> int:
        return os.preadv(self._file.fileno(), [buffer], start)

    def close(self) -> None:
        if self._bypass_cache:
            self._drop_from_cache()  # not needed again soon
        if self._direct is not None:
            os.close(self._direct)
        self._file.close()

    def _drop_from_cache(self) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # drops clean pages


class DirectWriteHandle:
    """A new file of `size` bytes, whose space is reserved when it is created.

    Errors of background writes are raised by a later `write` or by `finish`.

    Args:
        path: Of the file.
        size: Its bytes.
        start: Bytes left out at the start, a multiple of the alignment.
        aligned_data: Everything that will be written, in aligned memory that does not change
            until the file is closed; it is written directly from there. None if the data may
            change after `write`; then they are copied.

    Raises:
        OSError: If the file exists or the disk is full.
    """

    def __init__(self, path: Path, size: int, start: int, aligned_data: memoryview | None) -> None:
        self._start = start
        self._file = open(path, "x+b", buffering=0)  # noqa: SIM115 (closed by __exit__)
        self._pool = ThreadPoolExecutor(_WRITES_IN_FLIGHT)
        self._writes: deque[tuple[Future[None], np.ndarray]] = deque()
        self._aligned_data, self._num_sent = (
            None if aligned_data is None else np.frombuffer(aligned_data, np.uint8),
            0,
        )
        self._size, self._width = size, min(_CHUNK_BYTES, -(-size // ALIGNMENT) * ALIGNMENT)
        self._chunk, self._num_filled = self._get_next_chunk(), 0
        """The chunk to be written next, and how much of it has been filled."""
        self._direct = False

    def __enter__(self) -> DirectWriteHandle:
        try:
            self._direct = self._set_direct(True)
            _reserve_space(self._file.fileno(), self._size)
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

    def write(self, data: memoryview) -> None:
        """Write the next bytes."""
        remaining = np.frombuffer(data, np.uint8)
        while len(remaining):
            space = self._chunk[self._num_filled :]
            num_bytes = min(len(remaining), len(space))
            if self._aligned_data is None:
                space[:num_bytes] = remaining[:num_bytes]
            self._num_filled += num_bytes
            remaining = remaining[num_bytes:]
            if (
                num_bytes == len(space) and self._num_filled % ALIGNMENT == 0
            ):  # not at the end of `aligned_data`
                self._send(self._num_filled)

    def finish(self, header: bytes) -> None:
        """Write the bytes left out at the start. Returns when everything is on the disk."""
        unaligned = self._num_filled % ALIGNMENT
        tail = self._chunk[self._num_filled - unaligned : self._num_filled].copy()
        self._send(self._num_filled - unaligned)
        while self._writes:
            self._writes.popleft()[0].result()
        if self._direct:
            self._set_direct(False)  # the end of the file is not aligned
        self._write(np.frombuffer(header, np.uint8), 0)
        self._write(tail, self._start)
        os.fsync(self._file.fileno())
        if self._direct:
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _send(self, size: int) -> None:
        write = self._pool.submit(self._write, self._chunk[:size], self._start)
        self._writes.append((write, self._chunk))
        self._start, self._num_sent, self._num_filled = self._start + size, self._num_sent + size, 0
        free_chunk = None
        if len(self._writes) > _WRITES_IN_FLIGHT:
            oldest, free_chunk = self._writes.popleft()
            oldest.result()
        self._chunk = self._get_next_chunk(free_chunk)

    def _get_next_chunk(self, free_chunk: np.ndarray | None = None) -> np.ndarray:
        """Return the next chunk: the part of `aligned_data` that follows, or memory to copy data
        into.

        Args:
            free_chunk: A chunk that has been written and can be reused.
        """
        if self._aligned_data is not None:
            return self._aligned_data[self._num_sent : self._num_sent + _CHUNK_BYTES]
        return allocate_aligned(self._width) if free_chunk is None else free_chunk

    def _write(self, data: np.ndarray, start: int) -> None:
        while len(data):
            written = os.pwrite(self._file.fileno(), data.data, start)
            data, start = data[written:], start + written

    def _set_direct(self, enable: bool) -> bool:
        """Turn bypassing the page cache on or off. Returns whether it is on."""
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | flag if enable else flags & ~flag)
        except OSError:
            return False
        return enable and bool(flag)


def _is_cached(descriptor: int, size: int) -> bool:
    """Return whether most of a file is in the page cache; True if that cannot be determined."""
    with (
        suppress(OSError, ValueError, AttributeError),
        mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as memory,
    ):
        pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        mapped = np.frombuffer(memory, np.uint8)
        address, vector = (ctypes.c_void_p(array.ctypes.data) for array in (mapped, pages))
        del mapped  # otherwise the mapping cannot be closed
        if not _LIBC.mincore(address, ctypes.c_size_t(size), vector):
            return 2 * int((pages & 1).sum()) > len(pages)
    return True


def _reserve_space(descriptor: int, size: int) -> None:
    """Reserve disk space for a file, if the file system can.

    Unlike posix_fallocate, this does not fall back to writing every page.

    Raises:
        OSError: If there is not enough space.
    """
    reserve = getattr(_LIBC, "fallocate64", None)
    if reserve is None:
        return
    arguments = ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size)
    if reserve(*arguments) and ctypes.get_errno() not in _UNSUPPORTED_ERRORS:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
