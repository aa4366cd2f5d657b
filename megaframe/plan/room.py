"""Room: what of a chip's memory a run can have."""

from __future__ import annotations

from typing import Any

from megaframe.config.schema import Optim
from megaframe.plan.chips import Chip

OVERHEAD = 2.0 * 2**30
"""Bytes of the driver's context, of communication buffers and of what torch keeps for itself."""
FRAGMENTS = 0.03
"""Share of the rest that an allocator cannot give, because what is free is in pieces."""
CHUNK, ROOMS = 1 << 21, 3
"""Of what lies in the host's memory (`optim.offload`): elements that come at a time, long enough a
copy that its start costs little, and chunks on the device at once: one that comes, one that is
computed with, one that goes back."""
_CHOSEN = 0.95
"""Share of a chip's memory that a choice may take, by a plan that is good to a few percent."""


def room(chip: Chip) -> float:
    """Bytes that a run's own memory may take. A CPU has no such context."""
    overhead = 0.0 if chip.units == 1 else OVERHEAD
    return (chip.memory - overhead) * (1 - FRAGMENTS)


def leaves_room(needed: Any, chip: Chip) -> Any:
    """Whether a layout that needs so many bytes may be chosen; of an array, which of them may."""
    return needed <= _CHOSEN * chip.memory


def moments(optim: Optim) -> int:
    """Moments that an optimizer keeps of each element; those of matrices for muon."""
    return {"adamw": 2, "lion": 1}.get(optim.name, 1 if optim.momentum != 0 else 0)


def moment_width(optim: Optim, master: int) -> float:
    """Bytes of a moment of an element; int8 has a factor in fp32 for each 256."""
    return {"bf16": 2.0, "int8": 1.0 + 4 / 256}.get(optim.state, float(master))


def state_width(optim: Optim, master: int) -> float:
    """Bytes of an optimizer's state for each element; those of matrices for muon."""
    kept = moments(optim) * moment_width(optim, master)
    return kept + (master if optim.ema is not None else 0)


def passing_width(optim: Optim, master: int, *, weights: bool) -> float:
    """Bytes of each element that comes to the device, where its state lies in the host's memory;
    weights: with those. Muon has AdamW for what is no matrix, of which more comes at a time."""
    name = "adamw" if optim.name == "muon" else optim.name
    width = state_width(optim.model_copy(update={"name": name}), master)
    return width + (master if weights else 0)
