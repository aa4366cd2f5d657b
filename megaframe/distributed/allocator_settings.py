"""Settings of torch's allocator for GPUs: segments that grow, so that memory does not fragment.

A run whose shapes change from microbatch to microbatch, or which comes near to all of its memory,
loses some of it to blocks between which nothing fits. Segments of virtual addresses grow in place
instead (docs/guides/gpu.md has the rules).
"""

from __future__ import annotations

import os

SETTING = "PYTORCH_ALLOC_CONF"
"""The variable that torch 2.9 and later read, when the first memory of a device is asked for."""
_NAMES = (SETTING, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def configure_allocator(*, register: bool = False, graph: bool = False) -> str:
    """Let segments of a GPU's memory grow, unless the environment says how they are allocated. Must
    be called before CUDA starts.

    Args:
        register: Buffers are registered with NCCL, from a pool that knows no such segments.
        graph: Steps are CUDA graphs. NCCL registers the buffers of transfers that a graph records,
            and cannot do that with such segments (NCCL_GRAPH_REGISTER).

    Returns:
        A line for the log.
    """
    for name in _NAMES:
        if (value := os.environ.get(name)) is not None:
            return f"allocator: {name}={value}, from the environment"
    if register or graph:
        what = "buffers that are registered with NCCL" if register else "CUDA graphs"
        return f"allocator: segments of fixed sizes, as {what} need"
    os.environ[SETTING] = _EXPANDABLE
    return f"allocator: {SETTING}={_EXPANDABLE}"
