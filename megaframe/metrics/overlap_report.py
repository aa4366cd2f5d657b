"""Finds the transfers of a GPU that nothing hides, in a trace written by torch's profiler."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megaframe.errors import UserError
from megaframe.io.untrusted import open_file

MOST_BYTES = 256 << 20
"""Largest unpacked trace that is read; a step of a large model takes a sixth of it."""
_COPIES = ("gpu_memcpy", "gpu_memset")


class Interval(NamedTuple):
    """When something ran on a device (start and end in microseconds), and its name."""

    start: float
    end: float
    name: str = ""


@dataclass(frozen=True)
class DeviceOverlap:
    """Seconds of one device.

    Attributes:
        device: The device's number.
        span: From the start of the first operation to the end of the last; it is the sum of
            compute, exposed communication, exposed copies and idle time.
        compute: While compute runs.
        communication: All of it, whatever runs meanwhile.
        exposed_communication: While no compute runs.
        copies: All of them, whatever runs meanwhile.
        exposed_copies: While neither compute nor communication runs.
        idle: While nothing runs.
        gaps: The longest idle times.
    """

    device: int
    span: float
    compute: float
    communication: float
    exposed_communication: float
    copies: float
    exposed_copies: float
    idle: float
    gaps: tuple[IdleGap, ...] = ()


@dataclass(frozen=True)
class IdleGap:
    """A time in which a device is idle, between the operations `before` and `after`."""

    seconds: float
    before: str
    after: str


def measure_overlap(path: Path, gaps: int = 0) -> list[DeviceOverlap]:
    """Return one `DeviceOverlap` for each device, in order.

    Args:
        path: A trace (Chrome's JSON, with or without gzip).
        gaps: Most gaps to list for a device, the longest ones.

    Raises:
        UserError: If it is no trace, or has no events of a GPU.
    """
    spans: dict[int, dict[str, list[Interval]]] = {}
    events = _read_events(path)
    for device, kind, span in _read_device_intervals(path, events):
        spans.setdefault(device, {}).setdefault(kind, []).append(span)
    if not spans:
        raise UserError(
            f"{path} has {len(events)} events and none of a GPU; profile a step on one "
            "(run.device=cuda, metrics.profile=[10])"
        )
    return [_measure_device(device, spans[device], gaps) for device in sorted(spans)]


def _measure_device(device: int, by_kind: dict[str, list[Interval]], gaps: int) -> DeviceOverlap:
    compute = merge_intervals(by_kind.get("compute", ()))
    with_communication = merge_intervals([*compute, *by_kind.get("communication", ())])
    everything = merge_intervals([*with_communication, *by_kind.get("copies", ())])
    busy = [_sum_lengths(spans) for spans in (compute, with_communication, everything)]
    span = everything[-1].end - everything[0].start
    every = sorted(span for spans in by_kind.values() for span in spans)
    return DeviceOverlap(
        device,
        span / 1e6,
        busy[0] / 1e6,
        _sum_lengths(merge_intervals(by_kind.get("communication", ()))) / 1e6,
        (busy[1] - busy[0]) / 1e6,
        _sum_lengths(merge_intervals(by_kind.get("copies", ()))) / 1e6,
        (busy[2] - busy[1]) / 1e6,
        (span - busy[2]) / 1e6,
        tuple(_find_longest_gaps(every, gaps)),
    )


def merge_intervals(spans: Iterable[Interval]) -> list[Interval]:
    """Return the times in which at least one of the spans runs, in order."""
    merged: list[Interval] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(Interval(span.start, span.end))
    return merged


def _sum_lengths(spans: Sequence[Interval]) -> float:
    return sum(span.end - span.start for span in spans)


def _find_longest_gaps(spans: Sequence[Interval], most: int) -> Iterator[IdleGap]:
    """Yield the longest gaps between spans, longest first. spans: sorted by their starts."""
    gaps, last = [], spans[0]
    for span in spans[1:]:
        if span.start > last.end:
            gaps.append(IdleGap((span.start - last.end) / 1e6, last.name, span.name))
        last = max(last, span, key=lambda span: span.end)
    yield from sorted(gaps, key=lambda gap: -gap.seconds)[:most]


def _read_device_intervals(
    path: Path, events: Iterable[dict[str, Any]]
) -> Iterator[tuple[int, str, Interval]]:
    """Yield the device, the kind and the time of everything that devices did."""
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X" or category not in ("kernel", *_COPIES):
            continue
        try:
            start, lasted, name = float(event["ts"]), float(event["dur"]), str(event["name"])
            device = int(event["args"]["device"])
            if not (math.isfinite(start) and 0 <= lasted < math.inf):
                raise ValueError("no time")
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(
                f"{path}: a {category} without time, name or device: {str(event)[:200]}"
            ) from None
        kind = "communication" if "nccl" in name.lower() else "compute"
        yield (
            device,
            "copies" if category in _COPIES else kind,
            Interval(start, start + lasted, name),
        )


def _read_events(path: Path) -> list[dict[str, Any]]:
    try:
        with open_file(path) as packed:
            file = gzip.GzipFile(fileobj=packed) if path.suffix == ".gz" else packed
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise UserError(
                f"{path} is a trace of over {MOST_BYTES >> 20} MiB; profile fewer steps"
            )
        document = json.loads(text)
        events = document["traceEvents"] if isinstance(document, dict) else document
    except (OSError, EOFError, ValueError, KeyError, RecursionError, zlib.error) as error:
        raise UserError(f"{path} is not a trace of torch's profiler: {error}") from None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UserError(f"{path} is not a trace of torch's profiler: no list of events in it")
    return events
