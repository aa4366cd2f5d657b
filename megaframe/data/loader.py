"""The loader: makes the microbatches of one data rank from a config, one optimizer step at a time.

Every rank computes which samples are in the whole global batch and reads only its own, so ranks
agree without communicating. The saved state is that after the last step that was returned, not of
steps that a thread has read ahead, so a resumed run continues with exactly the next sample.

Shape suffixes: N samples of this rank; the rest as in `Microbatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megaframe.config.batch_ramp import compute_batch_size, count_samples
from megaframe.config.schema import RunConfig
from megaframe.data.blend import Blend
from megaframe.data.blended_dataset import BlendedDataset, select_sources, split_batch
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data.prefetch import Prefetch
from megaframe.data.sampler import BlendSources, SamplerState, restore_sampler
from megaframe.data.source_descriptions import describe_documents, describe_passes
from megaframe.data.split_advice import Split
from megaframe.data.streaming.open_streams import Streams
from megaframe.data.streaming.streamed_dataset import START
from megaframe.data.text_bytes import TextBytes
from megaframe.data.token_file_record import (
    TokenizerRecord,
    check_same_tokenizer,
    read_recorded_tokenizer,
    record_tokenizer,
)
from megaframe.data.tokenizer import load_tokenizer

_EVALUATION_SEED = 0
_OTHER_TOKENIZER = (
    "use the tokenizer that made the token files (data.tokenizer={name}), or make them again with "
    "another (tools/preprocess_data.py)"
)


class ValidationBatch(NamedTuple):
    """A microbatch of the validation split.

    Attributes:
        source: Name of its source.
        microbatch: Tokens and labels.
        text_bytes: Bytes of text that its labels represent, times their weights; 0 if no tokenizer
            says.
    """

    source: str
    microbatch: Microbatch
    text_bytes: float


@dataclass(frozen=True)
class StepBatch:
    """The data of one rank for one optimizer step.

    Attributes:
        microbatches: This rank's microbatches, each of `train.microbatch` samples.
        samples: Size of the global batch, over all ranks.
        first: Number of the step's first sample in the training order.
        valid: Sum of the weights of this rank's labels: how many there are, without weights.
        state: State of the loader after this step, as JSON values.
    """

    microbatches: tuple[Microbatch, ...]
    samples: int
    first: int
    valid: float
    state: dict[str, Any]


class Loader:
    """Makes an endless sequence of steps over one split. A source that is used up starts again in a
    new order.

    Position p of a global batch goes to microbatch p // (microbatch * data_ranks) of rank (p //
    microbatch) % data_ranks, so the batch has the same samples in the same order for any number of
    ranks. Islands each have one piece of the batch, which their ranks divide like this. The config
    must have passed the checks of `megaframe.validate` for this number of ranks, which ensure that
    batch sizes and ramp are divisible.

    Args:
        config: The run.
        data_rank: This rank among those that have different samples.
        data_ranks: How many these are.
        split: The split that is read.

    Raises:
        UserError: For sources and splits that cannot work.
    """

    def __init__(
        self, config: RunConfig, data_rank: int, data_ranks: int, *, split: Split = "train"
    ) -> None:
        self._config, self._rank, self._ranks = config, data_rank, data_ranks
        self._streams = Streams(config.data, config.run.dir)
        self._dataset = BlendedDataset(
            config.model, config.train, config.data, split, config.run.seed, self._streams
        )
        self._validation: BlendedDataset | None = None
        sizes = tuple(self._dataset.sizes.tolist())
        digests = tuple(source.compute_digest() for source in self._dataset.sources)
        self._sources = BlendSources(
            self._dataset.paths, self._dataset.weights, sizes, digests, self._dataset.caps
        )
        self._state_returned = self._state_read = SamplerState.start(self._sources)
        self._eod: int | None = None
        self._text_bytes: TextBytes | None = None
        self._tokenizer = self._check_tokenizer(self._dataset)
        self._prefetch: Prefetch[tuple[StepBatch, SamplerState]] | None = None
        self._peeked: tuple[StepBatch, SamplerState] | None = None
        if config.train.eval_every:
            self._open_validation()

    @property
    def state(self) -> dict[str, Any]:
        """The state after the last step that `next` returned."""
        return self._describe(self._state_returned)

    @property
    def masks_labels(self) -> bool:
        """Whether some tokens may have no label, or one with a weight."""
        return self._dataset.masks_labels

    @property
    def consumed(self) -> tuple[int, ...]:
        """The number of samples taken from each source that has a share of the split, in the order
        of `data.sources`."""
        return self._state_returned.blend.consumed

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of samples of each source that has a share of the split, by its name."""
        return dict(zip(self._dataset.names, self._dataset.sizes.tolist(), strict=True))

    @property
    def stream_digests(self) -> dict[str, str]:
        """What recognises each source that is read as a stream, by path."""
        streams = self._dataset.list_streams()
        return {path: stream.compute_digest() for path, stream in streams.items()}

    def load(self, state: Mapping[str, Any], seq: int | None = None) -> list[str]:
        """Continue after the step that `state` belongs to.

        Args:
            state: What `state` was.
            seq: Tokens per sample then. Default: as many as now.

        Returns:
            Lines for the run log; see `restore_sampler`.
        """
        validation = select_sources(self._config.data, "validation")
        validation_paths = [source.path for source, _ in validation]
        before = read_recorded_tokenizer(state)
        tokenizer = check_same_tokenizer(
            [("this run", self._tokenizer), ("its checkpoint", before)],
            "use the tokenizer that the run began with, or start a new run from its weights "
            "(checkpoint.weights)",
        )
        now = self._config.train.seq
        scale = Fraction(seq or now, now)
        state_restored, notes = restore_sampler(state, self._sources, validation_paths, scale)
        self._end_prefetch()
        self._tokenizer = tokenizer
        self._state_returned = self._state_read = state_restored
        self._dataset.order_sources(state_restored.numbers)
        for path, stream in self._dataset.list_streams().items():
            stream.start(state_restored.cursors.get(path, START))
        if self._validation is not None:
            self._validation.order_sources(state_restored.numbers)
        return notes

    def skip(self, steps: int) -> None:
        """Continue as after so many more steps, which other islands have trained."""
        self._end_prefetch()
        state = self._state_returned
        for _ in range(steps):
            state = self._take_samples(state)[2]
        self.load(self._describe(state))

    def compute_global_batch(self, samples_seen: int) -> int:
        """Return the size of the step that begins after `samples_seen` samples."""
        return compute_batch_size(self._config.train, samples_seen)

    def next(self) -> StepBatch:
        """Return the next step.

        Raises:
            UserError: For token ids outside of the vocabulary.
        """
        step, self._state_returned = self._peeked or self._advance_step()
        self._peeked = None
        return step

    def peek(self) -> StepBatch:
        """Return the step that `next` will return, and raise what it will raise. The loader's state
        stays as it is."""
        if self._peeked is None:
            self._peeked = self._advance_step()
        return self._peeked[0]

    def take_notes(self) -> list[str]:
        """Return lines for the run log about rows of streams that were left out, since the last
        call."""
        streams = self._dataset.list_streams().values()
        return [note for stream in streams for note in stream.take_notes()]

    def close(self) -> None:
        """End what reads ahead. A later `next` continues after the last returned step."""
        self._end_prefetch()
        self._streams.close()

    def _end_prefetch(self) -> None:
        if self._prefetch is not None:
            self._prefetch.close()
        self._prefetch = self._peeked = None
        self._state_read = self._state_returned

    def _advance_step(self) -> tuple[StepBatch, SamplerState]:
        depth = self._config.data.prefetch
        if depth and self._prefetch is None:
            self._prefetch = Prefetch(self._read_step, depth)
        return self._prefetch.next() if self._prefetch else self._read_step()

    def describe_sources(self, steps: int) -> Iterator[str]:
        """Yield lines for the run log: how often the sources are seen, and what may not be meant in
        the training data. steps: that are left of the run.

        Raises:
            UserError: The limits of the sources leave fewer samples than these steps take.
        """
        taken = count_samples(self._config.train, steps, self._state_returned.samples)
        samples = taken * self._runs
        yield from describe_passes(self._dataset, self.consumed, samples)
        yield from describe_documents(self._dataset, self._config.data, self._eod)

    def iterate_validation(self, samples: int) -> Iterator[ValidationBatch]:
        """Yield this rank's share of the first `samples` samples of the validation split, each
        once, source by source.

        The samples are the same each time, for any number of ranks and any `run.seed`; fewer if a
        source has no more. All ranks get the same number of microbatches with the same sizes. If
        the last samples of a source cannot be divided evenly, the positions left over repeat a
        sample with all labels `IGNORE`. samples_B counts from 0 in the order of the blend.

        Raises:
            UserError: If no source has a validation split, or one is too small.
        """
        dataset = self._open_validation()
        sources, numbers, _ = Blend.start(dataset.weights).take(samples)
        exists = dataset.find_existing(sources, numbers)
        sources, numbers = sources[exists], numbers[exists]
        per_step = self._config.train.microbatch * self._ranks
        for source, name in enumerate(dataset.names):
            of_source = np.flatnonzero(sources == source)
            for start in range(0, of_source.size, per_step):
                share = -(-min(per_step, of_source.size - start) // self._ranks)
                index_N = start + self._rank * share + np.arange(share)
                exists_N = index_N < of_source.size
                positions_N = of_source[np.minimum(index_N, of_source.size - 1)]
                batch = dataset.read(sources[positions_N], numbers[positions_N], positions_N)
                batch.labels_BS[int(exists_N.sum()) :] = IGNORE
                starts_BS = dataset.find_text_starts(sources[positions_N], numbers[positions_N])
                yield ValidationBatch(name, batch, self._count_text_bytes(batch, starts_BS))

    def _open_validation(self) -> BlendedDataset:
        """Return the validation split, opened when it is needed first."""
        if self._validation is None:
            self._validation = BlendedDataset(
                self._config.model,
                self._config.train,
                self._config.data,
                "validation",
                _EVALUATION_SEED,
                self._streams,
            )
            self._validation.order_sources(self._state_returned.numbers)
            used = [("the training data", self._tokenizer), *self._validation.list_tokenizers()]
            check_same_tokenizer(used, _OTHER_TOKENIZER)
        return self._validation

    def _read_step(self) -> tuple[StepBatch, SamplerState]:
        """Read the next step. Returns it and the state after it."""
        before, microbatch = self._state_read, self._config.train.microbatch
        sources, numbers, after = self._take_samples(before)
        island, islands, rank, ranks = self._find_island()
        # An island's share is one piece of the batch, so its ranks may be any number.
        positions = np.arange(len(numbers)).reshape(islands, -1, ranks, microbatch)
        positions_N = positions[island, :, rank].reshape(-1)
        batch = self._dataset.read(
            sources[positions_N], numbers[positions_N], before.samples + positions_N
        )
        self._state_read = after
        valid = float(batch.sum_label_weights())
        step = StepBatch(
            split_batch(batch, microbatch),
            len(numbers) // self._runs,
            before.samples,
            valid,
            self._describe(after),
        )
        return step, after

    @property
    def _runs(self) -> int:
        """Number of runs that read the samples of a step: with a server each island is one."""
        return self._config.sync.islands if self._config.sync.server else 1

    def _find_island(self) -> tuple[int, int, int, int]:
        """Return this rank's island, how many there are, its place in it, and how many ranks."""
        if self._config.sync.server:
            return self._config.sync.island, self._runs, self._rank, self._ranks
        islands = self._config.parallel.islands
        ranks = self._ranks // islands
        return self._rank // ranks, islands, self._rank % ranks, ranks

    def _take_samples(
        self, before: SamplerState
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], SamplerState]:
        """Return source and number of each sample of the step that begins at a state, of all
        islands, and the state after it."""
        size = self.compute_global_batch(before.samples) * self._runs
        limits = self._dataset.find_limits(before.blend.consumed, size)
        sources, numbers, after = before.take(size, limits)
        cursors = self._dataset.find_cursors(after.blend.consumed)
        return sources, numbers, replace(after, cursors={**before.cursors, **cursors})

    def _count_text_bytes(self, batch: Microbatch, starts_BS: NDArray[np.bool_]) -> float:
        """Return the bytes of text that the labels of a batch represent, times their weights; 0
        without a tokenizer. starts_BS: where a label is the first token of a document."""
        if self._text_bytes is None:
            return 0
        labels_BS = batch.labels_BS.numpy()
        valid = labels_BS != IGNORE
        tokens = batch.tokens_BS.numpy()[valid]
        sizes = self._text_bytes.count(labels_BS[valid], tokens, starts_BS[valid])
        if batch.weights_BS is not None:
            sizes = sizes * batch.weights_BS.numpy()[valid].astype(np.float64)
        return float(sizes.sum())

    def _describe(self, state: SamplerState) -> dict[str, Any]:
        """Return the loader's state as JSON values, when the sampler is at `state`."""
        return {**state.state(), "tokenizer": self._tokenizer and asdict(self._tokenizer)}

    def _check_tokenizer(self, dataset: BlendedDataset) -> TokenizerRecord | None:
        """Return the tokenizer of the run, if it is known. Raises `UserError` if a source has
        another one."""
        name = self._config.data.tokenizer
        used: list[tuple[str, TokenizerRecord]] = []
        if name is not None:
            tokenizer = load_tokenizer(name)
            used.append(("data.tokenizer", record_tokenizer(name, tokenizer)))
            self._eod, self._text_bytes = tokenizer.eod, TextBytes(tokenizer)
        return check_same_tokenizer([*used, *dataset.list_tokenizers()], _OTHER_TOKENIZER)
