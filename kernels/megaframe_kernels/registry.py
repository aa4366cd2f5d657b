"""All kernels by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaframe_kernels import (
    activation,
    adamw,
    attention,
    fp8,
    grouped,
    grouped_fp8,
    loss,
    norm,
    permute,
    rotary,
    router,
    square_sum,
)
from megaframe_kernels.kernel import Kernel

_ALL = (
    norm.KERNEL,
    activation.KERNEL,
    rotary.KERNEL,
    attention.KERNEL,
    attention.BACKWARD,
    loss.KERNEL,
    adamw.KERNEL,
    square_sum.KERNEL,
    router.KERNEL,
    permute.ORDER,
    permute.PERMUTE,
    permute.UNPERMUTE,
    grouped.KERNEL,
    grouped.GRADIENT,
    fp8.QUANTISE,
    fp8.SCALED_PRODUCT,
    grouped_fp8.QUANTISE_EXPERTS,
    grouped_fp8.QUANTISE_COLUMNS,
    grouped_fp8.KERNEL,
    grouped_fp8.GRADIENT,
)
KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _ALL})
"""All kernels, from which `select` chooses implementations."""
