"""The files of a block: a token file, and a small file that says what is in it, written last.

Both have the name of the block. A block without a token has only the small file.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import BinaryIO

import numpy as np

from megaframe.data.indexed_dataset import HEADER
from megaframe.data.indexed_dataset_writer import (
    IndexedDatasetWriter,
    name_unfinished,
    write_failure,
)
from megaframe.data.label_weights import SUFFIX as WEIGHTS
from megaframe.data.preprocessing.corpus_files import InputError, open_input
from megaframe.data.preprocessing.journal import EncodedDocuments
from megaframe.errors import UserError
from megaframe.io.regular_file import open_fresh, write_file
from megaframe.io.untrusted import parse_json

INFO = ".json"
SUFFIXES = (INFO, ".idx", ".bin", f"{WEIGHTS}.idx", f"{WEIGHTS}.bin")
"""Of the files of a block, in the order in which they are deleted."""
_LARGEST_INFO = 1 << 16
_NAMED = 3


@dataclass(frozen=True)
class BlockInfo:
    """What is in a block. Counts are 0 for copies of token files.

    Attributes:
        is_last: Whether it is the last block of its shard.
        is_empty: Whether it has no token.
        documents: Number of documents.
        tokens: Number of tokens.
        empty: Number of documents without a token, which are left out.
        broken: Number of rows that cannot be used, which are left out.
        named: What is wrong with the first of these.
    """

    is_last: bool
    is_empty: bool = False
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    broken: int = 0
    named: tuple[str, ...] = ()


def read_info(prefix: str) -> BlockInfo:
    """Return what is in a block.

    Args:
        prefix: Path or URL of its files, without suffix.

    Raises:
        InputError: There is no such block, or its file is damaged.
    """
    path = f"{prefix}{INFO}"
    try:
        with open_input(path) as file:
            content = file.read(_LARGEST_INFO)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    try:
        given = parse_json(content)
        info = BlockInfo(**{**given, "named": tuple(map(str, given["named"]))})
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{path} does not say what is in a block") from None
    if type(info.is_last) is not bool or type(info.is_empty) is not bool:
        raise InputError(f"{path} does not say what is in a block")
    return info


def write_info(prefix: str, info: BlockInfo) -> None:
    """Write what is in a block, which makes it a whole one. prefix: Of its files."""
    write_file(f"{prefix}{INFO}", json.dumps(asdict(info)), inside=os.path.dirname(prefix))


def delete_block(prefix: str) -> None:
    """Delete the files of a block. prefix: Of its files."""
    for suffix in SUFFIXES:
        with suppress(FileNotFoundError):
            os.unlink(f"{prefix}{suffix}")


def measure_block(prefix: str) -> int:
    """Return the bytes of the files of a block. prefix: Of its files."""
    return sum(
        os.stat(f"{prefix}{suffix}").st_size
        for suffix in SUFFIXES
        if os.path.exists(f"{prefix}{suffix}")
    )


class TextBlockWriter:
    """Writes a block of encoded texts, part by part.

    Args:
        prefix: Of its files.
        dtype: Of the tokens.

    Raises:
        UserError: The disk is full, or a write fails. So do its methods.
    """

    def __init__(self, prefix: str, dtype: np.dtype) -> None:
        self._prefix = prefix
        self._writer = IndexedDatasetWriter(prefix, dtype, sync=False)
        self._documents = self._tokens = self._empty = self._broken = 0
        self._named: list[str] = []

    @staticmethod
    def measure(part: EncodedDocuments) -> int:
        """Return the bytes that a part takes in the files of its block."""
        return int(part.tokens.nbytes) + 20 * int(part.lengths.size)

    def append(self, part: EncodedDocuments) -> None:
        """Append the next part."""
        self._writer.append_batch(part.tokens, part.lengths)
        self._documents += int(part.lengths.size)
        self._tokens += int(part.tokens.size)
        self._empty += part.empty
        self._broken += part.broken
        self._named += part.named[: _NAMED - len(self._named)]

    def finish(self, *, is_last: bool) -> None:
        """Complete the block. is_last: whether it is the last one of its shard."""
        if self._tokens:
            self._writer.finish()
        else:
            self._writer.abandon()
        counts = self._documents, self._tokens, self._empty, self._broken
        info = BlockInfo(is_last, not self._tokens, *counts, tuple(self._named))
        try:
            write_info(self._prefix, info)
        except OSError as error:
            raise UserError(write_failure(self._prefix, error)) from None

    def abandon(self) -> None:
        """Delete what is written."""
        self._writer.abandon()


HEADER_BYTES = HEADER.size + 8 + 4096
"""Bytes of a block beside its parts: a header, the end of the index, and what is in it."""


class FileBlockWriter:
    """Writes a block that is a copy of files, range by range.

    Args:
        prefix: Of its files.
        info: What is in it.
    """

    def __init__(self, prefix: str, info: BlockInfo) -> None:
        self._prefix, self._info = prefix, info
        self._files: dict[str, BinaryIO] = {}

    def append(self, suffix: str, content: bytes) -> None:
        """Append the next range of a file. Raises `UserError` for a write that fails."""
        if suffix == INFO:
            return
        try:
            if suffix not in self._files:
                name = name_unfinished(f"{self._prefix}{suffix}")
                self._files[suffix] = open_fresh(name, inside=os.path.dirname(self._prefix))
            self._files[suffix].write(content)
        except OSError as error:
            raise UserError(write_failure(self._prefix, error)) from None

    def finish(self) -> None:
        """Complete the block. Raises `UserError` for a write that fails."""
        try:
            for suffix, file in self._files.items():
                file.close()
                path = f"{self._prefix}{suffix}"
                os.replace(name_unfinished(path), path)
            write_info(self._prefix, self._info)
        except OSError as error:
            raise UserError(write_failure(self._prefix, error)) from None

    def abandon(self) -> None:
        """Delete what is written."""
        for suffix, file in self._files.items():
            with suppress(OSError):
                file.close()
                os.unlink(name_unfinished(f"{self._prefix}{suffix}"))
