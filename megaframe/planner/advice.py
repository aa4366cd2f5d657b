"""Advice: the decision of a search in words, and what every other choice would cost.

The value of an axis is judged by the best layout with this value, where everything else is free. So
a sentence never blames one axis for a bad choice of another.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megaframe.config.batch_ramp import count_samples
from megaframe.hardware.cluster import Cluster
from megaframe.planner.goodput import predict_goodput
from megaframe.planner.layout_search import LayoutChoice, SearchResult, describe_candidate
from megaframe.planner.layout_sizes import RECOMPUTE, Array
from megaframe.planner.peak_memory import fits_with_margin

_GIB = 2.0**30
_AXES = (
    "tensor",
    "context",
    "pipeline",
    "schedule",
    "expert",
    "zero",
    "recompute",
    "microbatch",
    "data_replicate",
)
_NOTHING = 0.0005
"""Share of a step below which a difference is ignored."""


def describe_decision(result: SearchResult, cluster: Cluster) -> Iterator[str]:
    """Yield a few sentences about the best layout of a search."""
    candidates = result.candidates
    yield f"Use {describe_candidate(candidates, result.best.index)}."
    yield from describe_prediction(result.best, cluster)
    yield (
        f"{len(candidates):,} layouts estimated in {result.estimated_seconds:.2g} s, "
        f"{int(result.estimates.fits.sum()):,} fit, {len(result.choices)} of the best simulated; "
        f"{result.seconds:.2g} s in all."
    )


def describe_prediction(choice: LayoutChoice, cluster: Cluster) -> Iterator[str]:
    """Yield the prediction of a layout in words, and the duration and cost of the run."""
    prediction, train = choice.prediction, choice.config.train
    used_gib = sum(prediction.memory_bytes.values()) / _GIB
    mfu = "" if prediction.mfu is None else f", MFU {prediction.mfu:.1%}"
    misfit = "" if prediction.fits else ": it does not fit"
    yield (
        f"A step takes {prediction.step_seconds:.3g} s: {prediction.tokens_per_second:,.0f} tokens "
        f"a second, {prediction.tflops_per_gpu:.0f} TFLOP/s a GPU{mfu}; the fullest GPU needs "
        f"{used_gib:.1f} of {cluster.chip.memory / _GIB:.0f} GiB{misfit}."
    )
    tokens = count_samples(train, train.steps) * train.seq
    speed, state = prediction.tokens_per_second, prediction.checkpoint_bytes
    run = predict_goodput(cluster, choice.layout.world, speed, tokens, state)
    yield (
        f"{tokens:.3g} tokens take {run.days:.3g} days and ${run.dollars:,.0f}, with "
        f"{run.failures_a_day:.2g} failures a day and {run.share:.1%} of the time left for "
        f"training, a checkpoint every {run.interval / 60:.2g} minutes."
    )


def describe_alternatives(result: SearchResult, cluster: Cluster) -> Iterator[str]:
    """Yield what other values of each axis would cost: the nearest ones on either side, or all of
    schedule and recompute; and whether more memory would help."""
    candidates, estimates, best = result.candidates, result.estimates, result.best.index
    fits = fits_with_margin(estimates.memory_bytes, cluster.chip)
    for name in _AXES:
        column = getattr(candidates, name)
        chosen = int(column[best])
        values = np.unique(column)
        alternatives = (
            values if name in ("schedule", "recompute") else _select_adjacent_values(values, chosen)
        )
        if name == "tensor":
            alternatives = np.union1d(alternatives, values[values > cluster.node][:1])
        for value in alternatives.tolist():
            if value != chosen:
                text = _compare_value(result, cluster, name, value, (column == value) & fits)
                if text is None:
                    text = _describe_too_large(result, cluster, name, value, column == value)
                yield text
    faster = np.where(fits, np.inf, estimates.step_seconds)
    fastest_index = int(np.argmin(faster))
    if faster[fastest_index] < (1 - _NOTHING) * estimates.step_seconds[best]:
        gain = 1 - float(faster[fastest_index] / estimates.step_seconds[best])
        yield (
            f"with {estimates.memory_bytes[fastest_index] / _GIB:.0f} GiB a GPU a step would be "
            f"{gain:.1%} shorter: {describe_candidate(candidates, fastest_index)}"
        )


def _select_adjacent_values(values: Array, chosen: int) -> Array:
    """Return the next smaller and the next larger value."""
    below, above = values[values < chosen][-1:], values[values > chosen][:1]
    return np.concatenate([below, above])


def _compare_value(
    result: SearchResult, cluster: Cluster, name: str, value: int, mask: Array
) -> str | None:
    """Return how much longer the best layout with this value takes; None if none fits.

    Args:
        mask: Mask of the candidates with this value that fit.
    """
    if not mask.any():
        return None
    column = getattr(result.candidates, name)
    simulated = [item for item in result.choices if int(column[item.index]) == value]
    if simulated:
        chosen, other = result.best.prediction, simulated[0].prediction
        slowdown = other.step_seconds / chosen.step_seconds - 1
        changes = {
            part: other.breakdown[part] - chosen.breakdown[part] for part in chosen.breakdown
        }
    else:
        estimates, best = result.estimates, result.best.index
        fastest_index = int(np.argmin(np.where(mask, estimates.step_seconds, np.inf)))
        slowdown = float(estimates.step_seconds[fastest_index] / estimates.step_seconds[best]) - 1
        changes = {
            part: float(seconds[fastest_index] - seconds[best])
            for part, seconds in estimates.breakdown.items()
        }
    part = max(changes, key=lambda item: changes[item] if slowdown > 0 else -changes[item])
    cause = f" ({part} {changes[part]:+.2g} s)" if abs(slowdown) > _NOTHING else ""
    suffix = "" if simulated else ", estimated" if slowdown < 0 else ""
    return f"{_describe_value(result, name, value, cluster)}: {slowdown:+.1%}{suffix}{cause}"


def _describe_too_large(
    result: SearchResult, cluster: Cluster, name: str, value: int, mask: Array
) -> str:
    memory = np.where(mask, result.estimates.memory_bytes, np.inf)
    return (
        f"{_describe_value(result, name, value, cluster)}: needs {memory.min() / _GIB:.0f} GiB "
        f"a GPU of {cluster.chip.memory / _GIB:.0f}"
    )


def _describe_value(result: SearchResult, name: str, value: int, cluster: Cluster) -> str:
    if name == "schedule":
        return f"schedule {result.candidates.schedules[value].name}"
    text = f"{name} {RECOMPUTE[value] if name == 'recompute' else value}"
    if name == "tensor" and value > cluster.node:
        text += f" crosses nodes of {cluster.node}"
    return text
