"""Bytes of optimizer state per parameter, and how offloaded state passes through the device."""

from __future__ import annotations

import math

from megaframe.config.optim import OptimConfig
from megaframe.config.part_calls import call_part
from megaframe.config.parts import OptimizerPart
from megaframe.config.sync import SyncConfig

UPDATE_CHUNK = 1 << 23
"""Elements of a chunk that an update changes at once where that takes memory of its own."""
_ROUNDED = {"bf16": (20.0, 6.0), "int8": (52.0, 5.0)}
"""Bytes per element of a chunk whose moments are in fewer bits, and more for each moment, while
they are decoded, and rounded by draws that follow from the number of each element. Counted in a
step on tensors without content (tests/unit/planner/test_update_memory.py)."""
_BLOCK_SCALE = 1.0 / 32
"""More of it for the scales of 8-bit blocks."""
_MATRIX_COPIES = {"alone": 4.0, "divided": 2.75, "whole": 5.125}
"""Copies of a bucket of matrices under Muon, in the type of the computation: what is sent, what
arrives, and what Newton-Schulz iterations hold; by whether other ranks have a part of the bucket,
and whether they have its weights whole (ZeRO 0). Counted in the same way, on two ranks where more
have less."""
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


def compute_update_bytes(
    optim: OptimConfig, width: int, elements: int, matrices: int, *, zero: int, alone: bool
) -> int:
    """Return the bytes that an update takes beside weights, gradients and state on a GPU. On a CPU
    chunks are so small that they do not matter.

    Args:
        optim: The optimizer.
        width: Bytes of an element in the type of the computation.
        elements: This rank's part of the largest bucket.
        matrices: Elements of the largest bucket of matrices, for Muon.
        zero: The ZeRO stage.
        alone: Whether no other rank has a part of the buckets.
    """
    chunk = min(elements, UPDATE_CHUNK)
    per_element = 4.0 if optim.name == "lion" else 0.0  # the direction
    if optim.state in _ROUNDED:
        constant, more = _ROUNDED[optim.state]
        per_element = constant + more * count_moments(optim)
        per_element += _BLOCK_SCALE * count_moments(optim) * (optim.state == "int8")
    copies = 0.0
    if optim.name == "muon":
        copies = _MATRIX_COPIES["alone" if alone else "divided" if zero else "whole"]
    return math.ceil(max(per_element * chunk, copies * width * matrices))


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


def count_outer_copies(sync: SyncConfig) -> float:
    """Return how many numbers in master precision a rank has of each of its own parameters for
    other islands: the last synchronised weight, momentum and residual, and the difference that
    travels of one fragment. A server has the momentum."""
    if sync.server is not None:
        return 2.0
    kept = 1 + (sync.outer_momentum > 0) + (sync.compress != "none")
    return kept + 1 / sync.fragments
