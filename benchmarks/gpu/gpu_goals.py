"""The goals for one H200, and whether a result of `gpu_check.py` meets them.

Shares and ratios are goals on every device. What is stated in tokens or operations per second holds
for an H200, and on any other device it is only measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import training_gpu
from kernel_bench import COMPILED, REFERENCE, is_right

Measured = dict[str, Any]
Number = Callable[[Measured], float | None]
_CHIP = "h200"
"""The chip for which rates are set."""
_AS_FAST = 1.01
"""Two calls of torch's attention that run the same kernel differ by less."""
_OWN = "triton"
"""This library's implementation of attention."""


@dataclass(frozen=True)
class Goal:
    """Attributes:
    measured: None if it was not measured.
    most: Whether `reach` is an upper limit instead of a lower.
    per_second: Whether it is a rate, which only the chip that it was set for can be held to.
    """

    name: str
    reach: float
    measured: float | None
    most: bool = False
    per_second: bool = False

    def is_met(self, chip: str) -> bool | None:
        """Return whether the goal is met; None if it was not measured, or on another chip."""
        if self.measured is None or (self.per_second and chip != _CHIP):
            return None
        return self.measured <= self.reach if self.most else self.measured >= self.reach


def evaluate_goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every goal as it is written into the result."""
    # A row and the one that it is compared with may come from different calls.
    training = training_gpu.with_ratios(result["training"])
    goals = [*_evaluate_kernels(result), *_evaluate_steps(training)]
    return [{**asdict(goal), "met": goal.is_met(result.get("chip", _CHIP))} for goal in goals]


def format_table(goals: Sequence[dict[str, Any]]) -> str:
    """Format goals as a table."""
    rows = [f"{'goal':<58}{'to reach':>12}{'measured':>12}  met?"]
    for goal in goals:
        sign = "<=" if goal["most"] else ">="
        measured = "-" if goal["measured"] is None else f"{goal['measured']:,.4g}"
        met = {True: "yes", False: "no", None: "-"}[goal["met"]]
        reach = f"{sign} {goal['reach']:,g}"
        rows.append(f"{goal['name']:<58}{reach:>12}{measured:>12}  {met}")
    return "\n".join(rows)


def list_right_seconds(measurements: Sequence[Measured]) -> dict[str, float]:
    """Return the seconds of one case, forward and backward together, of the implementations that
    are right."""
    return {
        m["implementation"]: sum(m[way]["seconds"] for way in ("forward", "backward") if m[way])
        for m in measurements
        if is_right(m) and m["implementation"] not in (REFERENCE, COMPILED)
    }


def order_of(measurements: Sequence[Measured], known: Sequence[str] = ()) -> list[str]:
    """Return the implementations of one kernel, best first, by the mean log of their time relative
    to the fastest one's.

    Wrong ones are left out, and so is the reference, which comes last anyway.

    Args:
        measurements: All of the kernel.
        known: The order so far. It stays among those that are as fast as the fastest.
    """
    slowness: dict[str, list[float]] = {}
    for measured in _group_by_case(measurements).values():
        durations = list_right_seconds(measured)
        for name, seconds in durations.items():
            slowness.setdefault(name, []).append(math.log(seconds / min(durations.values())))
    means = {name: sum(each) / len(each) for name, each in slowness.items()}
    least = min(means.values(), default=0.0)

    def rank(name: str) -> tuple[float, int]:
        as_fast = means[name] - least <= math.log(_AS_FAST)
        place = known.index(name) if name in known else len(known)
        return (least if as_fast else means[name]), place

    return sorted(means, key=rank)


def compare_chosen_with_best(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each case the speed of the implementation that a run uses over that of the
    fastest."""
    comparisons = []
    for (kernel, case), measured in _group_by_case(result["measurements"]).items():
        seconds, chosen = list_right_seconds(measured), _find_chosen(result, measured)
        if chosen is None or chosen["implementation"] not in seconds:
            continue
        name, best = (
            chosen["implementation"],
            min(seconds, key=lambda implementation: seconds[implementation]),
        )
        row = {"kernel": kernel, "case": case, "chosen": name, "best": best}
        comparisons.append({**row, "ratio": seconds[best] / seconds[name]})
    return comparisons


