"""Samples of a token file whose documents are packed (`data.packing=best_fit`).

A sample is a row of S + 1 tokens, as in a `GPTDataset`, but its row has whole documents, or whole
pieces of those that are longer, and then padding. Each of these begins a document for attention,
positions and masks, and so does every place of padding, which therefore has no label and sees
nothing. Which pieces share a sample follows from the lengths of documents alone, so every rank of
every layout finds the same.

Shape suffixes: W samples, T = S + 1 tokens of a sample, P pieces of these samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megaframe.data.gpt_dataset import GPTDataset
from megaframe.data.packing import cut_documents, pack_best_fit

Numbers = NDArray[np.int64]


class PackedDataset(GPTDataset):
    """The packed samples of one split of a token file. It has as many as are needed for every
    document once. See `GPTDataset` for arguments and errors."""

    _fewest_tokens = 2

    def measure_padding(self) -> float:
        """Return the share of all places that are padding."""
        return 1 - int(self._sizes.sum(dtype=np.int64)) / (self.windows * (self._seq + 1))

    def is_document_start(self, windows_W: Numbers) -> NDArray[np.bool_]:
        """Return where in these samples a piece of a document begins, and each place of padding,
        bool[W, T]."""
        pieces_P, rows_P = self._list_pieces(windows_W)
        width = self._seq + 1
        sizes_P = self._sizes[pieces_P].astype(np.int64)
        filled_W = np.bincount(rows_P, sizes_P, windows_W.size).astype(np.int64)
        beginnings_WT = np.arange(width) >= filled_W[:, None]
        before_W = np.cumsum(filled_W) - filled_W
        places_P = np.cumsum(sizes_P) - sizes_P - before_W[rows_P]
        beginnings_WT[rows_P, places_P] = True
        return beginnings_WT

    def _arrange(self) -> int:
        bounds = np.concatenate(([0], self.find_document_starts(), [self.tokens.size]))
        bounds = bounds[np.append(True, np.diff(bounds) > 0)]
        self._starts = None  # 8 bytes a document, which are not needed any more
        starts, sizes = cut_documents(bounds, self._seq + 1)
        samples, count = pack_best_fit(sizes, self._seq + 1)
        order = np.argsort(samples, kind="stable")
        self._piece_starts, self._sizes = starts[order], sizes[order].astype(np.int32)
        self._firsts = np.concatenate(([0], np.cumsum(np.bincount(samples, minlength=count))))
        return count

    def _gather(self, numbers: NDArray, windows_W: Numbers) -> NDArray:
        pieces_P, rows_P = self._list_pieces(windows_W)
        sizes_P = self._sizes[pieces_P].astype(np.int64)
        places = _count_up(sizes_P)
        rows_WT = np.zeros((windows_W.size, self._seq + 1), numbers.dtype)
        filled_W = np.bincount(rows_P, sizes_P, windows_W.size).astype(np.int64)
        rows = np.repeat(np.arange(windows_W.size), filled_W)
        rows_WT[rows, _count_up(filled_W)] = numbers[
            np.repeat(self._piece_starts[pieces_P], sizes_P) + places
        ]
        return rows_WT

    def _locate(self, window: int, column: int) -> int:
        first, last = self._firsts[window], self._firsts[window + 1]
        ends = np.cumsum(self._sizes[first:last], dtype=np.int64)
        piece = int(np.searchsorted(ends, column, "right"))
        before = int(ends[piece - 1]) if piece else 0
        return self._first + int(self._piece_starts[first + piece]) + column - before

    def _list_pieces(self, windows_W: Numbers) -> tuple[Numbers, Numbers]:
        """Return the pieces of these samples, and in which of them each is."""
        counts_W = self._firsts[windows_W + 1] - self._firsts[windows_W]
        pieces_P = np.repeat(self._firsts[windows_W], counts_W) + _count_up(counts_W)
        return pieces_P, np.repeat(np.arange(windows_W.size), counts_W)


def _count_up(sizes: Numbers) -> Numbers:
    """Return 0, 1, ..., size - 1 for each size, one after the other."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
