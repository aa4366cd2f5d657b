"""Strong and weak scaling of a layout over its data ranks, beside the laws of Amdahl and Gustafson.

The step of the same layout is predicted on half and twice the data ranks, repeatedly. From the
first two predictions follows what of each part of the step more ranks divide, and what they do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from megaframe.errors import UserError
from megaframe.hardware.cluster import Cluster
from megaframe.layout import Layout
from megaframe.planner.constants import Constants
from megaframe.planner.explanations.explanation import Cell, Explanation
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.prediction import Prediction, predict
from megaframe.planner.theory.speedup import (
    compute_fixed_speedup,
    compute_scaled_speedup,
    compute_serial_seconds,
    compute_serial_share,
)
from megaframe.validate.run import validate_config

_HALVINGS, _DOUBLINGS = 3, 5
_MOST_PASSES = 60_000
"""Most passes of a schedule that are simulated for a row."""
_WORTH_NAMING = 0.02
"""Share of the serial part, or of a step, below which a part is not named."""
_HEAD = (
    "GPUs", "step, s", "speed-up", "Amdahl", "efficiency",
    "growing batch", "step, s ", "scaled speed-up", "Gustafson", "efficiency ",
)  # fmt: skip


@dataclass(frozen=True)
class ScaledStep:
    """A step on `gpus` GPUs: with the same batch, and with a batch that grows with the GPUs. None
    where the batch cannot be divided like this."""

    gpus: int
    strong: Prediction | None
    batch: int | None
    weak: Prediction | None


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step that more ranks do not divide, and of what they divide."""

    serial: float
    divided: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.serial + self.divided

    @property
    def serial_share(self) -> float:
        """The share s of the laws."""
        return self.serial / self.total


def explain_scaling(choice: LayoutChoice, cluster: Cluster, constants: Constants) -> Explanation:
    """Return what more data ranks gain.

    Args:
        choice: The layout, of which only the data axis grows.
        cluster: Chips and links.
        constants: What kernels and collectives reach there.
    """
    title = f"Scaling of {choice.layout} over data ranks"
    steps = list_scaled_steps(choice, cluster, constants)
    strong = [(step.gpus, step.strong) for step in steps if step.strong is not None]
    if len(strong) < 2 or strong[1][0] != 2 * strong[0][0]:
        return Explanation(title, (_describe_indivisible(choice),))
    (gpus, base), (_, doubled) = strong[:2]
    by_part = compute_serial_parts(base, doubled)
    serial = sum(by_part.values())
    fixed = StepParts(serial, base.step_seconds - serial)
    batch, grown = _fit_growing_batch(choice, gpus, cluster, constants)
    lines = (
        _explain_amdahl(fixed, by_part, gpus),
        f"A part takes t(n) = a + b / n seconds; a = 2 t(2) - t(1) is serial, from the predictions "
        f"on {gpus} and {2 * gpus} GPUs.",
        f"Gustafson 1988: with a batch that grows with the GPUs, n times as many do it "
        f"s + (1 - s) n times as fast as {gpus} would, as those repeat only the divided part for "
        f"each n-th of it. Here s = {grown.serial_share:.2%} of {grown.total:.3g} s, from steps of "
        f"{batch} and {2 * batch} samples on {gpus} GPUs.",
        *_explain_growth(strong),
    )
    rows = [
        (step.gpus, *_compare_strong(step, fixed, gpus), *_compare_weak(step, grown, gpus))
        for step in steps
    ]
    return Explanation(title, lines, _HEAD, tuple(rows))


def _fit_growing_batch(
    choice: LayoutChoice, gpus: int, cluster: Cluster, constants: Constants
) -> tuple[int, StepParts]:
    """Return the batch of `gpus` GPUs with as many samples for each as the choice has, and the
    parts of its step. A step of twice the samples there takes serial + 2 divided seconds."""
    times = Fraction(gpus, choice.layout.world)
    batch = int(choice.config.train.global_batch * times)
    once, doubled = (
        _predict_scaled(choice, times, samples, cluster, constants)
        for samples in (batch, 2 * batch)
    )
    assert once is not None and doubled is not None, "the layout is valid with the whole batch"
    divided = doubled.step_seconds - once.step_seconds
    return batch, StepParts(once.step_seconds - divided, divided)


def _explain_amdahl(parts: StepParts, by_part: Mapping[str, float], gpus: int) -> str:
    share = parts.serial_share
    limit = f", so at most {1 / share:.3g} times" if share > 0 else ""
    named = sorted(by_part, key=lambda part: -by_part[part])
    causes = ", ".join(
        f"{part} {by_part[part] / parts.total:.2%}"
        for part in named
        if by_part[part] > _WORTH_NAMING * abs(parts.serial)
    )
    return (
        "Amdahl 1967: with the same batch, n times the GPUs are 1 / (s + (1 - s) / n) times as "
        f"fast, at most 1 / s. Here s = {share:.2%} of {parts.total:.3g} s on {gpus} GPUs{limit}"
        + (f": {causes}." if causes else ".")
    )


