"""Kernel: a fast function together with its slow reference.

The reference is plain torch: it runs on any device in any precision, is differentiable, and defines
what every implementation must compute. An implementation does not just say that it cannot run but
why, so that users know what to fix.
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
    """An implementation was requested that cannot run. The text is the whole message."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute a kernel, with the signature of its reference.

    Attributes:
        name: Of the implementation.
        run: Computes the kernel.
        explain_absence: Returns why this machine cannot run it at all, or None.
        refuses: Takes the arguments and returns why it cannot run with them, or None.
    """

    name: str
    run: Callable[..., Any]
    explain_absence: Callable[[], str | None]
    refuses: Callable[..., str | None]

    def explain_refusal(self, *arguments: Any, **options: Any) -> str | None:
        """Return why it cannot run with these arguments, or None."""
        return self.explain_absence() or self.refuses(*arguments, **options)

    def supports(self, *arguments: Any, **options: Any) -> bool:
        """Return whether it can run with these arguments."""
        return self.explain_refusal(*arguments, **options) is None


@dataclass(frozen=True)
class Kernel:
    """A function, its implementations by name, and how exact they are.

    Attributes:
        name: Of the kernel.
        reference: Computes it in plain torch.
        implementations: By name.
        constant: The c of the tolerance, about the number of roundings between an input and an
            output.
    """

    name: str
    reference: Callable[..., Any]
    implementations: Mapping[str, Implementation]
    constant: float = 4.0

    def compute_tolerance(self, dtype: torch.dtype, length: int) -> float:
        """Return the error allowed relative to the largest element of a row of the true result.

        It is c (eps(dtype) + eps(fp32) sqrt(length)): the result is rounded to `dtype`, and before
        that sums of `length` terms are accumulated in fp32, whose errors grow as a random walk.
        """
        accumulated = torch.finfo(torch.float32).eps * math.sqrt(max(length, 1))
        return self.constant * (torch.finfo(dtype).eps + accumulated)

    def list_names(self) -> tuple[str, ...]:
        """Return the names that a user can request."""
        return (*self.implementations, REFERENCE)


REFERENCE = "reference"
"""Name by which the reference is requested."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that Triton kernels take; fp64 is left to the references."""


def refuse_nothing(*_: Any, **__: Any) -> None:
    """Refuse nothing."""


def refuse_types(*tensors: Tensor | None) -> str | None:
    """Return why a Triton kernel cannot take these tensors, or None."""
    on_gpu = True
    for tensor in tensors:
        if tensor is not None:
            if tensor.dtype not in FLOATS:
                return f"{tensor.dtype} is not one of {', '.join(map(str, FLOATS))}"
            on_gpu = on_gpu and tensor.is_cuda
    return None if on_gpu else refuse_place(*tensors)


def refuse_place(*tensors: Tensor | None) -> str | None:
    """Return why a Triton kernel cannot access these tensors, or None."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cpu" and not INTERPRETED:
            return "tensors are on the CPU (TRITON_INTERPRET=1 runs Triton there, slowly)"
        if tensor is not None and tensor.device.type not in ("cpu", "cuda"):
            return f"tensors are on {tensor.device.type}"
    return None
