"""Run the tests of numbers as other processors would: `python tools/test_processors.py`.

The instructions that a processor has, and the number of its threads, decide the order of sums and
how often they are rounded. Each setting restricts these by environment variables of torch, oneDNN
and MKL, which are read when a process starts, so each is a process of its own. A setting of
instructions that this processor lacks is skipped by name, and so is one that torch does not follow:
torch accepts any `ATEN_CPU_CAPABILITY`, also one that the processor cannot execute. Status 1 means
that a test failed, or that no setting could run.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megaframe.io.closed_output import allow_closed_output

ROOT = Path(__file__).resolve().parent.parent
MARKER = "numeric"
"""Marker of the test files whose numbers depend on the processor."""
_AVX2 = ("avx2", "fma")
_AVX512 = ("avx512f", "avx512dq", "avx512bw", "avx512vl")
_INTEL = "GenuineIntel"
NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ATEN_CPU_CAPABILITY": {"default": (), "avx2": _AVX2, "avx512": _AVX512},
    "ONEDNN_MAX_CPU_ISA": {"SSE41": ("sse4_1",), "AVX2": _AVX2, "AVX512_CORE": _AVX512},
    # Other processors than Intel's do not follow it.
    "MKL_ENABLE_INSTRUCTIONS": {"AVX2": (_INTEL, *_AVX2), "AVX512": (_INTEL, *_AVX512)},
    "TEST_THREADS": {"1": (), "2": (), "3": ()},
}
"""The flags of /proc/cpuinfo, or the vendor, that each value of a variable needs. The threads are
those of `tests/conftest.py`."""
_PROBE = """
import torch
torch.nn.functional.gelu(torch.ones(64, 64))
print("torch uses " + torch.backends.cpu.get_cpu_capability())
"""
_REPORTED = {
    "ATEN_CPU_CAPABILITY": (
        "torch uses ",
        {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"},
    ),
    "ONEDNN_MAX_CPU_ISA": (
        "onednn_verbose,v1,info,cpu,isa:Intel ",
        {"SSE41": "SSE4.1", "AVX2": "AVX2", "AVX512_CORE": "AVX-512"},
    ),
}
"""How the lines begin in which `_PROBE`, with oneDNN verbose, shows what is used, and how they name
the values of the variable."""
SETTINGS: tuple[Mapping[str, str], ...] = (
    {"ATEN_CPU_CAPABILITY": "default", "TEST_THREADS": "3"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41", "TEST_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "TEST_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "TEST_THREADS": "3"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
)
"""Each value at least once: torch's plain code and oneDNN's oldest, each without the other, so that
neither hides what the other does; and processors that have no more than AVX2 or AVX-512, each with
several threads. Those of MKL, which few processors follow, stand alone. What torch, oneDNN and MKL
choose here, with one thread, is what all tests run with anyway."""


@dataclass(frozen=True)
class SettingResult:
    """The result of the tests under a setting.

    Attributes:
        verdict: Passed, failed or skipped.
        note: Why it was skipped, or pytest's summary.
    """

    setting: str
    verdict: str
    note: str
    seconds: float = 0.0


def read_processor_flags(text: str | None = None) -> frozenset[str]:
    """Return the flags and the vendor of this processor.

    Args:
        text: What /proc/cpuinfo holds; read from there by default. Where there is none, nothing is
            known, and every setting that needs an instruction is skipped.
    """
    path = Path("/proc/cpuinfo")
    if text is None:
        text = path.read_text() if path.exists() else ""
    lines = re.findall(r"^(?:flags|vendor_id)\s*:\s*(.*)$", text, re.MULTILINE)
    return frozenset(word for line in lines for word in line.split())


def read_processor_name() -> str:
    """Return the processor's name."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    match = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1] if match else platform.machine()


def format_setting(setting: Mapping[str, str]) -> str:
    """Return the setting as one would type it before a command."""
    return " ".join(f"{key}={value}" for key, value in setting.items())


def find_missing_instructions(setting: Mapping[str, str], flags: frozenset[str]) -> str | None:
    """Return which instructions of a setting the processor lacks, by name, or None.

    Args:
        setting: Values of environment variables, by name.
        flags: What `read_processor_flags` returned.
    """
    for variable, value in setting.items():
        if missing := [flag for flag in NEEDED[variable][value] if flag not in flags]:
            return f"{variable}={value}: this processor has no {', '.join(missing)}"
    return None


