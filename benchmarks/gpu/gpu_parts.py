"""What a step of `gpu_check.py` does: each part adds to the results as soon as it has a number."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import training_gpu
from gpu_results import Results
from gpu_steps import Step
from gpu_tests import TESTS, run_tests
from kernel_bench import Measurement, is_right
from time_limit import ROOT, parse_object, run_limited

HERE = Path(__file__).parent
QUIET_SECONDS = 40.0
"""Limit for one implementation on one case, which may have to be compiled first."""
LEAST_SECONDS = 12.0
"""With less time left, no process would get to its first measurement."""
_OF_TESTS = 0.6
"""Share of a step that its tests may take, if something else follows."""


def run_step(step: Step, results: Results, until: float, dry: bool) -> None:
    """Do all parts of a step until a monotonic time, and record how long it took."""
    begun, results.step = time.monotonic(), step
    left_out = results.sections["left_out_for_time"]
    results.sections["left_out_for_time"] = [n for n in left_out if not _is_part(n, step)]
    before = results.sections["steps"].get(step.name, {})
    parts = {*step.parts, *(before["parts"] if before.get("whole") else ())}
    record: dict[str, Any] = {"limit": round(until - begun, 1), "parts": sorted(parts)}
    results.add(steps={step.name: {**record, "seconds": None, "whole": False}})
    if step.smoke:
        check_smoke(results, until, dry)
    for name in step.tests:
        check_tests(results, name, until, dry, alone=not (step.kernels or step.rows))
    if step.kernels:
        command = [sys.executable, str(HERE / "kernel_bench.py"), *(["--dry"] if dry else [])]
        quiet = math.inf if dry else QUIET_SECONDS
        measure_group(command, step.kernels, results, until, quiet)
    if step.rows:
        check_training(results, step.rows, until, dry)
    if step.constants:
        check_constants(results, until, dry)
    left = [n for n in results.sections["left_out_for_time"] if _is_part(n, step)]
    seconds = time.monotonic() - begun
    record |= {"seconds": round(seconds, 1), "whole": not left and seconds < until - begun}
    results.add(steps={step.name: record})


def _is_part(name: str, step: Step) -> bool:
    return name.split(":")[0] in step.parts


def check_smoke(results: Results, until: float, dry: bool) -> None:
    """Train one step of the demo."""

    def read_line(line: str) -> None:
        if found := parse_object(line):
            results.add(smoke=found)

    results.sections["smoke"] = {}
    command = [sys.executable, str(HERE / "gpu_smoke.py"), *(["--dry"] if dry else [])]
    completed = run_limited(command, until - time.monotonic(), note=read_line)
    if completed.code != 0 and "trouble" not in results.sections["smoke"]:
        trouble = {"trouble": completed.explain_failure(), "details": completed.errors}
        results.add(smoke=trouble)


def check_tests(results: Results, name: str, until: float, dry: bool, alone: bool = True) -> None:
    """Run the tests of `TESTS` with this name; a part of the time, unless they are alone."""
    tests, seconds = TESTS[name], (until - time.monotonic()) * (1.0 if alone else _OF_TESTS)
    if seconds < LEAST_SECONDS:
        results.leave_out([f"tests of {name}"])
        return
    ended: list[str] = []

    def note(line: str) -> None:
        ended.append(line)
        results.add(tests={name: {"outcome": "not finished", "counts": "; ".join(ended)}})

    count = tests.count_processes(dry)
    results.add(tests={name: run_tests(tests.build_command(dry), seconds, count, note)})


def check_constants(results: Results, until: float, dry: bool) -> None:
    """Measure the constants that the planner has of this chip."""
    command = [sys.executable, str(ROOT / "tools" / "measure_kernels.py"), "--json"]
    command += ["--largest", "256"] if dry else []
    seconds = until - time.monotonic()
    completed = run_limited(command, seconds, training_gpu.make_environment())
    found = next(filter(None, map(parse_object, reversed(completed.lines))), None)
    if completed.code != 0 or found is None:
        found = {"trouble": completed.explain_failure(), "details": completed.errors}
    results.add(constants=found)


class KernelReader:
    """Reads the lines of `kernel_bench.py`.

    Attributes:
        todo: What it has to measure.
        at: Index of what it began last.
        running: Whether that still runs.
    """

    def __init__(self, results: Results, names: Sequence[str]) -> None:
        self.results = results
        self.todo: Sequence[Sequence[str]] = [[name] for name in names]
        self.at = -1
        self.running = False

    def read_line(self, line: str) -> None:
        """Process a line of output."""
        record = parse_object(line) or {}
        if "todo" in record:
            self.todo = record["todo"]
        elif "begun" in record:
            self.at, self.running = record["begun"], True
        elif "ceilings" in record or "active" in record:
            self.results.add(**record)
        elif "measured" in record:
            self.running = False
            self.results.add(measurements=[record["measured"]])


def measure_group(
    command: Sequence[str],
    names: Sequence[str],
    results: Results,
    until: float,
    quiet: float = QUIET_SECONDS,
) -> None:
    """Measure some kernels by `command`. If an implementation ends its process, or says nothing for
    `quiet` seconds, a new process continues after it."""
    reader = KernelReader(results, names)
    while (seconds := until - time.monotonic()) > LEAST_SECONDS:
        first, ceilings = reader.at + 1, results.sections["ceilings"]
        call = [*command, "--only", *names, "--begin", str(first)]
        if ceilings:
            call += ["--ceilings", str(ceilings["copy"]), str(ceilings["product"])]
        reader.running = False
        completed = run_limited(call, seconds, note=reader.read_line, quiet=quiet)
        if completed.code == 0:
            return
        lost = [reader.todo[reader.at]] if reader.running else []
        if reader.at < first:  # the process began no measurement
            lost = [(name, "all", "all") for name in names]
        for kernel, case, name in lost:
            why = Measurement(
                kernel, case, name, trouble=completed.explain_failure(), details=completed.errors
            )
            results.add(measurements=[asdict(why)])
        if reader.at < first:
            return
    results.leave_out([": ".join(label) for label in reader.todo[reader.at + 1 :]])


def check_training(results: Results, only: Sequence[str], until: float, dry: bool) -> None:
    """Measure rows of whole steps. One that is left out keeps the result of an earlier call."""
    traces = None
    if results.target is not None and not dry:
        traces = results.target
        traces = traces.with_suffix("") if traces.suffix else traces / "trace"
    for row in training_gpu.measure(dry, only, until, traces):
        if "trouble" in row:
            results.leave_out([row["row"]])
            continue
        known = {each["row"]: each for each in (*results.sections["training"], row)}
        results.add(training=training_gpu.with_ratios(list(known.values())))


def describe(part: dict[str, Any]) -> list[str]:
    """Return in a few words each what a step measured."""
    texts = []
    if smoke := part["smoke"]:
        losses = (f"{key} {smoke[key]:.5f}" for key in smoke if "loss" in key)
        active = (f"{name} {used}" for name, used in smoke.get("kernels", {}).items())
        texts.append(", ".join([*losses, *active]))
    texts += [
        f"tests of {name}: {tests.get('counts', '')}" for name, tests in part["tests"].items()
    ]
    texts += [" ".join(training_gpu.format_line(row).split()) for row in part["training"]]
    cases: dict[str, list[dict[str, Any]]] = {}
    for m in part["measurements"]:
        if is_right(m) and m["forward"]:
            cases.setdefault(f"{m['kernel']} {m['case']}", []).append(m)
    for case, measured in cases.items():
        best = min(measured, key=_sum_seconds)
        texts.append(f"{case}: {best['implementation']} {1e6 * _sum_seconds(best):,.0f} us")
    if constants := part["constants"]:
        numbers = ((k, v) for k, v in constants.items() if isinstance(v, float))
        texts.append(", ".join(f"{key} {value:.3g}" for key, value in numbers))
    return texts


def _sum_seconds(m: dict[str, Any]) -> float:
    return sum(m[way]["seconds"] for way in ("forward", "backward") if m[way])
