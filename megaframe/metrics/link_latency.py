"""Measures how long a message between pipeline stages takes on a free link, before the first step.

This separates waits that look alike: waiting longer than the message takes is waiting for the work
of a neighbour, which is the bubble.
"""

from __future__ import annotations

import time

import torch

from megaframe.config import ModelConfig, TrainConfig
from megaframe.distributed.collectives import Group, receive, send
from megaframe.distributed.mesh import Mesh
from megaframe.parameters.parameter import PRECISIONS

_TIMES = 5


def count_message_elements(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> int:
    """Return the number of elements that a rank sends to the next stage for one microbatch."""
    rows = train.microbatch * train.seq // mesh.layout.context
    return -(-rows // mesh.layout.tensor) * model.stream_width


def measure_idle_links(
    model: ModelConfig, train: TrainConfig, mesh: Mesh
) -> dict[tuple[int, int], float]:
    """Return the seconds of a message in one direction, by link of this rank: half of the fastest
    round trip. All ranks call it, and measure their links in the same order."""
    seconds_per_message: dict[tuple[int, int], float] = {}
    message = torch.zeros(
        count_message_elements(model, train, mesh),
        dtype=PRECISIONS[train.precision].compute,
        device=mesh.device,
    )
    own_coordinate = mesh.coordinate["pipeline"]
    for source, target in sorted(mesh.links):
        backward_link = mesh.links.get((target, source))
        if source > target or backward_link is None:
            continue
        forward_link = mesh.links[source, target]
        outgoing, incoming = (
            (forward_link, backward_link)
            if own_coordinate == source
            else (backward_link, forward_link)
        )
        rounds = [
            _time_round_trip(message, outgoing, incoming, first=own_coordinate == source)
            for _ in range(_TIMES)
        ]
        seconds = min(rounds[1:])  # in the first one the other rank may be far ahead
        for link in (forward_link, backward_link):
            link.traffic.take()
        seconds_per_message[source, target] = seconds_per_message[target, source] = seconds / 2
    return seconds_per_message


def _time_round_trip(
    message: torch.Tensor, outgoing: Group, incoming: Group, *, first: bool
) -> float:
    """Run this rank's part of a round trip, and return its seconds."""
    into = torch.empty_like(message)
    start = time.perf_counter()
    sending = send(message, outgoing) if first else None
    receive(into, incoming).wait()
    sending = sending or send(message, outgoing)
    sending.wait()
    if message.is_cuda:
        torch.cuda.synchronize(message.device)
    return time.perf_counter() - start
