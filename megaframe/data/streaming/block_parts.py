"""Cuts a shard of a corpus into blocks, and blocks into parts that are made at the same time.

A part of text is a few consecutive input shards, and makes a few megabytes; one of a token file is
a range of its bytes. Parts of a block are put together in order, so that a block does not depend on
how many processes make them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from megaframe.data.label_weights import SUFFIX as WEIGHTS
from megaframe.data.preprocessing.corpus_files import (
    CorpusFile,
    InputError,
    measure_input,
    open_input,
)
from megaframe.data.preprocessing.input_shards import InputShard, split_file
from megaframe.data.preprocessing.journal import EncodedDocuments
from megaframe.data.preprocessing.preprocess import (
    encode_shards,
    join_encoded,
    load_cached_tokenizer,
)
from megaframe.data.streaming.block_files import INFO, BlockInfo, read_info
from megaframe.data.streaming.corpus import Block, Corpus
from megaframe.data.token_file_record import TokenizerRecord
from megaframe.errors import UserError

PART_BYTES = 1 << 22
"""Bytes of a part: what one process works on for a second or so."""
_COPIED = 8 << 20


@dataclass(frozen=True)
class TextPart:
    """Consecutive texts of a block.

    Attributes:
        block: The block.
        shards: The texts.
        tokenizer: Which encodes them.
        ends_block: Whether it is the last part of its block.
        ends_shard: Whether it is the last part of its shard.
    """

    block: Block
    shards: tuple[InputShard, ...]
    tokenizer: TokenizerRecord
    ends_block: bool
    ends_shard: bool

    def make(self) -> EncodedDocuments:
        """Return the documents, encoded. Raises `UserError`."""
        tokenizer = load_cached_tokenizer(self.tokenizer.name)
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise UserError(
                f"the tokenizer {self.tokenizer.name} has changed since the run began; bring back "
                "the one that it began with"
            )
        batches = list(encode_shards(tokenizer, self.shards, append_eod=True))
        return join_encoded(batches, tokenizer)


@dataclass(frozen=True)
class FilePart:
    """A range of one of the files of a block.

    Attributes:
        block: The block.
        path: The file.
        suffix: Of the file of the block that it becomes.
        start: First byte of the range.
        stop: Its end.
        info: What is in the block.
        ends_block: Whether it is the last part of its block.
        ends_shard: Whether it is the last part of its shard.
    """

    block: Block
    path: str
    suffix: str
    start: int
    stop: int
    info: BlockInfo
    ends_block: bool
    ends_shard: bool

    def make(self) -> bytes:
        """Return the bytes. Raises `UserError`."""
        try:
            with open_input(self.path) as file:
                file.seek(self.start)
                content = file.read(self.stop - self.start)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from None
        if len(content) != self.stop - self.start:
            raise InputError(f"{self.path} has fewer than {self.stop:,} bytes now; it has changed")
        return content


Part = TextPart | FilePart


def make_part(part: Part) -> EncodedDocuments | bytes:
    """Make a part. Runs in a worker."""
    return part.make()


def cut_shard(corpus: Corpus, shard: int, first: int = 0) -> Iterator[Part]:
    """Yield the parts of the blocks of a shard, in order. A shard has at least one block.

    Args:
        corpus: The corpus.
        shard: Number of the shard.
        first: Number of its block to begin with.

    Raises:
        UserError: For files that cannot be read, or have another size than when they were listed.
    """
    if corpus.kind == "text":
        yield from _cut_texts(corpus, shard, first)
        return
    names = [files[0][0] for files in corpus.list_shards()] if corpus.kind == "tokens" else []
    is_last = False
    for number in count(first):
        if is_last:
            return
        block = Block(shard, number)
        if corpus.kind == "tokens":
            prefix, info = corpus.locate(names[shard]), BlockInfo(is_last=True)
        else:
            prefix = corpus.locate(block.stem)
            info = read_info(prefix)
        yield from _cut_files(
            block, prefix, info, weighted=bool(names) and names[shard] in corpus.weights
        )
        is_last = info.is_last


@dataclass
class _Begun:
    """The part that is being put together, and the size of its block so far."""

    number: int = 0
    block_bytes: int = 0
    part_bytes: int = 0
    shards: list[InputShard] = field(default_factory=list)


def _cut_texts(corpus: Corpus, shard: int, first: int) -> Iterator[Part]:
    record = corpus.tokenizer
    assert record is not None  # a corpus of text has one
    begun = _Begun()

    def cut(*, ends_block: bool, ends_shard: bool) -> TextPart:
        return TextPart(
            Block(shard, begun.number), tuple(begun.shards), record, ends_block, ends_shard
        )

    for following in _list_input_shards(corpus, shard):
        # What is begun is complete now that something follows it.
        ends_block = begun.block_bytes >= corpus.block_bytes
        if ends_block or begun.part_bytes >= PART_BYTES:
            if begun.number >= first:
                yield cut(ends_block=ends_block, ends_shard=False)
            begun.part_bytes, begun.shards = 0, []
            if ends_block:
                begun.number, begun.block_bytes = begun.number + 1, 0
        begun.block_bytes += following.size
        begun.part_bytes += following.size
        begun.shards.append(following)
    if begun.number >= first:
        yield cut(ends_block=True, ends_shard=True)


def _list_input_shards(corpus: Corpus, shard: int) -> Iterator[InputShard]:
    for name, size in corpus.list_shards()[shard]:
        file = CorpusFile(corpus.locate(name), corpus.reading)
        now, _ = measure_input(file.path)
        if now != size:
            raise InputError(
                f"{file.path} has {now:,} bytes now, and {size:,} when it was listed; what a run "
                "reads must not change: bring back the file, or start the run again"
            )
        yield from split_file(file, min(PART_BYTES, corpus.block_bytes))


def _cut_files(block: Block, prefix: str, info: BlockInfo, *, weighted: bool) -> Iterator[FilePart]:
    """Yield the parts of a token file, and of its weights if it has some."""
    suffixes = [] if info.is_empty else [".bin", ".idx"]
    if weighted:
        suffixes += [f"{WEIGHTS}.bin", f"{WEIGHTS}.idx"]
    ranges = [
        (suffix, start, min(start + _COPIED, size))
        for suffix in suffixes
        for size in (measure_input(f"{prefix}{suffix}")[0],)
        for start in range(0, size, _COPIED)
    ] or [(INFO, 0, 0)]
    for suffix, start, stop in ranges:
        ends = (suffix, start, stop) == ranges[-1]
        yield FilePart(
            block, f"{prefix}{suffix}", suffix, start, stop, info, ends, ends and info.is_last
        )
