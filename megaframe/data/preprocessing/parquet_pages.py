"""How large the pages of a Parquet file become, by the headers that a reader will obey.

The counts in a file's footer bind nobody: a kilobyte can hold a page of a gigabyte, and each of a
million rows can be the same text of that page's dictionary. A text lies within one page, so the
largest page bounds it. The library reads pages but does not tell their sizes; the headers are
structs in Thrift's compact protocol, of which this reads the integers and passes over the rest.
"""

from __future__ import annotations

from typing import BinaryIO

_INTEGERS, _STRUCT = (4, 5, 6), 12  # i16, i32, i64
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}
"""Bytes of true, false, byte and double."""
_BINARY = 8
_LARGEST_HEADER = 1 << 20
_MAX_DEPTH = 16
_UNCOMPRESSED, _COMPRESSED, _DATA_HEADERS = 2, 3, (5, 8)
"""Fields of a page's header; the last two describe the two kinds of data pages."""
_VALUES = 1
"""The field of both that counts values."""


def measure_largest_page(file: BinaryIO, start: int, size: int, values: int) -> int:
    """Return the bytes of the largest page of a column chunk after decompression.

    Args:
        file: The file.
        start: Where the first page begins.
        size: Bytes of all pages, with their headers.
        values: Values of all pages, at which a reader stops.

    Raises:
        ValueError: If there is something else where a header should be.
    """
    largest, position, end = 0, start, start + size
    while values > 0 and position < end:
        file.seek(position)
        reader = _HeaderReader(file)
        header = reader.read_struct()
        sizes = [header.get(field) for field in (_UNCOMPRESSED, _COMPRESSED)]
        uncompressed, compressed = (size if isinstance(size, int) else -1 for size in sizes)
        if min(uncompressed, compressed) < 0:
            raise ValueError(f"no page begins at byte {position}")
        largest = max(largest, uncompressed)
        for inner in map(header.get, _DATA_HEADERS):
            count = inner.get(_VALUES, 0) if isinstance(inner, dict) else 0
            values -= count if isinstance(count, int) else 0
        position += reader.size + compressed
    return largest


_Struct = dict[int, "int | _Struct"]


class _HeaderReader:
    """Reads a struct. size: the bytes read so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size = file, 0

    def read_struct(self, depth: int = 0) -> _Struct:
        """Return the integers and structs of a struct by the number of their field."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"the header of a page is nested more than {_MAX_DEPTH} deep")
        fields: _Struct = {}
        number = 0
        while start := self._read_byte():
            delta, kind = start >> 4, start & 15
            number = number + delta if delta else self._read_integer()
            if kind in _INTEGERS:
                fields[number] = self._read_integer()
            elif kind == _STRUCT:
                fields[number] = self.read_struct(depth + 1)
            else:
                self._skip(kind)
        return fields

    def _skip(self, kind: int) -> None:
        """Pass over a value of another type. The headers of pages have no lists and maps."""
        if kind != _BINARY and kind not in _FIXED:
            raise ValueError(f"a value of type {kind} in the header of a page")
        self._advance(self._read_varint() if kind == _BINARY else _FIXED[kind])

    def _read_byte(self) -> int:
        self._count(1)
        content = self._file.read(1)
        if not content:
            raise ValueError("the file ends in the header of a page")
        return content[0]

    def _advance(self, count: int) -> None:
        self._count(count)
        self._file.seek(count, 1)

    def _count(self, count: int) -> None:
        self.size += count
        if self.size > _LARGEST_HEADER:
            raise ValueError(f"the header of a page has more than {_LARGEST_HEADER} bytes")

    def _read_varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("an integer of more than 64 bits in the header of a page")

    def _read_integer(self) -> int:
        value = self._read_varint()
        return value >> 1 ^ -(value & 1)
