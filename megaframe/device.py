"""Device: where this process computes, and two settings of the host for it: the C library keeps
freed memory, and a rank that wakes does not preempt another one."""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

import torch
from torch import Tensor

from megaframe.errors import UserError

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of glibc's mallopt (malloc.h)."""


def device_of(wanted: str) -> torch.device:
    """Return the torch device of this process and make it current.

    wanted: `cpu`, `cuda` or `auto` (a GPU for each local rank), or `shared` (the first GPU for all
    of them). `auto` and `shared` use the CPU if torch sees no GPU.
    Raises `UserError` if `cuda` is wanted and there is no GPU, or if this local rank has none.
    """
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
    """Return x on a device. A copy to a GPU goes through pinned memory, because the host would wait
    for a copy from pageable memory."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def be_deterministic() -> None:
    """Make torch use deterministic algorithms only. Call it before anything is created that reads
    this setting once, such as a cuBLAS handle or an NCCL group."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Otherwise torch would fill every empty tensor first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def keep_freed_memory() -> None:
    """Make glibc keep up to 128 MiB of the memory that a step frees. Does nothing with another C
    library.

    By default glibc returns the end of the heap to the system in every step and takes it back page
    by page, which costs a small model 5 to 10% of its time. Tensors over 10 MiB get pages of their
    own, which leaves no holes in the heap (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 10 << 20)
        mallopt(_TRIM_THRESHOLD, 128 << 20)


def finish_before_others() -> None:
    """On Linux, use batch scheduling, so that a process that wakes up waits until this one pauses
    or its time slice ends. Threads and processes that this thread starts later inherit the policy.

    By default a rank that gets a message preempts the rank that sends it. The sender then holds the
    lock of a gloo connection while its own second thread spins on that lock. With more ranks than
    processors, this took half of their time (docs/log.md).
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # some containers allow no change
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