def _group_by_case(measurements: Sequence[Measured]) -> dict[tuple[str, str], list[Measured]]:
    cases: dict[tuple[str, str], list[Measured]] = {}
    for m in measurements:
        cases.setdefault((m["kernel"], m["case"]), []).append(m)
    return cases


def _find_chosen(result: dict[str, Any], measured: Sequence[Measured]) -> Measured | None:
    """Return the measurement of the implementation that a run uses in this case: the first that
    does not refuse, even if it failed."""
    by_implementation = {
        m["implementation"]: m for m in measured if m["forward"] or m["details"] is not None
    }
    active = result["active"].get(measured[0]["kernel"], [])
    return next((by_implementation[name] for name in active if name in by_implementation), None)


def _evaluate_kernels(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of kernels. The worst of a kernel's cases counts, for what a run uses; a
    wrong result has no number."""
    cases = _group_by_case(result["measurements"])
    chosen = [m for measured in cases.values() if (m := _find_chosen(result, measured)) is not None]

    def find_worst(
        measured: Sequence[Measured], kernel: str, way: str, number: Number, case: str = ""
    ) -> float | None:
        numbers = [
            number(m[way])
            for m in measured
            if m["kernel"] == kernel and m["case"].startswith(case) and is_right(m) and m[way]
        ]
        return min((figure for figure in numbers if figure is not None), default=None)

    def compare_with_copy(kernel: str, way: str, reach: float) -> Goal:
        share = find_worst(chosen, kernel, way, lambda measurement: measurement["copy_share"])
        return Goal(f"{kernel} {way} over a copy", reach, share)

    def compare_with_products(kernel: str, way: str, reach: float) -> Goal:
        share = find_worst(chosen, kernel, way, lambda measurement: measurement["product_share"])
        return Goal(f"{kernel} {way} over bare products", reach, share)

    for kernel in ("norm", "activation", "rotary", "qkv_rotary", "loss"):
        yield compare_with_copy(kernel, "forward", 0.97)
    yield compare_with_copy("norm", "backward", 0.85)
    yield compare_with_copy("adamw", "forward", 0.92)
    own = [m for m in result["measurements"] if m["implementation"] == _OWN]
    for way, reach in (("forward", 550.0), ("backward", 450.0)):
        rate = find_worst(own, "attention", way, _compute_teraflops, "causal, head 128, 8192")
        yield Goal(f"own attention {way}, TFLOP/s", reach, rate, per_second=True)
    ratios = [row["ratio"] for row in result["chosen_over_best"] if row["kernel"] == "attention"]
    yield Goal("chosen attention over the best", 0.95, min(ratios, default=None))
    yield compare_with_products("grouped_product", "forward", 0.92)
    yield compare_with_products("grouped_product", "backward", 0.92)
    yield compare_with_products("grouped_gradient", "forward", 0.92)


def _compute_teraflops(measurement: Measured) -> float:
    return measurement["flops"] / measurement["seconds"] / 1e12


def _evaluate_steps(rows: Sequence[dict[str, Any]]) -> Iterator[Goal]:
    by_name = {row["row"]: row for row in rows}
    for row in training_gpu.ROWS:
        if not row.goal:
            continue
        row_results = by_name.get(row.name, {})
        own_results = row_results.get("ours", {})
        measured = row_results.get(row.goal, own_results.get(row.goal))
        per_second = row.goal == "tokens_per_second"
        yield Goal(f"{row.name}: {row.goal}", row.reach, measured, row.most, per_second)
    for row in training_gpu.ROWS:
        if row.peer:
            times = by_name.get(row.name, {}).get("times_plain")
            yield Goal(f"{row.name}: over plain torch.compile", training_gpu.FASTER, times)
    for row in training_gpu.ROWS:
        if row.script == "gpu_ours.py":
            idle = by_name.get(row.name, {}).get("ours", {}).get("gpu_idle")
            limit = training_gpu.MOST_IDLE
            yield Goal(f"{row.name}: idle GPU of a step", limit, idle, most=True)
