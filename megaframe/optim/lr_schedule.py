"""The learning rate as a pure function of the number of updates done."""

from __future__ import annotations

import math

from megaframe.config import OptimConfig
from megaframe.config.part_calls import call_part
from megaframe.config.parts import SchedulePart


def compute_learning_rate(optim: OptimConfig, update: int, steps: int) -> float:
    """Return the learning rate of an update.

    Warm-up rises linearly and reaches `lr` at update `warmup`. inverse_sqrt falls from there as
    sqrt(warmup / update) (Vaswani et al. 2017). With `span` all of this counts from its first step.

    Args:
        optim: The schedule and its constants.
        update: Number of the update, from 0.
        steps: Updates of the whole run.
    """
    if optim.span is not None:
        update, steps = max(0, update - optim.span[0]), optim.span[1] - optim.span[0]
    # Update 0 has a rate above zero, and update `warmup` the full one.
    if update < optim.warmup:
        return optim.lr * (update + 1) / (optim.warmup + 1)
    fall = optim.lr - optim.min_lr
    if isinstance(optim.schedule, SchedulePart):
        share = call_part(optim.schedule, "compute_share", float, update, optim.warmup, steps)
        return optim.min_lr + fall * share
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "inverse_sqrt":
        start = max(1, optim.warmup)
        return max(optim.min_lr, optim.lr * math.sqrt(start / max(start, update)))
    if optim.schedule == "wsd":
        length = optim.decay or max(1, steps // 5)
        progress = (update - (steps - length)) / length
    else:
        end = optim.decay or steps
        progress = (update - optim.warmup) / max(1, end - optim.warmup)
    # Before the decay the rate is `lr`, and after its end `min_lr`.
    progress = min(max(progress, 0.0), 1.0)
    if optim.schedule == "cosine":
        return optim.min_lr + fall * 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr - fall * progress
