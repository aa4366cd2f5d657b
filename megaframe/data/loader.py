"""From a config to the microbatches of one data rank, one optimizer step at a time.

Every rank decides for the whole global batch which samples it holds and reads only its own, so that
ranks agree without talking. The state belongs to the step that was handed out, not to what a
thread has read ahead: a run that resumes from it continues with exactly the next sample.

Shape suffixes: N samples of this rank; the rest as in `Microbatch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaframe.config.schema import RunConfig, Train
from megaframe.data.blend import Blend
from megaframe.data.prefetch import Prefetch
from megaframe.data.progress import Progress, Roster, restore
from megaframe.data.reader import Reader, cut
from megaframe.data.samples import Split
from megaframe.microbatch import IGNORE, Microbatch

_EVALUATION_SEED = 0


@dataclass(frozen=True)
class Step:
    """What one rank needs for one optimizer step.

    microbatches: of this rank, each of `train.microbatch` samples.
    samples:      global batch, over all ranks.
    state:        of the loader after this step; JSON can hold it.
    """

    microbatches: tuple[Microbatch, ...]
    samples: int
    state: dict[str, Any]

    @property
    def first(self) -> int:
        """Number of its first sample in the training order."""
        return int(self.state["samples"]) - self.samples


def global_batch(train: Train, samples_seen: int) -> int:
    """Samples of the step that begins after `samples_seen`, by `train.batch_ramp`.

    Between start and train.global_batch lie k = (global_batch - start) / increment rises. The batch
    is start + i * increment in the i-th of k equal parts of the ramp's samples.
    """
    ramp = train.batch_ramp
    if ramp is None or samples_seen >= ramp.samples:
        return train.global_batch
    rises = (train.global_batch - ramp.start) // ramp.increment
    return (
        ramp.start + samples_seen * rises // ramp.samples * ramp.increment if rises else ramp.start
    )


class Loader:
    """Endless steps over one split; sources repeat in a new order when they are used up.

    Position p of a global batch goes to microbatch p // (microbatch * data_ranks) of rank
    (p // microbatch) % data_ranks: the batch is the same, in the same order, for any ranks.
    The config has passed `plan.check` for so many ranks, so that batches and ramp divide.
    Raises `UserError` for sources and splits that cannot work.
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

    @property
    def state(self) -> dict[str, Any]:
        """State after the last step that `next` returned."""
        return self._handed_out.state()

    @property
    def consumed(self) -> tuple[int, ...]:
        """Samples that each source has given, in the order of `data.sources`."""
        return self._handed_out.blend.consumed

    def load(self, state: Mapping[str, Any]) -> list[str]:
        """Continue after the step that `state` belongs to, and return what is to be said of it; see
        `progress.restore`."""
        progress, notes = restore(state, self._roster)
        self.close()
        self._handed_out = self._made = progress
        return notes

    def global_batch(self, samples_seen: int) -> int:
        """See the function of this name."""
        return global_batch(self._config.train, samples_seen)

    def next(self) -> Step:
        """The next step. Raises `UserError` for token ids beyond the vocabulary."""
        depth = self._config.data.prefetch
        if depth and self._ahead is None:
            self._ahead = Prefetch(self._make, depth)
        step, self._handed_out = self._ahead.next() if self._ahead else self._make()
        return step

    def close(self) -> None:
        """End the thread that reads ahead. A later `next` continues after the last step."""
        if self._ahead is not None:
            self._ahead.close()
        self._ahead, self._made = None, self._handed_out

    def evaluation(self, samples: int) -> Iterator[tuple[str, Microbatch]]:
        """This rank's share of the first `samples` samples of the validation split, once: the name
        of a source and a microbatch of it, source by source.

        They are the same ones each time, for any ranks and any `run.seed`; fewer where a source has
        no more. All ranks get equally many microbatches of equal sizes: where the last ones of a
        source do not divide, a rank's last place repeats a sample with labels `IGNORE` only.
        samples_B counts from 0 in the order of the blend. Raises `UserError` when a source whose
        share is not 0 has no validation split.
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
        """The step after the last one made, and the progress with it."""
        before, microbatch = self._made, self._config.train.microbatch
        size = self.global_batch(before.samples)
        sources, numbers, after = before.take(size)
        places = np.arange(size).reshape(-1, self._ranks, microbatch)
        places_N = places[:, self._rank].reshape(-1)
        batch = self._reader.read(sources[places_N], numbers[places_N], before.samples + places_N)
        self._made = after
        return Step(cut(batch, microbatch), size, after.state()), after
