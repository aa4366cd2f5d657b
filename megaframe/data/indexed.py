"""Megatron token files: `.bin` has token ids back to back, `.idx` the position of each document.

Reading maps both files. Writing uses temporary names next to the final ones. The files are renamed
last, `.idx` after `.bin`, so a file with a final name is complete. Document lengths are written to
disk as they arrive, so the memory of a writer does not grow with the number of documents.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaframe.data.token_index import (
    HEADER,
    MAGIC,
    VERSION,
    dtype_code,
    read_index,
)
from megaframe.errors import UserError

_AT_ONCE = 1 << 20
_LONGEST = 2**31 - 1


class TokenFile:
    """A token file open for reading: `prefix`.bin and `prefix`.idx.

    tokens: the whole `.bin` as one mapped array. The other arrays are those of `Index`. `len(file)`
    is the number of sequences. Raises `UserError` if a file is missing, truncated, empty, of
    another format or inconsistent.
    """

    def __init__(self, prefix: str) -> None:
        index = read_index(prefix)
        if not index.lengths.size or not index.bin_bytes:
            raise UserError(
                f"{prefix}: the token file is empty ({index.lengths.size} sequences in .idx, "
                f"{index.bin_bytes} bytes in .bin); it takes at least one token"
            )
        self.prefix = prefix
        self.dtype = index.dtype
        self.lengths = index.lengths
        self.pointers = index.pointers
        self.documents = index.documents
        self._bytes = np.memmap(f"{prefix}.bin", np.uint8, "r")
        self.tokens = self._bytes.view(index.dtype)

    def __len__(self) -> int:
        return self.lengths.size

    def sequence(self, number: int) -> NDArray:
        """Return the tokens of a sequence as a view of the file. Raises `IndexError` if `number` is
        not in 0 ... S - 1."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.prefix}: sequence {number} of {len(self)}")
        start = int(self.pointers[number])
        stop = start + int(self.lengths[number]) * self.dtype.itemsize
        return np.asarray(self._bytes)[start:stop].view(self.dtype)

    def close(self) -> None:
        """Release the files. They stay mapped as long as views of them exist."""
        self.lengths, self.pointers = np.empty(0, np.int32), np.empty(0, np.int64)
        self.documents = np.zeros(1, np.int64)
        self._bytes = self.tokens = np.empty(0, np.uint8)  # type: ignore[assignment]


