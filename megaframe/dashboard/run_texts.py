"""The texts of a run folder: the end of its log, and what its model wrote at some steps.

Both are read from the end of their file, up to a limit. A link is not followed: a folder of
somebody else could show any file of this machine as its log.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from megaframe.dashboard.downsample import list_bucket_starts
from megaframe.io.run_files import LOG_FILE, SAMPLES_FILE
from megaframe.io.untrusted import open_file, sanitize_text

_LONGEST_LINE = 2_000
_LONGEST_SAMPLE, _LONGEST_PROMPT = 4_000, 400
_LARGEST = 1 << 23
"""Bytes of the end of a file with samples that are read."""


def read_log(folder: Path, limit: int) -> dict[str, Any]:
    """Return the last lines of a run's log, of at most `limit` bytes, and how many bytes come
    before them; empty without a log."""
    text, skipped = _read_end(folder / LOG_FILE, limit)
    lines = [_show(line, _LONGEST_LINE) for line in text.splitlines()]
    return {"lines": lines, "skipped": skipped} if lines else {}


def read_samples(folder: Path, limit: int) -> list[dict[str, Any]]:
    """Return a run's samples, in the order of their steps: objects with `step`, `prompt` and
    `text`. If they have more than about `limit` characters, steps are left out evenly."""
    text, _ = _read_end(folder / SAMPLES_FILE, _LARGEST)
    by_step: dict[int, dict[str, str]] = {}
    for step, prompt, sample in _parse_samples(text):
        if by_step and step < next(reversed(by_step)):
            # A resumed run writes again what comes after its checkpoint.
            by_step = {other: kept for other, kept in by_step.items() if other < step}
        by_step.setdefault(step, {})[prompt] = sample
    size = sum(len(sample) for samples in by_step.values() for sample in samples.values())
    steps = list(by_step)
    kept = list_bucket_starts(len(steps), max(1, int(len(steps) * limit / max(size, limit))))
    return [
        {"step": step, "prompt": prompt, "text": sample}
        for step in dict.fromkeys([*(steps[place] for place in kept), *steps[-1:]])
        for prompt, sample in by_step[step].items()
    ]


def measure_texts(folder: Path) -> int:
    """Return the bytes of both files, which grow when something is written."""
    total = 0
    for name in (LOG_FILE, SAMPLES_FILE):
        with suppress(OSError):
            total += os.lstat(folder / name).st_size
    return total


def _parse_samples(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield step, prompt and text of the lines that have them."""
    for line in text.splitlines():
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(record, dict):
            step, prompt, sample = (record.get(key) for key in ("step", "prompt", "text"))
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53:
                continue
            if isinstance(prompt, str) and isinstance(sample, str):
                yield step, _show(prompt, _LONGEST_PROMPT), _show(sample, _LONGEST_SAMPLE)


def _read_end(path: Path, limit: int) -> tuple[str, int]:
    """Return the whole lines within the last `limit` bytes of a file, and how many bytes come
    before them; nothing of a file that is missing, a link, or not a regular file."""
    try:
        with open_file(path, inside=path.parent) as file:
            size = file.seek(0, os.SEEK_END)
            start = file.seek(max(0, size - limit))
            data = file.read(limit)
    except OSError:
        return "", 0
    if start:
        _, _, data = data.partition(b"\n")
    return data.decode(errors="replace"), size - len(data) if start else 0


def _show(text: str, most: int) -> str:
    """Return a text as it can be shown, of at most `most` characters."""
    shown = text if len(text) <= most else f"{text[:most]} ... ({len(text):,} characters)"
    return sanitize_text(shown.replace("\r\n", "\n").expandtabs(4))
