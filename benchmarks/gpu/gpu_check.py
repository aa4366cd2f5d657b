"""Tests the kernels and whole steps on the available GPU and measures them: `make gpu-check`.

One command takes under 8 minutes and writes one file, `results/<chip>.json`. It contains the
outcome of the tests; the ceilings of this GPU; for every kernel, each implementation's time, share
of the ceiling and error; whole training steps compared with plain PyTorch (`training_gpu.py`); and
which goals are met. It is written after every number, and lists what did not fit into the time.
`--skip-training` and `--only-training` each use the whole time, and the second adds to the first
one's results of the same commit. `--choose` writes the measured order into the table from which
implementations are chosen. `--dry` runs everything in tiny sizes, also on a CPU, and measures
nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tools")]
import training_gpu  # noqa: E402
from gpu_goals import compare_chosen_with_best, evaluate_goals, format_table, order_of  # noqa: E402
from kernel_bench import Measurement  # noqa: E402
from time_limit import LAST, parse_object, run_limited, write_json  # noqa: E402
from wheels import use_wheels  # noqa: E402

_MINUTES = 7.8
_OF_TRAINING = 0.5
"""Share of the time that kernels leave to whole steps."""
_QUIET_SECONDS = 60.0
"""Limit for one implementation on one case, which may have to be compiled first."""
_LEAST_SECONDS = 12.0
"""With less time left, no process would get to its first measurement."""
_OF_KERNELS: dict[str, Any] = {
    "ceilings": None,
    "active": {},
    "measurements": [],
    "left_out_for_time": [],
}
"""What a result contains about kernels before anything is measured."""
GROUPS = (
    ("attention",),
    ("norm", "activation", "rotary"),
    ("loss",),
    ("grouped_product", "grouped_gradient"),
    ("adamw", "square_sum"),
    ("grouped_scaled_product", "grouped_scaled_gradient", "quantise_columns", "quantise_experts"),
    ("router", "expert_order", "permute", "unpermute", "attention_backward", "quantise"),
)
"""Groups of kernels, each measured in one process. Those with goals come first."""
NAMES = tuple(name for group in GROUPS for name in group)
_ON_A_GPU = "test_graphs.py::test_a_step_on_a_gpu_is_the_same_to_the_bit_as_a_graph"


@dataclass(frozen=True)
class Tests:
    """Tests that run before measurements.

    Attributes:
        share: The most that they get of the time.
        targets: Files, folders or tests, as pytest takes them.
        tiny: The target of a dry run.
        workers: Number of processes that run one file each; None for one process per spare
            processor, each running one test at a time.
    """

    share: float
    targets: Sequence[str]
    tiny: str
    workers: int | None = None

    def build_command(self, dry: bool) -> list[str]:
        """Return the command that runs them."""
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-rfE", "--tb=short"]
        command += ["-p", "no:cacheprovider"]
        if dry:
            return [*command, str(ROOT / self.tiny)]
        # That test runs this script, which already runs for real on this GPU.
        command.append(f"--ignore={ROOT / 'tests/unit/benchmarks/test_gpu_check.py'}")
        if importlib.util.find_spec("xdist"):
            spare = max(2, (os.cpu_count() or 1) - 4)
            command += ["-n", str(self.workers or spare)]
            command += ["--dist", "loadfile"] if self.workers else []
        return [*command, *(str(ROOT / target) for target in self.targets)]


TESTS = {
    # Most of their time is Triton's compiler.
    "kernels": Tests(0.25, ["tests/unit/kernels"], "tests/unit/kernels/test_spans.py"),
    # Graphs, and ranks that share the GPU; each file starts four processes of its own on it.
    "steps": Tests(
        0.2,
        [f"tests/parity/{_ON_A_GPU}", "tests/parity/test_shared.py"],
        f"tests/parity/{_ON_A_GPU}",
        2,
    ),
}
"""By the name of the measurements that they precede."""


def run_tests(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run tests on this GPU. Return the outcome, the counts, and the end of the output."""
    completed = run_limited(command, seconds)
    return {
        "outcome": {0: "passed", None: completed.explain_failure()}.get(completed.code, "failed"),
        "counts": next((line for line in reversed(completed.lines) if line.strip()), "no output"),
        "log": ("\n".join(completed.lines) + "\n" + completed.errors)[-LAST:],
    }


def format_cell(result: dict[str, Any] | None) -> str:
    """Format a pass: its time and its share of the ceiling that binds."""
    return (
        "-" if result is None else f"{1e6 * result['seconds']:,.0f} us{100 * result['share']:5.0f}%"
    )


