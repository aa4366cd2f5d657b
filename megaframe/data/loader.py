"""The loader: makes the microbatches of one data rank from a config, one optimizer step at a time.

Every rank computes which samples are in the whole global batch and reads only its own, so ranks
agree without communicating. The saved state is that after the last step that was returned, not of
steps that a thread has read ahead, so a resumed run continues with exactly the next sample.

Shape suffixes: N samples of this rank; the rest as in `Microbatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig, TrainConfig
from megaframe.data.blend import Blend
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data.prefetch import Prefetch
from megaframe.data.reader import Reader, cut
from megaframe.data.sampler_state import Progress, Roster, restore
from megaframe.data.samples import Split

_EVALUATION_SEED = 0


@dataclass(frozen=True)
class Step:
    """The data of one rank for one optimizer step.

    microbatches: this rank's microbatches, each of `train.microbatch` samples.
    samples:      size of the global batch, over all ranks.
    valid:        number of this rank's tokens that have a label.
    state:        state of the loader after this step, as JSON values.
    """

    microbatches: tuple[Microbatch, ...]
    samples: int
    valid: int
    state: dict[str, Any]

    @property
    def first(self) -> int:
        """Number of the step's first sample in the training order."""
        return int(self.state["samples"]) - self.samples


def global_batch(train: TrainConfig, samples_seen: int) -> int:
    """Return the size of the step that begins after `samples_seen` samples, by `train.batch_ramp`.

    The ramp has k = (global_batch - start) / increment increases. Its samples are divided into k
    equal parts; in part i (from 0) the batch is start + i * increment.
    """
    ramp = train.batch_ramp
    if ramp is None or samples_seen >= ramp.samples:
        return train.global_batch
    rises = (train.global_batch - ramp.start) // ramp.increment
    return (
        ramp.start + samples_seen * rises // ramp.samples * ramp.increment if rises else ramp.start
    )


class Loader:
    """Makes an endless sequence of steps over one split. A source that is used up starts again in a
    new order.

    Position p of a global batch goes to microbatch p // (microbatch * data_ranks) of rank
    (p // microbatch) % data_ranks, so the batch has the same samples in the same order for any
    number of ranks. The config must have passed `plan.check` for this number of ranks, which
    ensures that batch sizes and ramp are divisible. Raises `UserError` for sources and splits that
    cannot work.
    """

    def __init__(
        self, config: RunConfig, data_rank: int, data_ranks: int, *, split: Split = "train"
    ) -> None:
        self._config, self._rank, self._ranks = config, data_rank, data_ranks
        self._reader = Reader(config, split, config.run.seed)
        self._validation: Reader | None = None
        if config.train.eval_every:
            self._validation = Reader(config, "validation", _EVALUATION_SEED)
        sizes = tuple(self._reader.sizes.tolist())
        self._roster = Roster(self._reader.paths, self._reader.weights, sizes)
        self._handed_out = self._made = Progress.start(self._roster)
        self._ahead: Prefetch[tuple[Step, Progress]] | None = None
        self._peeked: tuple[Step, Progress] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The state after the last step that `next` returned."""
        return self._handed_out.state()

    @property
    def consumed(self) -> tuple[int, ...]:
        """The number of samples taken from each source that has a share of the split, in the order
        of `data.sources`."""
        return self._handed_out.blend.consumed

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of samples of each source that has a share of the split, by its name."""
        return dict(zip(self._reader.names, self._reader.sizes.tolist(), strict=True))

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Continue after the step that `state` belongs to. Returns lines for the run log; see
        `progress.restore`."""
        progress, notes = restore(state, self._roster)
        self.close()
        self._handed_out = self._made = progress
        return notes

    def global_batch(self, samples_seen: int) -> int:
        """Return the size of the step that begins after `samples_seen` samples."""
        return global_batch(self._config.train, samples_seen)

    def next(self) -> Step:
        """Return the next step. Raises `UserError` for token ids outside of the vocabulary."""
        step, self._handed_out = self._peeked or self._take()
        self._peeked = None
        return step

    def peek(self) -> Step:
        """Return the step that `next` will return, and raise what it will raise. The loader's state
        stays as it is."""
        if self._peeked is None:
            self._peeked = self._take()
        return self._peeked[0]

    def close(self) -> None:
        """End the thread that reads ahead. A later `next` continues after the last returned
        step."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._peeked = None
        self._made = self._handed_out

    def _take(self) -> tuple[Step, Progress]:
        depth = self._config.data.prefetch
        if depth and self._ahead is None:
            self._ahead = Prefetch(self._make, depth)
        return self._ahead.next() if self._ahead else self._make()

    def evaluation(self, samples: int) -> Iterator[tuple[str, Microbatch]]:
        """Yield this rank's share of the first `samples` samples of the validation split, each
        once: name of a source and a microbatch of it, source by source.

        The samples are the same each time, for any number of ranks and any `run.seed`; fewer if a
        source has no more. All ranks get the same number of microbatches with the same sizes. If
        the last samples of a source cannot be divided evenly, the places left over repeat a sample
        with all labels `IGNORE`. samples_B counts from 0 in the order of the blend. Raises
        `UserError` if no source has a validation split, or one is too small.
        """
        if self._validation is None:
            self._validation = Reader(self._config, "validation", _EVALUATION_SEED)
        reader = self._validation
        sources, numbers, _ = Blend.start(reader.weights).take(samples)
        there = numbers < reader.sizes[sources]
        sources, numbers = sources[there], numbers[there]
        together = self._config.train.microbatch * self._ranks
        for source, name in enumerate(reader.names):
            of_source = np.flatnonzero(sources == source)
            for start in range(0, of_source.size, together):
                share = -(-min(together, of_source.size - start) // self._ranks)
                mine_N = start + self._rank * share + np.arange(share)
                there_N = mine_N < of_source.size
                places_N = of_source[np.minimum(mine_N, of_source.size - 1)]
                batch = reader.read(sources[places_N], numbers[places_N], places_N)
                batch.labels_BS[int(there_N.sum()) :] = IGNORE
                yield name, batch

    def _make(self) -> tuple[Step, Progress]:
        """Make the next step. Returns it and the progress after it."""
        before, microbatch = self._made, self._config.train.microbatch
        size = self.global_batch(before.samples)
        sources, numbers, after = before.take(size)
        places = np.arange(size).reshape(-1, self._ranks, microbatch)
        places_N = places[:, self._rank].reshape(-1)
        batch = self._reader.read(sources[places_N], numbers[places_N], before.samples + places_N)
        self._made = after
        valid = int((batch.labels_BS != IGNORE).sum())
        return Step(cut(batch, microbatch), size, valid, after.state()), after
