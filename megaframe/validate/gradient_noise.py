"""Checks of what a measurement of gradient noise needs (`metrics.gradient_noise_every`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaframe.config.model import ModelConfig
from megaframe.config.parallel import ParallelConfig
from megaframe.config.schema import RunConfig
from megaframe.schedule.named import get_schedule_name

_UNSPLIT = ("1f1b", "gpipe", "interleaved", "breadth-first")
"""Schedules whose backward passes compute all gradients of a microbatch at once."""


def find_gradient_noise_mistakes(config: RunConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield what keeps the gradients of small batches from being seen.

    Args:
        config: The run.
        sizes: Size of each axis.
    """
    parallel, every = config.parallel, config.metrics.gradient_noise_every
    if not every:
        return
    name = f"metrics.gradient_noise_every={every}"
    if sizes["data"] == 1:
        yield (
            f"{name} compares the gradients of data ranks, and parallel.data=1 is only one; use 2 "
            "or more, or metrics.gradient_noise_every=0"
        )
    if parallel.compress != "none":
        yield (
            f"{name} needs the sum of this step's gradients, and parallel.compress="
            f"{parallel.compress} adds to it what earlier steps have left out; use "
            "parallel.compress=none, or metrics.gradient_noise_every=0"
        )
    has_several = config.train.global_batch > config.train.microbatch * sizes["data"]
    if parallel.zero >= 2 and has_several:
        yield from _find_mixed_microbatches(config.model, parallel, name)


def _find_mixed_microbatches(
    model: ModelConfig, parallel: ParallelConfig, name: str
) -> Iterator[str]:
    """Yield why a reduction may have gradients of several microbatches, of which each is measured
    on its own where gradients are divided."""
    schedule = get_schedule_name(parallel.schedule)
    zero = f"{name} measures the gradients of each microbatch with parallel.zero={parallel.zero}"
    if schedule not in _UNSPLIT:
        yield (
            f"{zero}, and parallel.schedule={schedule} may add those of several before it reduces "
            "them; use parallel.zero=1, or parallel.schedule=1f1b"
        )
    elif (
        (model.tie_embeddings or model.mtp_depth) and schedule != "1f1b" and parallel.pipeline == 1
    ):
        key = "model.tie_embeddings=true" if model.tie_embeddings else "model.mtp_depth"
        yield (
            f"{zero}, and parallel.schedule={schedule} adds those of several to a table that both "
            f"ends of the model use ({key}); use parallel.zero=1, or parallel.schedule=1f1b"
        )
