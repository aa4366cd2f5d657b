"""Encodes a corpus into a token file, in parts, with one or several processes.

How the corpus is cut into parts does not depend on the number of workers, and parts are appended in
order, so the result does not either. The token file grows in `OUTPUT.parts`, next to a journal, and
is renamed when it is complete, so a run that was killed can continue. Memory and additional disk
space are bounded by the parts in progress.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from multiprocessing.connection import wait as wait_for_object
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megaframe.config.url import is_url
from megaframe.data.indexed_dataset import choose_token_dtype, read_index
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.data.preprocessing.corpus_files import (
    CorpusFile,
    InputError,
    list_names,
    measure_input,
)
from megaframe.data.preprocessing.deduplicate import DigestTable, digest_documents, drop_duplicates
from megaframe.data.preprocessing.documents import BrokenRows, read_documents
from megaframe.data.preprocessing.input_shards import InputShard, split_file
from megaframe.data.preprocessing.journal import (
    CorpusCounts,
    EncodedDocuments,
    JournalEntry,
    open_journal,
)
from megaframe.data.token_file_record import SUFFIX, record_tokenizer
from megaframe.data.tokenizer import Tokenizer, load_tokenizer
from megaframe.errors import UserError

_SMALLEST_PART, _LARGEST_PART, _PARTS = 1 << 22, 1 << 24, 256
_BATCH = 1 << 22
_PROBE = "The quick brown fox, 123."
"""A text of which every tokenizer of texts makes a token."""
_DOCUMENT = 64
"""What a document counts beside its text: a small file can have millions that are empty."""

Report = Callable[[CorpusCounts, int], None]


@dataclass(frozen=True)
class PreprocessJob:
    """What to encode, and how.

    Attributes:
        inputs: Input files, in the order of their documents in the result, and how to read them.
        tokenizer: KIND:PATH.
        output: Path of the token file without suffix.
        append_eod: Whether to end each document with the tokenizer's `eod`.
        deduplicate: Whether to keep only the first of documents with the same tokens.
    """

    inputs: tuple[CorpusFile, ...]
    tokenizer: str
    output: str
    append_eod: bool = True
    deduplicate: bool = False


@dataclass(frozen=True)
class PreprocessResult:
    """What was encoded.

    Attributes:
        total: Counts of the whole corpus.
        resumed: Counts of what an interrupted run had finished.
        broken: What is wrong with the first rows that were left out.
    """

    total: CorpusCounts
    resumed: CorpusCounts
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class _CorpusPart:
    number: int
    shards: tuple[InputShard, ...]

    def count_input(self) -> CorpusCounts:
        """Return the counts of the part's input."""
        return CorpusCounts(
            size=sum(shard.size for shard in self.shards),
            disk_bytes=sum(shard.disk_bytes for shard in self.shards),
        )


def preprocess(
    job: PreprocessJob,
    workers: int = 1,
    overwrite: bool = False,
    report: Report = lambda done, disk_bytes: None,
) -> PreprocessResult:
    """Encode a corpus into `job.output`.bin and .idx, or continue an interrupted run of the same
    job.

    After an error in the input nothing is left. After a failed write or a killed worker the
    finished parts remain, and the same call continues from them.

    Args:
        job: What to encode, and how.
        workers: Number of worker processes.
        overwrite: See `PreprocessJournal.start`.
        report: Called at the start and after each part with the counts so far and the bytes on disk
            of all inputs.

    Raises:
        UserError: For an error in the input, a failed write, or a killed worker.
    """
    tokenizer = load_tokenizer(job.tokenizer)
    manifest = _describe_job(job, tokenizer.fingerprint)
    disk_bytes = sum(size for _, size, *_ in manifest["inputs"])
    dtype = choose_token_dtype(tokenizer.vocab_size)
    with open_journal(job.output, dtype, manifest, overwrite) as folder:
        resumed, broken, seen = folder.total, list[str](), DigestTable()
        parts = islice(_group_shards(job, manifest["part_size"]), folder.parts, None)
        try:
            report(resumed, disk_bytes)
            if job.deduplicate and resumed.documents:
                for batch in folder.read_finished():
                    seen.add(digest_documents(batch))
            for counts, batches in _encode_parts(job, tokenizer, parts, workers, folder.path):
                if job.deduplicate:
                    batches = drop_duplicates(batches, seen)
                folder.append(counts, _collect_broken(batches, broken))
                report(folder.total, disk_bytes)
            if not folder.total.tokens:
                raise InputError(_describe_missing_tokens(job, tokenizer, folder.total.empty))
        except InputError:
            folder.remove()
            raise
        folder.finish(record_tokenizer(job.tokenizer, tokenizer), tokenizer.eod)
        return PreprocessResult(folder.total, resumed, tuple(broken))


