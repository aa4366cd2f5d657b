"""Small sources, and the samples that loaders read from them."""

from pathlib import Path

import torch
from token_files import make_counting_documents, write_token_file

from megaframe.config.data import DataConfig
from megaframe.config.data import DataSourceConfig as SourceConfig
from megaframe.config.model import ModelConfig
from megaframe.config.schema import RunConfig, TrainConfig

SEQ = 8
SPLIT = (0.8, 0.2, 0.0)


def write_sources(folder):
    """Write three sources without a common token id: a sample's first token identifies it."""
    return [
        write_token_file(
            Path(folder) / f"source{i}", make_counting_documents([length] * 20, 10_000 * i)
        )
        for i, length in enumerate((13, 40, 7))
    ]


def make_config(paths, weights=(1.0, 2.0, 0.5), *, train=None, **data):
    sources = tuple(SourceConfig(path=p, weight=w) for p, w in zip(paths, weights, strict=False))
    return RunConfig(
        model=ModelConfig(vocab=65536),
        train=TrainConfig(**{"seq": SEQ, "global_batch": 8, "microbatch": 1, **(train or {})}),
        data=DataConfig(**{"sources": sources, "split": SPLIT, "prefetch": 0, **data}),
    )


def list_samples(steps):
    """Return (number, first token) of each sample of these steps, sorted by number."""
    samples = [
        (int(number), int(tokens[0]))
        for step in steps
        for microbatch in step.microbatches
        for number, tokens in zip(microbatch.samples_B, microbatch.tokens_BS, strict=True)
    ]
    return sorted(samples)


def take(loader, count):
    return [loader.next() for _ in range(count)]


def is_same(left, right):
    """Return whether two steps are equal in every part."""
    if (left.samples, left.state) != (right.samples, right.state):
        return False
    return len(left.microbatches) == len(right.microbatches) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for first, other in zip(left.microbatches, right.microbatches, strict=True)
        for a, b in zip(vars(first).values(), vars(other).values(), strict=True)
    )
