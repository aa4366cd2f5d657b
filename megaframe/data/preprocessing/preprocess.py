"""Encodes a corpus into a token file, in parts, with one or several processes.

How the corpus is cut into parts does not depend on the number of workers, and parts are appended in
order, so the result does not either. The token file grows in `OUTPUT.parts`, next to a journal, and
is renamed when it is complete, so a run that was killed can continue. Memory and additional disk
space are bounded by the parts in progress.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from megaframe.data.indexed import TokenFileWriter
from megaframe.data.preprocessing.documents import texts
from megaframe.data.preprocessing.input_shards import (
    InputError,
    Piece,
    Reading,
    format_of,
    input_size,
    pieces,
)
from megaframe.data.preprocessing.journal import Batch, Counts, Manifest, parts_folder
from megaframe.data.preprocessing.workers import map_ordered
from megaframe.data.token_index import read_index, token_dtype
from megaframe.data.tokenizer import Tokenizer, load_tokenizer
from megaframe.errors import UserError

_SMALLEST_PART, _LARGEST_PART, _PARTS = 1 << 22, 1 << 24, 256
_BATCH = 1 << 22

Report = Callable[[Counts, int], None]


@dataclass(frozen=True)
class Job:
    """What to encode, and how.

    inputs:     input files, in the order of their documents in the result.
    tokenizer:  KIND:PATH.
    output:     path of the token file without suffix.
    reading:    how to read the inputs.
    append_eod: whether to end each document with the tokenizer's `eod`.
    """

    inputs: tuple[str, ...]
    tokenizer: str
    output: str
    reading: Reading
    append_eod: bool = True


@dataclass(frozen=True)
class Result:
    """total: counts of the whole corpus. resumed: counts of what an interrupted run had
    finished."""

    total: Counts
    resumed: Counts


@dataclass(frozen=True)
class _Part:
    number: int
    pieces: tuple[Piece, ...]

    def counts(self) -> Counts:
        """Return the counts of the part's input."""
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
    """Encode a corpus into `job.output`.bin and .idx, or continue an interrupted run of the same
    job.

    report: called at the start and after each part with the counts so far and the bytes on disk of
    all inputs. Raises `UserError`. After an error in the input nothing is left. After a failed
    write or a killed worker the finished parts remain, and the same call continues from them.
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
    """Return everything that the result depends on, as plain JSON. Raises `UserError` for inputs
    that cannot be read."""
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
    """Group the pieces of all inputs into parts of at least `part_size` bytes, except the last."""
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
    """Yield the counts of the input and the batches of each part, in order.

    With one worker this process encodes each batch when it is requested. Several workers return
    their parts as token files in `folder`, so that memory does not grow with the size of a part.
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

    Returns the counts of its input, the number of documents without a token, and `prefix`.
    """
    tokenizer = _tokenizer(job.tokenizer)
    empty = 0
    with TokenFileWriter(prefix, token_dtype(tokenizer.vocab_size), flush=False) as writer:
        for batch in _batches(job, tokenizer, part):
            writer.append_batch(batch.tokens, batch.lengths)
            empty += batch.empty
    return part.counts(), empty, prefix


def _taken(prefix: str, empty: int) -> Iterator[Batch]:
    """Yield a part's token file as one memory-mapped batch, and remove the file afterwards."""
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
    """Yield documents in groups of a few megabytes: enough for the libraries' batch calls, and
    little to keep in memory."""
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
    """Encode documents into the form in which a token file stores them.

    Raises `UserError` for an id that is negative or not below the tokenizer's vocabulary size.
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
    """Load the tokenizer once per worker."""
    return load_tokenizer(name)
