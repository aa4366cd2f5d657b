"""AdamW and the sum of squares over parameters that are not contiguous, in a few launches for all.

A trainer with flat shards needs neither. If parameters and gradients are separate tensors, one
launch for each would cost more than the work itself, so the CUDA kernels take 64 tensors at a time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megaframe_kernels import adamw, cuda_library, square_sum
from megaframe_kernels.cuda_library import KINDS, missing_library
from megaframe_kernels.installed import missing_apex, missing_nothing
from megaframe_kernels.kernel import Implementation, Kernel, never, refuse_types


def reference_adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    **options: Any,
) -> tuple[Tensor, ...]:
    """Run `adamw.reference` for each parameter, in place. Returns means, squares, weights and
    copies.

    copies: none, or one for each parameter. options: those of `adamw.reference`, without seed and
    first.
    """
    for index in range(len(weights)):
        copy = copies[index] if copies else None
        given = weights[index], grads[index], means[index], squares[index], copy
        adamw.reference(*given, **options)
    return (*means, *squares, *weights, *copies)


@torch.library.custom_op(
    "megaframe::scattered_adamw_", mutates_args=("weights", "means", "squares", "copies")
)
def _step_op(
    weights: list[Tensor],
    grads: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    copies: list[Tensor],
    divisor: Tensor | None,
    skip: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    if not weights:
        return
    lists = (weights, grads, means, squares, copies)
    kept = [cuda_library.addresses(tensors) if tensors else None for tensors in lists]
    pointers = (ctypes.c_void_p * len(lists))(
        *(None if array is None else ctypes.addressof(array) for array in kept)
    )
    types = (weights, grads, means, copies or weights)
    kinds = (ctypes.c_int * len(types))(*(KINDS[tensors[0].dtype] for tensors in types))
    cuda_library.call(
        "megaframe_adamw",
        weights[0],
        pointers,
        cuda_library.lengths(weights),
        len(weights),
        kinds,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        1.0 - lr * weight_decay,
        lr / (1.0 - beta1**step),
        1.0 / math.sqrt(1.0 - beta2**step),
        None if divisor is None else divisor.data_ptr(),
        None if skip is None else skip.data_ptr(),
    )


def run_cuda_adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compute the reference in CUDA C++."""
    lists = (list(weights), list(grads), list(means), list(squares), list(copies))
    _step_op(*lists, divisor, skip, lr, beta1, beta2, eps, weight_decay, step)
    return (*means, *squares, *weights, *copies)


def run_triton_adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute the reference in Triton, with one launch per parameter."""
    for index in range(len(weights)):
        copy = copies[index] if copies else None
        given = weights[index], grads[index], means[index], squares[index], copy
        adamw.run_triton(*given, **options)
    return (*means, *squares, *weights, *copies)


def run_torch_adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    step: int,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute the reference by torch's fused AdamW and copies. This divides the gradients in
    place."""
    number = torch.full((), step, dtype=torch.float32, device=weights[0].device)
    torch._fused_adamw_(
        list(weights),
        list(grads),
        list(means),
        list(squares),
        [],
        [number] * len(weights),  # only read, so one tensor serves all
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=skip,
        **options,
    )
    if copies:
        torch._foreach_copy_(list(copies), list(weights))
    return (*means, *squares, *weights, *copies)


def run_apex_adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    copies: Sequence[Tensor] = (),
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> tuple[Tensor, ...]:
    """Compute the reference by NVIDIA apex and copies."""
    import amp_C

    overflow = torch.zeros(1, dtype=torch.int32, device=weights[0].device)
    lists = [list(grads), list(weights), list(means), list(squares)]
    numbers = (lr, beta1, beta2, eps, step, 1, 1, weight_decay)  # decoupled decay, bias corrected
    amp_C.multi_tensor_adam(65536, overflow, lists, *numbers)
    if copies:
        torch._foreach_copy_(list(copies), list(weights))
    return (*means, *squares, *weights, *copies)


