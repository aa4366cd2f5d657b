"""Megatron's indexed dataset: `.bin` has token ids back to back, `.idx` where documents begin.

Reading maps both files. Everything that is used as an index is checked when a file is opened, in
one vectorised pass over the mapped file (tens of milliseconds for five million documents). So no
later read can leave the `.bin` file or silently return another document.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from megaframe.errors import UserError
from megaframe.io.untrusted import open_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, sequences S, document indices D (documents + 1)."""

DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_FIRST_WIDE_VOCAB = 65500
_CHECKED_AT_ONCE = 1 << 18
_DIGESTED = 1 << 14


def choose_token_dtype(vocab: int) -> np.dtype:
    """Return the dtype that Megatron's writer uses for this vocabulary size.

    The limit is 65,500, not 65,536; a reader that assumes the latter would misread files for
    vocabulary sizes in between.
    """
    return np.dtype("<u2") if vocab < _FIRST_WIDE_VOCAB else np.dtype("<i4")


def get_dtype_code(dtype: np.dtype) -> int:
    """Return the code of a dtype in the header."""
    return {stored: code for code, stored in DTYPES.items()}[dtype]


@dataclass(frozen=True)
class DatasetIndex:
    """The contents of a checked `.idx`, mapped into memory.

    Attributes:
        dtype: Dtype of the tokens.
        lengths: Tokens of each sequence, i32[S].
        pointers: Byte offset of each sequence in `.bin`, i64[S].
        documents: First sequence of each document, then S; i64[D].
        bin_bytes: Size of `.bin` in bytes.
    """

    dtype: np.dtype
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    documents: NDArray[np.int64]
    bin_bytes: int


def read_index(prefix: str) -> DatasetIndex:
    """Map and check `prefix`.idx against the size of `prefix`.bin.

    Raises:
        UserError: If one of them is missing, damaged or of another format.
    """
    index_path, bin_path = f"{prefix}.idx", f"{prefix}.bin"
    dtype, sequences, documents = read_header(index_path)
    bin_bytes = _read_file_size(bin_path)
    raw = np.asarray(np.memmap(index_path, np.uint8, "r"))
    pointers_at = HEADER.size + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    index = DatasetIndex(
        dtype,
        raw[HEADER.size : pointers_at].view("<i4"),
        raw[pointers_at:documents_at].view("<i8"),
        raw[documents_at : documents_at + 8 * documents].view("<i8"),
        bin_bytes,
    )
    _check_documents(index, index_path)
    _check_sequences(index, prefix)
    return index


