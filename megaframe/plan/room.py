"""Room: what of a chip's memory a run can have."""

from __future__ import annotations

from megaframe.config.schema import Optim
from megaframe.plan.chips import Chip

OVERHEAD = 2.0 * 2**30
"""Bytes of the driver's context, of communication buffers and of what torch keeps for itself."""
FRAGMENTS = 0.03
"""Share of the rest that an allocator cannot give, because what is free is in pieces."""


def room(chip: Chip) -> float:
    """Bytes that a run's own memory may take. A CPU has no such context."""
    overhead = 0.0 if chip.units == 1 else OVERHEAD
    return (chip.memory - overhead) * (1 - FRAGMENTS)


def state_width(optim: Optim, master: int) -> float:
    """Bytes of an optimizer's state for each element; those of matrices for muon."""
    moment = {"bf16": 2.0, "int8": 1.0 + 4 / 256}.get(optim.state, float(master))
    moments = {"adamw": 2, "lion": 1, "sgd": 1 if optim.momentum != 0 else 0, "muon": 1}[optim.name]
    return moments * moment + (master if optim.ema is not None else 0)
