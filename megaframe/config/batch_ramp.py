"""How many samples the steps of a run have, with a batch that may grow (`train.batch_ramp`).

A ramp has k = (global_batch - start) / increment increases. Its samples are divided into k equal
parts; in part i (from 0) the batch is start + i * increment. Sums over many steps take those with
the same batch at once, so they cost as much as there are increases.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.schema import TrainConfig


def compute_batch_size(train: TrainConfig, samples_seen: int) -> int:
    """Return the size of the step that begins after `samples_seen` samples."""
    ramp = train.batch_ramp
    if ramp is None or samples_seen >= ramp.samples:
        return train.global_batch
    rises = (train.global_batch - ramp.start) // ramp.increment
    return ramp.start + samples_seen * rises // ramp.samples * ramp.increment


def count_samples(train: TrainConfig, steps: int, samples_seen: int = 0) -> int:
    """Return the samples of the next `steps` steps.

    Args:
        train: The section.
        steps: Number of steps.
        samples_seen: Samples before the first of them.
    """
    samples = 0
    for size, most in _walk(train, samples_seen):
        now = steps if most is None else min(steps, most)
        samples, steps = samples + now * size, steps - now
        if not steps:
            return samples
    raise AssertionError("the last batch lasts for ever")


def count_steps(train: TrainConfig, samples: int, samples_seen: int = 0) -> int:
    """Return the fewest steps that have at least `samples` samples.

    Args:
        train: The section.
        samples: Number of samples; none for 0 and below.
        samples_seen: Samples before the first step.
    """
    steps = 0
    for size, most in _walk(train, samples_seen):
        needed = max(0, -(-samples // size))
        if most is None or needed <= most:
            return steps + needed
        samples, steps = samples - most * size, steps + most
    raise AssertionError("the last batch lasts for ever")


def _walk(train: TrainConfig, samples_seen: int) -> Iterator[tuple[int, int | None]]:
    """Yield each batch size from `samples_seen` samples on, and how many steps have it; None for
    all that follow."""
    ramp = train.batch_ramp
    rises = 0 if ramp is None else (train.global_batch - ramp.start) // ramp.increment
    while ramp is not None and rises > 0 and samples_seen < ramp.samples:
        size, part = compute_batch_size(train, samples_seen), samples_seen * rises // ramp.samples
        end = -(-(part + 1) * ramp.samples // rises)  # the first sample of the next part
        steps = -(-(end - samples_seen) // size)
        yield size, steps
        samples_seen += steps * size
    yield train.global_batch, None