def format_line(m: dict[str, Any]) -> str:
    """Format a measurement."""
    row = f"{m['kernel']:<22}{m['case']:<47}{m['implementation']:<13}"
    if m["forward"]:
        row += f"{format_cell(m['forward']):>18}{format_cell(m['backward']):>18}"
    if m["error"] is not None:
        row += f"  error {m['error']:.1e}"
    return f"{row}  {m['trouble']}" if m["trouble"] else row


def commit() -> str:
    """Return the commit of this checkout, with a + if anything but results differs from it."""
    if from_environment := os.environ.get("MEGAFRAME_COMMIT"):
        return from_environment

    def run_git(*arguments: str) -> str:
        completed = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
        return completed.stdout.strip()

    try:
        description = run_git("describe", "--always", "--abbrev=12")
        changed = run_git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
    except OSError:
        return "unknown"
    return f"{description}{'+' if changed else ''}" or "unknown"


@dataclass
class Results:
    """What is known so far; written whenever something is added.

    Attributes:
        path: None for nowhere.
        todo: What the process that measures kernels has to measure.
        at: Index of what it began last.
        running: Whether that still runs.
    """

    sections: dict[str, Any]
    path: Path | None = None
    todo: Sequence[Sequence[str]] = ()
    at: int = -1
    running: bool = False

    def add(self, **parts: Any) -> None:
        """Add parts, and update what follows from them."""
        self.sections |= parts
        measured = self.sections["measurements"]
        kernels = dict.fromkeys(m["kernel"] for m in measured)
        self.sections["order"] = {
            k: order_of([m for m in measured if m["kernel"] == k]) for k in kernels
        }
        self.sections["chosen_over_best"] = compare_chosen_with_best(self.sections)
        self.sections["goals"] = evaluate_goals(self.sections)
        if self.path is not None:
            write_json(self.path, self.sections)

    def read_line(self, line: str) -> None:
        """Process a line of output of `kernel_bench.py`."""
        record = parse_object(line) or {}
        if "todo" in record:
            self.todo = record["todo"]
        elif "begun" in record:
            self.at, self.running = record["begun"], True
        elif "ceilings" in record:
            copy, product = record["ceilings"]["copy"], record["ceilings"]["product"]
            print(f"copy {copy / 1e12:.2f} TB/s, product {product / 1e12:.0f} TFLOP/s", flush=True)
            self.add(**record)
        elif "active" in record:
            self.add(active={**self.sections["active"], **record["active"]})
        elif "measured" in record:
            self.add_measurement(record["measured"])

    def add_measurement(self, measurement: dict[str, Any]) -> None:
        """Add a measurement."""
        self.running = False
        print(format_line(measurement), flush=True)
        self.add(measurements=[*self.sections["measurements"], measurement])

    def leave_out(self, names: Sequence[str]) -> None:
        """Record what there is no time for."""
        self.add(left_out_for_time=[*self.sections["left_out_for_time"], *names])


