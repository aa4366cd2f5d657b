"""Draw a timeline as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

A rank is a process. Its compute lane is one thread. Its send and receive lanes have a thread for
each peer, because slices of one thread must not overlap, and only transfers on the same directed
edge never do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megaframe.schedule.costs import Seconds
from megaframe.schedule.simulate import Timeline

_COMPUTE = 0


def draw_trace(timeline: Timeline) -> str:
    """Draw the timeline as the text of a JSON trace: a slice for each action and transfer, and an
    arrow from the send of each tensor to its receive and to its consumer."""
    events = [
        *_list_name_events(timeline),
        *_list_compute_events(timeline),
        *_list_transfer_events(timeline),
    ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))


def _get_send_thread(peer: int) -> int:
    return 1 + 2 * peer


def _get_receive_thread(peer: int) -> int:
    return 2 + 2 * peer


def _to_microseconds(seconds: Seconds) -> float:
    return float(seconds * 1_000_000)


def _list_name_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    threads = {(rank, _COMPUTE): "compute" for rank in range(len(timeline.encoded.steps))}
    for transfer in timeline.transfers:
        source, target = transfer.source, transfer.target
        threads[source, _get_send_thread(target)] = f"send to rank {target}"
        threads[target, _get_receive_thread(source)] = f"recv from rank {source}"
    for rank in range(len(timeline.encoded.steps)):
        yield make_metadata_event(rank, _COMPUTE, "process_name", name=f"rank {rank}")
        yield make_metadata_event(rank, _COMPUTE, "process_sort_index", sort_index=rank)
    for (rank, thread), name in sorted(threads.items()):
        yield make_metadata_event(rank, thread, "thread_name", name=name)
        yield make_metadata_event(rank, thread, "thread_sort_index", sort_index=thread)


def make_metadata_event(
    rank: int, thread: int, kind: str, **arguments: str | int
) -> dict[str, Any]:
    """Return the event that names or sorts a rank or one of its threads.

    Args:
        rank: Number of the process in the viewer.
        thread: Number of the row within the rank.
        kind: Name of the event in the format.
        **arguments: Its arguments.
    """
    return {"ph": "M", "pid": rank, "tid": thread, "name": kind, "args": arguments}


def _list_compute_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, intervals in enumerate(timeline.compute):
        for interval in intervals:
            arguments = {
                "stage": interval.action.stage,
                "chunk": interval.chunk,
                "microbatch": interval.action.microbatch,
            }
            category = "BW" if interval.fused else interval.action.kind.value
            event = make_slice_event(
                rank, _COMPUTE, str(interval.action), category, interval.start, interval.end
            )
            yield event | {"args": arguments}


def make_slice_event(
    rank: int, thread: int, name: str, category: str, start: Seconds, end: Seconds
) -> dict[str, Any]:
    """Return the event for something with a duration.

    Viewers choose its colour by name and category, so an action has the same colour in every trace.

    Args:
        rank: Number of the process in the viewer.
        thread: Number of the row within the rank.
        name: Text on the slice.
        category: Kind of the action.
        start, end: Seconds from the beginning of the trace.
    """
    begin = _to_microseconds(start)
    duration = _to_microseconds(end) - begin
    place = {"pid": rank, "tid": thread, "ts": begin, "dur": duration}
    return {"ph": "X", "name": name, "cat": category, **place}


def _list_transfer_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    starts = {interval.action: interval.start for row in timeline.compute for interval in row}
    for number, transfer in enumerate(timeline.transfers):
        kind = transfer.producer.kind.value
        lanes = (
            (transfer.source, _get_send_thread(transfer.target)),
            (transfer.target, _get_receive_thread(transfer.source)),
        )
        for direction, action, (rank, thread) in zip(
            ("SEND", "RECV"), (transfer.producer, transfer.consumer), lanes, strict=True
        ):
            name = f"{action.stage}{direction}_{kind}{action.microbatch}"
            yield make_slice_event(rank, thread, name, direction, transfer.start, transfer.end)
        used = (transfer.target, _COMPUTE)
        for phase, (rank, thread), at in (
            ("s", lanes[0], transfer.start),
            ("t", lanes[1], transfer.start),
            ("f", used, starts[transfer.consumer]),
        ):
            place = {"pid": rank, "tid": thread, "ts": _to_microseconds(at)}
            arrow = {"ph": phase, "id": number, "name": "tensor", "cat": "transfer", **place}
            yield arrow | ({"bp": "e"} if phase == "f" else {})
