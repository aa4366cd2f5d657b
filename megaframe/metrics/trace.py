"""Trace: every action and transfer of every rank in some steps, as a file for ui.perfetto.dev.

Ranks note times on their own clocks. Only when the last traced step is over do they send them to
the first rank, converted to its clock, so a traced step takes no longer than another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from megaframe.config import MetricsConfig
from megaframe.distributed.mesh import Mesh
from megaframe.distributed.object_collectives import gather_bytes, measure_clock_offset
from megaframe.io.output_files import OutputFiles
from megaframe.metrics.timers import StepTimeline, StepTimer
from megaframe.schedule import ActionKind
from megaframe.schedule.draw_trace import make_metadata_event, make_slice_event

TRACE_FILE = "trace.json"
_LANES = ("compute", "send", "recv", "grad", "parts of the step")
_PARTS = _LANES.index("parts of the step")

Slice = tuple[str, str, str, float, float]
"""Lane, name, category, start and end in seconds."""


class Tracer:
    """Traces the steps in `metrics.trace`. All ranks make the same calls.

    Args:
        config: The run.
        mesh: The mesh of its ranks.
        timer: The timer of the steps.
        start_step: The step from which this process continues.
        files: Those of the run, on the first rank.
    """

    def __init__(
        self,
        metrics: MetricsConfig,
        mesh: Mesh,
        timer: StepTimer,
        start_step: int,
        files: OutputFiles | None,
    ) -> None:
        self._files = files
        self._steps = {step for step in metrics.trace if step > start_step}
        self._mesh, self._timer = mesh, timer
        self._splits: list[tuple[int, StepTimeline]] = []
        timer.records_actions = start_step + 1 in self._steps

    def end(self, step: int, split: StepTimeline) -> None:
        """End step `step`; after the last traced step, write the trace."""
        if step in self._steps:
            self._splits.append((step, split))
            self._steps.discard(step)
            if not self._steps:
                self.close()
        self._timer.records_actions = step + 1 in self._steps

    def close(self) -> None:
        """Write the steps traced so far."""
        splits, self._splits = self._splits, []
        self._steps = set()
        if not splits:
            return
        world, device = self._mesh.world, self._mesh.device
        offset = measure_clock_offset(world, device)
        base = self._timer.clock()
        splits[0][1].between(base, base)  # waits until a GPU has come here
        host = time.perf_counter_ns() + offset
        own_slices = [
            event
            for step, timeline in splits
            for event in _trace_slices(timeline, step, base, host)
        ]
        gathered = gather_bytes(json.dumps(own_slices).encode(), world, device)
        if gathered:
            self._write([json.loads(data) for data in gathered])

    def _write(self, ranks: list[list[Slice]]) -> None:
        start = min(begin for slices in ranks for _, _, _, begin, _ in slices)
        events = [
            event for rank, slices in enumerate(ranks) for event in _trace_events(rank, slices)
        ]
        for event in events:
            if "ts" in event:
                event["ts"] -= start * 1e6
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
        assert self._files is not None, "the first rank gathers"
        self._files.write(TRACE_FILE, text)


def _trace_slices(split: StepTimeline, step: int, base: Any, host: int) -> Iterator[Slice]:
    """Yield what a rank traced in one step, in seconds on the first rank's clock."""

    def to_seconds(mark: Any) -> float:
        return (host - split.between(mark, base)) / 1e9

    before = to_seconds(split.begin)
    for part, mark in split.marks:
        now = to_seconds(mark)
        if now > before:
            yield _LANES[_PARTS], part, f"step {step}", before, now
        before = now
    for name, kind, start, end in split.actions:
        lane = ActionKind(kind).lane if kind in ActionKind.__members__ else "compute"
        yield lane, name, kind, to_seconds(start), to_seconds(end)
    for transfer in split.transfers:
        yield (
            f"over {transfer.axes}",
            f"{transfer.size:,} bytes",
            transfer.axes,
            to_seconds(transfer.started),
            to_seconds(transfer.ended),
        )


def _trace_events(rank: int, slices: list[Slice]) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank. Slices of one thread must not overlap, so transfers that are in
    flight at the same time are on several threads."""
    yield make_metadata_event(rank, 0, "process_name", name=f"rank {rank}")
    yield make_metadata_event(rank, 0, "process_sort_index", sort_index=rank)
    busy: dict[str, list[float]] = {lane: [] for lane in _LANES}
    slices_in_rows = []
    for lane, name, category, start, end in sorted(slices, key=lambda event: (event[3], -event[4])):
        until = busy.setdefault(lane, [])
        apart = lane not in _LANES
        row = next((i for i, time in enumerate(until) if not apart or time <= start), len(until))
        until[row:] = [end] if row == len(until) else [end, *until[row + 1 :]]
        slices_in_rows.append((lane, row, name, category, start, end))
    threads = {(lane, row) for lane, row, *_ in slices_in_rows}
    order = [*_LANES, *sorted(set(busy) - set(_LANES))]
    numbers = {
        key: number
        for number, key in enumerate(
            sorted(threads, key=lambda thread: (order.index(thread[0]), thread[1]))
        )
    }
    for (lane, row), number in numbers.items():
        name = lane if not row else f"{lane} ({row + 1})"
        yield make_metadata_event(rank, number, "thread_name", name=name)
        yield make_metadata_event(rank, number, "thread_sort_index", sort_index=number)
    for lane, row, name, category, start, end in slices_in_rows:
        yield make_slice_event(rank, numbers[lane, row], name, category, start, end)
