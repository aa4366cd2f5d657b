"""Writes Megatron's indexed datasets: see `indexed_dataset.py` for the format.

Writing uses temporary names next to the final ones. The files are renamed last, `.idx` after
`.bin`, so a file with a final name is complete. Document lengths are written to disk as they
arrive, so the memory of a writer does not grow with the number of documents.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaframe.data.indexed_dataset import HEADER, MAGIC, VERSION, get_dtype_code
from megaframe.data.token_file_record import SUFFIX
from megaframe.errors import UserError
from megaframe.io.regular_file import delete_file, open_update

_WRITTEN_AT_ONCE = 1 << 20
_LONGEST_DOCUMENT = 2**31 - 1


class IndexedDatasetWriter:
    """Writes documents, each as one sequence, to `prefix`.bin and `prefix`.idx.

    Use it in a `with` block: leaving the block finishes the files, an exception removes them.

    Args:
        prefix: Path of the files without suffix.
        dtype: Dtype of the tokens.
        sync: Wait until everything is on the disk. Otherwise the files survive a kill, but not a
            power failure.
        resume_prefix: Prefix of the unfinished files. With it they are kept after an exception, and
            the writer continues after the documents in them that are counted here.
        documents: Number of documents in the unfinished files.
        tokens: Number of tokens in the unfinished files.

    Raises:
        UserError: If the disk is full or a token does not fit `dtype`.
    """

    def __init__(
        self,
        prefix: str,
        dtype: np.dtype,
        sync: bool = True,
        resume_prefix: str = "",
        documents: int = 0,
        tokens: int = 0,
    ) -> None:
        self._dtype = np.dtype(dtype)
        self._sync = sync
        self._documents = documents
        self._files = _UnfinishedFiles(prefix, resume_prefix)
        self._files.index.seek(HEADER.size)
        if resume_prefix:
            self._files.truncate(tokens * self._dtype.itemsize, HEADER.size + 4 * documents)

    def append(self, document: ArrayLike) -> None:
        """Add one document.

        Args:
            document: Token ids [tokens].
        """
        tokens = np.asarray(document)
        self.append_batch(tokens, np.array([tokens.size]))

    def append_batch(self, tokens: NDArray, lengths: NDArray[np.integer]) -> None:
        """Add several documents.

        Args:
            tokens: Their token ids, back to back [tokens].
            lengths: Number of tokens of each [documents].

        Raises:
            UserError: If a document is longer than the format can hold, or a write fails.
            ValueError: If the lengths do not add up to the number of tokens.
        """
        if lengths.size and int(lengths.max()) > _LONGEST_DOCUMENT:
            raise UserError(
                f"{self._files.prefix}: a document has {int(lengths.max())} tokens; the format "
                f"holds {_LONGEST_DOCUMENT} at most"
            )
        if int(lengths.sum()) != tokens.size:
            raise ValueError(f"lengths add up to {int(lengths.sum())}, not {tokens.size} tokens")
        with self._files.discard_on_failure():
            self._files.tokens.write(self._convert(tokens).data)
            self._files.index.write(np.ascontiguousarray(lengths, "<i4").data)
        self._documents += lengths.size

    def flush(self) -> None:
        """Pass everything appended so far to the operating system, so that it survives a kill."""
        with self._files.discard_on_failure():
            self._files.flush()

    def finish(self) -> None:
        """Complete the index and rename both files to their final names."""
        with self._files.discard_on_failure():
            self._write_pointers()
            for start in range(0, self._documents + 1, _WRITTEN_AT_ONCE):
                stop = min(start + _WRITTEN_AT_ONCE, self._documents + 1)
                self._files.index.write(np.arange(start, stop, dtype="<i8").data)
            self._files.write_header(self._dtype, self._documents, self._documents + 1)
            self._files.commit(self._sync)

    def abandon(self) -> None:
        """Close the files, and remove them unless they are kept for a later writer."""
        self._files.discard()

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _convert(self, tokens: NDArray) -> NDArray:
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
        for start in range(0, self._documents, _WRITTEN_AT_ONCE):
            count = min(_WRITTEN_AT_ONCE, self._documents - start)
            index.seek(HEADER.size + 4 * start)
            lengths = np.frombuffer(index.read(4 * count), "<i4")
            ends = begin + np.cumsum(lengths.astype(np.int64) * self._dtype.itemsize)
            index.seek(HEADER.size + 4 * self._documents + 8 * start)
            index.write(np.concatenate(([begin], ends[:-1])).astype("<i8").data)
            begin = int(ends[-1])
        index.seek(HEADER.size + 12 * self._documents)


class _UnfinishedFiles:
    """The two files of `prefix` under temporary names, until `commit` or `discard`.

    Args:
        prefix: Path of the files without suffix.
        resume_prefix: Prefix of the temporary names, in the folder of `prefix` or below it. Files
            that exist are then opened as they are, and `discard` does not remove them. If it is
            empty, the names contain the process id and the files are new.
    """

    def __init__(self, prefix: str, resume_prefix: str) -> None:
        self.prefix = prefix
        self._keep = bool(resume_prefix)
        self._names = [
            f"{resume_prefix}{suffix}" if resume_prefix else name_unfinished(f"{prefix}{suffix}")
            for suffix in (".bin", ".idx")
        ]
        self._open: list[BinaryIO] = []
        with self.discard_on_failure():
            for name in self._names:
                if resume_prefix:
                    home = os.path.dirname(prefix) or "."
                    self._open.append(open_update(name, inside=home))
                else:
                    delete_file(name)  # of an earlier process with this id
                    self._open.append(open(name, "x+b"))  # noqa: SIM115 (closed by discard)
        self.tokens, self.index = self._open

    @contextmanager
    def discard_on_failure(self) -> Iterator[None]:
        """Discard the files if anything in the block fails. Turns an OSError into a UserError."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise UserError(write_failure(self.prefix, error)) from None
        except BaseException:
            self.discard()
            raise

    def truncate(self, *sizes: int) -> None:
        """Truncate each file to its size in `sizes`, and continue there."""
        with self.discard_on_failure():
            for file, size in zip(self._open, sizes, strict=True):
                file.truncate(size)
                file.seek(size)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        for file in self._open:
            file.flush()

    def write_header(self, dtype: np.dtype, sequences: int, documents: int) -> None:
        """Write the header at the start of the index."""
        self.index.seek(0)
        self.index.write(HEADER.pack(MAGIC, VERSION, get_dtype_code(dtype), sequences, documents))

    def commit(self, sync: bool = True) -> None:
        """Rename the files. An old `.idx` is removed first, and so is the record of an old file,
        because they must never exist next to a new `.bin`."""
        self.flush()
        for file in self._open:
            if sync:
                os.fsync(file.fileno())
            file.close()
        for suffix in (".idx", SUFFIX):
            with suppress(FileNotFoundError):
                os.unlink(f"{self.prefix}{suffix}")
        for name, suffix in zip(self._names, (".bin", ".idx"), strict=True):
            os.replace(name, f"{self.prefix}{suffix}")
        if sync:
            flush_folder(os.path.dirname(self.prefix) or ".")

    def discard(self) -> None:
        """Close the files, and remove them unless `resume_prefix` was given."""
        for file in self._open:
            with suppress(OSError):
                file.close()
        for name in () if self._keep else self._names:
            with suppress(FileNotFoundError):
                os.unlink(name)


def write_failure(path: str, error: OSError) -> str:
    """Return the message to the user about a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {path}: the disk is full; make room and run the command again"
    return f"cannot write {path}: {error.strerror or error}"


def name_unfinished(path: str) -> str:
    """Return the temporary name of `path` while this process writes it."""
    return f"{path}.{os.getpid()}.unfinished"


def flush_folder(folder: str) -> None:
    """Flush a folder to disk, so that renames in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