def make_environment(setting: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with the variables of a setting, and without the others of `NEEDED`. Threads
    that wait do not spin, because ranks and settings share the cores."""
    unrelated = {key: value for key, value in base.items() if key not in NEEDED}
    return {**unrelated, "OMP_WAIT_POLICY": "PASSIVE", "TEST_THREADS": "1", **setting}


def find_ignored_setting(setting: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """Return what torch and oneDNN use instead of a setting, or None if they follow it.

    Args:
        setting: Values of environment variables, by name.
        environment: All variables of the new process.
    """
    command, verbose = [sys.executable, "-c", _PROBE], {**environment, "ONEDNN_VERBOSE": "1"}
    completed = subprocess.run(command, env=verbose, capture_output=True, text=True, check=True)
    lines = completed.stdout.splitlines()
    for variable, (start, names) in _REPORTED.items():
        values = (line.removeprefix(start) for line in lines if line.startswith(start))
        value_in_use = next(values, "unknown")
        value = setting.get(variable)
        if value is not None and not value_in_use.startswith(names[value]):
            return f"{variable}={value}: what is used is {value_in_use}"
    return None


def run(setting: Mapping[str, str], flags: frozenset[str], command: Sequence[str]) -> SettingResult:
    """Run a command under a setting, in a new process, or say why it cannot.

    Args:
        setting: Values of environment variables, by name.
        flags: What `read_processor_flags` returned.
        command: The command of the tests. Its last line of output is the note.
    """
    name = format_setting(setting)
    if reason := find_missing_instructions(setting, flags):
        return SettingResult(name, "skipped", reason)
    environment = make_environment(setting, os.environ)
    if reason := find_ignored_setting(setting, environment):
        return SettingResult(name, "skipped", reason)
    start = time.monotonic()
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    seconds = time.monotonic() - start
    lines = completed.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    note = "\n".join([*failed, *lines[-1:]]) or completed.stderr.strip()[-500:]
    return SettingResult(name, "failed" if completed.returncode else "passed", note, seconds)


def format_report(results: Iterable[SettingResult], processor_name: str) -> str:
    """Return a table of the results of all settings."""
    rows = [f"{processor_name}\n", "| setting | verdict | seconds | |", "|---|---|---|---|"]
    for result in results:
        note = result.note.replace("\n", "<br>").replace("|", "\\|")
        seconds = f"{result.seconds:.0f}" if result.seconds else ""
        rows.append(f"| `{result.setting}` | {result.verdict} | {seconds} | {note} |")
    return "\n".join(rows)


def compute_exit_status(results: Sequence[SettingResult]) -> int:
    """Return 1 if a test failed, or if no setting ran."""
    verdicts = {result.verdict for result in results}
    return int("failed" in verdicts or "passed" not in verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all settings and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "tests", nargs="*", help=f"files or options for pytest; by default all marked {MARKER}"
    )
    parser.add_argument("--slow", action="store_true", help="run also those that are marked slow")
    parser.add_argument("--workers", type=int, default=2, help="settings that run at a time")
    options = parser.parse_args(arguments)
    marker_expression = MARKER if options.slow else f"{MARKER} and not slow"
    tests = options.tests or find_marked_files(ROOT)
    # All tests have run with more examples of each property; a setting repeats them.
    profile = ["--hypothesis-profile", "quick"]
    command = [sys.executable, "-m", "pytest", *profile, "-m", marker_expression, *tests]
    flags = read_processor_flags()

    def run_and_print(setting: Mapping[str, str]) -> SettingResult:
        result = run(setting, flags, command)
        print(f"{result.verdict}: {result.setting}", file=sys.stderr, flush=True)
        return result

    with ThreadPoolExecutor(options.workers) as pool:  # each waits for a process of its own
        results = list(pool.map(run_and_print, SETTINGS))
    print(format_report(results, read_processor_name()))
    return compute_exit_status(results)


def find_marked_files(root: Path) -> list[str]:
    """Return the test files that have the marker, so that no other is imported."""
    marked = re.compile(rf"^pytestmark = .*\bmark\.{MARKER}\b", re.MULTILINE)
    tests = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in tests if marked.search(path.read_text())]


if __name__ == "__main__":
    with allow_closed_output():
        sys.exit(main())
