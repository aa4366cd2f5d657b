"""Which implementation runs: by a committed table of measurements, or by name.

The table `choices.json` has an order per chip and kernel, fastest first, written from what
`benchmarks/gpu_check.py` measured; nothing is timed when a run starts, so that two runs on one kind
of chip compute alike. Of the order the first implementation that can run is taken, and of those
that cannot the reason is kept. One that was asked for by name runs or is an error.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaframe_kernels.kernel import REFERENCE, Implementation, Kernel, KernelError

TABLE = Path(__file__).with_name("choices.json")
UNMEASURED = "unmeasured"
"""The entry of the table for chips that have none."""


@dataclass(frozen=True)
class Choice:
    """Calls a kernel by the first of `order` that can run. named: asked for by name."""

    kernel: Kernel
    order: tuple[str, ...]
    named: bool = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """As the kernel's reference."""
        return self.find(*arguments, **options)(*arguments, **options)

    def find(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """What runs for these arguments."""
        for name in self.order:
            if name == REFERENCE:
                break
            implementation = self.kernel.implementations[name]
            reason = implementation.why_not(*arguments, **options)
            if reason is None:
                return implementation.run
            if self.named:
                raise KernelError(f"kernels.{self.kernel.name}={name} cannot run here: {reason}")
        return self.kernel.reference

    def missing(self) -> dict[str, str]:
        """Of the implementations before the first that is here, what keeps them away."""
        found: dict[str, str] = {}
        for name in self.order:
            reason = None if name == REFERENCE else self._of(name).missing()
            if reason is None:
                break
            found[name] = reason
        return found

    def active(self) -> str:
        """The first implementation that this machine has."""
        return next(n for n in self.order if n == REFERENCE or self._of(n).missing() is None)

    def _of(self, name: str) -> Implementation:
        return self.kernel.implementations[name]


def select(
    kernels: Mapping[str, Kernel],
    overrides: Mapping[str, str] | None = None,
    chip: str | None = None,
) -> dict[str, Choice]:
    """A choice for each kernel.

    overrides: names of implementations by kernel. chip: as `chip_name` gives it, by default that of
    this machine. Raises KernelError for an override that names nothing.
    """
    overrides = overrides or {}
    for name in overrides:
        _check(f"kernels.{name}", name, tuple(kernels))
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    measured = table.get(chip or chip_name(), {})
    chosen = {}
    for name, kernel in kernels.items():
        if name in overrides:
            _check(f"kernels.{name}={overrides[name]}", overrides[name], kernel.names())
            chosen[name] = Choice(kernel, (overrides[name],), named=True)
        else:
            order = measured.get(name) or table[UNMEASURED].get(name, [])
            chosen[name] = Choice(kernel, (*(n for n in order if n != REFERENCE), REFERENCE))
    return chosen


def chip_name() -> str:
    """A GPU's name as a key: h200 for NVIDIA H200; cpu without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    words = torch.cuda.get_device_name().lower().split()
    return "-".join(w for w in words if w not in ("nvidia", "geforce", "tesla"))


def _check(what: str, name: str, valid: tuple[str, ...]) -> None:
    if name not in valid:
        near = difflib.get_close_matches(name, valid, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise KernelError(f"{what}: no {name!r}; {hint}valid are {', '.join(valid)}")
