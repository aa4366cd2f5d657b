"""Collect bytes of any length on the first rank of a group, and compare the ranks' clocks. For data
that is looked at later; not fast enough for a step to wait for."""

from __future__ import annotations

import time

import torch

from megaframe.distributed.collectives import Group, all_gather, receive, send

_ROUNDS = 8


def collect(data: bytes, group: Group, device: torch.device) -> list[bytes]:
    """Return the data of each rank, in order, on the first rank, and an empty list elsewhere. The
    first rank receives from one rank after the other, so it never has more than one in flight."""
    if group.handle is None:
        return [data]
    size = torch.tensor([len(data)], device=device)
    sizes = all_gather(size, group).wait().tolist()
    if group.index:
        if data:
            send(_tensor(data, device), group, to=0).wait()
        return []
    found = [data]
    for other, length in enumerate(sizes[1:], 1):
        into = torch.empty(length, dtype=torch.uint8, device=device)
        if length:
            receive(into, group, source=other).wait()
        found.append(into.cpu().numpy().tobytes())
    return found


def clock_offset(group: Group, device: torch.device) -> int:
    """Return the nanoseconds to add to this rank's `time.perf_counter_ns` to get that of the first
    rank. Taken from the fastest of several round trips, of which each way is assumed to take half.
    All ranks must call this."""
    if group.handle is None:
        return 0
    told = torch.zeros(1, dtype=torch.int64, device=device)
    if group.index == 0:
        for other in range(1, group.size):
            for _ in range(_ROUNDS):
                receive(told, group, source=other).wait()
                int(told)  # on a GPU, `wait` only blocks the stream
                told.fill_(time.perf_counter_ns())
                send(told, group, to=other).wait()
        return 0
    best: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        asked = time.perf_counter_ns()
        send(told, group, to=0).wait()
        receive(told, group, source=0).wait()
        theirs = int(told)
        answered = time.perf_counter_ns()
        found = answered - asked, theirs - (asked + answered) // 2
        # The first round trip also waits for the first rank to reach this rank.
        best = found if best is None or found < best else best
    assert best is not None
    return best[1]


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
