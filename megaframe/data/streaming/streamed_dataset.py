"""Samples of a corpus that is read as a stream.

A sample is identified by its number in the stream, over all epochs. The samples of the first block
come first, in a keyed order, then those of the second, and so on. How many a block has is known
when it is there, so a place in the stream is a `Cursor`: the position of a block and the number of
its first sample. From there any rank finds the samples that follow by itself.

Shape suffixes: N samples, S inputs of a sample, T = S + 1 tokens of a window.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaframe.data.dataset_options import DatasetOptions
from megaframe.data.gpt_dataset import GPTDataset, NoSamples
from megaframe.data.label_weights import WEIGHT_DTYPE
from megaframe.data.shuffle import derive_source_key, sample_indices
from megaframe.data.streaming.block_files import BlockInfo
from megaframe.data.streaming.corpus import Corpus, Position
from megaframe.data.streaming.stream_reader import StreamReader
from megaframe.data.token_file_record import TokenFileRecord
from megaframe.errors import UserError

Numbers = NDArray[np.int64]
_KEPT_OPEN = 4


class Cursor(NamedTuple):
    """A place in a stream: a block, and the number of its first sample."""

    epoch: int
    place: int
    block: int
    first: int

    @property
    def position(self) -> Position:
        """Position of the block."""
        return Position(self.epoch, self.place, self.block)

    def scale(self, factor: Fraction) -> Cursor:
        """Return the place if samples have so many times as few tokens. Rounded down, because the
        block begins before the samples that it has given."""
        return self._replace(first=math.floor(self.first * factor))


START = Cursor(0, 0, 0, 0)


class StreamedDataset:
    """The samples of one split of a corpus.

    Args:
        corpus: The corpus.
        options: How blocks become samples.
        seed: Of the order.
        reader: Finds its blocks.

    Attributes:
        path: What the source names.
        windows: 0, because nobody knows how many there are.
        weight_dtype: Of the weights of labels; None if all are 1.
    """

    windows = 0

    def __init__(
        self, corpus: Corpus, options: DatasetOptions, seed: int, reader: StreamReader
    ) -> None:
        self.path, self.corpus = corpus.root, corpus
        self._options, self._seed, self._reader = options, seed, reader
        self.weight_dtype = WEIGHT_DTYPE if corpus.weights and options.weighted else None
        self._open: OrderedDict[Position, tuple[GPTDataset | None, BlockInfo]] = OrderedDict()
        self._told: set[Position] = set()
        self.notes: list[str] = []
        self.start(START)

    def start(self, cursor: Cursor) -> None:
        """Continue from a place. Samples before it cannot be read any more."""
        self._cursors = [cursor]

    def find_cursor(self, consumed: int) -> Cursor:
        """Return the place of the last sample that was given; samples that follow are found from
        it. consumed: how many were given."""
        return self._seek(max(consumed - 1, self._cursors[0].first)) if consumed else START

    def count(self, most: int, epochs: int = 1) -> int:
        """Return how many samples the first epochs have, or `most` if they have more."""
        while self._measure_end(self._cursors[-1]) < most:
            following = self._find_next(self._cursors[-1])
            if following.epoch >= epochs:
                return following.first
            self._cursors.append(following)
        return most

    def read(self, numbers_N: Numbers) -> NDArray[np.integer]:
        """Return the tokens of these samples, [N, T]. Numbers ascend. Raises `UserError`."""
        parts = [block.read(windows) for block, windows in self._find_windows(numbers_N)]
        return np.concatenate(parts)

    def read_label_weights(self, numbers_N: Numbers) -> NDArray | None:
        """Return the weights that tokens of these samples have as labels, [N, T]; None if all are
        1."""
        if self.weight_dtype is None:
            return None
        parts = []
        for block, windows in self._find_windows(numbers_N):
            weights = block.read_label_weights(windows)
            shape = windows.size, self._options.seq + 1
            parts.append(np.ones(shape, np.float32) if weights is None else weights)
        return np.concatenate(parts).astype(np.float32)

    def is_document_start(self, numbers_N: Numbers) -> NDArray[np.bool_]:
        """Return where in these samples a document begins, bool[N, T]."""
        found = self._find_windows(numbers_N)
        return np.concatenate([block.is_document_start(windows) for block, windows in found])

    def read_record(self) -> TokenFileRecord | None:
        """Return what makes the tokens, if that is known."""
        tokenizer, eod = self.corpus.tokenizer, self.corpus.eod
        return None if tokenizer is None or eod is None else TokenFileRecord(tokenizer, eod, 0, 0)

    def compute_digest(self) -> str:
        """Return what recognises the corpus in another place."""
        return self.corpus.compute_digest()

    def take_notes(self) -> list[str]:
        """Return lines about rows that were left out, since the last call."""
        notes, self.notes = self.notes, []
        return notes

    def close(self) -> None:
        """Need no blocks any more."""
        self._open.clear()
        self._reader.close()

    def _find_windows(self, numbers_N: Numbers) -> Iterator[tuple[GPTDataset, Numbers]]:
        """Yield the blocks of these samples, and the windows in each."""
        done = 0
        while done < numbers_N.size:
            cursor = self._seek(int(numbers_N[done]))
            block, _ = self._find_block(cursor.position)
            assert block is not None  # it has a sample
            end = int(np.searchsorted(numbers_N, cursor.first + block.windows))
            numbers = numbers_N[done:end] - cursor.first
            yield block, sample_indices(numbers, block.windows, self._derive_key(cursor))
            done = end

    def _derive_key(self, cursor: Cursor) -> int:
        shard = self._reader.order.find_block(cursor.position).shard
        name = f"{self.corpus.name}\0{cursor.epoch}\0{shard}\0{cursor.block}"
        return derive_source_key(self._seed, name)

    def _seek(self, number: int) -> Cursor:
        """Return the cursor of the block that has a sample."""
        cursors = self._cursors
        if number < cursors[0].first:
            raise UserError(
                f"{self.path}: sample {number} lies before sample {cursors[0].first}, from which "
                "this run reads; resume from the checkpoint that is wanted"
            )
        while number >= self._measure_end(cursors[-1]):
            cursors.append(self._find_next(cursors[-1]))
            self._check_progress()
        return cursors[bisect_right(cursors, number, key=attrgetter("first")) - 1]

    def _check_progress(self) -> None:
        """Raise `UserError` if a whole epoch has no sample."""
        first, last = self._cursors[0], self._cursors[-1]
        if last.first == first.first and last.epoch > first.epoch + 1:
            raise UserError(
                f"the {self._options.split} split of {self.path} has no sample of train.seq="
                f"{self._options.seq}: its {self._reader.order.shards} shards have too few tokens; "
                "use a smaller train.seq, a larger data.streaming.shuffle_bytes, or another "
                "data.split"
            )

    def _find_next(self, cursor: Cursor) -> Cursor:
        _, info = self._find_block(cursor.position)
        position = self._reader.order.find_next(cursor.position, is_last=info.is_last)
        return Cursor(*position, self._measure_end(cursor))

    def _measure_end(self, cursor: Cursor) -> int:
        """Return the number of the sample after the last one of a block."""
        block, _ = self._find_block(cursor.position)
        return cursor.first + (block.windows if block else 0)

    def _find_block(self, position: Position) -> tuple[GPTDataset | None, BlockInfo]:
        """Return a block, None if it has no sample, and what is in it."""
        if position not in self._open:
            prefix, info = self._reader.find(position)
            self._tell(position, info)
            block = None if info.is_empty else self._cut_block(prefix)
            self._open[position] = block, info
            if len(self._open) > _KEPT_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(position)
        return self._open[position]

    def _cut_block(self, prefix: str) -> GPTDataset | None:
        try:
            return self._options.open(prefix)
        except NoSamples:
            return None

    def _tell(self, position: Position, info: BlockInfo) -> None:
        if info.broken and position not in self._told:
            self._told.add(position)
            named = "; ".join(info.named)
            self.notes.append(
                f"{self.path}: {info.broken:,} rows that cannot be used are left out of a block of "
                f"{info.documents:,} documents: {named}"
            )
