"""Documents of a corpus: the texts in the pieces that `pieces.py` cuts, in order.

Texts are passed on unchanged, with two exceptions: a byte order mark at the start of a file is
dropped, and a lone surrogate (which a JSON escape can produce) becomes U+FFFD, because UTF-8 cannot
encode it and one such document in a million should not end a run.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

import orjson

from megaframe.data.preprocessing.input_shards import (
    LONGEST_DOCUMENT,
    InputError,
    Piece,
    Reading,
    alternatives,
    check_length,
    decompressed,
    open_parquet,
)
from megaframe.io.untrusted import open_file

_ROWS = 512
_READ = 1 << 20


def texts(piece: Piece, reading: Reading) -> Iterator[str]:
    """Yield the documents of a piece, in order. Raises `InputError` that names file and line."""
    if piece.format == "parquet":
        documents = _rows(piece, reading.key)
    elif piece.format == "jsonl":
        documents = _objects(piece, reading.key)
    elif piece.data is None:
        documents = iter([_decoded(piece)])
    else:
        documents = _paragraphs(_decoded(piece))
    for text in documents:
        yield _without_lone_surrogates(text)


def _lines(piece: Piece) -> Iterator[bytes]:
    """Yield the lines that begin in the piece, with their line ends."""
    try:
        with _opened(piece) as file:
            left = (piece.stop if piece.data is None else len(piece.data)) - file.tell()
            while left > 0 and (line := file.readline(LONGEST_DOCUMENT + 1)):
                check_length(piece.path, len(line))
                left -= len(line)
                yield line
    except OSError as error:
        raise InputError(f"cannot read {piece.path}: {error.strerror}") from None


def _opened(piece: Piece) -> BinaryIO:
    """Open the piece's bytes or its file, positioned at the first line that begins in the piece."""
    if piece.data is not None:
        return io.BytesIO(piece.data)
    file = open_file(piece.path, buffering=_READ)
    if piece.start:
        # A line that begins exactly at `start` belongs to this piece. The line before it ends at
        # `start - 1`, so a readline from there consumes only its line end.
        file.seek(piece.start - 1)
        file.readline(LONGEST_DOCUMENT)
    return file


def _whole(path: str) -> bytes:
    content = bytearray()
    for chunk, _ in decompressed(path):
        content += chunk
        check_length(path, len(content))
    return bytes(content)


def _objects(piece: Piece, key: str) -> Iterator[str]:
    for number, line in enumerate(_lines(piece)):
        if line.isspace():
            continue
        try:
            record = _parsed(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{_place(piece, number)}: not JSON: {error}") from None
        text = record.get(key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise InputError(f"{_place(piece, number)}: {_no_text(record, key)}")
        yield text


def _parsed(line: bytes) -> object:
    """Parse a line of JSON. Byte order marks, lone surrogates and NaN need the slower parser."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line)


def _place(piece: Piece, number: int) -> str:
    """Return FILE:LINE of a line of the piece. Lines before the piece are counted only here, for an
    error message."""
    line = piece.line + number
    if piece.data is None and piece.start:
        with _opened(piece) as file:
            remaining = file.tell()
            file.seek(0)
            while remaining and (chunk := file.read(min(remaining, 1 << 20))):
                line += chunk.count(b"\n")
                remaining -= len(chunk)
    return f"{piece.path}:{line}"


def _no_text(record: object, key: str) -> str:
    if not isinstance(record, dict):
        return f"an object with the key {key!r} is needed, not {str(record)[:60]!r}"
    if key in record:
        return f"key {key!r} holds {str(record[key])[:60]!r}, not a text"
    return f"no key {key!r}; {alternatives(key, list(record))}"


def _paragraphs(text: str) -> Iterator[str]:
    # Enclosed in line ends, so that blanks at either end form a blank line.
    for paragraph in re.split(r"\n(?:[^\S\n]*\n)+", f"\n{text}\n"):
        stripped = paragraph.strip("\r\n")
        if stripped and not stripped.isspace():
            yield stripped


def _decoded(piece: Piece) -> str:
    content = _whole(piece.path) if piece.data is None else piece.data
    if not piece.start:
        content = content.removeprefix(codecs.BOM_UTF8)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = piece.line + content.count(b"\n", 0, error.start)
        raise InputError(
            f"{piece.path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8"
        ) from None


def _without_lone_surrogates(text: str) -> str:
    """Return the text with lone surrogates, which UTF-8 cannot encode, replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _rows(piece: Piece, key: str) -> Iterator[str]:
    with open_parquet(piece.path) as file:
        groups = list(range(piece.start, piece.stop))
        row = 0
        for batch in file.iter_batches(_ROWS, groups, columns=[key], use_threads=False):
            for text in batch.column(0).to_pylist():
                if text is None:
                    raise InputError(
                        f"{piece.path}: column {key!r} holds nothing in row {row} of row group "
                        f"{piece.start}"
                    )
                row += 1
                yield text