def _collect_broken(
    batches: Iterable[EncodedDocuments], broken: list[str]
) -> Iterator[EncodedDocuments]:
    """Yield the batches, and append what is wrong with the first of their broken rows."""
    for batch in batches:
        if not broken:
            broken += batch.named
        yield batch


def _describe_missing_tokens(job: PreprocessJob, tokenizer: Tokenizer, empty: int) -> str:
    """Return whether the corpus or the tokenizer is why none of `empty` documents has a token."""
    texts = f"{empty} documents without a token in {list_names(job.inputs)}"
    if len(tokenizer.encode(_PROBE)):
        return f"the corpus is empty: {texts}"
    return (
        f"the tokenizer {job.tokenizer} makes no token of a text such as {_PROBE!r}, and so there "
        f"are {texts}; use another one"
    )


def _describe_job(job: PreprocessJob, fingerprint: str) -> JournalEntry:
    """Return everything that the result depends on, as plain JSON. Raises `UserError` for inputs
    that cannot be read."""
    files = [file.resolve_format() for file in job.inputs]
    written = {os.path.abspath(f"{job.output}{suffix}") for suffix in (".bin", ".idx", SUFFIX)}
    for file in files:
        if os.path.abspath(file.path) in written:
            raise UserError(
                f"--output {job.output} would replace the input {file.path}; name another"
            )
    states = [measure_input(file.path) for file in files]
    size = sum(size for size, _ in states)
    entry = {
        "version": 5,
        "inputs": [
            [_locate_file(file.path), *state, asdict(file.reading)]
            for file, state in zip(files, states, strict=True)
        ],
        "part_size": min(max(size // _PARTS, _SMALLEST_PART), _LARGEST_PART),
        "tokenizer": fingerprint,
        "append_eod": job.append_eod,
        "deduplicate": job.deduplicate,
    }
    # As it is read again: without tuples.
    plain: JournalEntry = json.loads(json.dumps(entry))
    return plain


def _locate_file(path: str) -> str:
    return path if is_url(path) else os.path.abspath(path)


def _group_shards(job: PreprocessJob, part_size: int) -> Iterator[_CorpusPart]:
    """Group the shards of all inputs into parts of at least `part_size` bytes, except the last."""
    number, size = 0, 0
    shards: list[InputShard] = []
    for file in job.inputs:
        for shard in split_file(file, part_size):
            shards.append(shard)
            size += shard.size
            if size >= part_size:
                yield _CorpusPart(number, tuple(shards))
                number, size, shards = number + 1, 0, []
    if shards:
        yield _CorpusPart(number, tuple(shards))


def _encode_parts(
    job: PreprocessJob,
    tokenizer: Tokenizer,
    parts: Iterable[_CorpusPart],
    workers: int,
    folder: str,
) -> Iterator[tuple[CorpusCounts, Iterator[EncodedDocuments]]]:
    """Yield the counts of the input and the batches of each part, in order.

    With one worker this process encodes each batch when it is requested. Several workers return
    their parts as token files in `folder`, so that memory does not grow with the size of a part.
    """
    if workers == 1:
        for part in parts:
            yield part.count_input(), encode_shards(tokenizer, part.shards, job.append_eod)
        return
    tasks = ((job, part, os.path.join(folder, f"{part.number:08d}")) for part in parts)
    for counts, left_out, prefix in map_ordered(_encode_to_file, tasks, workers):
        yield counts, _read_encoded_part(prefix, left_out)


def _encode_to_file(
    job: PreprocessJob, part: _CorpusPart, prefix: str
) -> tuple[CorpusCounts, EncodedDocuments, str]:
    """Write one part's token file. Runs in a worker.

    Returns the counts of its input, what was left out, and `prefix`.
    """
    tokenizer = load_cached_tokenizer(job.tokenizer)
    left_out: list[EncodedDocuments] = []
    with IndexedDatasetWriter(
        prefix, choose_token_dtype(tokenizer.vocab_size), sync=False
    ) as writer:
        for batch in encode_shards(tokenizer, part.shards, job.append_eod):
            writer.append_batch(batch.tokens, batch.lengths)
            left_out.append(replace(batch, tokens=batch.tokens[:0], lengths=batch.lengths[:0]))
    return part.count_input(), join_encoded(left_out, tokenizer), prefix


def _read_encoded_part(prefix: str, left_out: EncodedDocuments) -> Iterator[EncodedDocuments]:
    """Yield a part's token file as one memory-mapped batch, and remove the file afterwards."""
    index = read_index(prefix)
    tokens: NDArray = np.empty(0, index.dtype)
    if index.bin_bytes:
        tokens = np.asarray(np.memmap(f"{prefix}.bin", index.dtype, "r"))
    yield replace(left_out, tokens=tokens, lengths=np.asarray(index.lengths))
    for suffix in (".bin", ".idx"):
        os.unlink(f"{prefix}{suffix}")


def encode_shards(
    tokenizer: Tokenizer, shards: Iterable[InputShard], append_eod: bool
) -> Iterator[EncodedDocuments]:
    """Yield the documents of consecutive shards, encoded a few megabytes at a time.

    Args:
        tokenizer: Which encodes them.
        shards: The shards.
        append_eod: Whether to add the token that ends a document to each.

    Raises:
        UserError: For an error in the input, and as `encode_documents` does.
    """
    broken = BrokenRows()
    for documents in _batch_documents(shards, broken):
        count, named = broken.take()
        encoded = encode_documents(tokenizer, documents, append_eod)
        yield replace(encoded, broken=count, named=named, filtered=broken.take_filtered())


def join_encoded(batches: Sequence[EncodedDocuments], tokenizer: Tokenizer) -> EncodedDocuments:
    """Return consecutive batches of a tokenizer's documents as one."""
    dtype = choose_token_dtype(tokenizer.vocab_size)
    return EncodedDocuments(
        np.concatenate([np.empty(0, dtype), *(batch.tokens for batch in batches)]),
        np.concatenate([np.empty(0, "<i4"), *(batch.lengths for batch in batches)]),
        sum(batch.empty for batch in batches),
        sum(batch.broken for batch in batches),
        tuple(name for batch in batches for name in batch.named),
        sum(batch.filtered for batch in batches),
    )


def _batch_documents(shards: Iterable[InputShard], broken: BrokenRows) -> Iterator[list[str]]:
    """Yield documents in groups of a few megabytes: enough for the libraries' batch calls, and
    little to keep in memory."""
    batch: list[str] = []
    size = 0
    for shard in shards:
        for text in read_documents(shard, broken):
            batch.append(text)
            size += len(text) + _DOCUMENT
            if size >= _BATCH:
                yield batch
                batch, size = [], 0
    if batch or broken.count or broken.filtered:
        yield batch


def encode_documents(
    tokenizer: Tokenizer, texts: Sequence[str], append_eod: bool
) -> EncodedDocuments:
    """Encode documents into the form in which a token file stores them.

    Args:
        tokenizer: Which encodes them.
        texts: The documents.
        append_eod: Whether to add the token that ends a document to each.

    Raises:
        UserError: For an id that is negative or not below the tokenizer's vocabulary size.
    """
    documents = [ids for ids in tokenizer.encode_batch(texts) if ids.size]
    end = np.array([tokenizer.eod] * append_eod, np.int32)
    lengths = np.array([ids.size + end.size for ids in documents], "<i4")
    dtype, empty = choose_token_dtype(tokenizer.vocab_size), len(texts) - len(documents)
    if not documents:
        return EncodedDocuments(np.empty(0, dtype), lengths, empty)
    ended = [array for ids in documents for array in (ids, end)] if append_eod else documents
    tokens = np.concatenate(ended, dtype=np.int32, casting="same_kind")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer made ids from {low} to {high}, but its vocabulary has "
            f"{tokenizer.vocab_size}; its file is damaged"
        )
    return EncodedDocuments(tokens.astype(dtype), lengths, empty)


@lru_cache(maxsize=1)
def load_cached_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer once per worker."""
    return load_tokenizer(name)


T = TypeVar("T")
_IN_FLIGHT = 2


def map_ordered(
    function: Callable[..., T], tasks: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[T]:
    """Yield `function(*task)` for every task, in order.

    At most two tasks per worker are taken from `tasks` ahead of their results. An exception of a
    task is raised in place of its result, and tasks that have not begun are dropped.

    Args:
        function: Run in worker processes.
        tasks: Its arguments, task by task.
        workers: Number of processes.

    Raises:
        UserError: If a worker dies.
    """
    pool = make_worker_pool(workers)
    waiting: deque[Future[T]] = deque()
    try:
        for task in tasks:
            if len(waiting) >= _IN_FLIGHT * workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, *task))
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UserError(
            f"one of {workers} worker processes died: killed, or out of memory; run the same "
            f"command again to continue, perhaps with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def make_worker_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of processes that end with this one, however it ends."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, context, _start_worker)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        wait_for_object([parent.sentinel])
        os._exit(1)
