"""Input shards: jsonl, Parquet and plain text, compressed or not, cut for parallel reading.

A shard can be read on its own. It is a byte range if reading can start anywhere in the file, a row
group of a Parquet file, and otherwise a block of decompressed bytes, which is part of the shard.
The cuts depend only on the files and the shard size, so a corpus has the same shards in every run.
The documents of a shard are read by `documents.py`.

    jsonl    .jsonl .json .ndjson   an object per line; the text is one of its keys
    parquet  .parquet               a row per document; the text is a column of strings
    text     .txt .text             the whole file is one document or, with `split_blank_lines`,
                                    each paragraph is one; blank lines separate paragraphs
All but Parquet files may also end in .gz or .zst.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, BinaryIO, Literal, get_args

from megaframe.data.preprocessing.parquet_pages import measure_largest_page
from megaframe.data.tokenizer import import_library
from megaframe.errors import UserError
from megaframe.io.untrusted import open_file

Format = Literal["auto", "jsonl", "parquet", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)
LONGEST_DOCUMENT = 1 << 28
"""Most bytes of a line, a paragraph or a text file. This limits the memory for one document."""
LARGEST_PAGE = 1 << 29
"""Most bytes of a page of Parquet; fastparquet writes the largest, of 500 MiB."""

_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}
_COMPRESSED = (".gz", ".zst")
_READ = 1 << 20
_ZSTANDARD_READ = 1 << 14


class InputError(UserError):
    """An input file that cannot be read as a corpus."""


@dataclass(frozen=True)
class CorpusFormat:
    """How to read a corpus.

    Attributes:
        key: Key of a jsonl object, or column of a Parquet file, that has the text.
        format: Format of all files; `auto` goes by each file's suffix.
        split_blank_lines: Plain text has a document per paragraph, not per file.
    """

    key: str = "text"
    format: Format = "auto"
    split_blank_lines: bool = False


@dataclass(frozen=True)
class InputShard:
    """Consecutive documents of one file.

    Attributes:
        path: Path of the file.
        format: Its format.
        start: First byte of the range in which the documents of the shard begin; for Parquet, the
            first row group.
        stop: End of that range.
        size: Bytes of the shard after decompression (of a whole text file: before).
        disk_bytes: Bytes on disk that the shard accounts for.
        line: Number of the first line of `data`, from 1.
        data: Contents of the shard, if the file cannot be read from `start` on.
    """

    path: str
    format: Format
    start: int
    stop: int
    size: int
    disk_bytes: int
    line: int = 1
    data: bytes | None = None


def measure_input(path: str) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in nanoseconds.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        with open_file(path) as file:
            status = os.fstat(file.fileno())
            return status.st_size, status.st_mtime_ns
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def format_of(path: str, corpus_format: CorpusFormat) -> Format:
    """Return the format of a file, from `corpus_format` or its suffix.

    Raises:
        InputError: For an unknown suffix.
    """
    if corpus_format.format != "auto":
        return corpus_format.format
    stem, suffix = os.path.splitext(path)
    if suffix in _COMPRESSED:
        suffix = os.path.splitext(stem)[1]
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise InputError(
        f"{path}: unknown kind of file {suffix!r}; known are {', '.join(_SUFFIXES)}, also with "
        f"{' or '.join(_COMPRESSED)}, or name it with --format {'|'.join(FORMATS[1:])}"
    )


def split_file(path: str, corpus_format: CorpusFormat, size: int) -> Iterator[InputShard]:
    """Yield the shards of a file in order. A row group of Parquet, or a text file that is one
    document, is always one shard.

    Args:
        path: Of the file.
        corpus_format: How it contains documents.
        size: About how many bytes a shard has.

    Raises:
        InputError: If the file cannot be read or is not of this format.
    """
    format = format_of(path, corpus_format)
    disk_bytes, _ = measure_input(path)
    if not disk_bytes:
        return
    if format == "parquet":
        yield from _read_row_groups(path, corpus_format.key)
    elif format == "text" and not corpus_format.split_blank_lines:
        yield InputShard(path, format, 0, disk_bytes, disk_bytes, disk_bytes)
    elif format == "jsonl" and not path.endswith(_COMPRESSED):
        for start in range(0, disk_bytes, size):
            length = min(size, disk_bytes - start)
            yield InputShard(path, format, start, start + length, length, length)
    else:
        yield from _read_blocks(path, format, size)


def _read_blocks(path: str, format: Format, size: int) -> Iterator[InputShard]:
    """Yield blocks of whole lines or paragraphs, of at least `size` bytes except the last one."""
    buffer, line, start, consumed = bytearray(), 1, 0, 0
    for chunk, position in decompress(path):
        # A new cut must involve new bytes. At the earliest it begins two bytes before them.
        searched = max(0, len(buffer) - 2)
        buffer += chunk
        if len(buffer) >= size and (cut := _find_last_cut(buffer, format, searched)):
            data = bytes(buffer[:cut])
            yield InputShard(path, format, start, start + cut, cut, position - consumed, line, data)
            del buffer[:cut]
            line, start, consumed = line + data.count(b"\n"), start + cut, position
        # If there was no cut, the bytes beyond `size` all belong to one document.
        if len(buffer) - size > LONGEST_DOCUMENT:
            check_length(f"{path}:{line + buffer.count(10)}", len(buffer) - size)
    if buffer:
        remaining = os.path.getsize(path) - consumed
        stop = start + len(buffer)
        yield InputShard(path, format, start, stop, len(buffer), remaining, line, bytes(buffer))


def _find_last_cut(buffer: bytearray, format: Format, searched: int) -> int:
    """Return the end of the last line or paragraph in `buffer` that is certainly complete, or 0.
    searched: where to begin looking."""
    if format == "jsonl":
        return buffer.rfind(b"\n", searched) + 1
    plain = buffer.rfind(b"\n\n", searched)
    windows = buffer.rfind(b"\n\r\n", searched)
    return max(plain + 2 if plain >= 0 else 0, windows + 3 if windows >= 0 else 0)


def decompress(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed bytes of a file, and the position reached on disk. Raises
    `InputError`."""
    streams = {".gz": _open_gzip_stream, ".zst": _open_zstandard_stream}
    stream = streams.get(os.path.splitext(path)[1], _open_plain_stream)
    try:
        with open_file(path) as file:
            for content in stream(file):
                yield content, file.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is truncated, or not what its suffix says: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _open_plain_stream(file: BinaryIO) -> Iterator[bytes]:
    while content := file.read(_READ):
        yield content


