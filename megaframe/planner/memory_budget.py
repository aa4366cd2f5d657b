"""Usable memory: how much of a chip's memory a run can use."""

from __future__ import annotations

from typing import Any

from megaframe.hardware.chips import Chip

OVERHEAD = 2.0 * 2**30
"""Bytes for the driver's context, communication buffers and what torch keeps for itself."""
FRAGMENTS = 0.03
"""Share of the rest that the allocator cannot use because of fragmentation."""
_CHOSEN = 0.95
"""Share of a chip's memory that a chosen layout may take; plans are good to a few percent."""


def room(chip: Chip) -> float:
    """Return the bytes that a run may use. A CPU has no driver's context."""
    overhead = 0.0 if chip.units == 1 else OVERHEAD
    return (chip.memory - overhead) * (1 - FRAGMENTS)


def leaves_room(needed: Any, chip: Chip) -> Any:
    """Return whether a layout that needs so many bytes may be chosen, elementwise for an array."""
    return needed <= _CHOSEN * chip.memory