def reference_square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of x^2 over all elements of all tensors, an fp64 scalar."""
    sums = [square_sum.reference(t) for t in tensors]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


@torch.library.custom_op("megaframe::scattered_square_sum", mutates_args=())
def _sum_op(tensors: list[Tensor]) -> Tensor:
    sizes = cuda_library.lengths(tensors)
    blocks = cuda_library.count("megaframe_square_sum_blocks", sizes, len(tensors))
    sums = torch.empty(blocks, dtype=torch.float64, device=tensors[0].device)
    kind = KINDS[tensors[0].dtype]
    given = cuda_library.addresses(tensors), sizes, len(tensors), kind, sums.data_ptr()
    cuda_library.call("megaframe_square_sum", tensors[0], *given)
    return sums.sum()


@_sum_op.register_fake
def _(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty((), dtype=torch.float64)


def run_cuda_square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the reference in CUDA C++."""
    return _sum_op(list(tensors))


def run_triton_square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the reference in Triton, with one launch per tensor."""
    return torch.stack([square_sum.KERNEL.implementations["triton"].run(t) for t in tensors]).sum()


def run_torch_square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the reference by torch's norms of many tensors, which holds if no square
    overflows."""
    norms = torch._foreach_norm(list(tensors), 2, torch.float32)
    return torch.stack(norms).double().square().sum()


def _refuse_lists(*lists: Sequence[Tensor]) -> str | None:
    given = [t for tensors in lists for t in tensors]
    if not given:
        return "there is no tensor"
    if any(not t.is_contiguous() for t in given):
        return "a tensor is not contiguous"
    if any(len({t.dtype for t in tensors}) > 1 for tensors in lists):
        return "the tensors of a list are of different types"
    if len({t.device for t in given}) > 1:
        return "the tensors are on different devices"
    return None


def _triton_refuses(*lists: Sequence[Tensor], **_: Any) -> str | None:
    return _refuse_lists(*lists) or refuse_types(*(t for tensors in lists for t in tensors))


def _cuda_refuses(*lists: Sequence[Tensor], **_: Any) -> str | None:
    reason = _refuse_lists(*lists)
    if reason is None and any(t[0].dtype not in KINDS for t in lists if t):
        return "the CUDA kernels take fp32, bf16 and fp16"
    if reason is None and lists[0][0].device.type != "cuda":
        return "tensors are not on a GPU"
    return reason


def _cuda_adamw_refuses(
    *lists: Sequence[Tensor],
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
    **_: Any,
) -> str | None:
    if any(t is not None and t.dtype != torch.float32 for t in (divisor, skip)):
        return "divisor and skip must be fp32"
    if lists[2] and lists[3] and lists[2][0].dtype != lists[3][0].dtype:
        return "both moments must be of one type"
    reason = _cuda_refuses(*lists)
    if reason is None:
        away = (t for t in (divisor, skip) if t is not None and t.device != lists[0][0].device)
        reason = next((f"divisor or skip is on {t.device}" for t in away), None)
    return reason


def _library_refuses(*lists: Sequence[Tensor], **_: Any) -> str | None:
    reason = _refuse_lists(*lists)
    if reason is None and len({tensors[0].dtype for tensors in lists[:4]}) > 1:
        return "weights, gradients and moments must be of one type"
    return reason


def _apex_refuses(
    *lists: Sequence[Tensor], divisor: Tensor | None = None, skip: Tensor | None = None, **_: Any
) -> str | None:
    if divisor is not None or skip is not None:
        return "it neither divides gradients nor skips a step"
    return _library_refuses(*lists)


ADAMW = Kernel(
    "scattered_adamw",
    reference_adamw,
    {
        "cuda": Implementation("cuda", run_cuda_adamw, missing_library, _cuda_adamw_refuses),
        "triton": Implementation("triton", run_triton_adamw, missing_nothing, _triton_refuses),
        "torch": Implementation("torch", run_torch_adamw, missing_nothing, _library_refuses),
        "apex": Implementation("apex", run_apex_adamw, missing_apex, _apex_refuses),
    },
    constant=8.0,
)
SQUARE_SUM = Kernel(
    "scattered_square_sum",
    reference_square_sum,
    {
        "cuda": Implementation("cuda", run_cuda_square_sum, missing_library, _cuda_refuses),
        "triton": Implementation("triton", run_triton_square_sum, missing_nothing, _triton_refuses),
        "torch": Implementation("torch", run_torch_square_sum, missing_nothing, never),
    },
)
