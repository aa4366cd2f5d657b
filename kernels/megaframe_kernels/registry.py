"""All kernels by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaframe_kernels import (
    activation,
    adamw,
    attention,
    cross_entropy,
    fp8,
    grouped,
    grouped_fp8,
    linear_cross_entropy,
    loss,
    norm,
    permute,
    rotary,
    router,
    scattered,
    square_sum,
)
from megaframe_kernels.kernel import Kernel

_ALL = (
    norm.KERNEL,
    activation.KERNEL,
    rotary.KERNEL,
    attention.KERNEL,
    attention.BACKWARD,
    cross_entropy.KERNEL,
    loss.KERNEL,
    linear_cross_entropy.KERNEL,
    adamw.KERNEL,
    square_sum.KERNEL,
    scattered.ADAMW,
    scattered.SQUARE_SUM,
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
