"""NCCL settings: what a run sets for CUDA, NCCL and torch before it makes process groups.

Each setting is a variable of CUDA, NCCL or torch. If the environment already has it, its value
counts. docs/guides/gpu.md has the rules behind the settings, with their sources.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from megaframe.distributed.allocator_settings import configure_allocator
from megaframe.errors import UserError

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues of a device, over which its streams are spread (CUDA C++ Programming Guide,
"CUDA Environment Variables")."""
MAX_CTAS = "NCCL_MAX_CTAS"
"""Thread blocks that a transfer may occupy."""
PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
"""1: the streams of transfers have a high priority."""
REGISTER = "NCCL_LOCAL_REGISTER"
"""1: NCCL reads and writes registered buffers without copying them to its own. Its own default is
1 too, but nothing is registered unless the environment asks for it, as torch's data parallelism
does not either (torch/csrc/distributed/c10d/reducer.cpp, `DDP_DISABLE_COMM_MEM`)."""
_RANGES = {QUEUES: (1, 32), MAX_CTAS: (1, 64), PRIORITY: (0, 1), REGISTER: (0, 1)}
_DEFAULT_QUEUES = 8
"""Those that CUDA has if nothing is set."""
LINK_CTAS = 8
"""Thread blocks of a pipeline link. A receive is posted before its message is sent, and occupies
them until it comes. NCCL's own choice is one for each 14 GB/s of a network card, and two for each
NVLink between GPUs of a node (src/graph/paths.cc, `ncclTopoGetNchannels`). So this limits no card
up to 800 Gbit/s, and a link within a node need not be faster than that."""

_LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_OLDEST_NCCL = (2, 26)
_ABORT_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
}
"""What torch's own watchdogs would do when a communicator fails: end the process, write the flight
record (and end the process afterwards, or keep its group for 8 minutes), and block the group for
four times the last of these. The watch does the first two (torch 2.13, `Watchdog::runLoop` and
`HeartbeatMonitor::runLoop` in ProcessGroupNCCL.cpp)."""


@dataclass(frozen=True)
class NcclSettings:
    """What a run sets for NCCL.

    Attributes:
        link_ctas: Thread blocks of a pipeline link; None to leave them to NCCL.
        high_priority: Whether transfers start before products that have not begun.
        register: Whether to allocate gradients and values in memory that NCCL uses directly, where
            torch offers it.
        lines: For the log.
        allocator: Likewise, and on one rank too: how memory is allocated.
        warnings: For the console.
    """

    link_ctas: int | None = LINK_CTAS
    high_priority: bool = True
    register: bool = False
    lines: tuple[str, ...] = ()
    allocator: str = ""
    warnings: tuple[str, ...] = ()


def configure_nccl(streams: int | None, *, graph: bool = False) -> NcclSettings:
    """Set the variables of CUDA, NCCL and torch's allocator. Must be called before CUDA starts.

    Args:
        streams: Those of the layout (`plan.streams`); None if it is not known yet.
        graph: Whether steps are CUDA graphs.

    Raises:
        UserError: The environment has a value that is out of range.
    """
    values = {name: _read_variable(name) for name in _RANGES}
    _, most = _RANGES[QUEUES]
    default_queues = most if streams is None else min(most, max(_DEFAULT_QUEUES, streams))
    queues = values[QUEUES] or default_queues
    os.environ[QUEUES] = str(queues)
    chosen = {
        QUEUES: f"{QUEUES}={queues}, as the layout has {streams or 'up to as many'} streams",
        MAX_CTAS: f"links use up to {LINK_CTAS} thread blocks, other transfers as NCCL decides",
        PRIORITY: "transfers have streams of high priority",
        REGISTER: f"no buffers are registered with NCCL; {REGISTER}=1 does that where torch can",
    }
    for name, value in values.items():
        if value is not None:
            chosen[name] = f"{name}={value}, from the environment"
    register = values[REGISTER] == 1
    return NcclSettings(
        link_ctas=None if values[MAX_CTAS] is not None else LINK_CTAS,
        high_priority=values[PRIORITY] != 0,
        register=register,
        lines=tuple(f"nccl: {line}" for line in chosen.values()),
        allocator=configure_allocator(register=register, graph=graph),
        warnings=_warn_too_few(queues, default_queues, streams),
    )


def _warn_too_few(queues: int, default_queues: int, streams: int | None) -> tuple[str, ...]:
    """Return a warning if there are fewer hardware queues than streams."""
    if streams is None or queues >= streams:
        return ()
    mend = f"; leave it unset, or use {default_queues}" if queues < default_queues else ""
    return (
        f"warning: {QUEUES}={queues} is less than the {streams} streams of this layout: a transfer "
        "that waits for others holds up what is behind it in its hardware queue, and ranks may "
        f"wait for each other forever{mend}",
    )


def _read_variable(name: str) -> int | None:
    """Return the number that the environment has for a variable, or None."""
    text = os.environ.get(name)
    if text is None:
        return None
    least, most = _RANGES[name]
    if not text.isascii() or not text.isdigit() or not least <= int(text[:9]) <= most:
        raise UserError(
            f"{name}={text[:40]!r} in the environment is not a number from {least} to {most}; "
            "leave it unset, and the run chooses"
        )
    return int(text)


def allow_abort() -> None:
    """Tell torch to leave it to this process what happens when a communicator fails. Call this
    before process groups are made. Values that the environment already has are kept."""
    for name, value in _ABORT_VARIABLES.items():
        os.environ.setdefault(name, value)


def can_abort() -> bool:
    """Return whether torch leaves failed communicators to this process."""
    return all(
        os.environ.get(name) == value
        for name, value in _ABORT_VARIABLES.items()
        if name != "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
    )


def keep_launch_order() -> None:
    """Tell NCCL to start transfers in the order in which this process does, whatever their
    communicator. Call this before process groups are made. A value that the environment already has
    is kept."""
    os.environ.setdefault(_LAUNCH_ORDER, "1")


def launch_order_problem() -> str | None:
    """Return why NCCL does not keep the order of several communicators, or None if it does."""
    if (value := os.environ.get(_LAUNCH_ORDER)) != "1":
        setting = f"{_LAUNCH_ORDER}={value or ''}"
        return f"NCCL keeps no order among them with {setting}; use {_LAUNCH_ORDER}=1"
    version = torch.cuda.nccl.version()
    if version < _OLDEST_NCCL:
        version_in_use, least = (".".join(map(str, numbers)) for numbers in (version, _OLDEST_NCCL))
        return f"NCCL {version_in_use} keeps no order among them; use NCCL {least} or later"
    return None
