"""Bytes of any length from all ranks of a group to its first one, and what their clocks differ by;
for what is looked at later, not for what a step waits for."""

from __future__ import annotations

import time

import torch

from megaframe.comm import Group, all_gather, receive, send

_ROUNDS = 8


def collect(data: bytes, group: Group, device: torch.device) -> list[bytes]:
    """What each rank gives, in their order, on the first rank; nothing elsewhere. One after the
    other, so that the first rank never has more than one in flight."""
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
    """Nanoseconds to add to this rank's `time.perf_counter_ns` to have that of the first rank: from
    the fastest of several questions, as half of its way each way. All ranks call it."""
    if group.handle is None:
        return 0
    told = torch.zeros(1, dtype=torch.int64, device=device)
    if group.index == 0:
        for other in range(1, group.size):
            for _ in range(_ROUNDS):
                receive(told, group, source=other).wait()
                int(told)  # a GPU's wait is its stream's
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
        # The first answer comes when the first rank has come to this one.
        best = found if best is None or found < best else best
    assert best is not None
    return best[1]


def _tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
