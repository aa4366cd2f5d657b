"""Collectives of data that are not tensors: bytes, rows of any length, and plain data as JSON.

Data from other ranks is never unpickled. `gather_bytes` and `measure_clock_offset` are for data
that is looked at later; they are not fast enough for a step to wait for.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from torch import Tensor

from megaframe.distributed.collectives import Group, all_gather, receive, send


def gather_json(group: Group, value: Any) -> list[Any]:
    """Return each rank's JSON value, in rank order. The group must communicate host tensors."""
    texts = gather_rows(group, torch.tensor([*json.dumps(value).encode()], dtype=torch.uint8))
    return [json.loads(text.numpy().tobytes()) for text in texts]


def gather_rows(group: Group, row: Tensor) -> list[Tensor]:
    """Return each rank's row [any length], in rank order."""
    lengths = all_gather(torch.tensor([len(row)]), group).wait().tolist()
    if not any(lengths):
        return [row] * group.size
    # With rows of one length the group may pass them around a ring, and need not connect all pairs.
    padded = row.new_zeros(max(lengths))
    padded[: len(row)] = row
    rows = all_gather(padded, group).wait().view(group.size, -1)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


_ROUNDS = 8


def gather_bytes(data: bytes, group: Group, device: torch.device) -> list[bytes]:
    """Gather the data of each rank on the first one.

    The first rank receives from one rank after the other, so it never has more than one in flight.

    Args:
        data: The data of this rank; may be empty.
        group: The ranks.
        device: Device of the tensors that carry the data.

    Returns:
        The data of each rank, in order, on the first rank, and an empty list elsewhere.
    """
    if group.handle is None:
        return [data]
    size = torch.tensor([len(data)], device=device)
    sizes = all_gather(size, group).wait().tolist()
    if group.index:
        if data:
            send(_bytes_to_tensor(data, device), group, to=0).wait()
        return []
    collected = [data]
    for other, length in enumerate(sizes[1:], 1):
        into = torch.empty(length, dtype=torch.uint8, device=device)
        if length:
            receive(into, group, source=other).wait()
        collected.append(into.cpu().numpy().tobytes())
    return collected


def measure_clock_offset(group: Group, device: torch.device) -> int:
    """Return the nanoseconds to add to this rank's `time.perf_counter_ns` to get that of the first
    rank. Taken from the fastest of several round trips, of which each way is assumed to take half.
    All ranks must call this."""
    if group.handle is None:
        return 0
    clock = torch.zeros(1, dtype=torch.int64, device=device)
    if group.index == 0:
        for other in range(1, group.size):
            for _ in range(_ROUNDS):
                receive(clock, group, source=other).wait()
                int(clock)  # on a GPU, `wait` only blocks the stream
                clock.fill_(time.perf_counter_ns())
                send(clock, group, to=other).wait()
        return 0
    best: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        sent_at = time.perf_counter_ns()
        send(clock, group, to=0).wait()
        receive(clock, group, source=0).wait()
        first_rank_time = int(clock)
        received_at = time.perf_counter_ns()
        time_and_offset = received_at - sent_at, first_rank_time - (sent_at + received_at) // 2
        # The first round trip also waits for the first rank to reach this rank.
        best = time_and_offset if best is None or time_and_offset < best else best
    assert best is not None
    return best[1]


def _bytes_to_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
