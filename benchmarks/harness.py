"""Runs contenders in turns, each in its own process, and says by how much they differ.

The order is A B C A B C ..., not A A B B C C: a shared machine drifts by more than the differences
that matter, and neighbours in time see the same drift. Besides the ratio of the medians, the spread
of the ratios within rounds is reported. Nothing here imports torch, because a process that is
started inherits its launcher's peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks/peers"
MATRIX_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Processor flags that decide the speed of fp32 and bf16 matrix products."""

SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables by which torch, oneDNN and MKL leave out instructions of the processor:
with them one machine stands for others."""

LOSS_TOLERANCE = 0.3
"""With an initial std of 0.02 the first loss is about 0.1 above ln(vocab)."""


@dataclass(frozen=True)
class Contender:
    """A command that prints its measurement as a JSON object in its last line of output."""

    name: str
    command: tuple[str, ...]
    ours: bool = False


@dataclass(frozen=True)
class ContenderRun:
    """One run of one contender: its own measurement, and the seconds from its start to its end.

    Attributes:
        best_tokens_per_second: Of the fastest step, which is least disturbed by other work on
            the machine.
        peak_rss_bytes: Of the process that trains.
        loss: As the comparison defines it.
        overhead: Share of the time that is neither forward, backward nor update, if the
            contender reports it.
    """

    tokens_per_second: float
    best_tokens_per_second: float
    peak_rss_bytes: int
    loss: float
    versions: Mapping[str, str]
    wall_seconds: float
    overhead: float | None = None


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of a few measurements."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class ContenderSummary:
    """Results of all rounds for one contender.

    Attributes:
        ratio: Its speed over the fastest peer's.
    """

    name: str
    speed: Spread
    best: float
    ratio: float
    ratio_in_rounds: Spread
    peak_rss_bytes: float
    loss: float


def add_common_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every comparison."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contender")
    parser.add_argument("--threads", type=int, default=2, help="threads of each contender")
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    return parser


def run_alternately(
    contenders: Sequence[Contender], rounds: int, threads: int
) -> dict[str, list[ContenderRun]]:
    """Run each contender once per round, one at a time, in the order given.

    Ends the program with the output of a contender that fails.
    """
    outcomes: dict[str, list[ContenderRun]] = {contender.name: [] for contender in contenders}
    for number in range(1, rounds + 1):
        for contender in contenders:
            outcome = run_once(contender, threads)
            outcomes[contender.name].append(outcome)
            print(
                f"round {number}/{rounds}  {contender.name:<20}"
                f"{outcome.tokens_per_second:9.0f} tokens/s"
                f"{outcome.peak_rss_bytes / 1e9:7.2f} GB  loss {outcome.loss:.4f}"
                f"{outcome.wall_seconds:7.0f} s in all",
                flush=True,
            )
    return outcomes


def check_losses(
    outcomes: Mapping[str, Sequence[ContenderRun]],
    expected: float,
    tolerance: float = LOSS_TOLERANCE,
) -> None:
    """End the program if a contender's loss is not about the expected one, because then it trained
    something else."""
    for name, runs in outcomes.items():
        for run in runs:
            if abs(run.loss - expected) > tolerance:
                sys.exit(f"{name}: loss {run.loss:.3f}, expected about {expected:.3f}")


def run_once(contender: Contender, threads: int) -> ContenderRun:
    """Run one contender to its end and read its measurement."""
    pinned = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    start = time.monotonic()
    result = subprocess.run(
        contender.command,
        env={**os.environ, **pinned},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stdout.strip().splitlines()
    if result.returncode != 0 or not lines:
        sys.exit(f"{contender.name} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return ContenderRun(**json.loads(lines[-1]), wall_seconds=time.monotonic() - start)


def summarise(
    contenders: Sequence[Contender], outcomes: Mapping[str, Sequence[ContenderRun]]
) -> list[ContenderSummary]:
    """Return one line per contender, in their order. Without a peer, ratios are to the first
    contender."""
    speeds = {
        contender.name: [outcome.tokens_per_second for outcome in outcomes[contender.name]]
        for contender in contenders
    }
    peers = [contender.name for contender in contenders if not contender.ours]
    reference = max(peers or list(speeds)[:1], key=lambda name: statistics.median(speeds[name]))
    lines = []
    for name, values in speeds.items():
        runs = outcomes[name]
        pairs = zip(values, speeds[reference], strict=True)
        lines.append(
            ContenderSummary(
                name=name,
                speed=Spread.of(values),
                best=max(run.best_tokens_per_second for run in runs),
                ratio=statistics.median(values) / statistics.median(speeds[reference]),
                ratio_in_rounds=Spread.of(
                    [value / reference_value for value, reference_value in pairs]
                ),
                peak_rss_bytes=statistics.median(run.peak_rss_bytes for run in runs),
                loss=statistics.median(run.loss for run in runs),
            )
        )
    return lines


def format_table(lines: Sequence[ContenderSummary]) -> str:
    """Format the lines as aligned text: medians, with smallest and largest in brackets. `best` is
    the fastest step of all rounds."""
    head = f"{'':<20}{'tokens/s':>10}{'':>16}{'best':>8}"
    head += f"{'ratio':>8}{'in rounds':>14}{'GB':>7}{'loss':>9}"
    rows = [head]
    for line in lines:
        spread = f"({line.speed.low:.0f}-{line.speed.high:.0f})"
        in_rounds = f"({line.ratio_in_rounds.low:.2f}-{line.ratio_in_rounds.high:.2f})"
        rows.append(
            f"{line.name:<20}{line.speed.median:>10.0f}{spread:>16}{line.best:>8.0f}{line.ratio:>8.3f}"
            f"{in_rounds:>14}{line.peak_rss_bytes / 1e9:>7.2f}{line.loss:>9.4f}"
        )
    return "\n".join(rows)


def describe_machine() -> dict[str, Any]:
    """Return the processor and its matrix instructions, the settings that leave out some of them,
    the cores that this process may use, and the memory in bytes."""
    info = Path("/proc/cpuinfo")
    pairs = (
        line.partition(":") for line in (info.read_text() if info.exists() else "").split("\n")
    )
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    flags = facts.get("flags", "").split()
    return {
        "cpu": facts.get("model name", platform.processor()),
        "instructions": [name for name in MATRIX_INSTRUCTIONS if name in flags],
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def describe_processor(document: Mapping[str, Any]) -> str:
    """Return the processor of a file of measurements in words: its name as the system gives it, its
    matrix instructions, and what was left out of them."""
    machine = document["machine"]
    words = [machine["cpu"], f"({', '.join(machine['instructions'])})"]
    settings = [f"{name}={value}" for name, value in machine.get("settings", {}).items()]
    return " ".join([*words, *(["with", *settings] if settings else ())])


def make_machine_file_name(machine: Mapping[str, Any]) -> str:
    """Return a part of a file's name for a machine: its processor, the widest of its matrix
    instructions, and what was left out of them."""
    parts = [machine["cpu"], *machine["instructions"][-1:], *machine["settings"].values()]
    return re.sub(r"[^a-z0-9]+", "_", " ".join(parts).lower()).strip("_")


def read_commit() -> str:
    """Return the commit that is measured; `+` marks files that differ from it."""
    described = subprocess.run(
        ("git", "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def describe_measurement() -> dict[str, Any]:
    """Return what every file of measurements begins with: the commit, now, and the machine."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"commit": read_commit(), "date": now, "machine": describe_machine()}


def write_results(
    path: Path,
    config: Mapping[str, Any],
    threads: int,
    results: Mapping[str, tuple[Sequence[ContenderSummary], Mapping[str, Sequence[ContenderRun]]]],
    limits: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Write all measurements, and what they were made on, as JSON.

    `results` has, for each heading (such as a precision), the lines and the outcomes behind them.
    `limits` has tokens per second that no contender can exceed, one for each round. Commands are
    left out, because they contain paths of one machine.
    """
    document = {
        **describe_measurement(),
        "threads": threads,
        "config": dict(config),
        "results": {
            heading: {
                "summary": [asdict(line) for line in lines],
                "rounds": {name: [asdict(run) for run in runs] for name, runs in outcomes.items()},
                **({"limit": asdict(Spread.of(limits[heading]))} if limits else {}),
            }
            for heading, (lines, outcomes) in results.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(f"wrote {path}")
