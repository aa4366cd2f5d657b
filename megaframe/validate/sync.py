"""Checks of islands (`parallel.islands`) and of how they synchronise (`sync`)."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.data import DataConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import FaultToleranceConfig, MetricsConfig, RunConfig, TrainConfig
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
    if sync.server is None:
        yield from _find_keys_without_server(sync)
    else:
        yield from _find_server_mistakes(sync, config.parallel, config.train, config.data)
    if config.parallel.islands > 1:
        yield from _find_conflicts(config.parallel, config.metrics, config.faults)
    if config.optim.ema is not None and (config.parallel.islands > 1 or sync.server is not None):
        yield (
            f"optim.ema={config.optim.ema:g} averages the weights of one island, and checkpoints "
            "have those that islands synchronise; leave it out, or use parallel.islands=1 and no "
            "sync.server"
        )


def _find_keys_without_server(sync: SyncConfig) -> Iterator[str]:
    """Yield the keys that only islands of a server have."""
    given = {"islands": 1, "island": 0, "consistency": "bulk_synchronous", "staleness": None}
    for key, default in given.items():
        if (value := getattr(sync, key)) != default:
            yield (
                f"sync.{key}={value} needs sync.server; give it, or leave sync.{key} out: islands "
                "of one run (parallel.islands) all wait for all"
            )


def _find_server_mistakes(
    sync: SyncConfig, parallel: ParallelConfig, train: TrainConfig, data: DataConfig
) -> Iterator[str]:
    """Yield what cannot be with a server."""
    if parallel.islands > 1:
        yield (
            f"parallel.islands={parallel.islands} are islands of one run, and with "
            f"sync.server={sync.server} each is a run of its own; use parallel.islands=1 and "
            f"sync.islands={parallel.islands}"
        )
    if sync.island >= sync.islands:
        yield (
            f"sync.island={sync.island} is none of sync.islands={sync.islands}, which count from "
            f"0; use {sync.islands - 1} or less, or sync.islands={sync.island + 1} or more"
        )
    if (sync.consistency == "bounded_staleness") != (sync.staleness is not None):
        yield (
            f"sync.staleness={sync.staleness} does not go with sync.consistency="
            f"{sync.consistency}: only bounded_staleness has one, and needs it; 1 lets an island "
            "be one round ahead of the slowest"
        )
    whole = f"with sync.server={sync.server} all differences travel at once and as they are"
    if sync.fragments > 1:
        yield f"sync.fragments={sync.fragments} cannot be: {whole}; use 1"
    if sync.compress != "none":
        yield f"sync.compress={sync.compress} cannot be: {whole}; use none"
    if train.batch_ramp is not None or data.phases:
        key = "data.phases" if data.phases else "train.batch_ramp"
        yield (
            f"{key} cannot be with sync.server={sync.server}: an island that joins later must know "
            "the samples of each step before; leave it out"
        )


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


def _find_conflicts(
    parallel: ParallelConfig, metrics: MetricsConfig, faults: FaultToleranceConfig
) -> Iterator[str]:
    """Yield what several islands cannot do."""
    islands = f"parallel.islands={parallel.islands}"
    if metrics.gradient_noise_every:
        yield (
            f"metrics.gradient_noise_every={metrics.gradient_noise_every} needs gradients "
            f"that all data ranks sum, and {islands} sum them apart; use 0, or parallel.islands=1"
        )
    if faults.non_finite == "replay":
        yield (
            "faults.non_finite=replay runs a step again on all ranks, but only the island with the "
            f"bad gradient would, of {islands}; use skip, stop or roll_back, or "
            "parallel.islands=1"
        )
