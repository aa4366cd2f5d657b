"""`tools/doctor.py --ranks`: do several ranks work together? Starts the ranks, watches over them,
and makes the report.

The work itself is in tools/doctor_parts.py, in processes of its own. If a part fails or hangs, they
are ended, and new ones do the parts that are left.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaframe.errors import explain_failed_write
from megaframe.io.local_rendezvous import find_free_port, make_rank_environment
from megaframe.io.regular_file import open_fresh, write_file
from megaframe.io.untrusted import sanitize_text

ROOT = Path(__file__).resolve().parent.parent
PARTS = [sys.executable, str(ROOT / "tools/doctor_parts.py")]
_LOOK = 0.1
_GRACE = 20.0
"""Seconds that other ranks have to say why one has ended, and to end by themselves."""
_LATE = 60.0
"""Seconds by which a part may exceed twice the timeout, as the ranks end what hangs by
themselves."""
_SHOWN = 600
_ADDRESS = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b")


_SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "v-half": 2}
"""Schedules to compare with one rank, with their chunks."""


def choose_axis_size(world: int) -> int:
    """Return the number of ranks on an axis of a layout that is compared with one rank."""
    return next(size for size in (4, 2, 1) if world % size == 0)


def list_layouts(world: int) -> dict[str, tuple[str, ...]]:
    """Return the layouts to compare with one rank, by name: overrides of the config. There are
    `choose_axis_size` ranks on one of the axes, and the other ranks are data ranks."""
    axis_size = choose_axis_size(world)
    layouts: dict[str, tuple[str, ...]] = {
        f"data, zero={zero}": (f"parallel.zero={zero}",) for zero in range(4)
    }
    if axis_size > 1:
        layouts["tensor"] = (f"parallel.tensor={axis_size}",)
        for kind in ("ring", "all_to_all"):
            layouts[f"context, {kind}"] = (
                f"parallel.context={axis_size}",
                f"parallel.context_kind={kind}",
            )
        for schedule, chunks in _SCHEDULES.items():
            layouts[f"pipeline, {schedule}"] = (
                f"parallel.pipeline={axis_size}",
                f"parallel.schedule={schedule}",
                f"parallel.chunks={chunks}",
            )
        layouts["experts"] = (f"parallel.expert={axis_size}",)
    if world % 4 == 0:
        layouts["tensor and pipeline"] = ("parallel.tensor=2", "parallel.pipeline=2")
    return {f"layout: {name}": overrides for name, overrides in layouts.items()}


def list_part_names(world: int) -> list[str]:
    """Return the names of all parts for this many ranks, in order."""
    return ["settings", "links", "rings", "collectives", *list_layouts(world), "abort"]


@dataclass
class RankFinding:
    """The outcome of a check in a part.

    Attributes:
        passed: Whether it is on every rank as it must be; None if nobody could judge it.
        failed_ranks: Ranks on which it is not as it must be.
    """

    part: str
    check: str
    passed: bool | None
    message: str
    numbers: dict[str, Any] = field(default_factory=dict)
    failed_ranks: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        mark = "X" if self.passed is False else " "
        name = f"{self.part}: {self.check}" if self.check else self.part
        where = f" (ranks {', '.join(map(str, self.failed_ranks))})" if self.failed_ranks else ""
        return f"{mark} {name:<44} {self.message}{where}"


Lines = dict[int, list[dict[str, Any]]]
"""What each rank has written."""


class RankProcesses:
    """The processes of some ranks.

    Args:
        ranks: The ranks of this machine.
        environment: Returns that of a rank, which all of one start share.
        timeout: Seconds that a part may take.
        device: On which they compute.
        command: What a rank runs.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        environment: Callable[[], Callable[[int], Mapping[str, str]]],
        timeout: float,
        device: str,
        command: Sequence[str] = PARTS,
    ) -> None:
        self._ranks, self._environment = ranks, environment
        self._timeout, self._device, self._command = timeout, device, command

    def run_parts(self, names: Sequence[str], note: Callable[[str], None]) -> Lines:
        """Do all parts; return what the ranks have written. A part that fails is a finding of the
        rank that says why.

        Args:
            names: The parts, in order.
            note: Called with the name of each part.
        """
        lines: Lines = {rank: [] for rank in self._ranks}
        first = 0
        while first < len(names):
            with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
                errors = self._run(names, first, Path(folder), note)
                for rank in self._ranks:
                    lines[rank] += _read(Path(folder) / f"rank-{rank}.jsonl")
            open_parts = [_find_unfinished(lines[rank], names, first) for rank in self._ranks]
            failed = min(open_parts)
            for rank, at in zip(self._ranks, open_parts, strict=True):
                if at == failed < len(names):
                    text = errors[rank] or "ended without a message"
                    finding = RankFinding(names[failed], "", False, text)
                    lines[rank].append(asdict(finding))
            first = failed + 1
        return lines

    def _run(
        self, names: Sequence[str], first: int, folder: Path, note: Callable[[str], None]
    ) -> dict[int, str]:
        """Start the ranks with the parts from number `first` on, and wait until all have ended.
        Returns the last words of each."""
        of_rank = self._environment()
        started: dict[int, subprocess.Popen[bytes]] = {}
        command = [*self._command, "--parts", json.dumps(names), "--first", str(first)]
        command += ["--device", self._device, "--timeout", str(self._timeout)]
        command += ["--folder", str(folder)]
        for rank in self._ranks:
            paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
            environment = {**os.environ, **of_rank(rank), "PYTHONPATH": os.pathsep.join(paths)}
            environment.pop("TORCHELASTIC_ERROR_FILE", None)
            with open_fresh(folder / f"rank-{rank}.err", inside=folder) as errors:
                started[rank] = subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=errors
                )
        try:
            self._wait(started, folder, note)
        finally:
            for process in started.values():
                process.kill()
                process.wait()
        texts = {
            rank: (folder / f"rank-{rank}.err").read_text("utf-8", "replace") for rank in started
        }
        return {rank: _extract_error(text, folder) for rank, text in texts.items()}

    def _wait(
        self,
        started: Mapping[int, subprocess.Popen[bytes]],
        folder: Path,
        note: Callable[[str], None],
    ) -> None:
        part, since, failed = "", time.monotonic(), 0.0
        first = min(started)
        while any(process.poll() is None for process in started.values()):
            time.sleep(_LOOK)
            now = time.monotonic()
            begun = [
                line["begin"] for line in _read(folder / f"rank-{first}.jsonl") if "begin" in line
            ]
            if begun and begun[-1] != part:
                part, since = begun[-1], now
                note(part)
            if any(process.poll() for process in started.values()):
                failed = failed or now
            if (failed and now - failed > _GRACE) or now - since > 2 * self._timeout + _LATE:
                return


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that a rank writes; the last may not be whole."""
    lines = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
    return lines


def _find_unfinished(lines: Iterable[Mapping[str, Any]], names: Sequence[str], first: int) -> int:
    """Return the number of the first part from `first` on that has not ended."""
    ended = {line["end"] for line in lines if "end" in line}
    return next((n for n in range(first, len(names)) if names[n] not in ended), len(names))


def _extract_error(text: str, folder: Path) -> str:
    """Return the message with which a process ended, without paths and addresses."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    message = (errors or lines or [""])[0 if errors else -1]
    message = re.sub(r"^(\[rank\d+\]: )+", "", message)  # torch names the rank of a traceback
    for path in (str(folder), str(ROOT), str(Path.home())):
        message = message.replace(path, ".")
    message = message.replace("faults.step_timeout=", "--timeout ")
    return sanitize_text(_ADDRESS.sub("(address)", message))[:_SHOWN]


