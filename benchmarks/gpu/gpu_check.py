"""Tests and measures kernels and whole steps on the GPU that is here: `make gpu-check`.

It consists of steps of up to two and a half minutes, the most important first (`gpu_steps.py`).
`--steps` names some of them; `--seconds` bounds the call, and one step alone may have all of it.
Without names a call goes on with what earlier ones on this device and commit did not do. Each step
writes a file of its own after every number, into `$OUT`, `--write` or `results/<chip>/`, and ends
with a verdict of a few lines. `apply_results.py` then makes use of the files. `--dry` runs
everything in tiny sizes, also on a CPU, and measures nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tools")]
import training_gpu  # noqa: E402
from gpu_goals import format_table  # noqa: E402
from gpu_parts import LEAST_SECONDS, describe, run_step  # noqa: E402
from gpu_results import (  # noqa: E402
    RESULTS,
    Results,
    check_disk,
    derive,
    describe_here,
    keep_aside,
    read_earlier,
    select_part,
)
from gpu_steps import (  # noqa: E402
    KERNELS,
    STEPS,
    Step,
    format_verdict,
    list_failures,
    select_steps,
    was_done,
)
from wheels import use_wheels  # noqa: E402

_MINUTES = 7.8


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ", ".join(f"{step.name} ({step.seconds:.0f} s)" for step in STEPS)
    parser.add_argument(
        "--steps",
        nargs="+",
        default=[],
        choices=[step.name for step in STEPS],
        metavar="STEP",
        help=f"do these, also if they were done before; in their order: {names}",
    )
    time_limit = parser.add_mutually_exclusive_group()
    time_limit.add_argument("--seconds", type=float, help="for the whole call")
    time_limit.add_argument(
        "--minutes", type=float, help=f"the same; {_MINUTES} if neither is given"
    )
    parser.add_argument("--dry", action="store_true", help="tiny sizes, no measurement")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        choices=KERNELS,
        metavar="KERNEL",
        help=f"of these, and no steps; written only where --write says: {', '.join(KERNELS)}",
    )
    parser.add_argument("--skip-tests", action="store_true")
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--skip-training", action="store_true")
    half.add_argument("--only-training", action="store_true")
    rows = [row.name for row in training_gpu.ROWS]
    parser.add_argument("--rows", nargs="+", default=[], choices=rows, help="of whole steps")
    parser.add_argument(
        "--write", type=Path, help="FILE.json for everything, or a folder for a file per step"
    )
    arguments = parser.parse_args()
    if arguments.only and (arguments.only_training or arguments.rows):
        parser.error("--only names kernels, and --only-training and --rows leave them out")
    return arguments


def explain_no_gpu() -> str:
    """Return why nothing can be measured here."""
    from megaframe.distributed.device import explain_hidden_gpu, explain_unusable_gpu

    why = explain_unusable_gpu() or explain_hidden_gpu()
    reason = f": {why}" if why else ""
    return f"torch sees no GPU{reason}: nothing to check here (--dry tries the script itself)"


def find_target(arguments: argparse.Namespace, chip: str) -> Path | None:
    """Return the file or folder to write; None for some kernels alone and for a dry run, if no
    place is named."""
    if arguments.write is not None:
        return arguments.write
    if out := os.environ.get("OUT"):
        return Path(out)
    return None if arguments.only or arguments.dry else RESULTS / chip


def begin(arguments: argparse.Namespace, steps: Sequence[Step]) -> Results | None:
    """Return the results to start from: those of earlier calls. Say first what is wrong with the
    place to write, and what earlier files cannot be used; None if nothing can be written."""
    about = describe_here(arguments.dry)
    target = find_target(arguments, about["chip"])
    if target is None:
        return Results(about)
    one_file = target.suffix == ".json"
    if trouble := check_disk(target.parent if one_file else target):
        print(trouble)
        return None
    paths = [target] if one_file else [target / f"{step.name}.json" for step in steps]
    for line in filter(None, [keep_aside(path, about) for path in paths]):
        print(line, flush=True)
    places = [target] if one_file or arguments.dry else [RESULTS / about["chip"], target]
    sections, line = read_earlier(about, places)
    if line:
        print(line, flush=True)
    return Results(about, target, sections)


def print_verdict(step: Step, results: Results) -> None:
    """Print what a step found."""
    part: dict[str, Any] = select_part(results.sections, step)
    part |= derive({**results.about, **part})
    print("\n".join(format_verdict(step, part, describe(part))), flush=True)


def main() -> int:
    """Run the command. The status is 1 if something failed or there is no GPU to check."""
    begun = time.monotonic()
    arguments = parse_arguments()
    # On SIGTERM exit normally, which also ends the processes that run in groups of their own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if note := use_wheels():
        print(note, flush=True)
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not arguments.dry:
        print(explain_no_gpu())
        return 1
    if not has_gpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    steps = select_steps(
        arguments.steps,
        arguments.only,
        arguments.rows,
        arguments.only_training,
        arguments.skip_training,
        arguments.skip_tests,
    )
    if (results := begin(arguments, steps)) is None:
        return 1
    seconds = arguments.seconds or 60 * (arguments.minutes or _MINUTES)
    asked = bool(arguments.steps or arguments.rows or arguments.only)
    done = [] if asked else [s for s in steps if was_done(s, results.sections["steps"].get(s.name))]
    if done:
        print(f"done before, on this device and commit: {', '.join(step.name for step in done)}")
    left = [step for step in steps if step not in done]
    if arguments.dry or (len(left) == 1 and (arguments.seconds or arguments.minutes)):
        # A dry run measures nothing, also not how busy its machine is.
        left = [replace(step, seconds=seconds) for step in left]
    return run_steps(left, results, begun + seconds, arguments.dry)


def run_steps(steps: Sequence[Step], results: Results, until: float, dry: bool) -> int:
    """Do steps until a monotonic time. Return the exit status."""
    begun, skipped, failures = time.monotonic(), [], 0
    for step in steps:
        now = time.monotonic()
        if until - now < LEAST_SECONDS:
            skipped.append(step.name)
            continue
        run_step(step, results, min(now + step.seconds, until), dry)
        print_verdict(step, results)
        failures += len([*list_failures(select_part(results.sections, step))])
    results.step = None
    results.write()
    if skipped:
        print(f"left out for time: {', '.join(skipped)}; the same command goes on with them")
    print(format_table(derive({**results.about, **results.sections})["goals"]))
    where = "nowhere" if results.target is None else results.target
    print(f"after {time.monotonic() - begun:.0f} s, written to {where}{results.trouble or ''}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
