"""Makes all blocks of a corpus beforehand, in a folder that a run reads in place of the corpus: the
same tokens in the same order, so the same samples bit by bit.

The description of the corpus is written last. Until then the same call continues from the blocks
that are there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator

from megaframe.data.indexed_dataset import choose_token_dtype
from megaframe.data.indexed_dataset_writer import write_failure
from megaframe.data.preprocessing.corpus_files import InputError
from megaframe.data.preprocessing.journal import CorpusCounts, EncodedDocuments
from megaframe.data.preprocessing.preprocess import load_cached_tokenizer, map_ordered
from megaframe.data.streaming.block_files import TextBlockWriter, read_info
from megaframe.data.streaming.block_parts import Part, TextPart, cut_shard, make_part
from megaframe.data.streaming.corpus import DESCRIPTION, Block, Corpus, write_description
from megaframe.errors import UserError
from megaframe.io.regular_file import write_file

_BEGUN = "stream.begun.json"


def prepare_blocks(
    corpus: Corpus,
    folder: str,
    workers: int = 1,
    report: Callable[[CorpusCounts], None] = lambda done: None,
) -> CorpusCounts:
    """Make the blocks of a corpus of text.

    Args:
        corpus: The corpus.
        folder: Where to; a folder that is empty, or that an interrupted call has begun.
        workers: Number of worker processes.
        report: Called after each block with the counts of those that this call has made.

    Returns:
        These counts.

    Raises:
        UserError: For an error in the input, a write that fails, and a folder of something else.
    """
    assert corpus.kind == "text" and corpus.tokenizer is not None
    _begin(corpus, folder)
    dtype = choose_token_dtype(load_cached_tokenizer(corpus.tokenizer.name).vocab_size)
    done, writer = CorpusCounts(), None
    for part, made in _make_parts(corpus, folder, workers):
        writer = writer or TextBlockWriter(os.path.join(folder, part.block.stem), dtype)
        writer.append(made)
        done += CorpusCounts(made.lengths.size, made.empty, made.tokens.size)
        done += CorpusCounts(broken=made.broken, filtered=made.filtered)
        if isinstance(part, TextPart):
            size = sum(shard.size for shard in part.shards)
            disk_bytes = sum(shard.disk_bytes for shard in part.shards)
            done += CorpusCounts(size=size, disk_bytes=disk_bytes)
        if part.ends_block:
            writer.finish(is_last=part.ends_shard)
            writer = None
            report(done)
    os.replace(os.path.join(folder, _BEGUN), os.path.join(folder, DESCRIPTION))
    return done


def _begin(corpus: Corpus, folder: str) -> None:
    """Make the folder, and say in it what it is for. Raises `UserError` if that is another use."""
    description = write_description(corpus)
    begun = os.path.join(folder, _BEGUN)
    try:
        os.makedirs(folder, exist_ok=True)
        names = os.listdir(folder)
        if _BEGUN in names:
            with open(begun, "rb") as file:
                if file.read() == description:
                    return
        if names:
            raise UserError(
                f"{folder} holds {names[0]!r} and is not the begun folder of this corpus, with the "
                "same files, tokenizer and sizes; name an empty folder"
            )
        write_file(begun, description, inside=folder)
    except OSError as error:
        raise UserError(write_failure(folder, error)) from None


def _make_parts(
    corpus: Corpus, folder: str, workers: int
) -> Iterator[tuple[Part, EncodedDocuments]]:
    """Yield the parts of all blocks that are not there, with their documents, in order."""
    taken: deque[Part] = deque()

    def take() -> Iterator[tuple[Part]]:
        for shard in range(len(corpus.list_shards())):
            first = _count_blocks(folder, shard)
            for part in cut_shard(corpus, shard, first) if first is not None else ():
                taken.append(part)
                yield (part,)

    for made in map_ordered(make_part, take(), workers):
        assert isinstance(made, EncodedDocuments)
        yield taken.popleft(), made


def _count_blocks(folder: str, shard: int) -> int | None:
    """Return how many blocks of a shard are there, or None for all."""
    number = 0
    while True:
        try:
            info = read_info(os.path.join(folder, Block(shard, number).stem))
        except InputError:
            return number
        if info.is_last:
            return None
        number += 1