def merge_findings(lines: Lines) -> list[RankFinding]:
    """Return the findings of all ranks together, in order: right if they are on every rank."""
    merged: dict[tuple[str, str], RankFinding] = {}
    for rank in sorted(lines):
        for line in lines[rank]:
            if "check" not in line:
                continue
            key = line["part"], line["check"]
            finding = RankFinding(*key, line["passed"], line["message"], line["numbers"])
            merged_finding = merged.setdefault(key, finding)
            if finding.passed is False:
                if merged_finding.passed is not False:
                    merged_finding.passed, merged_finding.message = False, finding.message
                merged_finding.failed_ranks.append(rank)
            elif merged_finding.passed is None:
                merged_finding.passed, merged_finding.message, merged_finding.numbers = (
                    finding.passed,
                    finding.message,
                    finding.numbers,
                )
    order: dict[str, int] = {}
    for finding in merged.values():
        order.setdefault(finding.part, len(order))
    return sorted(merged.values(), key=lambda finding: order[finding.part])


def run_alone(ranks: int) -> Callable[[], Callable[[int], Mapping[str, str]]]:
    """Return the environments for ranks of this machine, as torchrun sets them."""

    def start() -> Callable[[int], Mapping[str, str]]:
        port = find_free_port()
        return lambda rank: make_rank_environment(rank, ranks, port)

    return start


