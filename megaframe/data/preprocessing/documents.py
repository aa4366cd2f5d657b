"""Documents of a corpus: the texts in the shards that `input_shards.py` cuts, in order.

Texts are passed on unchanged, with two exceptions: a byte order mark at the start of a file is
dropped, and a lone surrogate (which a JSON escape can produce) becomes U+FFFD, because UTF-8 cannot
encode it and one such document in a million should not end a run.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import BinaryIO

import orjson

from megaframe.data.preprocessing.corpus_files import InputError, open_input, suggest_keys
from megaframe.data.preprocessing.csv_rows import find_column, read_rows, split_lines
from megaframe.data.preprocessing.decompress import (
    LONGEST_DOCUMENT,
    WrongEncoding,
    check_length,
    decode,
    decompress,
)
from megaframe.data.preprocessing.input_shards import InputShard
from megaframe.data.preprocessing.parquet_file import measure_pages, open_parquet
from megaframe.data.preprocessing.row_filters import UnjudgedRow, parse_filters

_ROWS = 16
"""Most rows at once; more is no faster."""
_ROW_BYTES = 1 << 28
"""Most bytes of the rows at once, of which each can have as many as the largest page."""
_READ = 1 << 20
_NAMED = 3
"""Most broken rows that are named; all are counted."""
_REMEDY = (
    "--skip-broken, or data.streaming.skip_broken, leaves out and counts rows that cannot be used"
)
_AS_LINES = " (`jq -c '.[]'` makes lines of an array)"


class BrokenRows:
    """The rows that were left out: how many, and what is wrong with the first of them.

    Attributes:
        count: How many cannot be used, since `take`.
        first: What is wrong with the first ones, each with file and line.
        filtered: For how many a condition does not hold, since `take_filtered`.
    """

    def __init__(self) -> None:
        self.count = self.filtered = 0
        self.first: list[str] = []

    def add(self, shard: InputShard, describe: Callable[[], str]) -> None:
        """Leave out a row, or raise `InputError` if the corpus is not read so.

        Args:
            shard: Which it is in.
            describe: Says where the row is and what is wrong with it. To count lines takes time.
        """
        if not shard.file.reading.skip_broken:
            raise InputError(f"{describe()}; {_REMEDY}")
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(describe())

    def take(self) -> tuple[int, tuple[str, ...]]:
        """Return both, and begin to count anew."""
        taken = self.count, tuple(self.first)
        self.count, self.first = 0, []
        return taken

    def take_filtered(self) -> int:
        """Return the number of rows for which a condition does not hold, and begin to count
        anew."""
        taken, self.filtered = self.filtered, 0
        return taken


class _RowSelection:
    """Which rows of a shard are read.

    Args:
        shard: The shard.
        broken: Takes those that are left out.
    """

    def __init__(self, shard: InputShard, broken: BrokenRows) -> None:
        self._shard, self._broken = shard, broken
        self._filters = parse_filters(shard.file.reading.where)
        self.fields = tuple(each.field for each in self._filters)

    def accepts(self, row: Mapping[str, object], locate: Callable[[], str]) -> bool:
        """Return whether a row is read, and count it if not. locate: says where it is."""
        try:
            accepted = all(each.accepts(row) for each in self._filters)
        except UnjudgedRow as error:
            problem = str(error)
            self._broken.add(self._shard, lambda: f"{locate()}: {problem}")
            return False
        self._broken.filtered += not accepted
        return accepted


def read_documents(shard: InputShard, broken: BrokenRows | None = None) -> Iterator[str]:
    """Yield the documents of a shard, in order.

    Args:
        shard: The shard.
        broken: Takes the rows that are left out, if the corpus is read so.

    Raises:
        InputError: With file and line.
    """
    reading, broken = shard.file.reading, broken or BrokenRows()
    if reading.format == "parquet":
        documents = _read_parquet(shard, reading.key, broken)
    elif reading.format == "jsonl":
        documents = _read_jsonl(shard, reading.key, broken)
    elif reading.format in ("csv", "tsv"):
        documents = _read_column(shard, broken)
    else:
        documents = _read_text(shard, broken)
    for text in documents:
        yield _replace_lone_surrogates(text)


def _read_lines(shard: InputShard) -> Iterator[bytes]:
    """Yield the lines that begin in the shard, with their line ends."""
    try:
        with _open_shard(shard) as file:
            remaining = (shard.stop if shard.data is None else len(shard.data)) - file.tell()
            while remaining > 0 and (line := file.readline(LONGEST_DOCUMENT + 1)):
                check_length(shard.file.path, len(line))
                remaining -= len(line)
                yield line
    except OSError as error:
        raise InputError(f"cannot read {shard.file.path}: {error.strerror}") from None


def _open_shard(shard: InputShard) -> BinaryIO:
    """Open the shard's bytes or its file, positioned at the first line that begins in the shard."""
    if shard.data is not None:
        return io.BytesIO(shard.data)
    file = open_input(shard.file.path, buffering=_READ)
    if shard.start:
        # A line that begins exactly at `start` belongs to this shard. The line before it ends at
        # `start - 1`, so a readline from there consumes only its line end.
        file.seek(shard.start - 1)
        file.readline(LONGEST_DOCUMENT)
    return file


