"""Advice: the decision of a search in words, and what every other choice would cost.

The value of an axis is judged by the best layout with this value, where everything else is free. So
a sentence never blames one axis for a bad choice of another.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megaframe.hardware.cluster import Cluster
from megaframe.planner.goodput import predict_goodput
from megaframe.planner.layout_search import LayoutChoice, SearchResult, describe_candidate
from megaframe.planner.layout_sizes import RECOMPUTE, SCHEDULES, Array
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
_NAMES = {"schedule": SCHEDULES, "recompute": RECOMPUTE}
_NOTHING = 0.0005
"""Share of a step below which a difference is ignored."""


def describe_decision(found: SearchResult, cluster: Cluster) -> Iterator[str]:
    """Yield a few sentences about the best layout of a search."""
    every = found.candidates
    yield f"Use {describe_candidate(every, found.best.place)}."
    yield from describe_prediction(found.best, cluster)
    yield (
        f"{len(every):,} layouts estimated in {found.estimated_seconds:.2g} s, "
        f"{int(found.estimates.fits.sum()):,} fit, {len(found.choices)} of the best simulated; "
        f"{found.seconds:.2g} s in all."
    )


def describe_prediction(choice: LayoutChoice, cluster: Cluster) -> Iterator[str]:
    """Yield the prediction of a layout in words, and the duration and cost of the run."""
    prediction, train = choice.prediction, choice.config.train
    used = sum(prediction.memory_bytes.values()) / _GIB
    mfu = "" if prediction.mfu is None else f", MFU {prediction.mfu:.1%}"
    there = "" if prediction.fits else ": it does not fit"
    yield (
        f"A step takes {prediction.step_seconds:.3g} s: {prediction.tokens_per_second:,.0f} tokens "
        f"a second, {prediction.tflops_per_gpu:.0f} TFLOP/s a GPU{mfu}; the fullest GPU needs "
        f"{used:.1f} of {cluster.chip.memory / _GIB:.0f} GiB{there}."
    )
    tokens = train.steps * train.global_batch * train.seq
    state = prediction.host_bytes
    state += sum(prediction.memory_bytes.get(kind, 0) for kind in ("weights", "optimizer"))
    run = predict_goodput(cluster, choice.layout.world, prediction.tokens_per_second, tokens, state)
    yield (
        f"{tokens:.3g} tokens take {run.days:.3g} days and ${run.dollars:,.0f}, with "
        f"{run.failures_a_day:.2g} failures a day and {run.share:.1%} of the time left for "
        f"training, a checkpoint every {run.interval / 60:.2g} minutes."
    )


def describe_alternatives(found: SearchResult, cluster: Cluster) -> Iterator[str]:
    """Yield what other values of each axis would cost: the nearest ones on either side, or all of
    schedule and recompute; and whether more memory would help."""
    every, estimates, best = found.candidates, found.estimates, found.best.place
    fits = fits_with_margin(estimates.memory_bytes, cluster.chip)
    for name in _AXES:
        column = getattr(every, name)
        chosen = int(column[best])
        values = np.unique(column)
        near = values if name in _NAMES else _adjacent_values(values, chosen)
        if name == "tensor":
            near = np.union1d(near, values[values > cluster.node][:1])
        for value in near.tolist():
            if value != chosen:
                text = _compare_value(found, cluster, name, value, (column == value) & fits)
                if text is None:
                    text = _describe_too_large(found, cluster, name, value, column == value)
                yield text
    faster = np.where(fits, np.inf, estimates.step_seconds)
    place = int(np.argmin(faster))
    if faster[place] < (1 - _NOTHING) * estimates.step_seconds[best]:
        gain = 1 - float(faster[place] / estimates.step_seconds[best])
        yield (
            f"with {estimates.memory_bytes[place] / _GIB:.0f} GiB a GPU a step would be {gain:.1%} "
            f"shorter: {describe_candidate(every, place)}"
        )


def _adjacent_values(values: Array, chosen: int) -> Array:
    """Return the next smaller and the next larger value."""
    below, above = values[values < chosen][-1:], values[values > chosen][:1]
    return np.concatenate([below, above])


def _compare_value(
    found: SearchResult, cluster: Cluster, name: str, value: int, which: Array
) -> str | None:
    """Return how much longer the best layout with this value takes; None if none fits.

    which: mask of the candidates with this value that fit.
    """
    if not which.any():
        return None
    column = getattr(found.candidates, name)
    simulated = [one for one in found.choices if int(column[one.place]) == value]
    if simulated:
        now, then = found.best.prediction, simulated[0].prediction
        more = then.step_seconds / now.step_seconds - 1
        changes = {part: then.breakdown[part] - now.breakdown[part] for part in now.breakdown}
    else:
        estimates, best = found.estimates, found.best.place
        place = int(np.argmin(np.where(which, estimates.step_seconds, np.inf)))
        more = float(estimates.step_seconds[place] / estimates.step_seconds[best]) - 1
        changes = {
            part: float(seconds[place] - seconds[best])
            for part, seconds in estimates.breakdown.items()
        }
    part = max(changes, key=lambda one: changes[one] if more > 0 else -changes[one])
    why = f" ({part} {changes[part]:+.2g} s)" if abs(more) > _NOTHING else ""
    by = "" if simulated else ", estimated" if more < 0 else ""
    return f"{_describe_value(name, value, cluster)}: {more:+.1%}{by}{why}"


def _describe_too_large(
    found: SearchResult, cluster: Cluster, name: str, value: int, which: Array
) -> str:
    memory = np.where(which, found.estimates.memory_bytes, np.inf)
    return (
        f"{_describe_value(name, value, cluster)}: needs {memory.min() / _GIB:.0f} GiB a GPU of "
        f"{cluster.chip.memory / _GIB:.0f}"
    )


def _describe_value(name: str, value: int, cluster: Cluster) -> str:
    text = f"{name} {_NAMES[name][value] if name in _NAMES else value}"
    if name == "tensor" and value > cluster.node:
        text += f" crosses nodes of {cluster.node}"
    return text
