"""All kernels by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megaframe_kernels import block_codes, loss
from megaframe_kernels.attention import attention
from megaframe_kernels.elementwise import activation, norm, qkv_rotary, rotary
from megaframe_kernels.experts import (
    expert_order,
    grouped_gradient,
    grouped_product,
    permute,
    router,
)
from megaframe_kernels.fp8 import (
    grouped_fp8,
    grouped_fp8_gradient,
    grouped_quantize,
    quantize,
    scaled_product,
)
from megaframe_kernels.kernel import Kernel
from megaframe_kernels.recurrent import recurrence
from megaframe_kernels.sparse_attention import chosen_latents
from megaframe_kernels.update import adamw, square_sum

_ALL = (
    norm.KERNEL,
    activation.KERNEL,
    rotary.KERNEL,
    qkv_rotary.KERNEL,
    attention.KERNEL,
    attention.BACKWARD,
    loss.KERNEL,
    adamw.KERNEL,
    square_sum.KERNEL,
    router.KERNEL,
    expert_order.ORDER,
    permute.PERMUTE,
    permute.UNPERMUTE,
    grouped_product.KERNEL,
    grouped_gradient.KERNEL,
    quantize.QUANTISE,
    scaled_product.KERNEL,
    grouped_quantize.QUANTISE_EXPERTS,
    grouped_quantize.QUANTISE_COLUMNS,
    grouped_fp8.KERNEL,
    grouped_fp8_gradient.KERNEL,
    recurrence.DELTA_RULE,
    recurrence.SSD,
    chosen_latents.KERNEL,
    chosen_latents.SHARES,
    block_codes.KERNEL,
)
KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _ALL})
"""All kernels, from which `select` chooses implementations."""
