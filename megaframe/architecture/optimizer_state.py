"""Bytes of optimizer state per parameter, and how offloaded state passes through the device."""

from __future__ import annotations

from megaframe.config.optim import OptimConfig
from megaframe.config.part_calls import call_part
from megaframe.config.parts import OptimizerPart

OFFLOAD_CHUNK = 1 << 21
"""Elements of a chunk of state in host memory (`optim.offload`): enough that the start of a copy
costs little."""
OFFLOAD_BUFFERS = 3
"""Chunks on the device at once: one arrives, one is computed with, one goes back."""


def count_moments(optim: OptimConfig) -> int:
    """Return the number of moments that the optimizer keeps per element; for Muon, of matrices."""
    if isinstance(optim.name, OptimizerPart):
        return call_part(optim.name, "count_moments", int)
    return {"adamw": 2, "lion": 1}.get(optim.name, 1 if optim.momentum != 0 else 0)


def compute_moment_bytes(optim: OptimConfig, master: int) -> float:
    """Return the bytes of one moment per element.

    Args:
        optim: `state` is the type of the moments; int8 has an fp32 scale for each 256 elements.
        master: bytes of an element in master precision.
    """
    return {"bf16": 2.0, "int8": 1.0 + 4 / 256}.get(optim.state, float(master))


def compute_state_bytes(optim: OptimConfig, master: int) -> float:
    """Return the bytes of optimizer state per element, including a moving average of the weights;
    for Muon, of matrices.

    Args:
        optim: The optimizer.
        master: Bytes of an element in master precision.
    """
    moments = count_moments(optim) * compute_moment_bytes(optim, master)
    return moments + (master if optim.ema is not None else 0)


def offload_bytes_per_element(optim: OptimConfig, master: int, *, weights: bool) -> float:
    """Return the bytes per element that offloaded state takes in a buffer on the device.

    Args:
        optim: Muon's buffers are those of AdamW, which updates whatever is not a matrix and has
            more state per element.
        master: bytes of an element in master precision.
        weights: whether the master weights come with the state.
    """
    name = "adamw" if optim.name == "muon" else optim.name
    state = compute_state_bytes(optim.model_copy(update={"name": name}), master)
    return state + (master if weights else 0)
