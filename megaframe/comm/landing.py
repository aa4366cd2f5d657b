"""The way of device tensors to the host, without a wait of the host for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from megaframe.comm import Pending


def land(pending: Sequence[Pending[Tensor]], device: torch.device) -> Callable[[], list[Tensor]]:
    """Bring tensors to the host as soon as they are there; calling the result waits for that.

    On a GPU the copies run on a stream of their own: waiting for one made on the compute stream
    would also wait for the next step, which is queued behind it.
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
    """One for all: torch has 32 in all, and those of NCCL's groups are among them."""
    return torch.cuda.Stream(device)
