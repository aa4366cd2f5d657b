"""Corpus to token file: parts encoded by one or several processes, and appended in order.

The corpus is cut into parts without regard to the number of workers. The token file grows in
`OUTPUT.parts` part by part, beside a journal, and is renamed when it is whole. So the result is the
same for any number of workers, a run that was killed continues where it was, and memory and the
disk space beside the result are bounded by the parts in flight.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from megaframe.data.documents import texts
from megaframe.data.indexed import TokenFileWriter
from megaframe.data.parts import Batch, Counts, Manifest, parts_folder
from megaframe.data.pieces import InputError, Piece, Reading, format_of, input_size, pieces
from megaframe.data.token_index import read_index, token_dtype
from megaframe.data.tokenizer import Tokenizer, load_tokenizer
from megaframe.data.workers import map_ordered
from megaframe.errors import UserError

_SMALLEST_PART, _LARGEST_PART, _PARTS = 1 << 22, 1 << 24, 256
_BATCH = 1 << 22

Report = Callable[[Counts, int], None]


@dataclass(frozen=True)
class Job:
    """What to make of which files.

    inputs:     files, in the order of their documents in the result.
    tokenizer:  KIND:PATH.
    output:     token file without suffix.
    append_eod: end each document with the tokenizer's `eod`.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    output: str
    reading: Reading
    append_eod: bool = True


@dataclass(frozen=True)
class Result:
    """Counts of the whole corpus, and of what an earlier, interrupted run had finished of it."""

    total: Counts
    resumed: Counts


@dataclass(frozen=True)
class _Part:
    number: int
    pieces: tuple[Piece, ...]

    def counts(self) -> Counts:
        """Of its input."""
        return Counts(
            size=sum(piece.size for piece in self.pieces),
            disk_bytes=sum(piece.disk_bytes for piece in self.pieces),
        )


def preprocess(
    job: Job,
    workers: int = 1,
    overwrite: bool = False,
    report: Report = lambda done, disk_bytes: None,
) -> Result:
    """Encode a corpus into `job.output`.bin and .idx; continue if such a run was interrupted.

    report is called after each part with the counts so far and the bytes on disk of all inputs.
    Raises `UserError`. After a mistake in the input nothing is left; after a failed write or a
    killed worker the finished parts are, and the same call goes on from them.
    """
    tokenizer = load_tokenizer(job.tokenizer)
    manifest = _manifest(job, tokenizer.fingerprint)
    disk_bytes = sum(size for _, size, _ in manifest["inputs"])
    dtype = token_dtype(tokenizer.vocab_size)
    with parts_folder(job.output, dtype, manifest, overwrite) as folder:
        resumed = folder.total
        parts = islice(_parts(job, manifest["part_size"]), folder.parts, None)
        try:
            report(resumed, disk_bytes)
            for counts, batches in _encoded(job, tokenizer, parts, workers, folder.path):
                folder.append(counts, batches)
                report(folder.total, disk_bytes)
            if not folder.total.tokens:
                raise InputError(
                    f"the corpus is empty: {folder.total.empty} documents without a token in "
                    f"{', '.join(job.inputs)}"
                )
        except InputError:
            folder.remove()
            raise
        folder.finish()
        return Result(folder.total, resumed)