class TokenFileWriter:
    """Writes documents, each as one sequence, to `prefix`.bin and `prefix`.idx.

    Use it in a `with` block: leaving the block finishes the files, an exception removes them.

    flush: wait until everything is on the disk. Otherwise the files survive a kill, but not a power
           failure.
    kept:  prefix of the unfinished files. With it they are kept after an exception, and the writer
           continues after the first `documents` documents in them, which have `tokens` tokens.
    Raises `UserError` if the disk is full or a token does not fit `dtype`.
    """

    def __init__(
        self,
        prefix: str,
        dtype: np.dtype,
        flush: bool = True,
        kept: str = "",
        documents: int = 0,
        tokens: int = 0,
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._flush = flush
        self._documents = documents
        self._files = _Unfinished(prefix, kept)
        self._files.index.seek(HEADER.size)
        if kept:
            self._files.cut(tokens * self._dtype.itemsize, HEADER.size + 4 * documents)

    def append(self, document: ArrayLike) -> None:
        """Add one document: token ids [tokens]."""
        tokens = np.asarray(document)
        self.append_batch(tokens, np.array([tokens.size]))

    def append_batch(self, tokens: NDArray, lengths: NDArray[np.integer]) -> None:
        """Add several documents. tokens: their tokens, back to back. lengths: number of tokens of
        each."""
        if lengths.size and int(lengths.max()) > _LONGEST:
            raise UserError(
                f"{self._files.prefix}: a document has {int(lengths.max())} tokens; the format "
                f"holds {_LONGEST} at most"
            )
        if int(lengths.sum()) != tokens.size:
            raise ValueError(f"lengths add up to {int(lengths.sum())}, not {tokens.size} tokens")
        with self._files.guarded():
            self._files.tokens.write(self._fitting(tokens).data)
            self._files.index.write(np.ascontiguousarray(lengths, "<i4").data)
        self._documents += lengths.size

    def hand_over(self) -> None:
        """Pass everything appended so far to the operating system, so that it survives a kill."""
        with self._files.guarded():
            self._files.hand_over()

    def finish(self) -> None:
        """Complete the index and rename both files to their final names."""
        with self._files.guarded():
            self._write_pointers()
            for start in range(0, self._documents + 1, _AT_ONCE):
                stop = min(start + _AT_ONCE, self._documents + 1)
                self._files.index.write(np.arange(start, stop, dtype="<i8").data)
            self._files.write_header(self._dtype, self._documents, self._documents + 1)
            self._files.commit(self._flush)

    def abandon(self) -> None:
        """Close the files, and remove them unless they are kept for a later writer."""
        self._files.discard()

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _fitting(self, tokens: NDArray) -> NDArray:
        """Convert tokens to the file's dtype. Raises `UserError` for those that do not fit."""
        if tokens.dtype != self._dtype and tokens.size and self._dtype.kind in "iu":
            limits = np.iinfo(self._dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                raise UserError(
                    f"{self._files.prefix}: token ids run from {low} to {high}, but {self._dtype} "
                    f"holds {limits.min} to {limits.max}"
                )
        return np.ascontiguousarray(tokens, self._dtype)

    def _write_pointers(self) -> None:
        """Write the byte offsets of all documents, computed from the lengths already in the
        index."""
        index, begin = self._files.index, 0
        for start in range(0, self._documents, _AT_ONCE):
            count = min(_AT_ONCE, self._documents - start)
            index.seek(HEADER.size + 4 * start)
            lengths = np.frombuffer(index.read(4 * count), "<i4")
            ends = begin + np.cumsum(lengths.astype(np.int64) * self._dtype.itemsize)
            index.seek(HEADER.size + 4 * self._documents + 8 * start)
            index.write(np.concatenate(([begin], ends[:-1])).astype("<i8").data)
            begin = int(ends[-1])
        index.seek(HEADER.size + 12 * self._documents)


class _Unfinished:
    """The two files of `prefix` under temporary names, until `commit` or `discard`.

    kept: prefix of the temporary names. Existing files are then opened as they are, and `discard`
    does not remove them. If it is empty, the names contain the process id and the files are new.
    """

    def __init__(self, prefix: str, kept: str) -> None:
        self.prefix = prefix
        self._kept = bool(kept)
        self._names = [
            f"{kept}{suffix}" if kept else unfinished_name(f"{prefix}{suffix}")
            for suffix in (".bin", ".idx")
        ]
        self._open: list[BinaryIO] = []
        with self.guarded():
            for name in self._names:
                found = kept and os.path.exists(name)
                self._open.append(open(name, "r+b") if found else open(name, "w+b"))  # noqa: SIM115
        self.tokens, self.index = self._open

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Discard the files if anything in the block fails. Turns an OSError into a UserError."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise UserError(write_failure(self.prefix, error)) from None
        except BaseException:
            self.discard()
            raise

    def cut(self, *sizes: int) -> None:
        """Truncate each file to its size in `sizes`, and continue there."""
        with self.guarded():
            for file, size in zip(self._open, sizes, strict=True):
                file.truncate(size)
                file.seek(size)

    def hand_over(self) -> None:
        for file in self._open:
            file.flush()

    def write_header(self, dtype: np.dtype, sequences: int, documents: int) -> None:
        self.index.seek(0)
        self.index.write(HEADER.pack(MAGIC, VERSION, dtype_code(dtype), sequences, documents))

    def commit(self, flush: bool = True) -> None:
        """Rename the files. An old `.idx` is removed first, because it must never exist next to a
        new `.bin`."""
        self.hand_over()
        for file in self._open:
            if flush:
                os.fsync(file.fileno())
            file.close()
        with suppress(FileNotFoundError):
            os.unlink(f"{self.prefix}.idx")
        for name, suffix in zip(self._names, (".bin", ".idx"), strict=True):
            os.replace(name, f"{self.prefix}{suffix}")
        if flush:
            flush_folder(os.path.dirname(self.prefix) or ".")

    def discard(self) -> None:
        for file in self._open:
            with suppress(OSError):
                file.close()
        for name in () if self._kept else self._names:
            with suppress(FileNotFoundError):
                os.unlink(name)


def write_failure(path: str, error: OSError) -> str:
    """Return the message to the user about a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {path}: the disk is full; make room and run the command again"
    return f"cannot write {path}: {error.strerror or error}"


def unfinished_name(path: str) -> str:
    """Return the temporary name of `path` while this process writes it."""
    return f"{path}.{os.getpid()}.unfinished"


def flush_folder(folder: str) -> None:
    """Flush a folder to disk, so that renames in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