def _read_file_size(path: str) -> int:
    try:
        with open_file(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        prefix, hint = path[:-4], ""
        if prefix.endswith((".bin", ".idx")):
            hint = f"; leave the suffix out: {prefix[:-4]}"
        raise UserError(f"cannot open {path}: {error.strerror}{hint}") from None


def read_header(path: str) -> tuple[np.dtype, int, int]:
    """Read the header of an `.idx`: dtype, number of sequences, number of document indices.

    Raises:
        UserError: If it is not a header that can be read, or does not match the file's size.
    """
    size = _read_file_size(path)
    try:
        with open_file(path) as file:
            header = file.read(HEADER.size)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not MAGIC.startswith(header[: len(MAGIC)]):
        raise UserError(
            f"{path} is not the index of a token file: it begins with {header[: len(MAGIC)]!r}, "
            f"not {MAGIC!r}"
        )
    if len(header) < HEADER.size:
        raise UserError(f"{path} is truncated: {size} bytes, but its header has {HEADER.size}")
    _, version, code, sequences, documents = HEADER.unpack(header)
    if version != VERSION:
        raise UserError(f"{path} has version {version}; only version {VERSION} can be read")
    if code not in DTYPES:
        raise UserError(f"{path} has dtype code {code}; known are 1 to {max(DTYPES)}")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size == expected + sequences and sequences:
        raise UserError(f"{path} belongs to a multimodal file; only text can be read")
    if size != expected:
        state = "is truncated" if size < expected else "is too long"
        raise UserError(
            f"{path} {state}: {size} bytes, but {sequences} sequences and {documents} document "
            f"indices take {expected}"
        )
    return DTYPES[code], sequences, documents


def _check_documents(index: DatasetIndex, path: str) -> None:
    """Check that document indices begin with 0, end with S and never decrease."""
    documents, sequences = index.documents, index.lengths.size
    ends = (int(documents[0]), int(documents[-1])) if documents.size else None
    if ends != (0, sequences):
        raise UserError(
            f"{path}: document indices run from {ends[0]} to {ends[1]}, not from 0 to {sequences}"
            if ends
            else f"{path}: has no document indices; at least the leading 0 is needed"
        )
    for start in range(0, documents.size - 1, _CHECKED_AT_ONCE):
        chunk = documents[start : start + _CHECKED_AT_ONCE + 1]
        falls = np.flatnonzero(chunk[1:] < chunk[:-1])
        if falls.size:
            at = int(falls[0])
            raise UserError(
                f"{path}: document index {start + at + 1} is {chunk[at + 1]}, below the one "
                f"before it, {chunk[at]}"
            )


def _check_sequences(index: DatasetIndex, prefix: str) -> None:
    """Check that every sequence lies within `.bin`, and that one ends where `.bin` ends.

    If `.bin` is longer than its sequences cover, the two files do not belong together.
    """
    item, covered = index.dtype.itemsize, 0
    if index.bin_bytes % item:
        raise UserError(
            f"{prefix}.bin is truncated: {index.bin_bytes} bytes are not a whole number of "
            f"{index.dtype} tokens of {item} bytes, the type that {prefix}.idx names"
        )
    for start, sizes, pointers in _list_sequence_chunks(index):
        # Subtract from the size of the file; adding to the pointer might overflow.
        bad = np.flatnonzero((sizes < 0) | (pointers < 0) | (pointers > index.bin_bytes - sizes))
        if bad.size:
            at = int(bad[0])
            raise UserError(
                f"{prefix}.idx: sequence {start + at} has {int(sizes[at]) // item} tokens at byte "
                f"{pointers[at]}, but {prefix}.bin has {index.bin_bytes} bytes; it is truncated or "
                f"belongs to another index"
            )
        covered = max(covered, int((pointers + sizes).max()))
    if covered != index.bin_bytes:
        raise UserError(
            f"{prefix}.bin has {index.bin_bytes} bytes, but the sequences of {prefix}.idx end at "
            f"{covered}; the two files do not belong together"
        )


def _list_sequence_chunks(
    index: DatasetIndex,
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield sequences in chunks of bounded size: number of the first, sizes in bytes, pointers."""
    for start in range(0, index.lengths.size, _CHECKED_AT_ONCE):
        chunk = slice(start, start + _CHECKED_AT_ONCE)
        sizes = index.lengths[chunk].astype(np.int64) * index.dtype.itemsize
        yield start, sizes, index.pointers[chunk]


class IndexedDataset:
    """A token file open for reading: `prefix`.bin and `prefix`.idx.

    tokens: the whole `.bin` as one mapped array. The other arrays are those of `Index`. `len(file)`
    is the number of sequences.

    Raises:
        UserError: If a file is missing, truncated, empty, of another format or inconsistent.
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

    def get_sequence(self, number: int) -> NDArray:
        """Return the tokens of a sequence as a view of the file.

        Raises:
            IndexError: If `number` is not in 0 ... S - 1.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"{self.prefix}: sequence {number} of {len(self)}")
        start = int(self.pointers[number])
        stop = start + int(self.lengths[number]) * self.dtype.itemsize
        return np.asarray(self._bytes)[start:stop].view(self.dtype)

    def locate_tokens(self, low: int, high: int) -> tuple[int, int]:
        """Return where in `tokens` the first token of sequences `low` to `high` is, and how many
        they have.

        Raises:
            UserError: If they do not follow one another, or not at multiples of a token's size. So
                what is read is never more than the file holds.
        """
        item = self.dtype.itemsize
        end = begin = int(self.pointers[low]) if low < high else 0
        for start in range(low, high, _CHECKED_AT_ONCE):
            chunk = slice(start, min(start + _CHECKED_AT_ONCE, high))
            ends = end + np.cumsum(self.lengths[chunk].astype(np.int64) * item)
            pointers = self.pointers[chunk]
            if int(pointers[0]) != end or (pointers[1:] != ends[:-1]).any():
                raise UserError(
                    f"{self.prefix}.idx: sequences {start} and after do not follow one another in "
                    f"{self.prefix}.bin; write the file again with its sequences in order"
                )
            end = int(ends[-1])
        if begin % item:
            raise UserError(
                f"{self.prefix}.idx: sequence {low} is at byte {begin}, which is not a multiple of "
                f"the {item} bytes of a {self.dtype} token; write the file again"
            )
        return begin // item, (end - begin) // item

    def compute_digest(self) -> str:
        """Return a digest of a few parts of the file, by which it is recognised in another place:
        the lengths of the first sequences, and the first and last tokens. Reading all of a large
        file would take as long as training on it for a while."""
        digest = xxhash.xxh3_128(self._bytes.size.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(self.lengths[:_DIGESTED]).data)
        for part in (slice(_DIGESTED), slice(-_DIGESTED, None)):
            digest.update(np.ascontiguousarray(self._bytes[part]).data)
        return digest.hexdigest()

    def close(self) -> None:
        """Release the files. They stay mapped as long as views of them exist."""
        self.lengths, self.pointers = np.empty(0, np.int32), np.empty(0, np.int64)
        self.documents = np.zeros(1, np.int64)
        self._bytes = self.tokens = np.empty(0, np.uint8)  # type: ignore[assignment]
