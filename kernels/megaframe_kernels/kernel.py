"""Kernel: a fast function beside its slow truth.

The reference is plain torch: it runs on any device in any precision, is differentiable, and is what
every implementation is held to. An implementation says why it cannot run instead of that it cannot,
so that whoever misses speed is told what to mend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megaframe_kernels.device import INTERPRETED


class KernelError(ValueError):
    """An implementation was asked for that cannot run; the text is the whole message."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute a kernel, called as its reference is.

    missing: why this machine cannot run it at all, or None. refuses: called with the arguments;
    why it cannot run these, or None.
    """

    name: str
    run: Callable[..., Any]
    missing: Callable[[], str | None]
    refuses: Callable[..., str | None]

    def why_not(self, *arguments: Any, **options: Any) -> str | None:
        """What stands in the way of running with these arguments, or None."""
        return self.missing() or self.refuses(*arguments, **options)

    def supports(self, *arguments: Any, **options: Any) -> bool:
        """Whether it can run with these arguments."""
        return self.why_not(*arguments, **options) is None


@dataclass(frozen=True)
class Kernel:
    """A function, its implementations by name, and how exact they are.

    constant: the c of the tolerance; about how many roundings lie between an input and an output.
    """

    name: str
    reference: Callable[..., Any]
    implementations: Mapping[str, Implementation]
    constant: float = 4.0

    def tolerance(self, dtype: torch.dtype, length: int) -> float:
        """Error that is allowed relative to the largest element of a row of the true result.

        c (eps(dtype) + eps(fp32) sqrt(length)): the result is rounded to `dtype`, and before that
        sums of `length` terms are accumulated in fp32, whose errors grow as a random walk.
        """
        accumulated = torch.finfo(torch.float32).eps * math.sqrt(max(length, 1))
        return self.constant * (torch.finfo(dtype).eps + accumulated)

    def names(self) -> tuple[str, ...]:
        """Of all that can be asked for."""
        return (*self.implementations, REFERENCE)


REFERENCE = "reference"
"""The name of a kernel's reference among its implementations."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What Triton kernels compute with; fp64 is left to the references."""


def never(*_: Any, **__: Any) -> None:
    """Refuses nothing."""


def refuse_types(*tensors: Tensor | None) -> str | None:
    """Why a Triton kernel cannot take these tensors, or None."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in FLOATS:
            return f"{tensor.dtype} is not one of {', '.join(map(str, FLOATS))}"
    return refuse_place(*tensors)


def refuse_place(*tensors: Tensor | None) -> str | None:
    """Why a Triton kernel cannot reach these tensors, or None."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cpu" and not INTERPRETED:
            return "tensors are on the CPU (TRITON_INTERPRET=1 runs Triton there, slowly)"
        if tensor is not None and tensor.device.type not in ("cpu", "cuda"):
            return f"tensors are on {tensor.device.type}"
    return None
