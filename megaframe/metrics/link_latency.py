"""Measures how long a message between pipeline stages takes on a free link, before the first step.

This separates waits that look alike: waiting longer than the message takes is waiting for the work
of a neighbour, which is the bubble.
"""

from __future__ import annotations

import time

import torch

from megaframe.config import RunConfig
from megaframe.distributed.collectives import Group, receive, send
from megaframe.distributed.mesh import Mesh
from megaframe.parameters.parameter import PRECISIONS

_TIMES = 5


def count_message_elements(config: RunConfig, mesh: Mesh) -> int:
    """Return the number of elements that a rank sends to the next stage for one microbatch."""
    rows = config.train.microbatch * config.train.seq // mesh.layout.context
    return -(-rows // mesh.layout.tensor) * config.model.hidden


def measure_idle_links(config: RunConfig, mesh: Mesh) -> dict[tuple[int, int], float]:
    """Return the seconds of a message in one direction, by link of this rank: half of the fastest
    round trip. All ranks call it, and measure their links in the same order."""
    found: dict[tuple[int, int], float] = {}
    message = torch.zeros(
        count_message_elements(config, mesh),
        dtype=PRECISIONS[config.train.precision].compute,
        device=mesh.device,
    )
    here = mesh.coordinate["pipeline"]
    for source, target in sorted(mesh.links):
        back = mesh.links.get((target, source))
        if source > target or back is None:
            continue
        there = mesh.links[source, target]
        out, home = (there, back) if here == source else (back, there)
        rounds = [_time_round_trip(message, out, home, first=here == source) for _ in range(_TIMES)]
        seconds = min(rounds[1:])  # in the first one the other rank may be far ahead
        for link in (there, back):
            link.traffic.take()
        found[source, target] = found[target, source] = seconds / 2
    return found


def _time_round_trip(message: torch.Tensor, out: Group, home: Group, *, first: bool) -> float:
    """Run this rank's part of a round trip, and return its seconds."""
    into = torch.empty_like(message)
    start = time.perf_counter()
    leaving = send(message, out) if first else None
    receive(into, home).wait()
    leaving = leaving or send(message, out)
    leaving.wait()
    if message.is_cuda:
        torch.cuda.synchronize(message.device)
    return time.perf_counter() - start
