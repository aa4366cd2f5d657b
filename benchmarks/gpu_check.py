"""Tests the kernels on the GPU that is here and measures them: `make gpu-check`.

One command, under 8 minutes, and one file: `results/<chip>.json` with the ceilings of this GPU, for
every kernel each implementation's time, share of the ceiling and error, and whole training steps
beside plain PyTorch (`training_gpu.py`). What is slower than another implementation says so itself;
the order of speed goes into the table that chooses (`--choose`). `--dry` runs everything on tiny
sizes, on a CPU too, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]
import training_gpu  # noqa: E402

_MINUTES = 8.0
_TESTS_MINUTES = 2.0
_WORTH_COMPILING = frozenset(
    ("norm", "activation", "rotary", "cross_entropy", "adamw", "square_sum", "router", "quantise")
)
"""Where a compiler can be a rival. Each takes seconds to compile."""
COMPILED = "compiled"
"""The reference under torch.compile, as a name among implementations."""


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reaches: bytes a second of a copy (read and written), FLOP/s of a product."""

    copy: float
    product: float


@dataclass(frozen=True)
class Measurement:
    """One implementation on one case; seconds are medians, shares of the ceiling that binds.

    error: of the result on tiny sizes, relative to the norm of the truth in fp64. trouble: why
    there is no number.
    """

    kernel: str
    case: str
    implementation: str
    forward_seconds: float | None = None
    forward_share: float | None = None
    backward_seconds: float | None = None
    backward_share: float | None = None
    error: float | None = None
    trouble: str | None = None


def seconds_of(run: Callable[[], Any], dry: bool) -> float:
    """Median time of a call on the GPU, its caches cleared between calls."""
    if dry:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    from triton.testing import do_bench

    return do_bench(run, warmup=10, rep=60, return_mode="median") / 1000


def measure_ceilings(dry: bool) -> Ceilings:
    """A large copy, and a large bf16 product of random numbers."""
    import torch

    count, width = (2**10, 32) if dry else (2**30, 8192)
    source = torch.randint(0, 256, (count,), dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = 2 * count / seconds_of(lambda: target.copy_(source), dry)
    a, b = (torch.randn(width, width, dtype=torch.bfloat16) for _ in range(2))
    return Ceilings(copy, 2 * width**3 / seconds_of(lambda: a @ b, dry))


def tensors_of(tree: Any) -> list[Any]:
    """All floating tensors of nested sequences."""
    import torch

    if isinstance(tree, torch.Tensor):
        return [tree] if tree.is_floating_point() else []
    if isinstance(tree, (list, tuple)):
        return [t for item in tree for t in tensors_of(item)]
    return []


def runs_of(kernel: Any, dry: bool) -> dict[str, Callable[..., Any]]:
    """What can be timed on this machine: implementations, the reference, and it compiled."""
    import torch

    here = {n: i.run for n, i in kernel.implementations.items() if i.missing() is None}
    here["reference"] = kernel.reference
    if kernel.name in _WORTH_COMPILING and not dry:
        torch._dynamo.reset()
        here[COMPILED] = torch.compile(kernel.reference, dynamic=False)
    return here


def error_of(kernel: Any, run: Callable[..., Any], tiny: Any) -> float:
    """Norm of the error of all outputs over the norm of the truth; NaN passes nothing."""
    import torch

    def changed(tree: Any, change: Callable[[Any], Any]) -> Any:
        if isinstance(tree, torch.Tensor) and tree.is_floating_point():
            return change(tree.detach())
        return type(tree)(changed(t, change) for t in tree) if isinstance(tree, list) else tree

    given = tiny.arguments()
    truth = kernel.reference(*(changed(a, torch.Tensor.double) for a in given), **tiny.options)
    got = run(*(changed(a, torch.Tensor.clone) for a in given), **tiny.options)
    pairs = zip(tensors_of(got), tensors_of(truth), strict=True)
    off = size = 0.0
    for mine, true in pairs:
        off += (mine.double() - true.double()).square().sum().item()
        size += true.double().square().sum().item()
    return math.sqrt(off / size) if size else off


def time_case(case: Any, run: Callable[..., Any], dry: bool) -> tuple[float, float | None]:
    """Seconds forward and backward (None where there is none)."""
    import torch

    given = case.arguments()

    def forward() -> Any:
        return run(*given, **case.options)

    if case.backward is None:
        return seconds_of(forward, dry), None
    outputs = [t for t in tensors_of(forward()) if t.requires_grad]
    leaves = [t for t in tensors_of(given) if t.requires_grad]
    gradients = [torch.randn_like(t) for t in outputs]
    forth = seconds_of(forward, dry)

    def backward() -> Any:
        return torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)

    return forth, seconds_of(backward, dry)


def share(work: Any, seconds: float | None, ceilings: Ceilings) -> float | None:
    """Of the ceiling that binds: the time that the work must take over the time that it took."""
    if work is None or seconds is None:
        return None
    return max(work.bytes / ceilings.copy, work.flops / ceilings.product) / seconds


def measure(case: Any, tiny: Any, ceilings: Ceilings, dry: bool) -> Iterator[Measurement]:
    """Every implementation on one case."""
    from megaframe_kernels.registry import KERNELS

    kernel = KERNELS[case.kernel]
    for name, run in runs_of(kernel, dry).items():
        label = (case.kernel, case.name, name)
        try:
            implementation = kernel.implementations.get(name)
            reason = implementation and implementation.refuses(*tiny.arguments(), **tiny.options)
            if reason:
                yield Measurement(*label, trouble=reason)
                continue
            error = None if name == COMPILED else error_of(kernel, run, tiny)
            forth, back = time_case(case, run, dry)
        except Exception as broken:
            yield Measurement(*label, trouble=_first_line(broken))
            continue
        shares = share(case.forward, forth, ceilings), share(case.backward, back, ceilings)
        yield Measurement(*label, forth, shares[0], back, shares[1], error)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:160] if text else 'no message'}"


