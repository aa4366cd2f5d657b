"""Opens the sources of a run that are read as streams: one cache and one producer for all."""

from __future__ import annotations

from megaframe.config.data import DataConfig, DataSourceConfig
from megaframe.data.dataset_options import DatasetOptions
from megaframe.data.streaming.block_cache import BlockCache
from megaframe.data.streaming.corpus import Corpus, find_corpus
from megaframe.data.streaming.stream_reader import ProducerProcess, StreamReader
from megaframe.data.streaming.streamed_dataset import StreamedDataset


class Streams:
    """What the streams of a run share.

    Args:
        data: The section of the run.
        folder: Of the run, for a cache that has no folder of its own.
    """

    def __init__(self, data: DataConfig, folder: str) -> None:
        self._data = data
        self._folder = data.streaming.cache or f"{folder}/cache"
        self._corpora: dict[str, Corpus] = {}
        self._cache: BlockCache | None = None
        self._producer: ProducerProcess | None = None
        self._opened: list[StreamedDataset] = []

    def open(self, source: DataSourceConfig, options: DatasetOptions, seed: int) -> StreamedDataset:
        """Return the samples of a source.

        Args:
            source: The source.
            options: How its blocks become samples.
            seed: Of its order.

        Raises:
            UserError: It cannot be read as a stream.
        """
        if source.path not in self._corpora:
            self._corpora[source.path] = find_corpus(source, self._data)
        corpus = self._corpora[source.path]
        if not corpus.is_ready and self._cache is None:
            self._cache = BlockCache(self._folder)
            self._producer = ProducerProcess(self._cache, self._data.streaming)
        trains = options.split == "train"
        cache, producer = (None, None) if corpus.is_ready else (self._cache, self._producer)
        reader = StreamReader(
            corpus, seed, cache, producer, reads_ahead=trains, keeps_read=not trains
        )
        self._opened.append(StreamedDataset(corpus, options, seed, reader))
        return self._opened[-1]

    def close(self) -> None:
        """Need no blocks any more, and end the process that makes them."""
        for stream in self._opened:
            stream.close()
        if self._producer is not None:
            self._producer.close()
