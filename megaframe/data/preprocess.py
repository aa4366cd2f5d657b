"""Corpus to token file: parts encoded by several processes, then merged in order.

The corpus is cut into parts without regard to the number of workers; each part becomes a small
token file of its own in `OUTPUT.parts`, and a journal there names the finished ones. So the result
is the same for any number of workers, a run that was killed continues where it was, and memory is
bounded by the parts in flight. Until they are merged, the parts take the disk space of the result
once more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megaframe.data.documents import texts
from megaframe.data.indexed import TokenFileWriter, merge, remove_unfinished
from megaframe.data.parts import (
    Counts,
    Manifest,
    PartsFolder,
    part_checksum,
    part_prefix,
    parts_folder,
)
from megaframe.data.pieces import InputError, Piece, Reading, format_of, input_size, pieces
from megaframe.data.token_index import token_dtype
from megaframe.data.tokenizer import Tokenizer, load_tokenizer
from megaframe.data.workers import map_unordered
from megaframe.errors import UserError

_SMALLEST_PART, _LARGEST_PART, _PARTS = 1 << 21, 1 << 24, 256
_BATCH = 1 << 20

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
    manifest = _manifest(job)
    disk_bytes = sum(size for _, size, _ in manifest["inputs"])
    with parts_folder(job.output, manifest, overwrite) as folder:
        resumed = folder.total()
        try:
            report(resumed, disk_bytes)
            count = _encode_parts(job, manifest["part_size"], workers, folder, disk_bytes, report)
            if not folder.total().tokens:
                raise InputError(
                    f"the corpus is empty: {folder.total().empty} documents without a token in "
                    f"{', '.join(job.inputs)}"
                )
        except InputError:
            folder.remove()
            raise
        remove_unfinished(job.output)
        merge([part_prefix(job.output, number) for number in range(count)], job.output)
        folder.remove()
        return Result(folder.total(), resumed)


def _manifest(job: Job) -> Manifest:
    """All that the result depends on, as plain JSON. Raises `UserError` for what cannot be read."""
    states = [input_size(path) for path in job.inputs]
    for path in job.inputs:
        format_of(path, job.reading)
    size = sum(size for size, _ in states)
    return {
        "version": 1,
        "inputs": [
            [os.path.abspath(path), *state] for path, state in zip(job.inputs, states, strict=True)
        ],
        "part_size": min(max(size // _PARTS, _SMALLEST_PART), _LARGEST_PART),
        "tokenizer": load_tokenizer(job.tokenizer).fingerprint,
        "reading": asdict(job.reading),
        "append_eod": job.append_eod,
    }


def _encode_parts(
    job: Job,
    part_size: int,
    workers: int,
    folder: PartsFolder,
    disk_bytes: int,
    report: Report,
) -> int:
    """Encode all parts that are not finished yet. Returns how many parts there are."""
    count, done = 0, folder.total()
    before = set(folder.finished)

    def unfinished() -> Iterator[tuple[Job, _Part]]:
        nonlocal count
        for part in _parts(job, part_size):
            count += 1
            if part.number not in before:
                yield job, part

    for number, counts, checksum in map_unordered(_encode_part, unfinished(), workers):
        folder.record(number, counts, checksum)
        done += counts
        report(done, disk_bytes)
    return count


def _parts(job: Job, part_size: int) -> Iterator[_Part]:
    """Pieces of all inputs, gathered until a part is worth its two files."""
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


def _encode_part(job: Job, part: _Part) -> tuple[int, Counts, str]:
    """Write one part's token file. Runs in a worker. Returns what the journal needs."""
    tokenizer = _tokenizer(job.tokenizer)
    counts = Counts(
        size=sum(piece.size for piece in part.pieces),
        disk_bytes=sum(piece.disk_bytes for piece in part.pieces),
    )
    prefix = part_prefix(job.output, part.number)
    with TokenFileWriter(prefix, token_dtype(tokenizer.vocab_size), flush=False) as writer:
        for batch in _batches(part, job.reading):
            tokens, lengths = encode_documents(tokenizer, batch, job.append_eod)
            writer.append_batch(tokens, lengths)
            counts += Counts(lengths.size, len(batch) - lengths.size, tokens.size)
    return part.number, counts, part_checksum(prefix)


def _batches(part: _Part, reading: Reading) -> Iterator[list[str]]:
    """Documents by the megabyte: enough for the libraries' batch calls, little to hold."""
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


def encode_documents(
    tokenizer: Tokenizer, batch: Sequence[str], append_eod: bool
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Tokens of these documents back to back, and how many each has. Empty ones are left out.

    Raises `UserError` for an id that is not below the tokenizer's vocabulary size.
    """
    documents = [ids for ids in tokenizer.encode_batch(batch) if ids.size]
    end = np.array([tokenizer.eod] * append_eod, np.int32)
    lengths = np.array([ids.size + end.size for ids in documents], np.int64)
    if not documents:
        return np.empty(0, np.int32), lengths
    ended = [array for ids in documents for array in (ids, end)] if append_eod else documents
    tokens = np.concatenate(ended, dtype=np.int32, casting="same_kind")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer made ids from {low} to {high}, but its vocabulary has "
            f"{tokenizer.vocab_size}; its file is damaged"
        )
    return tokens, lengths


@lru_cache(maxsize=1)
def _tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(name)
