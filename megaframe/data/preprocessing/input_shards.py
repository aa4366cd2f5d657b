"""Input shards: the files of a corpus, compressed or not, cut for parallel reading.

A shard can be read on its own. It is a byte range if reading can start anywhere in the file, a row
group of a Parquet file, and otherwise a block of decompressed bytes, which is part of the shard.
The cuts depend only on the files and the shard size, so a corpus has the same shards in every run.
The documents of a shard are read by `documents.py`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from megaframe.data.preprocessing.corpus_files import (
    COMPRESSED,
    CorpusFile,
    Format,
    InputError,
    measure_input,
    suggest_keys,
)
from megaframe.data.preprocessing.csv_rows import find_column, read_rows, split_lines
from megaframe.data.preprocessing.decompress import (
    LONGEST_DOCUMENT,
    check_length,
    decode,
    decompress,
)
from megaframe.data.preprocessing.parquet_file import list_columns, open_parquet
from megaframe.data.preprocessing.row_filters import parse_filters


@dataclass(frozen=True)
class InputShard:
    """Consecutive documents of one file.

    Attributes:
        file: The file, with its format.
        start: First byte of the range in which the documents of the shard begin; for Parquet, the
            first row group.
        stop: End of that range.
        size: Bytes of the shard after decompression (of a whole text file: before).
        disk_bytes: Bytes on disk that the shard accounts for.
        line: Number of the first line of `data`, from 1.
        data: Contents of the shard, if the file cannot be read from `start` on. Those of CSV begin
            with the first row of the file, as if that were in the lines before the shard.
    """

    file: CorpusFile
    start: int
    stop: int
    size: int
    disk_bytes: int
    line: int = 1
    data: bytes | None = None


def split_file(file: CorpusFile, size: int) -> Iterator[InputShard]:
    """Yield the shards of a file in order. A row group of Parquet, or a text file that is one
    document, is always one shard.

    Args:
        file: The file, and how it contains documents.
        size: About how many bytes a shard has.

    Raises:
        InputError: If the file cannot be read or is not of this format.
    """
    file = file.resolve_format()
    reading = file.reading
    if reading.format == "text" and reading.where:
        raise InputError(
            f"{file.path} is plain text, which has no fields for {', '.join(reading.where)}; leave "
            "the conditions out"
        )
    disk_bytes, _ = measure_input(file.path)
    if not disk_bytes:
        return
    if reading.format == "parquet":
        yield from _read_row_groups(file)
    elif reading.format in ("csv", "tsv"):
        yield from _read_row_blocks(file, size)
    elif reading.format == "text" and not reading.split_blank_lines:
        yield InputShard(file, 0, disk_bytes, disk_bytes, disk_bytes)
    elif reading.format == "jsonl" and not file.path.endswith(COMPRESSED):
        for start in range(0, disk_bytes, size):
            length = min(size, disk_bytes - start)
            yield InputShard(file, start, start + length, length, length)
    else:
        yield from _read_blocks(file, size)


def _read_blocks(file: CorpusFile, size: int) -> Iterator[InputShard]:
    """Yield blocks of whole lines or paragraphs, of at least `size` bytes except the last one."""
    buffer, line, start, consumed = bytearray(), 1, 0, 0
    for chunk, position in decompress(file.path):
        # A new cut must involve new bytes. At the earliest it begins two bytes before them.
        searched = max(0, len(buffer) - 2)
        buffer += chunk
        if len(buffer) >= size and (cut := _find_last_cut(buffer, file.reading.format, searched)):
            data = bytes(buffer[:cut])
            yield InputShard(file, start, start + cut, cut, position - consumed, line, data)
            del buffer[:cut]
            line, start, consumed = line + data.count(b"\n"), start + cut, position
        # If there was no cut, the bytes beyond `size` all belong to one document.
        if len(buffer) - size > LONGEST_DOCUMENT:
            check_length(f"{file.path}:{line + buffer.count(10)}", len(buffer) - size)
    if buffer:
        remaining = measure_input(file.path)[0] - consumed
        stop = start + len(buffer)
        yield InputShard(file, start, stop, len(buffer), remaining, line, bytes(buffer))


def _read_row_blocks(file: CorpusFile, size: int) -> Iterator[InputShard]:
    """Yield blocks of whole rows, of at least `size` bytes except the last one.

    Where a row ends is known only by reading all before it, because line ends may be in quotation
    marks. As every byte is a character of Latin-1, this needs no correct text.
    """
    lines = _RecordedLines(file.path)
    rows = read_rows(file, lines)
    if next(rows, None) is None:
        return
    head, _ = lines.take()
    find_column(file, next(read_rows(file, split_lines(decode(file.path, head)))).fields)
    line, start, consumed = 1, 0, 0
    for row in chain(rows, [None]):
        if lines.size < size and row is not None:
            continue
        position = measure_input(file.path)[0] if row is None else lines.position
        block, count = lines.take()
        if block:
            stop, share = start + len(block), position - consumed
            yield InputShard(file, start, stop, len(block), share, line, head + block)
            line, start, consumed = line + count, stop, position


class _RecordedLines:
    """The lines of a file as Latin-1, without a byte order mark, recorded as they are taken.

    Attributes:
        size: Bytes of the recorded lines.
        position: What is read of the file on disk.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines: list[bytes] = []
        self.size = self.position = 0

    def __iter__(self) -> Iterator[str]:
        for content, position in _split_lines(self._path):
            line = content if self.position else content.removeprefix(codecs.BOM_UTF8)
            self.position = position
            self._lines.append(line)
            self.size += len(line)
            yield line.decode("latin-1")

    def take(self) -> tuple[bytes, int]:
        """Return the recorded lines and their number, and begin a new record."""
        lines, self._lines, self.size = self._lines, [], 0
        return b"".join(lines), len(lines)


