"""Checks of where a run saves, and of how it recovers from faults."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import CheckpointConfig, FaultToleranceConfig, RunConfig, TrainConfig
from megaframe.config.url import find_url_mistake, is_url
from megaframe.errors import find_nearest_divisors, find_nearest_multiples
from megaframe.layout import Layout

_API_KEY = re.compile("[0-9a-f]{40}")


def find_saving_mistakes(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a message for each interval that is no multiple of `checkpoint.every`, and if exports
    have no file system to be written in."""
    every = checkpoint.every
    for key in ("keep_every", "huggingface_every"):
        interval = getattr(checkpoint, key)
        if interval and not every:
            yield (
                f"checkpoint.{key}={interval} has no effect with checkpoint.every=0, which "
                "saves nothing; leave it out"
            )
        elif interval and interval % every:
            yield (
                f"checkpoint.{key}={interval} is not a multiple of checkpoint.every={every}; "
                f"use {find_nearest_multiples(every, interval)}"
            )
    folder = checkpoint.folder
    if checkpoint.huggingface_every and folder is not None and is_url(folder):
        yield (
            f"checkpoint.huggingface_every={checkpoint.huggingface_every} writes into a file "
            "system, and checkpoint.folder is a URL; use 0, and tools/checkpoint.py export-hf"
        )


def find_best_mistakes(train: TrainConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a message if `checkpoint.keep_best` has no evaluations of the steps that are saved."""
    keep, every = checkpoint.keep_best, checkpoint.every
    eval_every = train.eval_every
    if keep and not every:
        yield (
            f"checkpoint.keep_best={keep} has no effect with checkpoint.every=0, which saves "
            "nothing; leave it out"
        )
    elif keep and not eval_every:
        yield (
            f"checkpoint.keep_best={keep} compares evaluations, and train.eval_every=0 has none; "
            f"use train.eval_every={every}, or checkpoint.keep_best=0"
        )
    elif keep and every % eval_every and eval_every % every:
        yield (
            f"checkpoint.keep_best={keep} compares steps that are saved and evaluated, and neither "
            f"of checkpoint.every={every} and train.eval_every={eval_every} is a multiple of the "
            f"other; use train.eval_every={find_nearest_divisors(every, eval_every)}"
        )


def find_checkpoint_url_mistakes(checkpoint: CheckpointConfig) -> Iterator[str]:
    """Yield a message for each URL of a checkpoint that is refused."""
    for key in ("folder", "resume", "weights"):
        value = getattr(checkpoint, key)
        if value is not None and is_url(value):
            mistake = find_url_mistake(value)
            if mistake:
                yield f"checkpoint.{key}: {mistake}"


def find_path_mistakes(config: RunConfig) -> Iterator[str]:
    """Yield the keys that take no URL and have one. Its text is not repeated: it may be secret."""
    paths = {
        "run.dir": config.run.dir,
        "checkpoint.memory_dir": config.checkpoint.memory_dir,
        "checkpoint.adapters": config.checkpoint.adapters,
        "parallel.cluster": config.parallel.cluster,
        "data.tokenizer": config.data.tokenizer,
        "metrics.wandb": config.metrics.wandb,
        "data.streaming.cache": config.data.streaming.cache,
    }
    for key, value in paths.items():
        takes = "the name of a project" if key == "metrics.wandb" else "a path of this machine"
        if value is not None and is_url(value):
            yield (
                f"{key}: takes {takes} and no URL; URLs are taken by data.sources, "
                "checkpoint.folder, checkpoint.resume and checkpoint.weights"
            )
        elif key == "metrics.wandb" and value is not None and _API_KEY.fullmatch(value):
            yield f"{key}: takes {takes}, not an API key; give that in WANDB_API_KEY"


def find_fault_mistakes(
    train: TrainConfig, checkpoint: CheckpointConfig, faults: FaultToleranceConfig
) -> Iterator[str]:
    """Yield a message for each policy of `faults` that cannot work with the rest of the config."""
    precision = train.precision
    if faults.non_finite != "skip" and precision == "fp16":
        yield (
            f"faults.non_finite={faults.non_finite} would act on every overflow by which "
            "train.precision=fp16 finds its loss scale; use faults.non_finite=skip, or bf16"
        )
    policies = {
        "faults.non_finite=roll_back": faults.non_finite == "roll_back",
        f"faults.spike_factor={faults.spike_factor}": faults.spike_factor is not None,
        f"faults.compare_every={faults.compare_every}": faults.compare_every > 0,
    }
    for name, enabled in policies.items():
        if enabled and not checkpoint.every:
            yield (
                f"{name} goes back to a checkpoint, and checkpoint.every=0 saves none; use "
                "checkpoint.every=100 or so"
            )


def find_replica_comparison_warning(
    parallel: ParallelConfig, faults: FaultToleranceConfig, layout: Layout
) -> str | None:
    """Return a warning if `faults.compare_every` has no replicas to compare, else None."""
    every, zero = faults.compare_every, parallel.zero
    if not every or not zero or layout.data_replicate > 1:
        return None
    return (
        f"faults.compare_every={every} compares nothing: with parallel.zero={zero} and "
        "parallel.data_replicate=1 no rank has the weights of another; use parallel.zero=0, or "
        "parallel.data_replicate=2 or more"
    )