def _explain_growth(strong: Sequence[tuple[int, Prediction]]) -> Iterator[str]:
    """Yield the serial share of the largest number of GPUs, and which part of a step grows with
    them; nothing if there are only two numbers, as Amdahl's law was fitted to these."""
    (gpus, base), *_, (most, last) = strong
    if len(strong) < 3:
        return
    speedup = base.step_seconds / last.step_seconds
    share = compute_serial_share(speedup, most / gpus)
    growth = {part: last.breakdown[part] - seconds for part, seconds in base.breakdown.items()}
    part = max(growth, key=lambda name: growth[name])
    cause = ""
    if growth[part] > _WORTH_NAMING * last.step_seconds:
        cause = f"; {part} grows from {base.breakdown[part]:.3g} to {last.breakdown[part]:.3g} s"
    yield (
        f"Karp and Flatt 1990: e = (1 / S - 1 / n) / (1 - 1 / n) = {share:.2%} is the serial share "
        f"with which Amdahl's law gives the speed-up S = {speedup:.3g} on {most} GPUs{cause}."
    )


def _describe_indivisible(choice: LayoutChoice) -> str:
    train, data = choice.config.train, choice.layout.data
    return (
        f"data={data} ranks cannot be doubled or halved with train.global_batch="
        f"{train.global_batch} and train.microbatch={train.microbatch}, so there is nothing to "
        f"compare; use train.global_batch={2 * data * train.microbatch * choice.layout.pipeline}"
    )


def list_scaled_steps(
    choice: LayoutChoice, cluster: Cluster, constants: Constants
) -> list[ScaledStep]:
    """Return the steps of a layout with fewer and more data ranks, in order of their number."""
    steps: list[ScaledStep] = []
    batch = choice.config.train.global_batch
    for exponent in range(-_HALVINGS, _DOUBLINGS + 1):
        times = Fraction(2) ** exponent
        strong = _predict_scaled(choice, times, batch, cluster, constants)
        grown = batch * times
        weak_batch = grown.numerator if grown.denominator == 1 else None
        weak = weak_batch and _predict_scaled(choice, times, weak_batch, cluster, constants)
        if strong is not None or weak:
            gpus = int(choice.layout.world * times)
            steps.append(ScaledStep(gpus, strong, weak_batch if weak else None, weak or None))
    return steps


def _predict_scaled(
    choice: LayoutChoice, times: Fraction, batch: int, cluster: Cluster, constants: Constants
) -> Prediction | None:
    """Return the prediction with so many times the data ranks and with this batch; None if that is
    no valid layout."""
    data, parallel = choice.layout.data * times, choice.config.parallel
    if data.denominator > 1 or choice.layout.world * times > cluster.size:
        return None
    microbatches = batch // (choice.config.train.microbatch * int(data))
    if 3 * microbatches * choice.layout.pipeline * parallel.chunks > _MOST_PASSES:
        return None
    config = choice.config.replace(
        parallel={"data": int(data), "schedule_microbatches": None},
        train={"global_batch": batch, "batch_ramp": None},
    )
    gpus = int(choice.layout.world * times)
    try:
        validate_config(config, gpus, data=False)
        return predict(config, Layout.from_parallel(config.parallel, gpus), cluster, constants)
    except UserError:
        return None


def compute_serial_parts(base: Prediction, doubled: Prediction) -> Mapping[str, float]:
    """Return the seconds of each part of a step that twice the ranks do not divide.

    Args:
        base: The step on some ranks.
        doubled: The same step on twice as many.
    """
    return {
        part: compute_serial_seconds(seconds, doubled.breakdown[part])
        for part, seconds in base.breakdown.items()
    }


def _compare_strong(step: ScaledStep, parts: StepParts, gpus: int) -> tuple[Cell, ...]:
    """Return seconds, speed-up, that of Amdahl's law, and efficiency."""
    if step.strong is None:
        return (None,) * 4
    seconds, times = step.strong.step_seconds, step.gpus / gpus
    law = compute_fixed_speedup(parts.serial_share, times)
    return seconds, parts.total / seconds, law, parts.total / seconds / times


def _compare_weak(step: ScaledStep, parts: StepParts, gpus: int) -> tuple[Cell, ...]:
    """Return batch, seconds, speed-up, that of Gustafson's law, and efficiency. On `gpus` GPUs an
    n-fold batch takes serial + n divided seconds, as gradients are accumulated and applied once."""
    if step.weak is None:
        return (None,) * 5
    seconds, times = step.weak.step_seconds, step.gpus / gpus
    law = compute_scaled_speedup(parts.serial_share, times)
    return step.batch, seconds, parts.total * law / seconds, law, parts.total / seconds
