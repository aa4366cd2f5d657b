"""Blended dataset: reads microbatches from all sources of one split.

A sample is identified by its source and its number within that source; its window in the file
follows from the source's keyed order. The windows of a batch over many sources are computed in one
vectorised pass, and then gathered source by source.

Shape suffixes: N samples, S tokens of a sample, T = S + 1 tokens of a window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaframe.config.data import DataConfig, DataSourceConfig
from megaframe.config.data import Split as Shares
from megaframe.config.model import ModelConfig
from megaframe.config.part_calls import call_part
from megaframe.config.schema import TrainConfig
from megaframe.data.dataset_options import DatasetOptions
from megaframe.data.fill_in_the_middle import find_fill_in_the_middle
from megaframe.data.gpt_dataset import GPTDataset, locate_documents, number_documents
from megaframe.data.label_weights import WEIGHT_DTYPE
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data.shuffle import derive_source_key, sample_indices
from megaframe.data.source_limits import check_caps, find_limit, list_caps
from megaframe.data.split_advice import SPLITS, Split, SplitSetting
from megaframe.data.streaming.corpus import is_stream
from megaframe.data.streaming.open_streams import Streams
from megaframe.data.streaming.streamed_dataset import Cursor, StreamedDataset
from megaframe.data.token_file_record import TokenizerRecord
from megaframe.data.tokenizer import load_tokenizer
from megaframe.data.transforms import SampleTransforms
from megaframe.errors import UserError
from megaframe.validate.data import NO_END_TOKEN, NO_SOURCES

Numbers = NDArray[np.int64]
_ANY_TOKEN = 2**63
_NO_STREAM = (
    "is read as a stream, whose size is not known; make a token file of it "
    "(tools/preprocess_data.py)"
)
_WINDOWS_AHEAD = 1024


class BlendedDataset:
    """The sources of `config.data` that have a share of one split. Samples are those of the files
    after the transforms of the split.

    `sources`, `paths`, `weights`, `sizes` (samples per epoch), `records` (what made the file, if
    that is known) and `names` have one entry per source, in the order of the config. A name is the
    file name, or the path if several sources have that file name. `caps` has the sources that a run
    does not repeat without end, by path. `masks_labels` says whether some
    tokens may have no label, or one with a weight.

    Args:
        config: The run.
        split: The split.
        seed: Determines the order of each source, with the source's file name.
        streams: Opens the sources that are read as streams; None: there must be none.
        is_evaluation: Whether a run that has trained is evaluated, for messages.

    Raises:
        UserError: For sources that cannot be used, and if none has a share of the split.
    """

    def __init__(
        self,
        model: ModelConfig,
        train: TrainConfig,
        data: DataConfig,
        split: Split,
        seed: int,
        streams: Streams | None = None,
        *,
        is_evaluation: bool = False,
    ) -> None:
        if not data.sources:
            raise UserError(NO_SOURCES)
        _check_paths([source.path for source in data.sources])
        used_sources = select_sources(data, split)
        if not used_sources:
            raise UserError(
                f"no source has a share of the {split} split: data.split={list(data.split)} and "
                f"data.sources[...].split leave it none; "
                f"{_advise_shares(data, split, is_evaluation)}"
            )
        self._used = used_sources
        self.paths = tuple(source.path for source, _ in used_sources)
        vocab = model.vocab or _ANY_TOKEN
        self._seq = train.seq
        self._data = data
        end = find_document_end(data)
        self.sources: list[GPTDataset | StreamedDataset] = []
        for source, shares in used_sources:
            packed = data.packing == "best_fit"
            options = DatasetOptions(
                split, shares, self._seq, vocab, end, data.label_weights, packed
            )
            if not is_stream(source.path):
                setting = SplitSetting(source.path if source.split else None, is_evaluation)
                self.sources.append(options.open(source.path, setting))
            elif streams is None:
                raise UserError(f"{source.path} {_NO_STREAM}")
            else:
                self.sources.append(streams.open(source, options, seed))
        self.caps = list_caps([source for source, _ in used_sources])
        if split == "train":
            for (source, _), samples in zip(used_sources, self.sources, strict=True):
                check_caps(source, samples, self._seq)
        self.weights = tuple(source.weight for source, _ in used_sources)
        self.sizes = np.array([source.windows for source in self.sources], np.int64)
        files = [Path(path).name for path in self.paths]
        count_of_name = Counter(files)
        self.names = tuple(
            name if count_of_name[name] == 1 else path
            for name, path in zip(files, self.paths, strict=True)
        )
        self.records = tuple(source.read_record() for source in self.sources)
        self._seed = seed
        self.order_sources({})
        transforms = [
            (place, part)
            for place, part in enumerate(data.transforms)
            if split == "train" or call_part(part, "includes_validation", bool)
        ]
        self._transforms = SampleTransforms(transforms, seed, vocab)
        self._fills = tuple(
            find_fill_in_the_middle(source, data, record.eod if record else None, seed)
            if split == "train"
            else None
            for (source, _), record in zip(used_sources, self.records, strict=True)
        )
        dtypes = {source.weight_dtype for source in self.sources} - {None}
        self._has_weights = WEIGHT_DTYPE in dtypes
        self.masks_labels = bool(dtypes or transforms or data.masks_document_starts)

    def find_text_starts(self, sources_N: Numbers, numbers_N: Numbers) -> NDArray[np.bool_]:
        """Return where a label of these samples is the first token of a document, bool [N, S]. See
        `read` for the arguments."""
        starts_NS = np.empty((sources_N.size, self._seq), np.bool_)
        windows_N = self._sample_windows(sources_N, numbers_N)
        for index, rows in self._group_rows_by_source(sources_N):
            starts_NS[rows] = self.sources[index].is_document_start(windows_N[rows])[:, 1:]
        return starts_NS

    def list_tokenizers(self) -> Iterator[tuple[str, TokenizerRecord]]:
        """Yield each source whose tokenizer is known, in words, and its tokenizer."""
        for path, record in zip(self.paths, self.records, strict=True):
            if record is not None:
                yield f"the token file {path}", record.tokenizer

    def order_sources(self, numbers: Mapping[str, int]) -> None:
        """Derive the order of each source anew from its file name without the folder, so that files
        can move, and its number. numbers: By path, those that are not 0; see `SamplerState`."""
        names = [f"{Path(path).name}\0{numbers.get(path, 0)}" for path in self.paths]
        self._streams = np.array([isinstance(each, StreamedDataset) for each in self.sources])
        self._keys = np.array([derive_source_key(self._seed, n) for n in names], np.uint64)
        self._windows_start = 0
        self._windows: Numbers = np.empty(0, np.int64)

    def list_token_files(self) -> Iterator[tuple[str, GPTDataset]]:
        """Yield the name of each source that is a token file, and its samples."""
        for name, source in zip(self.names, self.sources, strict=True):
            if isinstance(source, GPTDataset):
                yield name, source

    def list_streams(self) -> dict[str, StreamedDataset]:
        """Return the sources that are read as streams, by path."""
        pairs = zip(self.paths, self.sources, strict=True)
        return {path: each for path, each in pairs if isinstance(each, StreamedDataset)}

    def find_cursors(self, consumed: Sequence[int]) -> dict[str, Cursor]:
        """Return the place in each stream, by path. consumed: samples given by each source."""
        given = dict(zip(self.paths, consumed, strict=True))
        return {path: each.find_cursor(given[path]) for path, each in self.list_streams().items()}

    def find_existing(self, sources_N: Numbers, numbers_N: Numbers) -> NDArray[np.bool_]:
        """Return which of these samples the first epochs of their sources have, bool [N]."""
        sizes = self.sizes.copy()
        for index, source in enumerate(self.sources):
            if isinstance(source, StreamedDataset):
                most = int(numbers_N[sources_N == index].max(initial=-1)) + 1
                sizes[index] = source.count(most)
        return numbers_N < sizes[sources_N]

    def find_limits(self, consumed: Sequence[int], size: int) -> list[int | None]:
        """Return the most samples that each source gives in all, by its `epochs` and `max_tokens`;
        None where nothing limits them, or only beyond the next ones of a stream.

        Args:
            consumed: Samples that each source has given.
            size: How many the next ones are.
        """
        keys = [source for source, _ in self._used]
        return [
            find_limit(source, samples, self._seq, given, size)
            for source, samples, given in zip(keys, self.sources, consumed, strict=True)
        ]

    def read(self, sources_N: Numbers, numbers_N: Numbers, samples_N: Numbers) -> Microbatch:
        """Read these samples, in this order, as one microbatch.

        The numbers of each source must be ascending, and N at least 1.

        Args:
            sources_N: Index of each sample's source.
            numbers_N: Its number within the source, over all epochs.
            samples_N: Its number in the training order, passed on as `samples_B`.
        """
        data, shape = self._data, (sources_N.size, self._seq)
        tokens_NS, labels_NS = np.empty(shape, np.int64), np.empty(shape, np.int64)
        needs_documents = data.reset_positions or data.reset_attention
        needs_documents |= data.masks_document_starts or bool(self._transforms)
        needs_documents |= any(fill is not None for fill in self._fills)
        weights_NS = np.ones(shape, np.float32) if self._has_weights else None
        next_N = np.empty(shape[0], np.int64)
        beginnings_NT = np.zeros((shape[0], shape[1] + 1), np.bool_) if needs_documents else None
        windows_N = self._sample_windows(sources_N, numbers_N)
        for index, rows in self._group_rows_by_source(sources_N):
            source, fill = self.sources[index], self._fills[index]
            tokens_RT = source.read(windows_N[rows]).astype(np.int64, copy=False)
            weights_RT = source.read_label_weights(windows_N[rows])
            if beginnings_NT is not None:
                beginnings_NT[rows] = source.is_document_start(windows_N[rows])
                if fill is not None:
                    fill.apply(tokens_RT, weights_RT, beginnings_NT[rows], samples_N[rows])
            tokens_NS[rows] = tokens_RT[:, :-1]
            labels_NS[rows] = tokens_RT[:, 1:]
            next_N[rows] = tokens_RT[:, -1]
            if weights_RT is not None:
                labels_NS[rows] = np.where(weights_RT[:, 1:] == 0, IGNORE, labels_NS[rows])
                if weights_NS is not None:
                    weights_NS[rows] = weights_RT[:, 1:]
        positions_NS = documents_NS = None
        if beginnings_NT is not None:
            if data.masks_document_starts:
                labels_NS[beginnings_NT[:, 1:]] = IGNORE
            if self._transforms:
                documents = number_documents(beginnings_NT[:, :-1])
                self._transforms.apply(
                    tokens_NS, labels_NS, documents, next_N, samples_N, weights_NS
                )
            if data.reset_positions:
                positions_NS = torch.from_numpy(locate_documents(beginnings_NT[:, :-1]))
            if data.reset_attention:
                documents_NS = torch.from_numpy(number_documents(beginnings_NT[:, :-1]))
        return Microbatch(
            torch.from_numpy(tokens_NS),
            torch.from_numpy(labels_NS),
            torch.from_numpy(samples_N),
            positions_NS,
            documents_NS,
            weights_BS=None if weights_NS is None else torch.from_numpy(weights_NS),
        )

    def _sample_windows(self, sources_N: Numbers, numbers_N: Numbers) -> Numbers:
        """Return the window of each sample within its source; its number, if that is a stream.

        Permuting a few numbers takes as long as permuting a thousand. So with a single source,
        whose numbers ascend, the next thousand are computed together.
        """
        if self._streams.any():
            windows_N, rows = numbers_N.copy(), ~self._streams[sources_N]
            numbers, sources = numbers_N[rows], sources_N[rows]
            windows_N[rows] = sample_indices(numbers, self.sizes[sources], self._keys[sources])
            return windows_N
        if len(self.sources) > 1:
            return sample_indices(numbers_N, self.sizes[sources_N], self._keys[sources_N])
        first, last = int(numbers_N[0]), int(numbers_N[-1])
        if first < self._windows_start or last >= self._windows_start + self._windows.size:
            positions = np.arange(first, max(last + 1, first + _WINDOWS_AHEAD))
            self._windows_start = first
            self._windows = sample_indices(positions, self.sizes, self._keys)
        return self._windows[numbers_N - self._windows_start]

    def _group_rows_by_source(self, sources_N: Numbers) -> Iterator[tuple[int, Numbers | slice]]:
        """Yield the index of each source of the batch and the rows that come from it."""
        if len(self.sources) == 1:
            yield 0, slice(None)
            return
        order = np.argsort(sources_N, kind="stable")
        ends = np.flatnonzero(np.diff(sources_N[order])) + 1
        for rows in np.split(order, ends):
            if rows.size:
                yield int(sources_N[rows[0]]), rows


def split_batch(batch: Microbatch, size: int) -> tuple[Microbatch, ...]:
    """Cut a batch into microbatches of `size` samples, as views."""
    if batch.tokens_BS.shape[0] == size:
        return (batch,)
    parts: dict[str, tuple[Tensor, ...]] = {
        name: tensor.split(size)
        for name, tensor in vars(batch).items()
        if isinstance(tensor, Tensor)
    }
    return tuple(
        replace(batch, **dict(zip(parts, tensors, strict=True)))
        for tensors in zip(*parts.values(), strict=True)
    )


def select_sources(data: DataConfig, split: Split) -> list[tuple[DataSourceConfig, Shares]]:
    """Return the sources that have a share of a split, each with its shares of all splits."""
    shares = [source.split or data.split for source in data.sources]
    position = SPLITS.index(split)
    return [pair for pair in zip(data.sources, shares, strict=True) if pair[1][position]]


def _advise_shares(data: DataConfig, split: Split, is_evaluation: bool) -> str:
    """Return how to give a share to a split that no source has one of."""
    first = data.sources[0]
    own = first.path if all(source.split for source in data.sources) else None
    setting = SplitSetting(own, is_evaluation)
    train = (first.split if own and first.split else data.split)[0]
    held_out = round(1.0 - train, 9)
    if split == "train" or not held_out:
        divided = (0.98, 0.02, 0.0) if split != "test" else (0.98, 0.01, 0.01)
        return setting.advise(divided, keeps_training=False)
    half = round(held_out / 2, 9)
    return setting.advise((train, half, round(held_out - half, 9)), keeps_training=True)


def find_document_end(data: DataConfig) -> int | None:
    """Return the token that ends documents, or None if the index says where they end."""
    if data.document_ends != "tokens":
        return None if data.document_ends == "index" else data.document_ends
    if data.tokenizer is None:
        raise UserError(NO_END_TOKEN)
    return load_tokenizer(data.tokenizer).eod


def _check_paths(paths: Sequence[str]) -> None:
    """Raise `UserError` if two sources have the same path. Counts of consumed samples are kept by
    path."""
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise UserError(
            f"data.sources names {twice[0]} {paths.count(twice[0])} times; name each source once, "
            "with the sum of the weights"
        )
