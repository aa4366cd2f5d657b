"""What islands exchange: bytes and seconds of a synchronisation, and what of them is exposed."""

from __future__ import annotations

import math

import numpy as np

from megaframe.architecture.traffic import count_message_bytes
from megaframe.config.sync import SyncConfig
from megaframe.hardware.chips import DTYPE_BYTES
from megaframe.layout import Layout
from megaframe.planner.data_parallel_times import ParameterLoad
from megaframe.planner.machine import (
    Machine,
    Number,
    compute_axis_span,
    find_outermost_tier,
)

_LENGTH, _SHARE = 1 << 20, 0.01
_LITTLE = 0.1
"""Share of a step that islands may wait without the link being the limit."""


def compute_sync_bytes_per_element(sync: SyncConfig, precision: str) -> float:
    """Return the bytes of a message per element of a matrix."""
    width, share = max(4, DTYPE_BYTES[precision]), sync.compress_keep or _SHARE
    return count_message_bytes(sync.compress, _LENGTH, width, share) / _LENGTH


def count_sent_messages(sync: SyncConfig, islands: int) -> float:
    """Return how many messages of all its elements a rank sends in a synchronisation: all parts to
    their owners, and the sums back; or one to a server, which sends another one back."""
    return 1.0 if sync.server is not None else 2 * (islands - 1) / islands


def count_own_elements(machine: Machine, load: ParameterLoad) -> Number:
    """Return the parameters that a rank synchronises: its own part of those of its stages."""
    sizes = machine.sizes
    stage = sizes.tensor * sizes.context * sizes.data
    copies = sizes.data_replicate * sizes.islands
    of_experts = stage / (sizes.expert * sizes.expert_tensor * copies)
    return (load.dense + load.tables) / sizes.shard + load.experts / np.maximum(1.0, of_experts)


def estimate_fragment_seconds(machine: Machine, elements: Number) -> Number:
    """Return the seconds in which one fragment travels. Its parts are summed by their owners, and
    the sums are sent back.

    Args:
        machine: The links.
        elements: What a rank synchronises of all fragments.
    """
    sync, precision = machine.config.sync, machine.config.train.precision
    size = compute_sync_bytes_per_element(sync, precision) * elements / sync.fragments
    if sync.server is not None:
        size = 2 * size  # all of it goes and comes, where one of two islands keeps half
    return machine.estimate_exchange_seconds(size, "islands") + machine.estimate_collective_seconds(
        "all_gather", size, "islands"
    )


def estimate_exposed_sync_seconds(machine: Machine, load: ParameterLoad, step: Number) -> Number:
    """Return the seconds of a step, in the mean, that ranks wait for other islands.

    Args:
        machine: The links, and the layout.
        load: The rank's parameters.
        step: Seconds of a step without that.
    """
    sync = machine.config.sync
    each = estimate_fragment_seconds(machine, count_own_elements(machine, load))
    return sync.fragments / sync.every * np.maximum(0.0, each - sync.delay * step)


def explain_islands(machine: Machine, layout: Layout, elements: float, step: float) -> str:
    """Return a sentence about what islands exchange, and from which settings on they do not wait.

    Args:
        machine: The links.
        layout: The sizes of the axes.
        elements: What a rank synchronises.
        step: Seconds of a step without waits for islands.
    """
    config, sync = machine.config, machine.config.sync
    has_server = sync.server is not None
    islands = sync.islands if has_server else layout.islands
    size = compute_sync_bytes_per_element(sync, config.train.precision) * elements
    sent = count_sent_messages(sync, islands) * size
    tokens = config.train.global_batch * config.train.seq
    distance, ranks = compute_axis_span("islands", layout)
    tier = find_outermost_tier(machine.cluster, distance, 2 if has_server else ranks)
    each = float(estimate_fragment_seconds(machine, elements))
    exposed = sync.fragments / sync.every * max(0.0, each - sync.delay * step)
    text = (
        f"{islands} islands synchronise every {sync.every} steps over {tier.name}"
        + (f" with server {sync.server}" if has_server else "")
        + ": a rank sends "
        f"{sent / 1e6:.3g} MB each time, {sent * layout.world / sync.every / tokens:.3g} bytes per "
        f"token of all ranks, and waits {exposed / (step + exposed):.1%} of the time"
    )
    if exposed == 0:
        return text
    hidden = math.ceil(each / step)
    if hidden < sync.every:
        return f"{text}; sync.delay={hidden} hides it"
    enough = math.ceil(sync.fragments * each / (_LITTLE * step))
    return f"{text}; from sync.every={enough} on it is less than a tenth of a step"