def _manifest(job: Job, fingerprint: str) -> Manifest:
    """All that the result depends on, as plain JSON. Raises `UserError` for what cannot be read."""
    states = [input_size(path) for path in job.inputs]
    for path in job.inputs:
        format_of(path, job.reading)
    size = sum(size for size, _ in states)
    return {
        "version": 2,
        "inputs": [
            [os.path.abspath(path), *state] for path, state in zip(job.inputs, states, strict=True)
        ],
        "part_size": min(max(size // _PARTS, _SMALLEST_PART), _LARGEST_PART),
        "tokenizer": fingerprint,
        "reading": asdict(job.reading),
        "append_eod": job.append_eod,
    }


def _parts(job: Job, part_size: int) -> Iterator[_Part]:
    """Pieces of all inputs, gathered until a part is worth a process's turn."""
    number, size = 0, 0
    gathered: list[Piece] = []
    for path in job.inputs:
        for piece in pieces(path, job.reading, part_size):
            gathered.append(piece)
            size += piece.size
            if size >= part_size:
                yield _Part(number, tuple(gathered))
                number, size, gathered = number + 1, 0, []
    if gathered:
        yield _Part(number, tuple(gathered))


def _encoded(
    job: Job, tokenizer: Tokenizer, parts: Iterable[_Part], workers: int, folder: str
) -> Iterator[tuple[Counts, Iterator[Batch]]]:
    """The input's counts and the batches of each part, in order.

    A single worker is this very process, which encodes a batch when it is asked for. Several ones
    hand their parts over as token files in `folder`, so that memory does not grow with a part.
    """
    if workers == 1:
        for part in parts:
            yield part.counts(), _batches(job, tokenizer, part)
        return
    tasks = ((job, part, os.path.join(folder, f"{part.number:08d}")) for part in parts)
    for counts, empty, prefix in map_ordered(_encode_to_file, tasks, workers):
        yield counts, _taken(prefix, empty)


def _encode_to_file(job: Job, part: _Part, prefix: str) -> tuple[Counts, int, str]:
    """Write one part's token file. Runs in a worker.

    Returns the counts of its input, its documents without a token, and `prefix`.
    """
    tokenizer = _tokenizer(job.tokenizer)
    empty = 0
    with TokenFileWriter(prefix, token_dtype(tokenizer.vocab_size), flush=False) as writer:
        for batch in _batches(job, tokenizer, part):
            writer.append_batch(batch.tokens, batch.lengths)
            empty += batch.empty
    return part.counts(), empty, prefix


def _taken(prefix: str, empty: int) -> Iterator[Batch]:
    """A part's token file as one mapped batch; the file is removed behind it."""
    index = read_index(prefix)
    tokens: NDArray = np.empty(0, index.dtype)
    if index.bin_bytes:
        tokens = np.asarray(np.memmap(f"{prefix}.bin", index.dtype, "r"))
    yield Batch(tokens, np.asarray(index.lengths), empty)
    for suffix in (".bin", ".idx"):
        os.unlink(f"{prefix}{suffix}")


def _batches(job: Job, tokenizer: Tokenizer, part: _Part) -> Iterator[Batch]:
    for documents in _gathered(part, job.reading):
        yield encode_documents(tokenizer, documents, job.append_eod)


def _gathered(part: _Part, reading: Reading) -> Iterator[list[str]]:
    """Documents by a few megabytes: enough for the libraries' batch calls, little to hold."""
    batch: list[str] = []
    size = 0
    for piece in part.pieces:
        for text in texts(piece, reading):
            batch.append(text)
            size += len(text)
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str], append_eod: bool) -> Batch:
    """What a token file holds of these documents.

    Raises `UserError` for an id that is not below the tokenizer's vocabulary size.
    """
    documents = [ids for ids in tokenizer.encode_batch(texts) if ids.size]
    end = np.array([tokenizer.eod] * append_eod, np.int32)
    lengths = np.array([ids.size + end.size for ids in documents], "<i4")
    dtype, empty = token_dtype(tokenizer.vocab_size), len(texts) - len(documents)
    if not documents:
        return Batch(np.empty(0, dtype), lengths, empty)
    ended = [array for ids in documents for array in (ids, end)] if append_eod else documents
    tokens = np.concatenate(ended, dtype=np.int32, casting="same_kind")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer made ids from {low} to {high}, but its vocabulary has "
            f"{tokenizer.vocab_size}; its file is damaged"
        )
    return Batch(tokens.astype(dtype), lengths, empty)


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    """A worker's own."""
    return load_tokenizer(name)
