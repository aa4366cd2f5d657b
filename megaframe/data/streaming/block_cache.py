"""The folder in which blocks wait for their readers, shared by all processes of a machine.

    DIGEST/corpus.json            a corpus that somebody reads
    DIGEST/SHARD-BLOCK.bin ...    its blocks
    readers/NAME.json             what a reader needs, locked as long as it lives
    producer                      locked by the process whose child makes the blocks
    failure.txt                   why no more blocks are made

Readers and the producer talk through files alone, so any number of ranks share the blocks, whatever
the layout, and so do several machines if the folder is on a file system of all of them.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megaframe.data.preprocessing.corpus_files import InputError
from megaframe.data.streaming.block_files import BlockInfo, read_info
from megaframe.data.streaming.corpus import (
    Block,
    Corpus,
    Position,
    parse_description,
    write_description,
)
from megaframe.errors import UserError
from megaframe.io.regular_file import open_append, write_file
from megaframe.io.untrusted import parse_json

_CORPUS = "corpus.json"
_LARGEST = 1 << 28
_DEMAND_BYTES = 512
"""A demand is written at once and over the one before, so that no reader of it sees half of one."""


@dataclass(frozen=True)
class Demand:
    """What a reader needs.

    Attributes:
        digest: Of the corpus.
        seed: Of its order.
        first: The first block that it may come back to.
        current: The block that it reads, or waits for.
        reads_ahead: Whether it will need what follows.
    """

    digest: str
    seed: int
    first: Position
    current: Position
    reads_ahead: bool

    def encode(self) -> bytes:
        """Return it as the text of a file."""
        return json.dumps(vars(self)).encode().ljust(_DEMAND_BYTES)

    @staticmethod
    def decode(content: bytes) -> Demand:
        """Return the demand that a file holds. Raises `ValueError` if it holds none."""
        try:
            given = parse_json(content)
            positions = {name: Position(*given[name]) for name in ("first", "current")}
            return Demand(**{**given, **positions})
        except (TypeError, KeyError) as error:
            raise ValueError(str(error)) from None


class BlockCache:
    """The folder. Raises `UserError` if it cannot be made.

    Args:
        folder: Its path.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._failure = self.folder / "failure.txt"
        try:
            (self.folder / "readers").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"data.streaming.cache: cannot make {folder}: {error.strerror}; name another folder"
            ) from None

    def locate(self, digest: str, block: Block) -> str:
        """Return the path of the files of a block, without suffix."""
        return str(self.folder / digest / block.stem)

    def find(self, digest: str, block: Block) -> BlockInfo | None:
        """Return what is in a block, or None if it is not here."""
        try:
            return read_info(self.locate(digest, block))
        except InputError:
            return None

    def add_corpus(self, corpus: Corpus) -> str:
        """Say how the blocks of a corpus are made. Returns its digest."""
        digest = corpus.compute_digest()
        path = self.folder / digest / _CORPUS
        write_file(path, write_description(corpus), inside=self.folder)
        return digest

    def read_corpus(self, digest: str) -> Corpus:
        """Return a corpus that somebody added. Raises `UserError` if it is damaged."""
        path = self.folder / digest / _CORPUS
        try:
            return parse_description(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} describes no corpus ({error}); delete its folder") from None

    def list_blocks(self) -> Iterator[tuple[str, Block]]:
        """Yield the digest and block of each block that is here."""
        for path in self.folder.glob("*/*-*.json"):
            shard, _, number = path.name.removesuffix(".json").partition("-")
            if shard.isdecimal() and number.isdecimal():
                yield path.parent.name, Block(int(shard), int(number))

    def delete_unfinished(self) -> None:
        """Delete what a producer that was killed left half written."""
        for pattern in ("*/*.unfinished", "*/*.tmp"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def list_demands(self) -> list[Demand]:
        """Return what the readers that live need. Forgets those that have ended."""
        demands = []
        for path in sorted((self.folder / "readers").glob("*.json")):
            with suppress(OSError, ValueError), open(path, "rb") as file:
                if _try_lock(file):
                    path.unlink()
                else:
                    demands.append(Demand.decode(file.read(_DEMAND_BYTES)))
        return demands

    def fail(self, text: str) -> None:
        """Tell all readers why no more blocks are made."""
        write_file(self._failure, text, inside=self.folder)

    def read_failure(self) -> str | None:
        """Return why no more blocks are made, or None."""
        with suppress(FileNotFoundError):
            return self._failure.read_text(encoding="utf-8")
        return None

    def lead(self) -> IO[bytes] | None:
        """Return the lock of the process whose child makes blocks, or None if another one has it.
        Closing it gives it back."""
        file = open_append(self.folder / "producer", inside=self.folder)
        if _try_lock(file):
            self._failure.unlink(missing_ok=True)
            return file
        file.close()
        return None


class Reader:
    """A reader's place among those of a cache, until `close`.

    Args:
        cache: The cache.
    """

    def __init__(self, cache: BlockCache) -> None:
        self._path = cache.folder / "readers" / f"{os.getpid()}-{uuid.uuid4().hex}.json"
        self._file = open(self._path, "x+b", buffering=0)  # noqa: SIM115 (closed by close)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._demand: Demand | None = None

    def ask(self, demand: Demand) -> None:
        """Say what is needed now."""
        if demand != self._demand:
            os.pwrite(self._file.fileno(), demand.encode(), 0)
            self._demand = demand

    def close(self) -> None:
        """Need nothing any more."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
