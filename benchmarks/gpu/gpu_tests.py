"""Runs tests on this GPU: each set of them in as many processes as help, within a time limit."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from time_limit import LAST, ROOT, TimedResult, run_limited

_ON_A_GPU = "test_cuda_graph_replay.py::test_a_step_on_a_gpu_is_the_same_to_the_bit_as_a_graph"
_NO_TESTS = 5
"""Exit status of pytest that found none, as in a shard of fewer tests than there are shards."""


@dataclass(frozen=True)
class Tests:
    """Tests that run together.

    Attributes:
        targets: Files, folders or tests, as pytest takes them.
        tiny: The target of a dry run.
        processes: Number of processes that each run a part of them; None for one per spare
            processor.
    """

    targets: Sequence[str]
    tiny: str
    processes: int | None = 1

    def build_command(self, dry: bool) -> list[str]:
        """Return the command that runs them."""
        command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-rfE", "--tb=short"]
        command += ["-p", "no:cacheprovider", "-p", "shard_tests"]
        targets = [self.tiny] if dry else self.targets
        return [*command, *(str(ROOT / target) for target in targets)]

    def count_processes(self, dry: bool) -> int:
        """Return in how many processes they run."""
        return 1 if dry else self.processes or max(2, (os.cpu_count() or 1) - 4)


TESTS = {
    # Most of their time is Triton's compiler.
    "kernels": Tests(["tests/unit/kernels"], "tests/unit/kernels/test_spans.py", None),
    "graphs": Tests([f"tests/parity/{_ON_A_GPU}"], f"tests/parity/{_ON_A_GPU}"),
    # Ranks that share the GPU.
    "layouts": Tests(["tests/parity/test_shared_device.py"], f"tests/parity/{_ON_A_GPU}"),
}


def run_tests(
    command: Sequence[str],
    seconds: float,
    processes: int = 1,
    note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run tests. Return the outcome, the counts, and the end of the output of those that fail.

    Args:
        note: Is given the last line of each process as it ends.
    """

    def run_shard(number: int) -> TimedResult:
        folders = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        shard = {"SHARD": f"{number}/{processes}", "PYTHONPATH": os.pathsep.join(folders)}
        completed = run_limited(command, seconds, {**os.environ, **shard})
        note(find_counts(completed))
        return completed

    with ThreadPoolExecutor(processes) as pool:
        shards = list(pool.map(run_shard, range(processes)))
    failed = [shard for shard in shards if shard.code not in (0, _NO_TESTS)]
    late = [shard for shard in failed if shard.code is None]
    outcome = late[0].explain_failure() if late else "failed" if failed else "passed"
    logs = ("\n".join(shard.lines) + "\n" + shard.errors for shard in failed or shards[:1])
    return {
        "outcome": outcome,
        "counts": sum_counts([find_counts(shard) for shard in shards]),
        "log": "\n".join(log[-LAST // max(len(failed), 1) :] for log in logs),
    }


def find_counts(completed: TimedResult) -> str:
    """Return the last line of pytest, which has the counts of its tests, or why there is none."""
    lines = [line for line in completed.lines if line.strip()]
    return lines[-1] if lines else completed.explain_failure()


def sum_counts(lines: Sequence[str]) -> str:
    """Return the counts of all processes together; the line itself, if there is one process."""
    if len(lines) == 1:
        return lines[0]
    total: Counter[str] = Counter()
    for line in lines:
        for count, outcome in re.findall(r"(\d+) (passed|failed|skipped|errors?|xfailed)", line):
            total[outcome.rstrip("s") if outcome == "errors" else outcome] += int(count)
    return ", ".join(f"{count} {outcome}" for outcome, count in total.items()) or lines[0]
