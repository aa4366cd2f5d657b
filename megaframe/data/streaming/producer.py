"""Makes blocks ahead of their readers, in a process with workers of its own, within the bound of
the cache.

    python -m megaframe.data.streaming.producer

The process is a child of one of the readers and ends with it: its job is a line of its standard
input, which the reader closes when it ends, however it does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_any
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass

from megaframe.data.indexed_dataset import choose_token_dtype
from megaframe.data.preprocessing.journal import EncodedDocuments
from megaframe.data.preprocessing.preprocess import load_cached_tokenizer, make_worker_pool
from megaframe.data.streaming.block_cache import BlockCache
from megaframe.data.streaming.block_files import (
    HEADER_BYTES,
    FileBlockWriter,
    TextBlockWriter,
    delete_block,
    measure_block,
)
from megaframe.data.streaming.block_parts import FilePart, Part, TextPart, cut_shard, make_part
from megaframe.data.streaming.corpus import Block, Corpus, StreamOrder
from megaframe.data.streaming.plan_blocks import (
    UNNEEDED,
    BlockRanks,
    Key,
    StoredBlock,
    choose_victim,
    rank_blocks,
)
from megaframe.errors import UserError

_IN_FLIGHT = 2
"""Parts per worker that are taken ahead of their results."""
_PAUSE = 0.05
"""Seconds between two looks at what readers need."""

Made = EncodedDocuments | bytes


@dataclass(frozen=True)
class ProducerJob:
    """What a producer is told.

    Attributes:
        folder: Of the cache.
        limit: Most bytes of blocks in it.
        workers: Processes that make parts.
    """

    folder: str
    limit: int
    workers: int


class BlockNeeds:
    """What readers need of a cache.

    Args:
        cache: The cache.
        limit: Most bytes of blocks in it.
    """

    def __init__(self, cache: BlockCache, limit: int) -> None:
        self._cache, self.limit = cache, limit
        self._corpora: dict[str, Corpus] = {}
        self._orders: dict[tuple[str, int], StreamOrder] = {}

    def rank(self, stored: dict[Key, StoredBlock]) -> BlockRanks:
        """Return the ranks of the blocks that readers need now. stored: see `rank_blocks`."""
        return rank_blocks(self._cache.list_demands(), stored, self._find_order, self.limit)

    def find_corpus(self, digest: str) -> Corpus:
        """Return a corpus."""
        if digest not in self._corpora:
            self._corpora[digest] = self._cache.read_corpus(digest)
        return self._corpora[digest]

    def _find_order(self, digest: str, seed: int) -> StreamOrder:
        if (digest, seed) not in self._orders:
            self._orders[digest, seed] = StreamOrder(self.find_corpus(digest), seed)
        return self._orders[digest, seed]


class BlockPlanner:
    """Chooses the next block, and cuts it into parts. Used by one thread at a time.

    Args:
        needs: What readers need.
    """

    def __init__(self, needs: BlockNeeds) -> None:
        self._needs = needs
        self._cut: dict[str, tuple[Block, Iterator[Part]]] = {}
        self._begun: Key | None = None

    def take_part(self, stored: dict[Key, StoredBlock]) -> tuple[Key, Part] | None:
        """Return the next part of the block that was begun, or the first one of the block that is
        needed most; None if there is no room for another one, or none is needed.

        Args:
            stored: What is in the cache or being made.
        """
        key = self._begun or self._choose(stored)
        if key is None:
            return None
        digest, block = key
        following, parts = self._cut.get(digest, (None, None))
        if parts is None or (self._begun is None and following != block):
            parts = cut_shard(self._needs.find_corpus(digest), block.shard, block.number)
        part = next(parts)
        self._begun = None if part.ends_block else key
        self._cut[digest] = (Block(block.shard, block.number + 1), parts)
        if part.ends_shard:
            del self._cut[digest]
        return key, part

    def forget(self) -> None:
        """Begin the next block anew."""
        self._begun = None
        self._cut.clear()

    def _choose(self, stored: dict[Key, StoredBlock]) -> Key | None:
        ranked = self._needs.rank(stored)
        estimate = max((block.size for block in stored.values()), default=0)
        for key in ranked.missing[:1]:
            rank, ranks = ranked.ranks[key], ranked.ranks
            before = [b.size for each, b in stored.items() if ranks.get(each, UNNEEDED) < rank]
            if rank == 0 or sum(before) + estimate <= self._needs.limit:
                return key
        return None


class BlockProducer:
    """Makes blocks until it is ended.

    Args:
        job: What it is told.
    """

    def __init__(self, job: ProducerJob) -> None:
        self._job, self._cache = job, BlockCache(job.folder)
        self._cache.delete_unfinished()
        self._stored = {
            (digest, block): StoredBlock(
                measure_block(self._cache.locate(digest, block)), info.is_last
            )
            for digest, block in self._cache.list_blocks()
            if (info := self._cache.find(digest, block)) is not None
        }
        self._planned: dict[Key, StoredBlock] = {}
        self._needs = BlockNeeds(self._cache, job.limit)
        self._planner = BlockPlanner(self._needs)
        self._is_stale = False
        self._in_flight: deque[tuple[Key, Part, Future[Made]]] = deque()
        self._writing: tuple[Key, TextBlockWriter | FileBlockWriter] | None = None
        self._written = 0

    def run(self) -> None:
        """Make blocks without end. Raises `UserError` for what cannot be made."""
        pool = make_worker_pool(self._job.workers)
        planning: Future[tuple[Key, Part] | None] | None = None
        with ThreadPoolExecutor(1) as thread:
            while True:
                if planning is None and len(self._in_flight) < _IN_FLIGHT * self._job.workers:
                    known = {**self._stored, **self._planned}
                    planning = thread.submit(self._planner.take_part, known)
                waiting: list[Future] = [planning] if planning else []
                waiting += [self._in_flight[0][2]] if self._in_flight else []
                wait_for_any(waiting, timeout=_PAUSE, return_when=FIRST_COMPLETED)
                stored = bool(self._in_flight) and self._store_first(planning)
                if planning is not None and planning.done():
                    taken, planning = planning.result(), None
                    taken, self._is_stale = None if self._is_stale else taken, False
                    if taken is not None:
                        self._submit(pool, *taken)
                    elif not stored:
                        time.sleep(_PAUSE)
                elif not stored and self._in_flight and self._in_flight[0][2].done():
                    time.sleep(_PAUSE)

    def _submit(self, pool: ProcessPoolExecutor, key: Key, part: Part) -> None:
        if part.ends_block:
            estimate = max((block.size for block in self._stored.values()), default=0)
            self._planned[key] = StoredBlock(estimate, part.ends_shard)
        self._in_flight.append((key, part, pool.submit(make_part, part)))

    def _store_first(self, planning: Future | None) -> bool:
        """Store the first result, if it is there and has room. Returns whether it is stored."""
        key, part, future = self._in_flight[0]
        if not future.done():
            return False
        made = future.result()
        if not self._make_room(key, _measure(part, made), planning):
            return False
        if not self._in_flight or self._in_flight[0][2] is not future:
            return False  # dropped for another one
        self._in_flight.popleft()
        self._append(key, part, made)
        return True

    def _append(self, key: Key, part: Part, made: Made) -> None:
        digest, block = key
        if self._writing is None:
            self._writing = key, _open_writer(self._cache.locate(digest, block), part)
        _, writer = self._writing
        _write(writer, part, made)
        self._written += _measure(part, made)
        if not part.ends_block:
            return
        if isinstance(writer, TextBlockWriter):
            writer.finish(is_last=part.ends_shard)
        else:
            writer.finish()
        self._writing, self._written = None, 0
        self._planned.pop(key, None)
        size = measure_block(self._cache.locate(digest, block))
        self._stored[key] = StoredBlock(size, part.ends_shard)

    def _make_room(self, key: Key, size: int, planning: Future | None) -> bool:
        """Delete blocks that are needed less than this one. Returns whether there is room."""
        used = sum(block.size for block in self._stored.values())
        needed = used + self._written + size + HEADER_BYTES - self._job.limit
        if needed <= 0:
            return True
        ranked = self._needs.rank({**self._stored, **self._planned})
        rank = ranked.ranks.get(key, UNNEEDED)
        while needed > 0:
            victim = choose_victim(ranked.ranks, self._stored, rank)
            if victim is None:
                self._give_way(key, size, ranked, planning)
                return False
            digest, block = victim
            delete_block(self._cache.locate(digest, block))
            needed -= self._stored.pop(victim).size
        return True

    def _give_way(self, key: Key, size: int, ranked: BlockRanks, planning: Future | None) -> None:
        """Drop the block that is being made if a reader waits for another one. Raises `UserError`
        if it waits for this one, and there is no room for it."""
        rank = ranked.ranks.get(key, UNNEEDED)
        if rank == 0:
            kept = sum(block.size for block in self._stored.values())
            raise UserError(
                f"data.streaming.cache_bytes={self._job.limit:,} has no room for a block that the "
                f"run waits for, of {self._written + size:,} bytes or more, beside {kept:,} bytes "
                "that it reads; use two or more times as much, or a smaller "
                "data.streaming.shuffle_bytes"
            )
        urgent = [each for each in ranked.missing if ranked.ranks[each] == 0]
        if (urgent or rank == UNNEEDED) and (planning is None or planning.done()):
            for _, _, future in self._in_flight:
                future.cancel()
            self._in_flight.clear()
            self._planned.clear()
            if self._writing is not None:
                self._writing[1].abandon()
            self._writing, self._written = None, 0
            self._planner.forget()
            self._is_stale = planning is not None


def _measure(part: Part, made: Made) -> int:
    return len(made) if isinstance(made, bytes) else TextBlockWriter.measure(made)


def _open_writer(prefix: str, part: Part) -> TextBlockWriter | FileBlockWriter:
    if isinstance(part, FilePart):
        return FileBlockWriter(prefix, part.info)
    tokenizer = load_cached_tokenizer(part.tokenizer.name)
    return TextBlockWriter(prefix, choose_token_dtype(tokenizer.vocab_size))


def _write(writer: TextBlockWriter | FileBlockWriter, part: Part, made: Made) -> None:
    if isinstance(writer, FileBlockWriter):
        assert isinstance(part, FilePart) and isinstance(made, bytes)
        writer.append(part.suffix, made)
    else:
        assert isinstance(part, TextPart) and isinstance(made, EncodedDocuments)
        writer.append(made)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def _show_warning(message: Warning | str, *details: object, **more: object) -> None:
    print(f"megaframe: {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Make blocks as the first line of the standard input says, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = ProducerJob(**json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_input, daemon=True).start()
    warnings.showwarning = _show_warning
    try:
        BlockProducer(job).run()
    except BrokenProcessPool:
        text = (
            f"one of {job.workers} processes that tokenise died: killed, or out of memory; start "
            "the run again, perhaps with fewer data.streaming.workers"
        )
    except UserError as error:
        text = str(error)
    except Exception as error:
        BlockCache(job.folder).fail(f"the process that tokenises failed: {error!r}")
        raise
    BlockCache(job.folder).fail(text)
    os._exit(1)  # without waiting for what the workers are doing


def encode_job(job: ProducerJob) -> bytes:
    """Return the line that tells a producer its job."""
    return json.dumps(asdict(job)).encode() + b"\n"


if __name__ == "__main__":
    main()