def _read_whole(path: str) -> bytes:
    content = bytearray()
    for chunk, _ in decompress(path):
        content += chunk
        check_length(path, len(content))
    return bytes(content)


def _read_jsonl(shard: InputShard, key: str, broken: BrokenRows) -> Iterator[str]:
    selection = _RowSelection(shard, broken)
    for number, line in enumerate(_read_lines(shard)):
        if line.isspace():
            continue
        try:
            record = _parse_json(line)
        except (ValueError, RecursionError) as error:
            problem = f"not JSON: {error}; each line must be a whole object{_AS_LINES}"
        else:
            text = record.get(key) if isinstance(record, dict) else None
            if isinstance(record, dict) and isinstance(text, str):
                if selection.accepts(record, partial(_locate_line, shard, number)):
                    yield text
                continue
            problem = _describe_missing_text(record, key)
        broken.add(shard, partial(_describe_line, shard, number, problem))


def _describe_line(shard: InputShard, number: int, problem: str) -> str:
    return f"{_locate_line(shard, number)}: {problem}"


def _parse_json(line: bytes) -> object:
    """Parse a line of JSON. Byte order marks, lone surrogates and NaN need the slower parser."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line)


def _locate_line(shard: InputShard, number: int) -> str:
    """Return FILE:LINE of a line of the shard. Lines before the shard are counted only here, for an
    error message."""
    line = shard.line + number
    if shard.data is None and shard.start:
        with _open_shard(shard) as file:
            remaining = file.tell()
            file.seek(0)
            while remaining and (chunk := file.read(min(remaining, 1 << 20))):
                line += chunk.count(b"\n")
                remaining -= len(chunk)
    return f"{shard.file.path}:{line}"


def _describe_missing_text(record: object, key: str) -> str:
    """Return what is wrong with a record, without its values: a link can lead to any file."""
    if not isinstance(record, dict):
        needed = f"an object with the key {key!r} is needed, not {_describe_kind(record)}"
        return needed + _AS_LINES * isinstance(record, list)
    if key in record:
        return f"key {key!r} holds {_describe_kind(record[key])}, not a text"
    return f"no key {key!r}; {suggest_keys(key, list(record))}"


def _describe_kind(value: object) -> str:
    """Return the name of JSON for the kind of a value."""
    kinds = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else kinds.get(type(value), "a number")


def _read_column(shard: InputShard, broken: BrokenRows) -> Iterator[str]:
    """Yield the text of each row of a block, whose first row names the columns."""
    rows = read_rows(shard.file, split_lines(_decode_shard(shard)), shard.line)
    names = next(rows).fields
    column, selection = find_column(shard.file, names), _RowSelection(shard, broken)
    stripped = [name.strip() for name in names]
    for line, fields in rows:
        if len(fields) == len(names):
            row = dict(zip(stripped, fields, strict=True)) if selection.fields else {}
            if selection.accepts(row, f"{shard.file.path}:{line}".__str__):
                yield fields[column]
            continue
        problem = (
            f"{shard.file.path}:{line}: a row with {len(fields)} fields, where the first row "
            f"names {len(names)} columns"
        )
        broken.add(shard, problem.__str__)


def _read_text(shard: InputShard, broken: BrokenRows) -> Iterator[str]:
    """Yield the texts of a file or of some of its paragraphs."""
    try:
        text = _decode_shard(shard)
    except WrongEncoding as error:
        broken.add(shard, error.__str__)
        return
    if shard.data is None:
        yield text
    else:
        yield from _split_paragraphs(text)


def _split_paragraphs(text: str) -> Iterator[str]:
    # Enclosed in line ends, so that blanks at either end form a blank line.
    for paragraph in re.split(r"\n(?:[^\S\n]*\n)+", f"\n{text}\n"):
        stripped = paragraph.strip("\r\n")
        if stripped and not stripped.isspace():
            yield stripped


def _decode_shard(shard: InputShard) -> str:
    content = _read_whole(shard.file.path) if shard.data is None else shard.data
    if not shard.start:
        content = content.removeprefix(codecs.BOM_UTF8)
    return decode(shard.file.path, content, shard.line)


def _replace_lone_surrogates(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _read_parquet(shard: InputShard, key: str, broken: BrokenRows) -> Iterator[str]:
    groups = list(range(shard.start, shard.stop))
    selection = _RowSelection(shard, broken)
    columns = list(dict.fromkeys([key, *selection.fields]))
    with open_parquet(shard.file.path) as file:
        largest = sum(
            measure_pages(shard.file.path, file.metadata, groups, each) for each in columns
        )
        rows, row = max(1, min(_ROWS, _ROW_BYTES // max(1, largest))), 0
        for batch in file.iter_batches(rows, groups, columns=columns, use_threads=False):
            column = batch.column(key)
            others = [batch.column(name).to_pylist() for name in selection.fields]
            if rows == 1:
                check_length(f"{shard.file.path}: row {row}", column.nbytes)
            for number, text in enumerate(column.to_pylist()):
                fields = {n: o[number] for n, o in zip(selection.fields, others, strict=True)}
                if text is None:
                    problem = (
                        f"{shard.file.path}: column {key!r} holds nothing in row {row} of row "
                        f"group {shard.start}"
                    )
                    broken.add(shard, problem.__str__)
                elif selection.accepts(fields, f"{shard.file.path}: row {row}".__str__):
                    yield text
                row += 1