def order_of(measurements: Sequence[Measurement], most_error: float = 0.05) -> list[str]:
    """Implementations of one kernel by the mean of their slowness beside the fastest, best first.

    Those that are wrong, and the reference, which comes last anyway, are left out.
    """
    slowness: dict[str, list[float]] = {}
    for case in {m.case for m in measurements}:
        took = {
            m.implementation: (m.forward_seconds or 0.0) + (m.backward_seconds or 0.0)
            for m in measurements
            if m.case == case and m.trouble is None and (m.error or 0.0) <= most_error
        }
        took = {n: s for n, s in took.items() if n not in ("reference", COMPILED)}
        for name, seconds in took.items():
            slowness.setdefault(name, []).append(math.log(seconds / min(took.values())))
    return sorted(slowness, key=lambda name: sum(slowness[name]) / len(slowness[name]))


def run_tests(dry: bool) -> str:
    """The kernels' tests on this GPU; how they ended."""
    tests = ROOT / "tests" / "kernels"
    command = [sys.executable, "-m", "pytest", "-q", str(tests / "test_spans.py" if dry else tests)]
    if importlib.util.find_spec("xdist") and not dry:
        command += ["-n", "4"]  # most of their time is Triton's compiler
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60 * _TESTS_MINUTES
        )
    except subprocess.TimeoutExpired:
        return f"not finished after {_TESTS_MINUTES:g} minutes"
    return next((line for line in reversed(done.stdout.splitlines()) if line), "no output")


def report(measurements: Sequence[Measurement]) -> str:
    """A table for people."""
    rows = [f"{'kernel':<22}{'case':<36}{'implementation':<16}{'forward':>18}{'backward':>18}"]

    def cell(seconds: float | None, part: float | None) -> str:
        return "-" if seconds is None else f"{1e6 * seconds:,.0f} us{100 * (part or 0):5.0f}%"

    for m in measurements:
        row = f"{m.kernel:<22}{m.case:<36}{m.implementation:<16}"
        if m.trouble:
            rows.append(f"{row}  {m.trouble}")
            continue
        forth = cell(m.forward_seconds, m.forward_share)
        rows.append(f"{row}{forth:>18}{cell(m.backward_seconds, m.backward_share):>18}")
    return "\n".join(rows)


def commit() -> str:
    """Of this checkout, with a + where it differs from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def check(dry: bool, only: Sequence[str], minutes: float, skip_tests: bool) -> dict[str, Any]:
    """Everything, as it is written into the results."""
    begun = time.monotonic()
    import torch
    from kernel_cases import REAL, TINY, cases
    from megaframe_kernels.installed import versions
    from megaframe_kernels.selection import chip_name

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tests = "skipped" if skip_tests else run_tests(dry)
    print(f"tests: {tests}", flush=True)
    measurements: list[Measurement] = []
    left_out: list[str] = []
    with torch.device(device):
        ceilings = measure_ceilings(dry)
        print(
            f"copy {ceilings.copy / 1e12:.2f} TB/s, product {ceilings.product / 1e12:.0f} TFLOP/s"
        )
        for case, tiny in zip(cases(TINY if dry else REAL), cases(TINY), strict=True):
            if only and case.kernel not in only:
                continue
            if time.monotonic() - begun > 60 * (minutes - training_gpu.MINUTES):
                left_out.append(f"{case.kernel}: {case.name}")
                continue
            found = list(measure(case, tiny, ceilings, dry))
            measurements += found
            print(report(found).split("\n", 1)[1], flush=True)
            if device == "cuda":
                torch.cuda.empty_cache()
    kernels = list(dict.fromkeys(m.kernel for m in measurements))
    return {
        "chip": chip_name(),
        "commit": commit(),
        "versions": versions(),
        "dry": dry,
        "tests": tests,
        "ceilings": asdict(ceilings),
        "measurements": [asdict(m) for m in measurements],
        "left_out_for_time": left_out,
        "order": {k: order_of([m for m in measurements if m.kernel == k]) for k in kernels},
        "seconds": time.monotonic() - begun,
    }


def choose(result: dict[str, Any], table: Path) -> None:
    """Put the measured order of this chip into the table that chooses."""
    choices = json.loads(table.read_text(encoding="utf-8"))
    choices[result["chip"]] = {**choices.get(result["chip"], {}), **result["order"]}
    table.write_text(json.dumps(choices, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """The command. Status 1 where tests fail or there is no GPU to check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes, no measurement")
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL")
    parser.add_argument("--minutes", type=float, default=_MINUTES)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--choose", action="store_true", help="write the order into choices.json")
    parser.add_argument("--skip-training", action="store_true")
    parser.add_argument("--write", type=Path, help="by default results/<chip>.json")
    given = parser.parse_args()
    if given.dry:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch

    if not torch.cuda.is_available() and not given.dry:
        print("torch sees no GPU: nothing to check here (--dry tries the script itself)")
        return 1
    result = check(given.dry, given.only, given.minutes, given.skip_tests)
    if not given.skip_training and not given.only:
        rows = []
        for row in training_gpu.measure(given.dry):
            rows.append(row)
            print(training_gpu.line_of(row), flush=True)
        result["training"] = training_gpu.with_ratios(rows)
    path = given.write or ROOT / "benchmarks" / "results" / f"{result['chip']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path} after {result['seconds']:.0f} s")
    if given.choose:
        from megaframe_kernels.selection import TABLE

        choose(result, TABLE)
    return 1 if "failed" in result["tests"] or "error" in result["tests"] else 0


if __name__ == "__main__":
    sys.exit(main())
