"""Checks of islands (`parallel.islands`) and of how they synchronise (`sync`)."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import RunConfig
from megaframe.config.sync import SyncConfig
from megaframe.validate.train import SPARSE_CODECS


def find_sync_mistakes(config: RunConfig) -> Iterator[str]:
    """Yield a message for each mistake in `sync`, and for what islands cannot do."""
    sync, layers = config.sync, config.model.layers
    if sync.delay >= sync.every:
        yield (
            f"sync.delay={sync.delay} is not less than sync.every={sync.every}, so a fragment "
            f"would still travel when it is due again; use sync.delay={sync.every - 1} or less, or "
            f"sync.every={sync.delay + 1} or more"
        )
    for key, most in (("model.layers", layers), ("sync.every", sync.every)):
        if sync.fragments > most:
            yield (
                f"sync.fragments={sync.fragments} is more than {key}={most}, so some would be "
                f"empty or due at the same step; use {most} or fewer"
            )
    yield from _find_keep_mistakes(sync)
    if config.parallel.islands > 1:
        yield from _find_conflicts(config, config.parallel)


def _find_keep_mistakes(sync: SyncConfig) -> Iterator[str]:
    keep, name = sync.compress_keep, f"sync.compress={sync.compress}"
    if keep is not None and sync.compress not in SPARSE_CODECS:
        yield (
            f"sync.compress_keep={keep:g} has no effect with {name}; leave it out, or use "
            f"sync.compress={', '.join(SPARSE_CODECS[:-1])} or {SPARSE_CODECS[-1]}"
        )
    elif keep is not None and keep > 1:
        yield (
            f"sync.compress_keep={keep:g} is more than all elements, of which {name} sends a "
            "share; use 1 or less"
        )


def _find_conflicts(config: RunConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield what several islands cannot do."""
    islands = f"parallel.islands={parallel.islands}"
    if config.metrics.gradient_noise_every:
        yield (
            f"metrics.gradient_noise_every={config.metrics.gradient_noise_every} needs gradients "
            f"that all data ranks sum, and {islands} sum them apart; use 0, or parallel.islands=1"
        )
    if config.faults.non_finite == "replay":
        yield (
            "faults.non_finite=replay runs a step again on all ranks, but only the island with the "
            f"bad gradient would, of {islands}; use skip, stop or roll_back, or "
            "parallel.islands=1"
        )
    if config.optim.ema is not None:
        yield (
            f"optim.ema={config.optim.ema:g} averages the weights of one island, and checkpoints "
            f"have those of all of {islands}; leave it out, or use parallel.islands=1"
        )
