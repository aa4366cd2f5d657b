"""Walks through the blocks of a stream in their order, and waits for those that are not there yet.

One of the readers of a cache starts the process that makes blocks; if it ends, another one does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import IO

from megaframe.config.data import StreamingConfig
from megaframe.data.streaming.block_cache import BlockCache, Demand, Reader
from megaframe.data.streaming.block_files import BlockInfo, read_info
from megaframe.data.streaming.corpus import Block, Corpus, Position, StreamOrder
from megaframe.data.streaming.producer import ProducerJob, encode_job
from megaframe.errors import UserError

_FIRST_PAUSE, _LAST_PAUSE = 0.01, 0.2
_SAID_AFTER = 10.0
"""Seconds after which a wait is said."""


def count_workers(streaming: StreamingConfig) -> int:
    """Return how many processes tokenise on this machine."""
    if streaming.workers is not None:
        return streaming.workers
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores // 2)


class ProducerProcess:
    """The process that makes blocks, if no other reader of the cache has started it.

    Args:
        cache: The cache.
        streaming: How large it is, and how many processes work for it.
    """

    def __init__(self, cache: BlockCache, streaming: StreamingConfig) -> None:
        self._cache, self._streaming = cache, streaming
        self._lock: IO[bytes] | None = None
        self._child: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Start the process if there is none. Raises `UserError` if it has failed."""
        if self._lock is None:
            self._lock = self._cache.lead()
            if self._lock is not None:
                self._start()
        ended = self._child.poll() if self._child else None
        failure = self._cache.read_failure()
        if failure is not None:
            raise UserError(failure)
        if ended is not None:
            raise UserError(
                f"the process that tokenises ended with status {ended}: killed, or out of memory; "
                "start the run again, perhaps with fewer data.streaming.workers"
            )

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            assert self._child.stdin is not None
            with suppress(OSError):
                self._child.stdin.close()
            self._child.wait()
        if self._lock is not None:
            self._lock.close()
        self._child = self._lock = None

    def _start(self) -> None:
        folder, limit = str(self._cache.folder), self._streaming.cache_bytes
        job = ProducerJob(folder, limit, count_workers(self._streaming))
        command = [sys.executable, "-m", "megaframe.data.streaming.producer"]
        # The process ends without notice, which the one that cleans up after it need not say.
        quiet = {"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, **quiet})
        assert self._child.stdin is not None
        with suppress(OSError):  # it has ended, which `check` says
            self._child.stdin.write(encode_job(job))
            self._child.stdin.flush()


class StreamReader:
    """Finds the blocks of a corpus at their positions.

    Args:
        corpus: The corpus.
        seed: Of its order.
        cache: Where blocks are made; None if all lie on this machine already.
        producer: Makes them.
        reads_ahead: Whether blocks are made before they are asked for.
        keeps_read: Whether what was read will be read again.
    """

    def __init__(
        self,
        corpus: Corpus,
        seed: int,
        cache: BlockCache | None,
        producer: ProducerProcess | None,
        *,
        reads_ahead: bool,
        keeps_read: bool,
    ) -> None:
        self.order = StreamOrder(corpus, seed)
        self._corpus, self._cache, self._producer = corpus, cache, producer
        self._keeps_read = keeps_read
        self._reader: Reader | None = None
        self._demand: Demand | None = None
        if cache is not None:
            digest, start = cache.add_corpus(corpus), Position(0, 0, 0)
            self._demand = Demand(digest, seed, start, start, reads_ahead)

    def find(self, position: Position) -> tuple[str, BlockInfo]:
        """Return the path of a block without suffix, and what is in it. Waits until it is there.

        Raises:
            UserError: It cannot be made, or cannot be read.
        """
        block = self.order.find_block(position)
        if self._cache is None or self._demand is None:
            return self._find_ready(block)
        if self._reader is None:
            self._reader = Reader(self._cache)
        first = min(position, self._demand.first) if self._keeps_read else position
        self._demand = replace(self._demand, first=first, current=position)
        self._reader.ask(self._demand)
        prefix = self._cache.locate(self._demand.digest, block)
        return prefix, self._wait(self._demand.digest, block)

    def close(self) -> None:
        """Need no blocks any more."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def _find_ready(self, block: Block) -> tuple[str, BlockInfo]:
        if self._corpus.kind == "tokens":
            name, _ = self._corpus.list_shards()[block.shard][0]
            return self._corpus.locate(name), BlockInfo(is_last=True)
        prefix = self._corpus.locate(block.stem)
        return prefix, read_info(prefix)

    def _wait(self, digest: str, block: Block) -> BlockInfo:
        assert self._cache is not None and self._producer is not None
        begin, pause, said = time.monotonic(), _FIRST_PAUSE, False
        while True:
            self._producer.check()
            info = self._cache.find(digest, block)
            if info is not None:
                return info
            waited = time.monotonic() - begin
            if waited > _SAID_AFTER and not said:
                said = True
                warnings.warn(
                    f"the run has waited for {waited:.0f} s for tokens of {self._corpus.root}: it "
                    "trains faster than data.streaming.workers tokenise, the first block is not "
                    "yet there, or a store does not answer",
                    stacklevel=2,
                )
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
