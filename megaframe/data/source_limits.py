"""How many samples a source gives in a run: its `epochs` and `max_tokens`.

How many samples the epochs of a stream have is known when its last block is there, and not asked
before it matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from megaframe.config.data import DataSourceConfig
from megaframe.data.blend import Cap, Limits, round_weights
from megaframe.data.gpt_dataset import GPTDataset
from megaframe.data.streaming.streamed_dataset import StreamedDataset
from megaframe.errors import UserError


def list_caps(sources: Sequence[DataSourceConfig]) -> dict[str, Cap]:
    """Return, by path, `epochs` and `max_tokens` of each source that has one of them."""
    return {
        each.path: [each.epochs, each.max_tokens]
        for each in sources
        if each.epochs is not None or each.max_tokens is not None
    }


def check_caps(source: DataSourceConfig, samples: GPTDataset | StreamedDataset, seq: int) -> None:
    """Raise `UserError` for limits that leave a source without a sample, and for a part of an epoch
    of a stream. seq: tokens of a sample."""
    name, epochs = f"data.sources, {source.path}", source.epochs
    if source.max_tokens is not None and source.max_tokens < seq:
        raise UserError(
            f"{name}: max_tokens={source.max_tokens} is less than a sample of train.seq={seq}; use "
            f"max_tokens={seq} or more, or leave the source out"
        )
    if epochs is None:
        return
    if isinstance(samples, StreamedDataset) and epochs % 1:
        raise UserError(
            f"{name}: epochs={epochs:g} of a stream, whose size is not known; use "
            f"{max(1, round(epochs))}, or max_tokens"
        )
    if isinstance(samples, GPTDataset) and epochs * samples.windows < 1:
        raise UserError(
            f"{name}: epochs={epochs:g} of {samples.windows:,} samples is less than one; use "
            f"epochs={1 / samples.windows:.3g} or more, or leave the source out"
        )


def find_limit(
    source: DataSourceConfig,
    samples: GPTDataset | StreamedDataset,
    seq: int,
    given: int = 0,
    size: int = 0,
) -> int | None:
    """Return the most samples that a source gives in all; None if nothing limits them, or only
    beyond the next ones of a stream.

    Args:
        source: Its keys.
        samples: Its samples.
        seq: Tokens of a sample.
        given: Samples that it has given.
        size: How many the next ones are at most.
    """
    limits = [] if source.max_tokens is None else [source.max_tokens // seq]
    if source.epochs is not None and isinstance(samples, GPTDataset):
        # As a decimal: 0.1 epochs of 1,000 samples are 100.
        limits.append(int(Fraction(repr(source.epochs)) * samples.windows))
    elif source.epochs is not None and isinstance(samples, StreamedDataset) and size:
        beyond = given + size + 1
        known = samples.count(beyond, int(source.epochs))
        limits += [known] if known < beyond else []
    return min(limits, default=None)


def divide_samples(
    weights: Sequence[float], limits: Limits, given: Sequence[int], samples: int
) -> list[Fraction]:
    """Return how many samples each source of a blend has given after the next ones, but for
    rounding.

    Args:
        weights: Relative shares of the sources.
        limits: Most samples of each in all; None where nothing limits them.
        given: Samples of each before.
        samples: How many the next ones are; fewer are divided if all sources are used up.
    """
    shares, counts, left = round_weights(weights), [Fraction(n) for n in given], Fraction(samples)
    ends = [Fraction(samples) + count if limit is None else Fraction(limit)
            for limit, count in zip(limits, counts, strict=True)]  # fmt: skip
    while left and (active := [n for n, end in enumerate(ends) if counts[n] < end]):
        total = sum(shares[n] for n in active)
        taken = min(left, *((ends[n] - counts[n]) * total / shares[n] for n in active))
        for n in active:
            counts[n] += taken * shares[n] / total
        left -= taken
    return counts
