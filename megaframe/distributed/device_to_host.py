"""Copies device tensors to the host without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from megaframe.distributed.collectives import Pending


def land(pending: Sequence[Pending[Tensor]], device: torch.device) -> Callable[[], list[Tensor]]:
    """Start copying tensors to the host as soon as they are ready. Returns a function that waits
    for the copies and returns them.

    On a GPU the copies run on a separate stream. Waiting for a copy on the compute stream could
    also mean waiting for the next step, which is queued there.
    """
    if device.type != "cuda":
        return lambda: [one.wait() for one in pending]
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    host = []
    with torch.cuda.stream(stream):
        for tensor in (one.wait() for one in pending):
            tensor.record_stream(stream)
            landing = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.append(landing.copy_(tensor, non_blocking=True))
        event = stream.record_event()

    def landed() -> list[Tensor]:
        event.synchronize()
        return host

    return landed


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream for all copies. Torch has a pool of only 32 streams, which NCCL's
    groups use too."""
    return torch.cuda.Stream(device)
