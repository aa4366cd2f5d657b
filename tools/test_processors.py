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

ROOT = Path(__file__).resolve().parent.parent
MARKED = "numeric"
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
_ASK = """
import torch
torch.nn.functional.gelu(torch.ones(64, 64))
print("torch uses " + torch.backends.cpu.get_cpu_capability())
"""
_SHOWN = {
    "ATEN_CPU_CAPABILITY": (
        "torch uses ",
        {"default": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"},
    ),
    "ONEDNN_MAX_CPU_ISA": (
        "onednn_verbose,v1,info,cpu,isa:Intel ",
        {"SSE41": "SSE4.1", "AVX2": "AVX2", "AVX512_CORE": "AVX-512"},
    ),
}
"""How the lines begin in which `_ASK`, with oneDNN verbose, shows what is used, and how they name
the values of the variable."""
SETTINGS: tuple[Mapping[str, str], ...] = (
    {},  # what torch, oneDNN and MKL choose here, with one thread
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "avx512"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"TEST_THREADS": "2"},
    {"TEST_THREADS": "3"},
    {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "TEST_THREADS": "3",
    },
    {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "TEST_THREADS": "2",
    },
    {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "TEST_THREADS": "3",
    },
)
"""Each value once with the others left alone, and the ends of what a processor may be."""


@dataclass(frozen=True)
class Outcome:
    """What became of a setting. note: why it was skipped, or pytest's summary."""

    setting: str
    verdict: str
    note: str
    seconds: float = 0.0


def processor(text: str | None = None) -> frozenset[str]:
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


def model() -> str:
    """Return the processor's name."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()


def name_of(setting: Mapping[str, str]) -> str:
    """Return the setting as one would type it before a command."""
    return " ".join(f"{key}={value}" for key, value in setting.items()) or "as this processor is"


def lacking(setting: Mapping[str, str], has: frozenset[str]) -> str | None:
    """Return which instructions of a setting the processor lacks, by name, or None.

    Args:
        setting: Values of environment variables, by name.
        has: What `processor` returned.
    """
    for variable, value in setting.items():
        if missing := [flag for flag in NEEDED[variable][value] if flag not in has]:
            return f"{variable}={value}: this processor has no {', '.join(missing)}"
    return None


def environment(setting: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with the variables of a setting, and without the others of `NEEDED`. Threads
    that wait do not spin, because ranks and settings share the cores."""
    kept = {key: value for key, value in base.items() if key not in NEEDED}
    return {**kept, "OMP_WAIT_POLICY": "PASSIVE", "TEST_THREADS": "1", **setting}


def unheeded(setting: Mapping[str, str], given: Mapping[str, str]) -> str | None:
    """Return what torch and oneDNN use instead of a setting, or None if they follow it.

    Args:
        setting: Values of environment variables, by name.
        given: The whole environment of the new process that is asked.
    """
    command, asked = [sys.executable, "-c", _ASK], {**given, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(command, env=asked, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    for variable, (start, names) in _SHOWN.items():
        used = next((one.removeprefix(start) for one in lines if one.startswith(start)), "unknown")
        value = setting.get(variable)
        if value is not None and not used.startswith(names[value]):
            return f"{variable}={value}: what is used is {used}"
    return None


def run(setting: Mapping[str, str], has: frozenset[str], command: Sequence[str]) -> Outcome:
    """Run a command under a setting, in a new process, or say why it cannot.

    Args:
        setting: Values of environment variables, by name.
        has: What `processor` returned.
        command: The command of the tests. Its last line of output is the note.
    """
    name = name_of(setting)
    if reason := lacking(setting, has):
        return Outcome(name, "skipped", reason)
    given = environment(setting, os.environ)
    if reason := unheeded(setting, given):
        return Outcome(name, "skipped", reason)
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True)
    seconds = time.monotonic() - start
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    note = "\n".join([*failed, *lines[-1:]]) or done.stderr.strip()[-500:]
    return Outcome(name, "failed" if done.returncode else "passed", note, seconds)


def report(outcomes: Iterable[Outcome], model: str) -> str:
    """Return a table of what became of each setting."""
    rows = [f"{model}\n", "| setting | verdict | seconds | |", "|---|---|---|---|"]
    for one in outcomes:
        note = one.note.replace("\n", "<br>").replace("|", "\\|")
        seconds = f"{one.seconds:.0f}" if one.seconds else ""
        rows.append(f"| `{one.setting}` | {one.verdict} | {seconds} | {note} |")
    return "\n".join(rows)


def status(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a test failed, or if no setting ran."""
    verdicts = {one.verdict for one in outcomes}
    return int("failed" in verdicts or "passed" not in verdicts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all settings and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "tests", nargs="*", help=f"files or options for pytest; by default all marked {MARKED}"
    )
    parser.add_argument("--slow", action="store_true", help="run also those that are marked slow")
    parser.add_argument("--workers", type=int, default=2, help="settings that run at a time")
    given = parser.parse_args(arguments)
    chosen = MARKED if given.slow else f"{MARKED} and not slow"
    command = [sys.executable, "-m", "pytest", "-m", chosen, *(given.tests or files(ROOT))]
    has = processor()

    def told(setting: Mapping[str, str]) -> Outcome:
        outcome = run(setting, has, command)
        print(f"{outcome.verdict}: {outcome.setting}", file=sys.stderr, flush=True)
        return outcome

    with ThreadPoolExecutor(given.workers) as pool:  # each waits for a process of its own
        outcomes = list(pool.map(told, SETTINGS))
    print(report(outcomes, model()))
    return status(outcomes)


def files(root: Path) -> list[str]:
    """Return the test files that have the marker, so that no other is imported."""
    marked = re.compile(rf"^pytestmark = .*\bmark\.{MARKED}\b", re.MULTILINE)
    tests = sorted((root / "tests").rglob("test_*.py"))
    return [str(path.relative_to(root)) for path in tests if marked.search(path.read_text())]


if __name__ == "__main__":
    sys.exit(main())
