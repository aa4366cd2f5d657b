"""The bytes of a corpus file, decompressed as they are read, and limits of what is held of them."""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from megaframe.data.preprocessing.corpus_files import InputError, open_input
from megaframe.data.tokenizer import import_library

LONGEST_DOCUMENT = 1 << 28
"""Most bytes of a line, a row, a paragraph or a text file. This limits the memory for one
document."""
_READ = 1 << 20
_ZSTANDARD_READ = 1 << 14


class WrongEncoding(InputError):
    """Bytes of a file that are not UTF-8."""


def decompress(path: str) -> Iterator[tuple[bytes, int]]:
    """Yield the decompressed bytes of a file, and the position reached on disk. Raises
    `InputError`."""
    streams = {".gz": _open_gzip_stream, ".zst": _open_zstandard_stream}
    stream = streams.get(os.path.splitext(path)[1], _open_plain_stream)
    try:
        with open_input(path) as file:
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


def decode(path: str, content: bytes, line: int = 1) -> str:
    """Return bytes of a file as text.

    Args:
        path: Of the file, for the message.
        content: The bytes.
        line: Number of their first line.

    Raises:
        WrongEncoding: With the line, if they are not UTF-8.
    """
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line += content.count(b"\n", 0, error.start)
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding = "UTF-16" if is_utf16 else "WINDOWS-1252"
        raise WrongEncoding(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8; convert the file from "
            f"its encoding, as `iconv -f {encoding} -t UTF-8` does"
        ) from None
