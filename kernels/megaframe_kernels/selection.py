"""Which implementation runs: by a committed table of measurements, or by name.

The table `choices.json` lists implementations per chip and kernel, fastest first, and is meant to
be written from what `benchmarks/gpu/gpu_check.py` measures. Nothing is timed when a run starts, so
two runs on the same kind of chip compute alike. The first implementation in the list that can run
is used, and the reasons why earlier ones are not are kept. An implementation requested by name
either runs or is an error.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaframe_kernels.kernel import REFERENCE, Implementation, Kernel, KernelError, refuse_nothing

TABLE = Path(__file__).with_name("choices.json")
UNMEASURED = "unmeasured"
"""Entry of the table for chips that have none of their own."""


OnRefusal = Callable[[str, str, str], None]
"""Takes the names of an implementation that refused arguments and of the next one to try, and the
reason in between: (implementation, reason, next)."""


@dataclass(frozen=True)
class KernelChoice:
    """Calls a kernel by the first implementation of `order` that takes the arguments, else by its
    reference.

    Attributes:
        kernel: The kernel.
        order: Implementations available on this machine, best first.
        absent: The preferred ones that are not used, each with the reason.
        named: Whether the implementation was requested by name.
        on_refusal: Is called for every implementation that refuses arguments, unless it was
            requested by name.
    """

    kernel: Kernel
    order: tuple[Implementation, ...]
    absent: Mapping[str, str]
    named: bool = False
    on_refusal: OnRefusal = refuse_nothing

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Compute the kernel; the arguments are those of its reference."""
        return self.find(*arguments, **options)(*arguments, **options)

    def find(self, *arguments: Any, **options: Any) -> Callable[..., Any]:
        """Return the function that runs for these arguments.

        Raises:
            KernelError: If an implementation requested by name does not take them.
        """
        for number, implementation in enumerate(self.order):
            reason = implementation.refuses(*arguments, **options)
            if reason is None:
                return implementation.run
            if self.named:
                request = f"{self.kernel.name}={implementation.name}"
                raise KernelError(f"{request} cannot run here: {reason}")
            following = self.order[number + 1 : number + 2]
            instead = following[0].name if following else REFERENCE
            self.on_refusal(implementation.name, reason, instead)
        return self.kernel.reference

    def explain_fallback(self, *arguments: Any, **options: Any) -> str | None:
        """Return why the reference runs for these arguments, or None if it does not."""
        reasons = dict(self.absent)
        for implementation in self.order:
            reason = implementation.refuses(*arguments, **options)
            if reason is None:
                return None
            reasons[implementation.name] = reason
        refusals = [f"not {name}: {reason}" for name, reason in reasons.items()]
        return f"{self.kernel.name} {', '.join(refusals) or 'has no faster implementation'}"

    @property
    def active(self) -> str:
        """Name of what runs if it takes the arguments."""
        return self.order[0].name if self.order else REFERENCE


def select(
    kernels: Mapping[str, Kernel],
    overrides: Mapping[str, str] | None = None,
    chip: str | None = None,
) -> dict[str, KernelChoice]:
    """Return a choice for each kernel.

    Args:
        kernels: Those that will be used; if an order names CUDA kernels, they are built here.
        overrides: Names of implementations, by kernel.
        chip: A key of the table, by default `read_chip_name()`.

    Raises:
        KernelError: If an override names something that does not exist or is not available here.
    """
    overrides = overrides or {}
    for name in overrides:
        _check(name, name, tuple(kernels))
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    # A committed table, not a timing at start: two runs on the same chip compute alike.
    measured = table.get(chip or read_chip_name(), {})
    order = {name: measured.get(name) or table[UNMEASURED].get(name, []) for name in kernels}
    return {
        name: _override(kernel, overrides[name], order[name])
        if name in overrides
        else _choose(kernel, order[name])
        for name, kernel in kernels.items()
    }


def _choose(kernel: Kernel, order: Sequence[str]) -> KernelChoice:
    present, absent = [], {}
    for name in order:
        # What comes after the reference is slower than it.
        if name == REFERENCE:
            break
        reason = kernel.implementations[name].explain_absence()
        if reason is None:
            present.append(kernel.implementations[name])
        # Only those before the first that is present would have been used.
        elif not present:
            absent[name] = reason
    return KernelChoice(kernel, tuple(present), absent)


def _override(kernel: Kernel, name: str, order: Sequence[str]) -> KernelChoice:
    _check(f"{kernel.name}={name}", name, kernel.list_names())
    faster = order[: order.index(name)] if name in order else order
    absent = dict.fromkeys(faster, f"{name} is requested by name")
    if name == REFERENCE:
        return KernelChoice(kernel, (), absent, named=True)
    implementation = kernel.implementations[name]
    reason = implementation.explain_absence()
    if reason is not None:
        raise KernelError(f"{kernel.name}={name} cannot run here: {reason}")
    return KernelChoice(kernel, (implementation,), absent, named=True)


def read_chip_name() -> str:
    """Return the GPU's name as a key of the table: h200 for NVIDIA H200, cpu without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    words = torch.cuda.get_device_name().lower().split()
    return "-".join(w for w in words if w not in ("nvidia", "geforce", "tesla"))


def _check(subject: str, name: str, valid: tuple[str, ...]) -> None:
    if name not in valid:
        near = difflib.get_close_matches(name, valid, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise KernelError(f"{subject}: no {name!r}; {hint}valid are {', '.join(valid)}")
