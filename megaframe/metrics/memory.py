"""Memory: the peak of a rank, and the message if its memory was not enough."""

from __future__ import annotations

import pickle
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from megaframe.errors import UserError
from megaframe.io.regular_file import write_file

_ADVICE = {
    "weights": "parallel.zero=3 or more parallel.tensor or parallel.pipeline ranks divide weights, "
    "and optim.offload=true keeps those in master precision on the host",
    "gradients": "parallel.zero=2 divides gradients over data ranks",
    "optimizer": "parallel.zero=1 divides the optimizer's state, optim.state=int8 makes it smaller "
    "and optim.offload=true keeps it on the host",
    "buffers": "parallel.zero=3 lends values and gradients to a block at a time",
    "activations": "a smaller train.microbatch, train.recompute=full, or more parallel.tensor or "
    "parallel.context ranks make activations smaller",
}


def measure_peak_memory(device: torch.device) -> float:
    """Return the most bytes held so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def read_allocator_metrics(device: torch.device) -> dict[str, float]:
    """Return the bytes that torch's allocator took from a GPU, and how many of them were unused
    pieces of blocks that it cannot return (fragmentation), both peak values; empty on a CPU."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    names = {"reserved_bytes": "reserved_bytes", "fragmented_bytes": "inactive_split_bytes"}
    return {name: float(stats[f"{of}.all.peak"]) for name, of in names.items()}


def read_memory_metrics(bytes_by_kind: Mapping[str, int], device: torch.device) -> dict[str, float]:
    """Return what a rank reports about its memory: its peak, and what it holds by kind."""
    return {
        "memory_bytes": measure_peak_memory(device),
        **{f"held/{k}": v for k, v in bytes_by_kind.items()},
    }


def explain_out_of_memory(
    rank: int, bytes_by_kind: Mapping[str, int], device: torch.device, folder: Path
) -> UserError:
    """Return the error for a device without enough memory: what held it, and how to reduce the two
    largest kinds.

    Args:
        rank: This rank.
        bytes_by_kind: Bytes of what stays in memory, by kind; the rest of the peak is activations.
        device: The device.
        folder: Where to write, on a GPU, the allocator's figures and all blocks.
    """
    activations = max(0, int(measure_peak_memory(device)) - sum(bytes_by_kind.values()))
    kinds = {**bytes_by_kind, "activations": activations}
    order = sorted(kinds, key=lambda kind: -kinds[kind])
    sizes = ", ".join(f"{kind} {kinds[kind] / 2**30:.2f} GiB" for kind in order if kinds[kind])
    advice = "; ".join(_ADVICE[kind] for kind in order[:2] if kind in _ADVICE)
    text = f"rank {rank} ran out of memory. At its peak it held {sizes}: {advice}"
    if device.type == "cuda":
        path = folder / f"memory-rank-{rank}.txt"
        with suppress(OSError):  # a full disk must not hide this message
            write_file(path, torch.cuda.memory_summary(device), inside=folder)
            blocks = pickle.dumps(torch.cuda.memory._snapshot())
            write_file(path.with_suffix(".pickle"), blocks, inside=folder)
            text += f"; details in {path}; all blocks for pytorch.org/memory_viz are next to it"
    return UserError(text)
