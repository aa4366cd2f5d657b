"""Real sizes of each kernel, with tensors that have no memory: what is compiled without a GPU.

Each example calls the functions that launch kernels, forward and backward, as a training step
would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megaframe_kernels import block_codes, loss
from megaframe_kernels.attention import launches
from megaframe_kernels.elementwise import activation, norm, qkv_rotary, rotary
from megaframe_kernels.experts import (
    expert_order,
    grouped_gradient,
    grouped_product,
    permute,
    router,
)
from megaframe_kernels.fp8 import grouped_fp8, grouped_fp8_gradient, grouped_quantize, quantize
from megaframe_kernels.recurrent import launches as recurrent
from megaframe_kernels.sparse_attention import launches as sparse_attention
from megaframe_kernels.update import adamw, square_sum


@dataclass(frozen=True)
class Example:
    """A call with real sizes.

    Attributes:
        name: Of the example.
        call: Makes the launch.
        least_chip: Lowest compute capability on which it can run, such as 80.
    """

    name: str
    call: Callable[[], None]
    least_chip: int = 80


def _make_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _launch_norms() -> Iterator[Example]:
    def call(width: int, center: bool, added: bool) -> None:
        x, gain = _make_tensor(8192, width), _make_tensor(width, dtype=torch.float32)
        bias = gain if center else None
        y, total, means, scales = norm.launch_forward(
            x, x if added else None, gain, bias, center, 1e-5
        )
        norm.launch_backward(
            y, total if added else None, total if added else x, gain, means, scales, center
        )

    narrow = (128, False, False), (2048, False, True), (4096, False, True), (4096, True, True)
    for width, center, added in (*narrow, (16384, False, True), (16384, True, True)):
        kind = "layernorm" if center else "rmsnorm"
        name = f"{kind} {width}{' + residual' if added else ''}"
        yield Example(name, partial(call, width, center, added))


def _launch_activations() -> Iterator[Example]:
    def call(kind: str) -> None:
        x = _make_tensor(8192, 2 * 14336 if kind in activation.GATED else 16384)
        activation.launch_backward(activation.launch_forward(x, kind), x, kind)

    for kind in activation.KINDS:
        yield Example(kind, partial(call, kind))


def _launch_rotary() -> Iterator[Example]:
    def call(half: int) -> None:
        x, table = _make_tensor(2, 8192, 32, 128), _make_tensor(8192, half, dtype=torch.float32)
        rotary.launch_turn(x, table, table, False)

    yield Example("32 heads of 128", partial(call, 64))
    yield Example("a part of each head", partial(call, 32))


def _launch_qkv_rotary() -> Iterator[Example]:
    def call(half: int) -> None:
        qkv, table = _make_tensor(2, 8192, 8, 6, 128), _make_tensor(8192, half, dtype=torch.float32)
        parts = qkv_rotary.launch_forward(qkv, table, table)
        qkv_rotary.launch_backward(*parts, table, table)

    yield Example("8 groups of 4 heads of 128", partial(call, 64))
    yield Example("a part of each head", partial(call, 32))


def _launch_loss() -> Iterator[Example]:
    def call(smoothing: float, softcap: float | None) -> None:
        logits, labels = _make_tensor(8192, 128256), _make_tensor(8192, dtype=torch.int64)
        arguments = (0, 128256, smoothing, softcap)
        partition, label = loss.launch_forward(logits, labels, *arguments)
        loss.launch_backward(partition, label, logits, labels, partition, logits, *arguments)

    yield Example("plain", partial(call, 0.0, None))
    yield Example("label smoothing, softcap", partial(call, 0.1, 30.0))


def _launch_adamw() -> Iterator[Example]:
    def call(weights: torch.dtype, grads: torch.dtype) -> None:
        w, g = _make_tensor(2**27, dtype=weights), _make_tensor(2**27, dtype=grads)
        scalar = _make_tensor(dtype=torch.float32)
        copy = _make_tensor(2**27) if weights == torch.float32 else None
        numbers = (1e-3, 0.9, 0.95, 1e-8, 0.1, 5)
        adamw.launch_step(w, g, w, w, copy, scalar, scalar, *numbers)

    yield Example("fp32 master, bf16 copy", partial(call, torch.float32, torch.float32))
    yield Example("bf16", partial(call, torch.bfloat16, torch.bfloat16))


def _launch_square_sum() -> Iterator[Example]:
    def call(dtype: torch.dtype) -> None:
        square_sum.launch_sum(_make_tensor(2**27, dtype=dtype))

    yield Example("fp32", partial(call, torch.float32))
    yield Example("bf16", partial(call, torch.bfloat16))


def _launch_attention() -> Iterator[Example]:
    def call(width: int, dtype: torch.dtype, softcap: float | None, sinks: bool) -> None:
        q, k = (
            _make_tensor(1, 8192, 32, width, dtype=dtype),
            _make_tensor(1, 8192, 8, width, dtype=dtype),
        )
        ends = _make_tensor(1, 8192, dtype=torch.int32)
        sink = _make_tensor(32) if sinks else None
        out, lse = launches.launch_forward(q, k, k, ends, ends, sink, None, softcap)
        spans = ends, ends, ends, ends
        launches.launch_backward(out, q, k, k, out, lse, *spans, sink, None, softcap)

    for width in (64, 96, 128, 256):
        yield Example(f"head {width}", partial(call, width, torch.bfloat16, None, False))
        capped = partial(call, width, torch.bfloat16, 30.0, True)
        yield Example(f"head {width}, cap, sinks", capped)
    for width in (128, 256):
        yield Example(f"head {width}, fp32", partial(call, width, torch.float32, None, False))


def _launch_router() -> Iterator[Example]:
    def call(experts: int, sigmoid: bool) -> None:
        logits = _make_tensor(8192, experts, dtype=torch.float32)
        bias = _make_tensor(experts, dtype=torch.float32) if sigmoid else None
        weights, chosen = router.launch_forward(logits, 8, bias, sigmoid, True)
        router.launch_backward(weights, logits, weights, chosen, sigmoid, True)

    yield Example("64 experts, softmax", partial(call, 64, False))
    yield Example("256 experts, sigmoid", partial(call, 256, True))


def _launch_permutation() -> Iterator[Example]:
    def call(experts: int) -> None:
        chosen = _make_tensor(8192, 8, dtype=torch.int32)
        order, places, _ = expert_order.launch_order(chosen, experts)
        x = _make_tensor(8192, 4096)
        permute.launch_combine(permute.launch_gather(x, order, 8), places)

    yield Example("64 experts, 8 of them", partial(call, 64))


def _launch_grouped() -> Iterator[Example]:
    def call(dtype: torch.dtype) -> None:
        x = _make_tensor(16384, 4096, dtype=dtype)
        weights, ends = (
            _make_tensor(8, 14336, 4096, dtype=dtype),
            _make_tensor(8, dtype=torch.int32),
        )
        y = grouped_product.launch_multiply(x, weights, ends)
        grouped_product.launch_clear(y, ends)
        grouped_product.launch_multiply(y, weights.transpose(1, 2), ends)
        grouped_gradient.launch_weight_gradient(y, x, weights, ends)
        into = _make_tensor(8, 14336, 4096, dtype=torch.float32)
        grouped_gradient.launch_weight_gradient_into(into, y, x, ends, add=True)

    yield Example("8 experts", partial(call, torch.bfloat16))


def _quantise() -> Iterator[Example]:
    def call(width: int, block: tuple[int, int], transposed: bool = False) -> None:
        x = _make_tensor(8192, width)
        quantize.launch_quantise(x.t() if transposed else x, torch.float8_e4m3fn, *block)

    sharing = ("tensor", (0, 0)), ("row", (1, 0)), ("1 x 128", (1, 128)), ("128 x 128", (128, 128))
    for name, block in sharing:
        yield Example(name, partial(call, 4096, block), least_chip=90)
        yield Example(f"{name}, transposed", partial(call, 4096, block, True), least_chip=90)
    yield Example("row of 32768", partial(call, 32768, (1, 0)), least_chip=90)


def _launch_grouped_fp8() -> Iterator[Example]:
    def call(sharing: str, other: torch.dtype = torch.float8_e4m3fn) -> None:
        def make_scales(*shape: int) -> Tensor:
            return _make_tensor(*shape, dtype=torch.float32)

        ends = _make_tensor(8, dtype=torch.int32)
        x, dy = _make_tensor(16384, 4096), _make_tensor(16384, 14336)
        a, b = (
            _make_tensor(16384, 4096, dtype=other),
            _make_tensor(8, 14336, 4096, dtype=quantize.TYPES[0]),
        )
        by = (make_scales(16384, 1), make_scales(8, 14336, 1))
        if sharing == "block":
            by = (make_scales(16384, 32), make_scales(8, 112, 32))
        grouped_fp8.launch_multiply(a, b, *by, ends, torch.bfloat16)
        grouped_quantize.launch_experts(x, ends, other)
        left, left_scales = grouped_quantize.launch_columns(dy, ends, other, sharing)
        right, right_scales = grouped_quantize.launch_columns(x, ends, quantize.TYPES[0], sharing)
        into = make_scales(8, 14336, 4096)
        for add in (False, True):
            arguments = into, left, right, left_scales, right_scales, ends, add
            grouped_fp8_gradient.launch_gradient(*arguments)

    yield Example("columns", partial(call, "column"), least_chip=90)
    yield Example("blocks", partial(call, "block"), least_chip=90)
    wide = partial(call, "column", torch.float8_e5m2)
    yield Example("gradients in e5m2", wide, least_chip=90)


def _launch_recurrence(
    *cases: tuple[str, tuple[int, int, int, int], torch.dtype], corrects: bool
) -> Iterator[Example]:
    """Yield examples of key heads, value heads, and their widths; of decays of heads and, where
    tokens correct, of channels."""

    def call(sizes: tuple[int, int, int, int], dtype: torch.dtype, channels: bool) -> None:
        groups, heads, width, values = sizes
        query = _make_tensor(1, 8192, groups, width, dtype=dtype)
        value = _make_tensor(1, 8192, heads, values, dtype=dtype)
        falls = _make_tensor(1, 8192, heads, width if channels else 1, dtype=torch.float32)
        strength = falls[..., 0] if corrects else None
        documents = _make_tensor(1, 8192, dtype=torch.int32)
        initial = _make_tensor(1, heads, width, values, dtype=torch.float32)
        arguments = query, query, value, strength, falls, documents
        out, final, *kept = recurrent.launch_forward(*arguments, initial)
        recurrent.launch_backward(out, final, *arguments, *kept)

    for name, sizes, dtype in cases:
        yield Example(name, partial(call, sizes, dtype, "channels" in name))


def _launch_decoding() -> Iterator[Example]:
    def call(block: int, group: int, count: int, dtype: torch.dtype) -> None:
        length = 2**28
        values, levels = _make_tensor(length, dtype=dtype), _make_tensor(count, dtype=torch.float32)
        stored = _make_tensor(length // (2 if count == 16 else 1), dtype=torch.uint8)
        scales = _make_tensor(length // block // group, dtype=torch.float32)
        shares = _make_tensor(length // block, dtype=torch.uint8) if group > 1 else None
        block_codes.launch_decode(values, stored, levels, scales, shares, block)

    yield Example("nf4", partial(call, 64, 1, 16, torch.bfloat16))
    yield Example("nf4, shares", partial(call, 64, 16, 16, torch.bfloat16))
    yield Example("nf4, blocks of 16, fp32", partial(call, 16, 1, 16, torch.float32))
    yield Example("int8", partial(call, 64, 1, 255, torch.bfloat16))


def _launch_sparse_attention() -> Iterator[Example]:
    def call(heads: int, widths: tuple[int, int], dtype: torch.dtype) -> None:
        values, width = widths[1], sum(widths)
        query = _make_tensor(32, heads, width, dtype=dtype)
        latents = _make_tensor(8192, width, dtype=dtype)
        places = _make_tensor(32, 2048, dtype=torch.int32)
        tensors = query, latents, places
        out, lse = sparse_attention.launch_forward(*tensors, values, 0.1)
        sparse_attention.launch_backward(out, *tensors, out, lse, values, 0.1, len(query))
        sparse_attention.launch_shares(*tensors, lse, values, 0.1)

    yield Example("16 heads of 64 + 512", partial(call, 16, (64, 512), torch.bfloat16))
    yield Example("16 heads of 64 + 128, fp32", partial(call, 16, (64, 128), torch.float32))


EXAMPLES: dict[str, Callable[[], Iterable[Example]]] = {
    "norm": _launch_norms,
    "activation": _launch_activations,
    "rotary": _launch_rotary,
    "qkv_rotary": _launch_qkv_rotary,
    "loss": _launch_loss,
    "adamw": _launch_adamw,
    "square_sum": _launch_square_sum,
    "attention": _launch_attention,
    "router": _launch_router,
    "permute": _launch_permutation,
    "grouped_product": _launch_grouped,
    "quantise": _quantise,
    "grouped_scaled_product": _launch_grouped_fp8,
    "delta_rule": partial(
        _launch_recurrence,
        ("heads of 128", (16, 32, 128, 128), torch.bfloat16),
        ("heads of 128, channels", (32, 32, 128, 128), torch.bfloat16),
        ("heads of 128, fp32", (16, 32, 128, 128), torch.float32),
        ("heads of 64, channels, fp32", (32, 32, 64, 64), torch.float32),
        corrects=True,
    ),
    "ssd": partial(
        _launch_recurrence,
        ("heads of 64, keys of 128", (8, 128, 128, 64), torch.bfloat16),
        ("heads of 64, keys of 256", (1, 48, 256, 64), torch.bfloat16),
        corrects=False,
    ),
    "decode_blocks": _launch_decoding,
    "sparse_attention": _launch_sparse_attention,
}
"""Examples by the name of a kernel."""
