"""Draw a timeline as text: one row per rank, time to the right.

If the costs are exact and the timeline is short enough, a column is one tick and its cell names the
action. Otherwise the picture is scaled to the width, and each column is one letter for whatever
fills most of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megaframe.schedule.costs import Seconds
from megaframe.schedule.simulate import ActionInterval, Timeline

_MOST_BANDS = 4
_IDLE = "."


def label_action(timeline: Timeline, interval: ActionInterval) -> str:
    """Return the label of an action in drawings.

    It includes the stage only if ranks have several stages.
    """
    action, ranks = interval.action, len(timeline.encoded.steps)
    stage = action.stage if len(timeline.encoded.rank_of) > ranks else ""
    return f"{stage}{action.kind.value}{action.microbatch}"


def summarize_timeline(timeline: Timeline) -> str:
    """Return size, time, bubble and memory in one line."""
    encoded = timeline.encoded
    ranks, stages = len(encoded.steps), len(encoded.rank_of)
    return (
        f"{ranks} ranks, {stages} stages, {encoded.microbatches} microbatches; "
        f"time {format_number(timeline.time)}, bubble {float(timeline.bubble):.2%}, "
        f"activations {format_number(max(timeline.peak_activations))}"
    )


def format_number(value: Seconds) -> str:
    """Format a number with up to 6 digits."""
    return f"{float(value):.6g}"


def draw_text(timeline: Timeline, width: int = 120) -> str:
    """Draw the timeline in lines of about `width` characters."""
    names = [f"rank {rank}" for rank in range(len(timeline.encoded.steps))]
    margin = max(map(len, names)) + 1
    space = max(20, width - margin)
    rows = [
        [label_action(timeline, interval) for interval in intervals]
        for intervals in timeline.compute
    ]
    cell = 1 + max(len(text) for row in rows for text in row)
    per_band = space // cell
    columns = timeline.time / timeline.tick if timeline.tick else math.inf
    if columns > per_band * _MOST_BANDS:
        lines = [f"a column is {format_number(timeline.time / space)} s, {_IDLE} is waiting"]
        lines += [f"{n:<{margin}}{_draw_scaled(timeline, r, space)}" for r, n in enumerate(names)]
        return "\n".join(lines)
    grid = [list(_draw_cells(timeline, rank, row, cell)) for rank, row in enumerate(rows)]
    lines = []
    for start in range(0, max(1, int(columns)), per_band):
        lines.append(f"from {format_number(start * (timeline.tick or 0))} s")
        for name, cells in zip(names, grid, strict=True):
            lines.append(f"{name:<{margin}}{''.join(cells[start : start + per_band])}".rstrip())
    return "\n".join(lines)


def _draw_cells(timeline: Timeline, rank: int, labels: list[str], width: int) -> Iterator[str]:
    """Yield one cell per tick: the label of an action, then `-` while it continues."""
    tick, at = timeline.tick, 0
    assert tick is not None
    for text, interval in zip(labels, timeline.compute[rank], strict=True):
        start, end = int(interval.start / tick), int(interval.end / tick)
        yield from [_IDLE.ljust(width)] * (start - at)
        bar = text.ljust((end - start) * width - 1, "-" if end > start + 1 else " ") + " "
        yield from (bar[i * width : (i + 1) * width] for i in range(end - start))
        at = end
    yield from [_IDLE.ljust(width)] * (int(timeline.time / tick) - at)


def _draw_scaled(timeline: Timeline, rank: int, columns: int) -> str:
    """Return one letter per column: the kind of work, or waiting, that fills most of it."""
    filled: list[dict[str, float]] = [{} for _ in range(columns)]
    scale = columns / float(timeline.time) if timeline.time else 0.0
    for interval in timeline.compute[rank]:
        start, end = float(interval.start) * scale, float(interval.end) * scale
        kind = interval.action.kind.value
        for column in range(int(start), min(columns, math.ceil(end))):
            part = min(end, column + 1) - max(start, column)
            filled[column][kind] = filled[column].get(kind, 0.0) + part
    for parts in filled:
        parts[_IDLE] = 1 - sum(parts.values())
    return "".join(max(parts, key=lambda kind: parts[kind]) for parts in filled)
