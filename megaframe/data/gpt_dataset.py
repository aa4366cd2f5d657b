"""Samples of a token file: one split of it, cut into windows of equal length.

A split is a range of documents, or of tokens if the file is a single document. Documents are
concatenated and cut wherever a window is full, so there is no padding. Each window has one token
more than it trains on, and the next one starts with that token, so every token but the first is
predicted exactly once. Windows are rows of one overlapping view of the mapped file, so a batch of
windows is a single gather of rows.

Shape suffixes: W windows, S inputs of a sample, T = S + 1 tokens of a window.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.label_weights import find_wrong_weight, open_label_weights, refuse_weight
from megaframe.data.split_advice import SPLITS, Split, SplitSetting, enlarge_split, split_range
from megaframe.data.token_file_record import TokenFileRecord, read_record
from megaframe.errors import UserError

_LOOKED_AT = 1 << 20


class NoSamples(UserError):
    """A split of a token file without a sample."""


class GPTDataset:
    """The windows of one split of a token file.

    `tokens` has the tokens of the split, in the file's dtype; `find_document_starts()` returns
    where in it the documents begin.

    Args:
        path: Path of the token file without suffix.
        split: Which of the three ranges of documents, or of the tokens of a single document.
        shares: Shares of the documents for training, validation and test.
        seq: Inputs per window, S.
        end: Documents end after each token with this id; None: where the index says.
        vocab: Token ids that are not below this, and negative ones, are refused when they are read.
        setting: Where the shares are set, for messages; None: in `data.split`.
        weighted: Whether to use the weight file beside it, if there is one.

    Attributes:
        weight_dtype: Of the weights of labels; None if all are 1.

    Raises:
        NoSamples: If the split is empty or shorter than a window.
        UserError: If the file cannot be read, or the split is not contiguous in the file.
    """

    _fewest_tokens: int | None = None
    """Of a split; None: those of a window."""

    def __init__(
        self,
        path: str,
        split: Split,
        shares: tuple[float, float, float],
        seq: int,
        vocab: int,
        end: int | None = None,
        setting: SplitSetting | None = None,
        *,
        weighted: bool = True,
    ) -> None:
        self.path, self._end = path, end
        self._vocab = vocab
        self._file = _open_dataset(path)
        if self._file.dtype.kind not in "iu":
            raise UserError(f"{path} holds {self._file.dtype}; token ids are whole numbers")
        documents = len(self._file.documents) - 1
        self._documents = (0, 1) if documents == 1 else split_range(documents, shares, split)
        if self._documents[0] == self._documents[1]:
            raise NoSamples(
                f"data.split, or the source's own, {list(shares)} leaves the {split} split of "
                f"{path} without a document: {shares[SPLITS.index(split)]:g} of {documents} "
                f"documents; {self._advise(shares, split, seq, setting)}"
            )
        sequences = (int(self._file.documents[number]) for number in self._documents)
        self._first, tokens = self._file.locate_tokens(*sequences)
        if documents == 1:
            begin, end = split_range(tokens, shares, split)
            self._first, tokens = self._first + begin, end - begin
        fewest = self._fewest_tokens or seq + 1
        if tokens < fewest:
            shorter = f"train.seq={tokens - 1} in a new run, or " if tokens > 1 else ""
            raise NoSamples(
                f"train.seq={seq} needs {fewest} tokens for one sample, but the {split} split of "
                f"{path} has {tokens}; {shorter}{self._advise(shares, split, seq, setting)}"
            )
        self._seq = seq
        self._starts: NDArray[np.int64] | None = None
        self.tokens = np.asarray(self._file.tokens)[self._first : self._first + tokens]
        self._weights = open_label_weights(path, self._file) if weighted else None
        self.weight_dtype = self._weights and self._weights.dtype
        self.windows = self._arrange()
        if not self.windows:
            raise NoSamples(
                f"no document of the {split} split of {path} has 2 tokens, so there is nothing to "
                f"predict; {self._advise(shares, split, seq, setting)}"
            )

    def read(self, windows_W: NDArray[np.int64]) -> NDArray[np.integer]:
        """Return the tokens of these windows, [W, T], in the file's dtype.

        Raises:
            UserError: For a token id that is negative or not below the vocabulary size.
        """
        tokens_WT = self._gather(self.tokens, windows_W)
        self._check(tokens_WT, windows_W)
        return tokens_WT

    def read_label_weights(self, windows_W: NDArray[np.int64]) -> NDArray | None:
        """Return the weights that the tokens of these windows have as labels, [W, T], in the file's
        dtype; None if all are 1.

        Raises:
            UserError: For a number that is no weight.
        """
        if self._weights is None:
            return None
        file_weights = np.asarray(self._weights.tokens)[self._first :][: self.tokens.size]
        weights_WT = self._gather(file_weights, windows_W)
        place = find_wrong_weight(weights_WT)
        if place is not None:
            row, column = place
            token = self._locate(int(windows_W[row]), column)
            refuse_weight(self.path, token, weights_WT[row, column])
        return weights_WT

    def is_document_start(self, windows_W: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return where in these windows a document begins, bool[W, T]."""
        if self._end is not None:
            ends_WS = self._gather(self.tokens, windows_W)[:, :-1] == self._end
            firsts_W = self._first + windows_W * self._seq
            before_W = np.asarray(self._file.tokens)[np.maximum(firsts_W - 1, 0)]
            begins_W = (before_W == self._end) | (firsts_W == 0)
            return np.concatenate((begins_W[:, None], ends_WS), 1)
        starts = self._find_starts_in_file()
        firsts_W = self._first + windows_W * self._seq
        low_W = np.searchsorted(starts, firsts_W, "left")
        high_W = np.searchsorted(starts, firsts_W + self._seq, "right")
        counts_W = high_W - low_W
        rows = np.repeat(np.arange(windows_W.size), counts_W)
        start_indices = np.arange(rows.size) + np.repeat(
            low_W - (np.cumsum(counts_W) - counts_W), counts_W
        )
        beginnings_WT = np.zeros((windows_W.size, self._seq + 1), np.bool_)
        beginnings_WT[rows, starts[start_indices] - firsts_W[rows]] = True
        return beginnings_WT

    def read_record(self) -> TokenFileRecord | None:
        """Return what made the file, if a record beside it says so.

        Raises:
            UserError: If the record cannot be read.
        """
        return read_record(self.path, len(self._file.documents) - 1, self._file.tokens.size)

    def compute_digest(self) -> str:
        """Return what recognises the file, and its weights, in another place; see
        `IndexedDataset`."""
        digest = self._file.compute_digest()
        return digest if self._weights is None else digest + self._weights.compute_digest()

    def _advise(
        self,
        shares: tuple[float, float, float],
        split: Split,
        seq: int,
        setting: SplitSetting | None,
    ) -> str:
        """Return what to do about a split that has no sample."""
        index = self._file.documents
        ends: Sequence[int] = range(self._file.tokens.size + 1)
        if len(index) > 2:
            sizes = np.concatenate(([0], np.cumsum(self._file.lengths, dtype=np.int64)))
            ends = sizes[np.asarray(index, np.int64)].tolist()
        enough = enlarge_split(shares, split, ends, seq + 1)
        keeps = enough is not None and enough[0] == shares[0]
        return (setting or SplitSetting()).advise(enough, keeps_training=keeps)

    def find_document_starts(self) -> NDArray[np.int64]:
        """Return the first token of each non-empty document that begins in the split, counted from
        the split's first token."""
        return self._find_starts_in_file() - self._first

    def count_documents(self) -> int:
        """Return how many documents the split has by the index."""
        return self._documents[1] - self._documents[0]

    def count_inner_ends(self, end: int) -> int:
        """Return how many of the split's first tokens are `end` without being the last token of a
        document by the index."""
        looked_at = self.tokens[:_LOOKED_AT]
        ends = 1 + np.flatnonzero(looked_at == end)
        return int((~np.isin(ends, self.find_document_starts()) & (ends < looked_at.size)).sum())

    def _find_starts_in_file(self) -> NDArray[np.int64]:
        """Return the first token of each non-empty document that begins in the split, counted from
        the start of the file. Computed on first use."""
        if self._starts is None and self._end is not None:
            starts = self._first + 1 + np.flatnonzero(self.tokens[:-1] == self._end)
            if not self._first or self._file.tokens[self._first - 1] == self._end:
                starts = np.append(self._first, starts)
            self._starts = starts
        if self._starts is None:
            first, last = self._documents
            sequences = np.asarray(self._file.documents[first : last + 1], np.int64)
            sequences = sequences[:-1][np.diff(sequences) > 0]
            starts = np.asarray(self._file.pointers[sequences], np.int64)
            starts = np.unique(starts // self._file.dtype.itemsize)
            self._starts = starts[starts >= self._first]  # a part of a document may begin within it
        return self._starts

    def _arrange(self) -> int:
        """Decide which tokens each window has. Returns how many windows there are."""
        return (self.tokens.size - 1) // self._seq

    def _gather(self, numbers: NDArray, windows_W: NDArray[np.int64]) -> NDArray:
        """Return these windows of the tokens of the split, or of what else each of them has, as
        rows [W, T]."""
        step = numbers.itemsize
        shape, strides = (self.windows, self._seq + 1), (self._seq * step, step)
        rows_WT = np.lib.stride_tricks.as_strided(numbers, shape, strides, writeable=False)
        return rows_WT[windows_W]

    def _locate(self, window: int, column: int) -> int:
        """Return the place in the file of a token of a window."""
        return self._first + window * self._seq + column

    def _check(self, tokens_WT: NDArray[np.integer], windows_W: NDArray[np.int64]) -> None:
        """Raise `UserError` for a token id that is not in the model's vocabulary."""
        if not tokens_WT.size:
            return
        largest = int(np.iinfo(tokens_WT.dtype).max)
        limit = min(self._vocab, largest + 1)
        # As an unsigned integer, a negative id exceeds every limit, so one pass finds both.
        unsigned_WT = tokens_WT.view(f"u{tokens_WT.itemsize}")
        if int(unsigned_WT.max()) < limit:
            return
        row, column = np.argwhere(unsigned_WT >= limit)[0]
        position = self._locate(int(windows_W[row]), int(column))
        token = int(tokens_WT[row, column])
        remedy = (
            f"use the tokenizer that wrote the file, or model.vocab={token + 1} or more"
            if token >= 0
            else "the file is damaged, or its .idx names another type"
        )
        raise UserError(
            f"{self.path}.bin: token {position} is {token}, but model.vocab={self._vocab} allows "
            f"0 to {limit - 1}; {remedy}"
        )


def _open_dataset(path: str) -> IndexedDataset:
    """Open a token file. Raises `UserError` that names the config key and what makes such files."""
    try:
        return IndexedDataset(path)
    except UserError as error:
        text, output = "TEXT", path
        if os.path.isfile(path) and not path.endswith((".bin", ".idx")):
            text, output = path, os.path.splitext(path)[0]
        raise UserError(
            f"data.sources: {error}; tools/preprocess_data.py makes a token file of text: "
            f"--input {text} --output {output}"
        ) from None


def locate_documents(beginnings_WS: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the position of each token, [W, S], counted from the start of its document or, if that
    is in an earlier window, of the window."""
    places_WS = np.broadcast_to(np.arange(beginnings_WS.shape[1]), beginnings_WS.shape)
    return places_WS - np.maximum.accumulate(np.where(beginnings_WS, places_WS, 0), axis=1)


def number_documents(beginnings_WS: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the number of each token's document within its window, [W, S]. The first is 1 if the
    document starts with the window, else 0."""
    return np.cumsum(beginnings_WS, axis=1, dtype=np.int64)
