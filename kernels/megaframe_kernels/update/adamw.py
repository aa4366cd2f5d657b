"""AdamW over a flat shard in one pass: master weights, moments, and the copy that the model reads.

The clipping factor and the flag that skips a step stay on the device, so no step waits for the host
to read a norm.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megaframe_kernels.device import ceil_div, launch
from megaframe_kernels.direct import bypass_dispatcher
from megaframe_kernels.installed import check_apex, require_nothing
from megaframe_kernels.kernel import Implementation, Kernel, refuse_types

_BLOCK = 2048
_APEX_CHUNK = 65536
"""Elements of a block of apex's kernel, as its own optimizers choose."""


def run_reference(
    weights: Tensor,
    grads: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None = None,
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
    """Do one step in place (Loshchilov and Hutter 2019) and return what changed.

    g = grads / divisor; mean = beta1 mean + (1 - beta1) g; square likewise from g^2; w = w (1 - lr
    decay) - lr (mean / (1 - beta1^step)) / (sqrt(square / (1 - beta2^step)) + eps).

    Args:
        weights: Flat, as are all other tensors, which are equally long.
        grads: Gradients.
        mean: First moment.
        square: Second moment.
        copy: Receives the weights, rounded.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root.
        weight_decay: Decoupled from the gradient.
        step: Number of this step, from 1.
        divisor: Scalar on the device.
        skip: Scalar on the device; if it is 1, nothing changes.

    Returns:
        Mean, square, weights, and copy if there is one.
    """
    # fp32 at least, whatever the types of weights, gradients and moments.
    wide = torch.promote_types(weights.dtype, torch.float32)
    g = grads.to(wide) if divisor is None else grads.to(wide) / divisor.to(wide)
    new_mean = mean.to(wide).lerp(g, 1.0 - beta1)
    new_square = square.to(wide) * beta2 + g * g * (1.0 - beta2)
    scale = (new_square / (1.0 - beta2**step)).sqrt() + eps
    new_weights = weights.to(wide) * (1.0 - lr * weight_decay)
    new_weights = new_weights - lr * new_mean / (1.0 - beta1**step) / scale
    changed = [(mean, new_mean), (square, new_square), (weights, new_weights)]
    if copy is not None:
        changed.append((copy, new_weights))
    for old, new in changed:
        # Selected on the device, so the host does not wait for the flag.
        selected = old if skip is None else torch.where(skip.bool(), old, new.to(old.dtype))
        old.copy_(new if skip is None else selected)
    return tuple(old for old, _ in changed)


@triton.jit
def _step(
    weights: tl.tensor,
    grads: tl.tensor,
    mean: tl.tensor,
    square: tl.tensor,
    copy: tl.tensor,
    divisor: tl.tensor,
    skip: tl.tensor,
    length: tl.tensor,
    mean_share: tl.tensor,
    beta2: tl.tensor,
    square_share: tl.tensor,
    eps: tl.tensor,
    keep: tl.tensor,
    rate: tl.tensor,
    unbias: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """mean_share, square_share: 1 - beta1 and 1 - beta2, computed on the host because fp32 would
    lose digits. keep: 1 - lr decay. rate: lr / (1 - beta1^step). unbias: (1 -
    beta2^step)^(-1/2)."""
    if skip is not None:  # noqa: SIM102 (compiled without a flag, there is none to load)
        # The flag is read on the device, so no step waits for the host.
        if tl.load(skip) != 0.0:
            return
    # Every element is read and written by one program only, so the update in place is safe.
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    g = tl.load(grads + place, mask=inside, other=0.0).to(tl.float32)
    if divisor is not None:
        g /= tl.load(divisor).to(tl.float32)
    m = tl.load(mean + place, mask=inside, other=0.0).to(tl.float32)
    # An interpolation; mean_share is 1 - beta1, computed on the host.
    m += mean_share * (g - m)
    v = tl.load(square + place, mask=inside, other=0.0).to(tl.float32)
    v = beta2 * v + square_share * g * g
    w = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    # sqrt(v / (1 - beta2^step)) = sqrt(v) unbias, and rate holds the bias correction of m.
    w = w * keep - rate * m / (tl.sqrt(v) * unbias + eps)
    tl.store(mean + place, m.to(mean.dtype.element_ty), mask=inside)
    tl.store(square + place, v.to(square.dtype.element_ty), mask=inside)
    tl.store(weights + place, w.to(weights.dtype.element_ty), mask=inside)
    if copy is not None:
        # The copy is rounded from the fp32 result, not from weights that may be rounded already.
        tl.store(copy + place, w.to(copy.dtype.element_ty), mask=inside)


def launch_step(
    weights: Tensor,
    grads: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None,
    divisor: Tensor | None,
    skip: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Do the step of the reference by the Triton kernel. Arguments are those of `run_reference`."""
    launch(
        _step,
        (ceil_div(weights.numel(), _BLOCK),),
        weights,
        grads,
        mean,
        square,
        copy,
        divisor,
        skip,
        weights.numel(),
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        eps,
        1.0 - lr * weight_decay,
        # Bias corrections are computed on the host in fp64.
        lr / (1.0 - beta1**step),
        1.0 / math.sqrt(1.0 - beta2**step),
        BLOCK=_BLOCK,
        warps=8,
    )


_step_op = torch.library.custom_op(
    "megaframe::adamw_", launch_step, mutates_args=("weights", "mean", "square", "copy")
)
_direct_step = bypass_dispatcher(_step_op, launch_step)


def run_triton(
    weights: Tensor,
    grads: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None = None,
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
    """Compute the reference in Triton."""
    numbers = (lr, beta1, beta2, eps, weight_decay, step)
    _direct_step(weights, grads, mean, square, copy, divisor, skip, *numbers)
    return (mean, square, weights) if copy is None else (mean, square, weights, copy)


def run_torch(
    weights: Tensor,
    grads: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None = None,
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
    """Compute the reference by torch's fused AdamW and a copy. This divides the gradients in
    place."""
    torch._fused_adamw_(
        [weights],
        [grads],
        [mean],
        [square],
        [],
        # torch takes the step as a tensor. It is made on the device, without a copy from the host.
        [torch.full((), step, dtype=torch.float32, device=weights.device)],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=skip,
    )
    if copy is None:
        return mean, square, weights
    # A second pass over memory, which the Triton kernel saves.
    copy.copy_(weights)
    return mean, square, weights, copy


def run_apex(
    weights: Tensor,
    grads: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None = None,
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
    """Compute the reference by NVIDIA apex and a copy. This divides the gradients in place."""
    import amp_C

    def fill(number: float, dtype: torch.dtype) -> Tensor:
        return torch.full((1,), number, dtype=dtype, device=weights.device)

    # The form for CUDA graphs, which reads on the device by what gradients are multiplied and
    # whether to do nothing.
    amp_C.multi_tensor_adam_capturable(
        _APEX_CHUNK,
        fill(0, torch.int32) if skip is None else skip.to(torch.int32).reshape(1),
        [[grads], [weights], [mean], [square]],
        fill(lr, torch.float32),
        beta1,
        beta2,
        eps,
        fill(step, torch.int32),
        1,  # decay is decoupled from the gradient
        1,  # moments are corrected for having started at zero
        weight_decay,
        fill(1, torch.float32) if divisor is None else divisor.float().reciprocal().reshape(1),
    )
    if copy is None:
        return mean, square, weights
    copy.copy_(weights)
    return mean, square, weights, copy


def _refuse_inputs(
    weights: Tensor,
    grads: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None = None,
    *,
    divisor: Tensor | None = None,
    skip: Tensor | None = None,
    **_: Any,
) -> str | None:
    tensors = (weights, grads, mean, square, copy)
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            return "a span is not contiguous"
    return refuse_types(*tensors, divisor, skip)


def _refuse_for_torch(
    *spans: Tensor | None, divisor: Tensor | None = None, skip: Tensor | None = None, **_: Any
) -> str | None:
    """spans: weights, gradients, both moments, and maybe the copy."""
    if any(number is not None and number.dtype != torch.float32 for number in (divisor, skip)):
        return "torch's fused AdamW takes divisor and skip in fp32, whatever the weights are"
    return _refuse_for_apex(*spans)


def _refuse_for_apex(*spans: Tensor | None, **_: Any) -> str | None:
    kinds = {span.dtype for span in spans[:4] if span is not None}
    return None if len(kinds) == 1 else "weights, gradients and moments must be of one type"


KERNEL = Kernel(
    "adamw",
    run_reference,
    {
        "triton": Implementation("triton", run_triton, require_nothing, _refuse_inputs),
        "torch": Implementation("torch", run_torch, require_nothing, _refuse_for_torch),
        "apex": Implementation("apex", run_apex, check_apex, _refuse_for_apex),
    },
    constant=8.0,
)
