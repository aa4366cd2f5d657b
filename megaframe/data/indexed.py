"""Megatron token files: `.bin` holds token ids back to back, `.idx` says where each document lies.

Reading maps both files. Writing goes to temporary names beside the final ones and is renamed last,
`.idx` after `.bin`, so that a name that exists is a whole file; lengths are spilled to disk as they
come, so that neither a writer nor a merge needs memory for the number of documents.
"""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megaframe.data.token_index import (
    HEADER,
    MAGIC,
    VERSION,
    dtype_code,
    read_header,
    read_index,
)
from megaframe.errors import UserError

_AT_ONCE = 1 << 20
_LONGEST = 2**31 - 1


class TokenFile:
    """A token file open for reading: `prefix`.bin and `prefix`.idx.

    tokens is the whole `.bin` as one mapped array; the other arrays are those of `Index`.
    `len(file)` is the number of sequences. Raises `UserError` when a file is missing, truncated,
    foreign, empty or says something impossible.
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
        """Tokens of one sequence, a view of the file. Raises `IndexError` outside 0 ... S - 1."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.prefix}: sequence {number} of {len(self)}")
        start = int(self.pointers[number])
        stop = start + int(self.lengths[number]) * self.dtype.itemsize
        return np.asarray(self._bytes)[start:stop].view(self.dtype)

    def close(self) -> None:
        """Let go of the files; views taken from them keep them mapped until they go too."""
        self.lengths, self.pointers = np.empty(0, np.int32), np.empty(0, np.int64)
        self.documents = np.zeros(1, np.int64)
        self._bytes = self.tokens = np.empty(0, np.uint8)  # type: ignore[assignment]


class TokenFileWriter:
    """Writes documents one after the other, each as one sequence, to `prefix`.bin and `prefix`.idx.

    Use it in a `with` block: leaving it finishes the file, an exception leaves nothing behind.
    flush: wait until the disk has it all; without, it survives a kill but not a loss of power.
    Raises `UserError` when the disk is full or a token does not fit `dtype`.
    """

    def __init__(self, prefix: str, dtype: np.dtype, flush: bool = True) -> None:
        self._dtype = np.dtype(dtype)
        self._flush = flush
        self._documents = 0
        self._files = _Unfinished(prefix)
        self._files.index.seek(HEADER.size)

    def append(self, document: ArrayLike) -> None:
        """Add one document: token ids [tokens]."""
        tokens = np.asarray(document)
        self.append_batch(tokens, np.array([tokens.size]))

    def append_batch(self, tokens: NDArray, lengths: NDArray[np.integer]) -> None:
        """Add several documents, back to back in `tokens`, of `lengths` tokens each."""
        if lengths.size and int(lengths.max()) > _LONGEST:
            raise UserError(
                f"{self._files.prefix}: a document has {int(lengths.max())} tokens; the format "
                f"holds {_LONGEST} at most"
            )
        if int(lengths.sum()) != tokens.size:
            raise ValueError(f"lengths add up to {int(lengths.sum())}, not {tokens.size} tokens")
        with self._files.guarded():
            self._files.tokens.write(self._fitting(tokens).data)
            self._files.index.write(lengths.astype("<i4").data)
        self._documents += lengths.size

    def finish(self) -> None:
        """Complete the index and give both files their final names."""
        with self._files.guarded():
            self._write_pointers()
            for start in range(0, self._documents + 1, _AT_ONCE):
                stop = min(start + _AT_ONCE, self._documents + 1)
                self._files.index.write(np.arange(start, stop, dtype="<i8").data)
            self._files.write_header(self._dtype, self._documents, self._documents + 1)
            self._files.commit(self._flush)

    def abandon(self) -> None:
        """Remove what was written."""
        self._files.discard()

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _fitting(self, tokens: NDArray) -> NDArray:
        """The tokens in the file's dtype; refuses those that would wrap around."""
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
        """Byte offsets of all documents, from the lengths that were spilled to the index."""
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


