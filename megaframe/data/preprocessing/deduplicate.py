"""Exact deduplication: of documents with the same tokens only the first is kept.

Documents are compared by 128 bits of a hash of their tokens (xxh3), in the order of the corpus, so
what is kept does not depend on workers; among 10**12 different documents two have the same hash
with a probability of 10**-15. The hashes seen so far are a table in memory, 24 to 48 bytes for each
document that is kept, and 72 while it grows. They are not stored: the token file so far has the
documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from megaframe.data.preprocessing.journal import EncodedDocuments

Digests = NDArray[np.uint64]
_FIRST_SLOTS = 1 << 16


def drop_duplicates(
    batches: Iterable[EncodedDocuments], seen: DigestTable
) -> Iterator[EncodedDocuments]:
    """Yield the batches without documents that were seen before. seen: those before, to which
    these are added."""
    for batch in batches:
        is_new = seen.add(digest_documents(batch))
        if is_new.all():
            yield batch
            continue
        tokens = batch.tokens[np.repeat(is_new, batch.lengths)]
        dropped = int((~is_new).sum())
        yield replace(batch, tokens=tokens, lengths=batch.lengths[is_new], duplicates=dropped)


def digest_documents(batch: EncodedDocuments) -> Digests:
    """Return a hash of the tokens of each document, [documents, 2]."""
    content = np.ascontiguousarray(batch.tokens).view(np.uint8).data
    ends = np.cumsum(batch.lengths, dtype=np.int64) * batch.tokens.itemsize
    starts = [0, *ends[:-1].tolist()]
    digests = b"".join(
        xxhash.xxh3_128_digest(content[start:end])
        for start, end in zip(starts, ends.tolist(), strict=False)
    )
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


class DigestTable:
    """A set of hashes: a hash table with linear probing, in which a pair of zeros is an empty slot.

    `count` is how many it has.
    """

    def __init__(self) -> None:
        self.count = 0
        self._slots: Digests = np.zeros((_FIRST_SLOTS, 2), np.uint64)

    def add(self, digests: Digests) -> NDArray[np.bool_]:
        """Add hashes, [N, 2]. Returns which of them are new, bool[N]: of equal ones the first."""
        digests = np.where(digests.any(1, keepdims=True), digests, np.uint64(1))
        _, firsts = np.unique(digests.view("V16"), return_index=True)
        while 3 * (self.count + firsts.size) > 2 * len(self._slots):
            self._grow()
        is_new = np.zeros(len(digests), np.bool_)
        is_new[firsts[self._insert(digests[firsts])]] = True
        self.count += int(is_new.sum())
        return is_new

    def _insert(self, digests: Digests) -> NDArray[np.bool_]:
        """Insert different hashes. Returns which of them were not there."""
        is_new, left = np.zeros(len(digests), np.bool_), np.arange(len(digests))
        last = np.uint64(len(self._slots) - 1)
        places = digests[:, 0] & last
        while left.size:
            here = self._slots[places]
            empty = np.flatnonzero(~here.any(1))
            # Of several that want the same slot, one gets it: whichever is written last.
            self._slots[places[empty]] = digests[left[empty]]
            stored = (self._slots[places] == digests[left]).all(1)
            is_new[left[empty[stored[empty]]]] = True
            left, places = left[~stored], (places[~stored] + np.uint64(1)) & last
        return is_new

    def _grow(self) -> None:
        before = self._slots[self._slots.any(1)]
        self._slots = np.zeros((2 * len(self._slots), 2), np.uint64)
        for start in range(0, len(before), _FIRST_SLOTS):  # what inserting takes beside is small
            self._insert(before[start : start + _FIRST_SLOTS])
