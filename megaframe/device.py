"""Device: where this process computes, and what it asks of the host for that: memory that the C
library keeps, and processors that are not taken away when another rank wakes."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

import torch
from torch import Tensor

from megaframe.errors import UserError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt (malloc.h)."""


def device_of(wanted: str) -> torch.device:
    """The torch device of this process; on a GPU machine one per local rank. shared: the first GPU
    for all of them, or the CPU where there is none."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UserError("run.device=cuda, but torch sees no GPU here; use run.device=cpu or auto")
    if wanted == "cpu" or not available:
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if wanted == "shared":
        local = 0
    if local >= count:
        raise UserError(
            f"local rank {local} has no GPU: this machine has {count}; "
            f"start torchrun with --nproc-per-node {count} or fewer, or let ranks share one "
            "(run.device=shared: slow, for trying layouts)"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def brought(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; to a GPU by way of pinned memory, for of what comes from any other the host
    would wait for the copy."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def be_deterministic() -> None:
    """Let torch take deterministic algorithms only. What is made before, as a handle of cuBLAS or a
    group over NCCL, does not know of it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Else whatever is made empty would be filled first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Let the C library keep up to 128 MiB of what a step frees, where it is glibc.

    By default it returns the end of the heap to the system and takes it back, page by page, in
    every step: 5 to 10% of a small model's time. Tensors over 10 MiB have pages of their own, which
    leaves no holes in the heap (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 10 << 20)
        mallopt(_TRIM_THRESHOLD, 128 << 20)


def finish_before_others() -> None:
    """Let a process that wakes wait until this one pauses or its time is up, where the system is
    Linux; what this thread starts from now on is asked the same.

    By default a rank that gets a message takes the processor of the one that sends it, which then
    holds the lock of a connection of gloo, on which its own second thread spins: where ranks are
    more than processors, that took half of their time (docs/log.md).
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # some containers allow no change
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