def merge(prefixes: Sequence[str], out: str) -> None:
    """Concatenate token files of one dtype into `out`, as one writer would have written them all.

    Sequences stay in their documents and keep their places relative to their file's `.bin`. Parts
    without documents are allowed. Raises `UserError`, also when their dtypes differ.
    """
    headers = [read_header(f"{prefix}.idx") for prefix in prefixes]
    dtypes = {dtype for dtype, _, _ in headers}
    if len(dtypes) != 1:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "none"
        raise UserError(f"{out}: token files of one dtype can be merged, these have: {found}")
    sequences = sum(count for _, count, _ in headers)
    documents = 1 + sum(count - 1 for _, _, count in headers)
    files = _Unfinished(out)
    with files.guarded():
        files.write_header(dtypes.pop(), sequences, documents)
        _merge_parts(prefixes, files, sequences)
        files.commit()


def _merge_parts(prefixes: Sequence[str], files: _Unfinished, sequences: int) -> None:
    """Copy each part's four arrays to where they belong; offsets grow by what came before."""
    sequence = position = document = 0
    for prefix in prefixes:
        index = read_index(prefix)
        arrays = (
            (HEADER.size + 4 * sequence, index.lengths, 0),
            (HEADER.size + 4 * sequences + 8 * sequence, index.pointers, position),
            # The end of the last document is the beginning of the next part's first one.
            (HEADER.size + 12 * sequences + 8 * document, index.documents, sequence),
        )
        for place, values, offset in arrays:
            files.index.seek(place)
            for start in range(0, values.size, _AT_ONCE):
                chunk = values[start : start + _AT_ONCE]
                files.index.write((chunk + chunk.dtype.type(offset)).data)
        _copy_tokens(prefix, files, index.bin_bytes)
        sequence += index.lengths.size
        document += index.documents.size - 1
        position += index.bin_bytes


def _copy_tokens(prefix: str, files: _Unfinished, size: int) -> None:
    with open(f"{prefix}.bin", "rb") as source:
        while chunk := source.read(_AT_ONCE):
            files.tokens.write(chunk)
            size -= len(chunk)
    if size:
        raise UserError(f"{prefix}.bin changed its size by {-size} bytes while it was read")


class _Unfinished:
    """The two files of `prefix` under temporary names, until `commit` or `discard`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._names = [unfinished_name(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
        self._open: list[BinaryIO] = []
        with self.guarded():
            for name in self._names:
                self._open.append(open(name, "w+b"))  # noqa: SIM115
        self.tokens, self.index = self._open

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Remove what was written when anything in the block fails; explain a failed write."""
        try:
            yield
        except OSError as error:
            self.discard()
            raise UserError(write_failure(self.prefix, error)) from None
        except BaseException:
            self.discard()
            raise

    def write_header(self, dtype: np.dtype, sequences: int, documents: int) -> None:
        self.index.seek(0)
        self.index.write(HEADER.pack(MAGIC, VERSION, dtype_code(dtype), sequences, documents))

    def commit(self, flush: bool = True) -> None:
        """Rename. An old `.idx` goes first: it must never stand beside a new `.bin`."""
        for file in self._open:
            file.flush()
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
        for name in self._names:
            with suppress(FileNotFoundError):
                os.unlink(name)


def write_failure(path: str, error: OSError) -> str:
    """What to tell the user about a failed write to `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot write {path}: the disk is full; make room and run the command again"
    return f"cannot write {path}: {error.strerror or error}"


def unfinished_name(path: str) -> str:
    """Temporary name of `path` while this process writes it."""
    return f"{path}.{os.getpid()}.unfinished"


def remove_unfinished(prefix: str) -> None:
    """Remove what killed writers of `prefix` have left. Only while no other one is at work."""
    for suffix in (".bin", ".idx"):
        for path in glob.glob(f"{glob.escape(prefix + suffix)}.[0-9]*.unfinished"):
            os.unlink(path)


def flush_folder(folder: str) -> None:
    """Make renames in `folder` survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
