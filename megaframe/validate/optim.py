"""Checks of the optimizer and its learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from megaframe.config.keys import format_value
from megaframe.config.optim import OptimConfig
from megaframe.config.registry import get_part_name
from megaframe.errors import join_or


def find_optimizer_mistakes(optim: OptimConfig) -> Iterator[str]:
    """Yield mistakes in keys that only some optimizers have."""
    with_momentum = ("muon", "sgd")
    for key, value in (("momentum", optim.momentum), ("nesterov", optim.nesterov)):
        if value is not None and optim.name not in with_momentum:
            yield (
                f"optim.{key}={format_value(value)} has no effect with "
                f"optim.name={get_part_name(optim.name)}; "
                f"leave it out, or use optim.name={join_or(with_momentum)}"
            )
    if optim.nesterov and optim.momentum == 0:
        yield (
            "optim.nesterov=true looks ahead along optim.momentum=0; use optim.nesterov=false, or "
            "a momentum such as 0.9"
        )


def find_learning_rate_mistakes(optim: OptimConfig, steps: int) -> Iterator[str]:
    """Yield a message for each mistake in warm-up, decay and the smallest learning rate.

    Args:
        optim: The section.
        steps: Steps of the whole run.
    """
    if optim.min_lr > optim.lr:
        yield (
            f"optim.min_lr={optim.min_lr:g} is above optim.lr={optim.lr:g}; "
            f"use {optim.lr:g} or less"
        )
    if optim.decay is None:
        return
    steps_after_warmup = steps - optim.warmup
    if optim.schedule == "wsd" and optim.decay >= steps:
        yield (
            f"optim.decay={optim.decay} steps of final decay are not fewer than train.steps="
            f"{steps}; use {max(1, steps // 5)} (a fifth)"
        )
    elif optim.schedule == "wsd" and optim.decay > steps_after_warmup >= 0:
        yield (
            f"optim.warmup={optim.warmup} and the final optim.decay={optim.decay} steps overlap "
            f"in train.steps={steps}; use optim.decay={steps_after_warmup} or fewer"
        )
    if optim.schedule in ("cosine", "linear") and optim.decay <= optim.warmup:
        yield (
            f"optim.decay={optim.decay}, the step at which optim.min_lr is reached, is not after "
            f"optim.warmup={optim.warmup}; use {optim.warmup + 1} or more"
        )


def find_warmup_warning(optim: OptimConfig, steps: int) -> str | None:
    """Return a warning if the run of `steps` steps ends within the warm-up, else None."""
    if optim.warmup <= steps:
        return None
    return (
        f"optim.warmup={optim.warmup} is longer than train.steps={steps}: the learning rate is "
        "still rising when the run ends"
    )
