"""All kernels by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaframe_kernels import (
    activation,
    adamw,
    attention,
    cross_entropy,
    linear_cross_entropy,
    norm,
    rotary,
    square_sum,
)
from megaframe_kernels.kernel import Kernel

_MODULES = (
    attention,
    norm,
    activation,
    rotary,
    cross_entropy,
    linear_cross_entropy,
    adamw,
    square_sum,
)
KERNELS: Mapping[str, Kernel] = MappingProxyType({m.KERNEL.name: m.KERNEL for m in _MODULES})
"""What `select` chooses implementations for."""
