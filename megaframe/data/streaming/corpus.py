"""A corpus that is read as a stream: its files, how they are cut into blocks, and their order.

Files are put together, in the order of their names, until a shard has `block_bytes`; a larger file
is a shard of its own. A shard is cut into blocks of about `block_bytes` of text, each of which is a
token file of its own: by itself in a cache, or made beforehand in a folder. Samples do not reach
across blocks, and are shuffled within one. Where blocks begin and which tokens they have follows
from the files, the tokenizer and `block_bytes` alone, so a place in the stream is a few integers.

    kind    files                                     a block is
    text    of texts                                  tokenised from them
    tokens  token files, PREFIX.bin and PREFIX.idx    such a file
    blocks  what `prepare_blocks` made of text        one of its token files
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from megaframe.config.data import DataConfig, DataSourceConfig
from megaframe.config.url import is_url
from megaframe.data.label_weights import SUFFIX as WEIGHTS
from megaframe.data.preprocessing.corpus_files import (
    CorpusFile,
    CorpusFormat,
    list_corpus_files,
    list_files,
    measure_input,
    open_input,
)
from megaframe.data.shuffle import derive_source_key, sample_indices
from megaframe.data.token_file_record import TokenizerRecord, parse_tokenizer, record_tokenizer
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError
from megaframe.io.untrusted import parse_json

Kind = Literal["text", "tokens", "blocks"]
DESCRIPTION = "stream.json"
"""Name of the file in a folder of blocks that says of what they were made."""
_VERSION = 1
_LARGEST_DESCRIPTION = 1 << 28


class Position(NamedTuple):
    """A block in the order of a stream: its epoch, the place of its shard in the order of that
    epoch, and its number in the shard."""

    epoch: int
    place: int
    block: int


class Block(NamedTuple):
    """A block of a corpus: its shard, in the order of the files, and its number in that."""

    shard: int
    number: int

    @property
    def stem(self) -> str:
        """Name of its files, without suffix."""
        return f"{self.shard:08d}-{self.number:08d}"


@dataclass(frozen=True)
class Corpus:
    """A corpus, and how it is cut.

    Attributes:
        root: The path or URL that a source names.
        name: Determines the order, with the seed: the last part of the path.
        kind: See the module.
        files: Names below the root, or an empty one for the root itself, and sizes in bytes; of
            token files without suffix.
        reading: How texts are read.
        tokenizer: Which makes the tokens; None if the files do not say.
        eod: The id that ends documents; None if the files do not say.
        block_bytes: Bytes of text of a block; see the module.
        weights: Token files that have weights of labels.
    """

    root: str
    name: str
    kind: Kind
    files: tuple[tuple[str, int], ...]
    reading: CorpusFormat
    tokenizer: TokenizerRecord | None
    eod: int | None
    block_bytes: int
    weights: tuple[str, ...] = ()

    def locate(self, name: str) -> str:
        """Return the path or URL of a file. name: below the root."""
        return f"{self.root}/{name}" if name else self.root

    @property
    def is_ready(self) -> bool:
        """Whether its blocks lie on this machine already."""
        return self.kind != "text" and not is_url(self.root)

    def list_shards(self) -> list[tuple[tuple[str, int], ...]]:
        """Return the files of each shard."""
        if self.kind == "tokens":
            return [(file,) for file in self.files]
        shards: list[tuple[tuple[str, int], ...]] = []
        begun: list[tuple[str, int]] = []
        for file in self.files:
            begun.append(file)
            if sum(size for _, size in begun) >= self.block_bytes:
                shards.append(tuple(begun))
                begun = []
        return [*shards, tuple(begun)] if begun else shards

    def compute_digest(self) -> str:
        """Return what the blocks depend on as a digest: the same wherever the files lie, and for
        text as for blocks that were made of it."""
        made = {
            "version": _VERSION,
            "kind": "text" if self.kind == "blocks" else self.kind,
            "files": self.files,
            "reading": asdict(self.reading),
            "tokenizer": self.tokenizer and self.tokenizer.fingerprint,
            "block_bytes": self.block_bytes,
            "weights": self.weights,
        }
        return xxhash.xxh3_128(json.dumps(made).encode()).hexdigest()


class StreamOrder:
    """The order in which a run reads a corpus: a keyed permutation of its shards for each epoch.

    Args:
        corpus: The corpus.
        seed: Determines the order, with the name of the corpus.
    """

    def __init__(self, corpus: Corpus, seed: int) -> None:
        self.shards = len(corpus.list_shards())
        self._key = derive_source_key(seed, corpus.name)

    def find_block(self, position: Position) -> Block:
        """Return the block at a position."""
        number = np.array([position.epoch * self.shards + position.place % self.shards])
        return Block(int(sample_indices(number, self.shards, self._key)[0]), position.block)

    def find_next(self, position: Position, *, is_last: bool) -> Position:
        """Return the position after one. is_last: whether it is the last of its shard."""
        if not is_last:
            return position._replace(block=position.block + 1)
        if position.place + 1 < self.shards:
            return Position(position.epoch, position.place + 1, 0)
        return Position(position.epoch + 1, 0, 0)


def is_stream(path: str) -> bool:
    """Return whether a source is read as a stream: it is no token file, but a URL, a file or a
    folder."""
    if is_url(path):
        return True
    if any(os.path.lexists(f"{path}{suffix}") for suffix in (".idx", ".bin")):
        return False
    return os.path.isdir(path) or os.path.isfile(path)


def find_corpus(source: DataSourceConfig, data: DataConfig) -> Corpus:
    """Return the corpus that a source names.

    Args:
        source: The source.
        data: The section of the run.

    Raises:
        UserError: It cannot be read, or has text and the run no tokenizer.
    """
    root = source.path.rstrip("/") or source.path
    description = _read_description(root)
    if description is not None:
        return description
    name = root.rpartition("/")[2]
    skip = data.streaming.skip_broken
    plain = source.split_blank_lines
    reading = CorpusFormat(source.key, source.format, plain, skip, source.where)
    block_bytes = data.streaming.shuffle_bytes
    sizes = _measure_files(root, source.files)
    prefixes = [name[:-4] for name in sizes if name.endswith(".idx")]
    prefixes = [prefix for prefix in prefixes if f"{prefix}.bin" in sizes]
    if prefixes and source.format == "auto":
        weights = {prefix for prefix in prefixes if prefix.endswith(WEIGHTS)}
        files = tuple((each, sizes[f"{each}.bin"]) for each in prefixes if each not in weights)
        named = tuple(name for name, _ in files if data.label_weights and name + WEIGHTS in weights)
        return Corpus(root, name, "tokens", files, CorpusFormat(), None, None, 0, named)
    if data.tokenizer is None:
        raise UserError(
            f"data.sources: {root} is a corpus of text, which takes a tokenizer; name it: "
            "data.tokenizer=KIND:PATH"
        )
    tokenizer = load_tokenizer(data.tokenizer)
    record = record_tokenizer(data.tokenizer, tokenizer)
    texts = _select_texts(root, reading, source.files)
    files = tuple((text, sizes[text]) for text in texts)
    return Corpus(root, name, "text", files, reading, record, tokenizer.eod, block_bytes)


def _measure_files(root: str, names: Iterable[str]) -> dict[str, int]:
    """Return the size of each file below a root, by its name below it."""
    if names:
        return {name: measure_input(f"{root}/{name}")[0] for name in names}
    return {path.removeprefix(root).lstrip("/"): size for path, size in list_files(root)}


def _select_texts(root: str, reading: CorpusFormat, names: Iterable[str]) -> list[str]:
    """Return the names below the root of the files that are read as text."""
    given = [f"{root}/{name}" for name in names] or [root]
    found, _ = list_corpus_files(CorpusFile(path, reading) for path in given)
    return [file.path.removeprefix(root).lstrip("/") for file in found]


def write_description(corpus: Corpus) -> bytes:
    """Return a corpus as the text of a file."""
    return json.dumps({"version": _VERSION, **asdict(corpus)}).encode()


def parse_description(content: bytes, root: str | None = None) -> Corpus:
    """Return the corpus that a file describes.

    Args:
        content: Of the file.
        root: Where the blocks of the corpus are, whose description this is; None: where it says.

    Raises:
        ValueError: It describes none.
    """
    try:
        given = parse_json(content)
        if given.pop("version") != _VERSION:
            raise ValueError("it is of another version")
        corpus = _build_corpus(given)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None
    return corpus if root is None else replace(corpus, root=root, kind="blocks")


def _build_reading(given: Mapping[str, Any]) -> CorpusFormat:
    return CorpusFormat(**{**given, "where": tuple(map(str, given["where"]))})


def _build_corpus(given: Mapping[str, Any]) -> Corpus:
    record = given["tokenizer"]
    corpus = Corpus(
        **{
            **given,
            "files": tuple((name, size) for name, size in given["files"]),
            "weights": tuple(given["weights"]),
            "reading": _build_reading(given["reading"]),
            "tokenizer": record if record is None else parse_tokenizer(record),
        }
    )
    texts = [corpus.root, corpus.name, *corpus.weights, *(name for name, _ in corpus.files)]
    sizes = [corpus.block_bytes, *(size for _, size in corpus.files)]
    if not all(isinstance(text, str) for text in texts) or corpus.kind not in Kind.__args__:  # type: ignore[attr-defined]
        raise ValueError("its names are no texts")
    if not sizes[1:] or not isinstance(corpus.eod, int | None):
        raise ValueError("it has no files, or an end of documents that is no token")
    if not all(type(size) is int and 0 <= size < 1 << 53 for size in sizes):
        raise ValueError("its sizes are no whole numbers")
    if any(part in ("..", "") for name, _ in corpus.files if name for part in name.split("/")):
        raise ValueError("its files are not below it")
    return corpus


def _read_description(root: str) -> Corpus | None:
    """Return the corpus of a folder of blocks; None if it is something else."""
    path = f"{root}/{DESCRIPTION}"
    try:
        if not is_url(root) and not os.path.isdir(root):
            return None
        with open_input(path) as file:
            content = file.read(_LARGEST_DESCRIPTION)
    except OSError:
        return None
    try:
        return parse_description(content, root)
    except ValueError as error:
        raise UserError(
            f"{path} describes no blocks ({error}); make them again, or delete it"
        ) from None
