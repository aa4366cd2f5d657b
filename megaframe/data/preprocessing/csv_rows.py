"""Rows of CSV and TSV files, as RFC 4180 has them: the first row names the columns, a field in
quotation marks may contain separators and line ends, and a quotation mark in it is written twice.

What does not follow these rules is refused with its line: a row that is read otherwise than it was
meant would be a wrong text, and so would be all the rows after an open quotation mark.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megaframe.data.preprocessing.corpus_files import CorpusFile, Format, InputError, suggest_keys
from megaframe.data.preprocessing.decompress import LONGEST_DOCUMENT, check_length

_SEPARATORS: Mapping[Format, str] = {"csv": ",", "tsv": "\t"}
_MOST_SEPARATORS = 1 << 22
"""In a row, texts included. A small compressed file can have a row of a billion empty fields."""


class Row(NamedTuple):
    """A row that is not blank.

    Attributes:
        line: Number of its first line.
        fields: Its fields.
    """

    line: int
    fields: list[str]


def read_rows(file: CorpusFile, lines: Iterable[str], first: int = 1) -> Iterator[Row]:
    """Yield the rows of consecutive lines. A row is yielded before a line after it is taken.

    Args:
        file: The file, for its separator and for messages.
        lines: The lines, each with its line end.
        first: Number of the first line.

    Raises:
        InputError: For a row that is no row, with its line, and for one that is too long.
    """
    csv.field_size_limit(LONGEST_DOCUMENT)  # of the whole process; it is 128 kB otherwise
    separator = _SEPARATORS[file.reading.format]
    begin, length, separators = first, 0, 0

    def measure() -> Iterator[str]:
        nonlocal length, separators
        for line in lines:
            length += len(line)
            separators += line.count(separator)
            check_length(f"{file.path}:{begin}", length)
            if separators > _MOST_SEPARATORS:
                raise InputError(f"{file.path}:{begin}: a row of more than {separators:,} fields")
            yield line

    reader = csv.reader(measure(), delimiter=separator, strict=True)
    while True:
        begin, length, separators = first + reader.line_num, 0, 0
        try:
            fields = next(reader, None)
        except csv.Error as error:
            last = first + reader.line_num - 1
            raise InputError(_describe_error(file, str(error), begin, last)) from None
        if fields is None:
            return
        if fields:
            yield Row(begin, fields)


def split_lines(text: str) -> Iterable[str]:
    """Return the lines of a text, each with its line end. Only a line feed ends one."""
    return io.StringIO(text, newline="\n")


def find_column(file: CorpusFile, names: Sequence[str]) -> int:
    """Return the place of the text in the rows of a file.

    Args:
        file: The file.
        names: Its first row.

    Raises:
        InputError: If there is no such column, or more than one.
    """
    key = file.reading.key
    stripped = [name.strip() for name in names]
    if stripped.count(key) == 1:
        return stripped.index(key)
    if key in stripped:
        raise InputError(f"{file.path}: {stripped.count(key)} columns are named {key!r}")
    separator = "tabs" if file.reading.format == "tsv" else "commas"
    hint = f"; the columns of {file.reading.format} are separated by {separator}"
    raise InputError(
        f"{file.path}: no column {key!r} in the first row, which names the columns; "
        f"{suggest_keys(key, stripped)}{hint * (len(names) == 1)}"
    )


def _describe_error(file: CorpusFile, error: str, begin: int, last: int) -> str:
    """Return the message about a row that cannot be read. begin, last: its lines so far."""
    location = f"{file.path}:{begin}"
    if last > begin:
        location += f" (to line {last})"
    if "expected after" in error:
        reason = (
            "text follows a quotation mark that ends a field; a quotation mark within a field is "
            'written twice ("")'
        )
    elif "unexpected end" in error:
        reason = "a quotation mark that begins a field is never closed"
    elif "new-line" in error:
        reason = "a carriage return without a line feed, outside of quotation marks"
    else:
        reason = error
    return f"{location}: not a row of {file.reading.format}: {reason}"
