"""Room: how much of a chip's memory a run can use, and bytes of optimizer state per element."""

from __future__ import annotations

from typing import Any

from megaframe.config.schema import OptimConfig
from megaframe.hardware.chips import Chip

OVERHEAD = 2.0 * 2**30
"""Bytes for the driver's context, communication buffers and what torch keeps for itself."""
FRAGMENTS = 0.03
"""Share of the rest that the allocator cannot use because of fragmentation."""
CHUNK, ROOMS = 1 << 21, 3
"""For data in host memory (`optim.offload`): elements of a chunk, enough that the start of a copy
costs little; and the number of chunks on the device at once: one arrives, one is computed with, one
goes back."""
_CHOSEN = 0.95
"""Share of a chip's memory that a chosen layout may take; plans are good to a few percent."""


def room(chip: Chip) -> float:
    """Return the bytes that a run may use. A CPU has no driver's context."""
    overhead = 0.0 if chip.units == 1 else OVERHEAD
    return (chip.memory - overhead) * (1 - FRAGMENTS)


def leaves_room(needed: Any, chip: Chip) -> Any:
    """Return whether a layout that needs so many bytes may be chosen, elementwise for an array."""
    return needed <= _CHOSEN * chip.memory


def moments(optim: OptimConfig) -> int:
    """Return the number of moments that the optimizer keeps per element; for Muon, of matrices."""
    return {"adamw": 2, "lion": 1}.get(optim.name, 1 if optim.momentum != 0 else 0)


def moment_width(optim: OptimConfig, master: int) -> float:
    """Return the bytes of a moment per element; int8 has an fp32 scale for each 256 elements."""
    return {"bf16": 2.0, "int8": 1.0 + 4 / 256}.get(optim.state, float(master))


def state_width(optim: OptimConfig, master: int) -> float:
    """Return the bytes of optimizer state per element; for Muon, of matrices."""
    kept = moments(optim) * moment_width(optim, master)
    return kept + (master if optim.ema is not None else 0)


def passing_width(optim: OptimConfig, master: int, *, weights: bool) -> float:
    """Return the bytes per element that offloaded state takes in a room on the device.

    weights: whether the master weights come with it. Muon's rooms are those of AdamW, which updates
    whatever is not a matrix and has more state per element.
    """
    name = "adamw" if optim.name == "muon" else optim.name
    width = state_width(optim.model_copy(update={"name": name}), master)
    return width + (master if weights else 0)