def begin(path: Path | None, dry: bool) -> Results:
    """Return the results to start from: those of an earlier call for the same chip, commit and
    libraries, if there are any."""
    from megaframe_kernels.installed import read_versions
    from megaframe_kernels.selection import read_chip_name

    about = {"chip": read_chip_name(), "commit": commit(), "versions": read_versions(), "dry": dry}
    empty = {**_OF_KERNELS, "tests": {}, "training": []}
    try:
        before = json.loads(path.read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        before = {}
    if any(before.get(key) != value for key, value in about.items()):
        before = {}
    return Results({**about, **empty, **before}, path)


def measure_group(
    command: Sequence[str], names: Sequence[str], results: Results, until: float
) -> None:
    """Measure some kernels by `command`. If an implementation ends its process, a new process
    continues after it."""
    results.todo, results.at = [[name] for name in names], -1
    while (seconds := until - time.monotonic()) > _LEAST_SECONDS:
        first, ceilings = results.at + 1, results.sections["ceilings"]
        call = [*command, "--only", *names, "--begin", str(first)]
        if ceilings:
            call += ["--ceilings", str(ceilings["copy"]), str(ceilings["product"])]
        results.running = False
        completed = run_limited(call, seconds, tell=results.read_line, quiet=_QUIET_SECONDS)
        if completed.code == 0:
            return
        lost = [results.todo[results.at]] if results.running else []
        if results.at < first:  # the process began no measurement
            lost = [(name, "all", "all") for name in names]
        for kernel, case, name in lost:
            why = Measurement(
                kernel, case, name, trouble=completed.explain_failure(), details=completed.errors
            )
            results.add_measurement(asdict(why))
        if results.at < first:
            return
    results.leave_out([": ".join(label) for label in results.todo[results.at + 1 :]])


def check_tests(results: Results, name: str, total_seconds: float, until: float, dry: bool) -> None:
    """Run the tests of `TESTS` with this name, within their share of `whole` seconds."""
    tests = TESTS[name]
    seconds = min(tests.share * total_seconds, until - time.monotonic())
    result = {"outcome": "left out for time"}
    if seconds > _LEAST_SECONDS:
        result = run_tests(tests.build_command(dry), seconds)
    results.add(tests={**results.sections["tests"], name: result})
    print(f"tests of {name}: {result['outcome']} {result.get('counts', '')}", flush=True)


def check_kernels(results: Results, only: Sequence[str], until: float, dry: bool) -> None:
    """Measure all groups, or only the kernels that were requested."""
    command = [sys.executable, str(Path(__file__).with_name("kernel_bench.py"))]
    # A dry run cannot lose its GPU, so one process is enough.
    for group in (NAMES,) if dry else GROUPS:
        names = [name for name in group if not only or name in only]
        if names:
            measure_group([*command, *(["--dry"] if dry else [])], names, results, until)


def check_training(results: Results, only: Sequence[str], until: float, dry: bool) -> None:
    """Measure all or some rows of whole steps. Rows that are left out keep the results of an
    earlier call."""
    traces = results.path.with_suffix("") if results.path and not dry else None
    rows = {row["row"]: row for row in results.sections["training"]}
    for row in training_gpu.measure(dry, only, until, traces):
        print(training_gpu.format_line(row), flush=True)
        if "trouble" not in row or row["row"] not in rows:
            rows[row["row"]] = row
        results.add(training=training_gpu.with_ratios(list(rows.values())))


def choose(result: dict[str, Any], table: Path) -> None:
    """Write the measured order of this chip into the table from which implementations are
    chosen."""
    choices = json.loads(table.read_text(encoding="utf-8"))
    choices[result["chip"]] = {**choices.get(result["chip"], {}), **result["order"]}
    table.write_text(json.dumps(choices, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, no measurement")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=NAMES,
        metavar="KERNEL",
        help=f"of these, and no steps; written only where --write says: {', '.join(NAMES)}",
    )
    parser.add_argument("--minutes", type=float, default=_MINUTES)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--choose", action="store_true", help="write the order into choices.json")
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--skip-training", action="store_true")
    half.add_argument("--only-training", action="store_true")
    rows = [row.name for row in training_gpu.ROWS]
    parser.add_argument("--rows", nargs="+", default=[], choices=rows, help="of whole steps")
    parser.add_argument("--write", type=Path, help="by default results/<chip>.json")
    arguments = parser.parse_args()
    if arguments.only and arguments.only_training:
        parser.error("--only names kernels, and --only-training leaves all of them out")
    return arguments


def main() -> int:
    """Run the command. The status is 1 if tests have not passed or there is no GPU to check."""
    begun = time.monotonic()
    arguments = parse_arguments()
    # On SIGTERM exit normally, which also ends the processes that run in groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if note := use_wheels():
        print(note, flush=True)
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not arguments.dry:
        print("torch sees no GPU: nothing to check here (--dry tries the script itself)")
        return 1
    if not has_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from megaframe_kernels.selection import TABLE, read_chip_name

    path = arguments.write
    if path is None and not arguments.only:
        path = ROOT / "benchmarks" / "results" / f"{read_chip_name()}.json"
    results = begin(path, arguments.dry)
    total_seconds = 60 * arguments.minutes
    until = begun + total_seconds
    if not arguments.only_training:
        results.sections |= _OF_KERNELS
        if not arguments.skip_tests:
            check_tests(results, "kernels", total_seconds, until, arguments.dry)
        alone = arguments.skip_training or arguments.only
        kernels_until = until if alone else until - _OF_TRAINING * total_seconds
        check_kernels(results, arguments.only, kernels_until, arguments.dry)
    if not arguments.skip_training and not arguments.only:
        if not arguments.skip_tests:
            check_tests(results, "steps", total_seconds, until, arguments.dry)
        check_training(results, arguments.rows, until, arguments.dry)
    results.add(seconds=time.monotonic() - begun)
    for name in results.sections["left_out_for_time"]:
        print(f"left out for time: {name}")
    print(format_table(results.sections["goals"]))
    print(f"{f'wrote {path}' if path else 'done'} after {results.sections['seconds']:.0f} s")
    if arguments.choose:
        choose(results.sections, TABLE)
    return (
        0
        if all(result["outcome"] == "passed" for result in results.sections["tests"].values())
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