def _open_gzip_stream(file: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as decompressed:
        while content := decompressed.read(_READ):
            yield content


def _open_zstandard_stream(file: BinaryIO) -> Iterator[bytes]:
    """Decompress frame by frame. The library's own reader accepts a truncated frame as complete.

    Little is read at a time, which limits the size of what is decompressed at once: a block of
    zeros grows 32,000-fold.
    """
    library = import_library("zstandard", "data")
    frame = None
    while chunk := file.read(_ZSTANDARD_READ):
        while chunk:
            frame = frame or library.ZstdDecompressor().decompressobj()
            try:
                content = frame.decompress(chunk)
            except library.ZstdError as error:
                raise EOFError(str(error)) from None
            chunk = frame.unused_data
            if frame.eof:
                frame = None
            if content:
                yield content
    if frame:
        raise EOFError("its last frame has no end")


def check_length(location: str, length: int) -> None:
    """Refuse a document that is too long.

    Args:
        location: Where the document is, for the message.
        length: Its length in bytes.

    Raises:
        InputError: If it has more than `LONGEST_DOCUMENT` bytes.
    """
    if length > LONGEST_DOCUMENT:
        raise InputError(
            f"{location}: a document of more than {LONGEST_DOCUMENT} bytes, the most that is held "
            f"in memory; split it (plain text with --split-blank-lines)"
        )


def _read_row_groups(path: str, key: str) -> Iterator[InputShard]:
    with open_parquet(path) as file:
        schema = file.schema_arrow
        if key not in schema.names:
            raise InputError(f"{path}: no column {key!r}; {suggest_keys(key, schema.names)}")
        kind = schema.field(key).type
        if str(kind) not in ("string", "large_string", "string_view"):
            raise InputError(f"{path}: column {key!r} holds {kind}, not texts")
        groups, disk_bytes = file.num_row_groups, os.path.getsize(path)
        for group in range(groups):
            columns = _list_columns(file.metadata, [group], key)
            size = sum(column.total_uncompressed_size for column in columns)
            share = disk_bytes * (group + 1) // groups - disk_bytes * group // groups
            yield InputShard(path, "parquet", group, group + 1, size, share)


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """Open a Parquet file so that it is read by pages instead of whole row groups.

    Raises:
        InputError: If it is not a whole Parquet file.
    """
    parquet = import_library("pyarrow.parquet", "data")
    arrow = import_library("pyarrow", "data")
    try:
        with parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as file:
            yield file
    except (arrow.ArrowException, OSError) as error:
        raise InputError(f"{path} is not a whole Parquet file: {error}") from None


def measure_pages(path: str, metadata: Any, groups: list[int], key: str) -> int:
    """Return the bytes of the largest page of a column in some row groups, after decompression.

    Args:
        path: Of the Parquet file.
        metadata: Of the same, as pyarrow reads it.
        groups: The row groups.
        key: The column.

    Raises:
        InputError: For a page of more than `LARGEST_PAGE` bytes, and for a damaged file.
    """
    largest = 0
    try:
        with open_file(path) as file:
            for column in _list_columns(metadata, groups, key):
                starts = [column.data_page_offset, column.dictionary_page_offset or 0]
                start = min((start for start in starts if start > 0), default=0)
                page = measure_largest_page(
                    file, start, column.total_compressed_size, column.num_values
                )
                largest = max(largest, page)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a whole Parquet file: {error}") from None
    if largest > LARGEST_PAGE:
        raise InputError(
            f"{path}: column {key!r} has a page of {largest} bytes; the most that is held in "
            f"memory is {LARGEST_PAGE}: write it with smaller pages"
        )
    return largest


def _list_columns(metadata: Any, groups: Iterable[int], key: str) -> Iterator[Any]:
    """Yield what a Parquet file says of a column, row group by row group."""
    for group in groups:
        columns = metadata.row_group(group)
        named = (columns.column(i) for i in range(columns.num_columns))
        yield from (column for column in named if column.path_in_schema == key)


def suggest_keys(key: str, names: list[str]) -> str:
    """Return a text, for the message about a missing key, that names those that there are.

    Args:
        key: The key that is missing.
        names: The keys or columns that there are.
    """
    nearest = get_close_matches(key, names, n=1, cutoff=0.0)
    listed = ", ".join(names[:20]) or "none"
    return f"there are: {listed}" + (f" (nearest: --key {nearest[0]})" if nearest else "")