def gather_lines(lines: Lines, rank: int, world: int, timeout: float) -> Lines:
    """Return what the ranks of all nodes have written, on the first one. Those that do not say so
    in time are a finding.

    Args:
        lines: What the ranks of this node have written.
        rank: The first rank of this node.
        world: Number of ranks.
        timeout: Seconds to wait for the others.
    """
    from megaframe.distributed.rendezvous import get_launcher_store

    store, _, _ = get_launcher_store(rank, world, timeout)
    store.set(f"doctor/{rank}", json.dumps(lines[rank]))
    if rank:
        return lines
    for other in range(1, world):
        try:
            lines[other] = json.loads(store.get(f"doctor/{other}"))
        except RuntimeError:
            text = f"rank {other} has not reported"
            lines[other] = [asdict(RankFinding("report", f"rank {other}", False, text))]
    store.set("doctor/done", "")
    return lines


def write_report(
    findings: Sequence[RankFinding], report: Path, ranks: int, names: Sequence[str]
) -> list[Path]:
    """Write the report as JSON and as text; return both files.

    Args:
        findings: The findings of all ranks.
        report: Path of the files without suffix.
        ranks: Number of ranks.
        names: The parts that were done.
    """
    texts, table = report.with_suffix(".txt"), report.with_suffix(".json")
    report_fields = {
        "at": time.strftime("%Y-%m-%d"),
        "ranks": ranks,
        "parts": list(names),
        "passed": all(finding.passed is not False for finding in findings),
        "findings": [asdict(finding) for finding in findings],
    }
    text = "\n".join([*map(str, findings), describe_verdict(findings)])
    with explain_failed_write(report):
        report.parent.mkdir(parents=True, exist_ok=True)
        write_file(texts, text + "\n", inside=report.parent)
        write_file(table, json.dumps(report_fields, indent=1) + "\n", inside=report.parent)
    return [texts, table]


def describe_verdict(findings: Sequence[RankFinding]) -> str:
    """Return the last line of the report."""
    failed_ranks = [finding for finding in findings if finding.passed is False]
    if not failed_ranks:
        return "the ranks work together"
    names = ", ".join(dict.fromkeys(finding.part for finding in failed_ranks))
    count = len(failed_ranks)
    return f"{count} finding{'s are' if count > 1 else ' is'} wrong (X), in {names}"


def check_ranks(
    ranks: int,
    report: Path,
    *,
    timeout: float = 120.0,
    device: str = "auto",
    chosen: Sequence[str] = (),
    command: Sequence[str] = PARTS,
) -> int:
    """Examine several ranks, and print and write the report. Returns the exit status.

    Args:
        ranks: Number of ranks to start on this machine; 0 under torchrun, whose ranks each call
            this.
        report: The file to write; its suffix is replaced.
        timeout: Seconds that a part may take.
        device: As `run.device`.
        chosen: Parts to do, by the beginnings of their names; all if empty.
        command: What a rank runs.
    """
    world = ranks or int(os.environ["WORLD_SIZE"])
    me = 0 if ranks else int(os.environ["RANK"])
    names = [
        name
        for name in list_part_names(world)
        if not chosen or any(name.startswith(prefix) for prefix in chosen)
    ]
    local_ranks = range(ranks) if ranks else [me]
    environment = run_alone(ranks) if ranks else lambda: lambda rank: {}
    processes = RankProcesses(local_ranks, environment, timeout, device, command)

    def note(part: str) -> None:
        if not me:
            print(f"... {part}", file=sys.stderr, flush=True)

    lines = processes.run_parts(names, note)
    if not ranks:
        lines = gather_lines(lines, me, world, timeout)
    if me:
        return 0
    findings = merge_findings(lines)
    files = write_report(findings, report, world, names)
    print(*findings, describe_verdict(findings), sep="\n")
    print(f"report to send back: {files[0]} and {files[1]}")
    return 0 if all(finding.passed is not False for finding in findings) else 1