def _split_lines(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed lines of a file, and the position reached on disk."""
    begun: list[bytes] = []
    position = 0
    for chunk, position in decompress(path):
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join([*begun, line, b"\n"]), position
            begun = []
        begun.append(rest)
        check_length(path, sum(map(len, begun)))
    if last := b"".join(begun):
        yield last, position


def _find_last_cut(buffer: bytearray, format: Format, searched: int) -> int:
    """Return the end of the last line or paragraph in `buffer` that is certainly complete, or 0.
    searched: where to begin looking."""
    if format == "jsonl":
        return buffer.rfind(b"\n", searched) + 1
    plain = buffer.rfind(b"\n\n", searched)
    windows = buffer.rfind(b"\n\r\n", searched)
    return max(plain + 2 if plain >= 0 else 0, windows + 3 if windows >= 0 else 0)


def _read_row_groups(file: CorpusFile) -> Iterator[InputShard]:
    path, key = file.path, file.reading.key
    with open_parquet(path) as parquet:
        schema = parquet.schema_arrow
        if key not in schema.names:
            raise InputError(f"{path}: no column {key!r}; {suggest_keys(key, schema.names)}")
        for condition in parse_filters(file.reading.where):
            if condition.field not in schema.names:
                known = suggest_keys(condition.field, schema.names)
                raise InputError(f"{path}: no column {condition.field!r} for {condition}; {known}")
        kind = schema.field(key).type
        if str(kind) not in ("string", "large_string", "string_view"):
            raise InputError(f"{path}: column {key!r} holds {kind}, not texts")
        groups, disk_bytes = parquet.num_row_groups, measure_input(path)[0]
        for group in range(groups):
            columns = list_columns(parquet.metadata, [group], key)
            size = sum(column.total_uncompressed_size for column in columns)
            share = disk_bytes * (group + 1) // groups - disk_bytes * group // groups
            yield InputShard(file, group, group + 1, size, share)
