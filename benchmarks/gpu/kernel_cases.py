"""The cases of the kernel benchmark: arguments in real or tiny sizes, and the least possible work.

`bytes` and `flops` count what no implementation can avoid: each input read once, each output
written once, each product of a causal half. What an implementation moves beyond that counts against
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from megaframe_kernels.attention.spans import find_spans
from megaframe_kernels.experts import expert_order
from torch import Tensor


@dataclass(frozen=True)
class LeastWork:
    """Work of one pass: bytes moved, and floating-point operations if those decide.

    Attributes:
        products: Rows, columns and depth of the bare products, if the pass consists of whole
            ones.
    """

    bytes: float = 0.0
    flops: float = 0.0
    products: tuple[tuple[int, int, int], ...] = ()


def count_products(*shapes: tuple[int, int, int]) -> LeastWork:
    """Return the work of a pass that consists only of products."""
    return LeastWork(flops=sum(2.0 * m * n * k for m, n, k in shapes), products=shapes)


@dataclass(frozen=True)
class KernelCase:
    """Arguments for a kernel, and the least work.

    Attributes:
        arguments: Makes them, requiring gradients where they have one.
        backward: None if nothing has a gradient.
        length: Of the longest sum.
    """

    kernel: str
    name: str
    arguments: Callable[[], tuple[Any, ...]]
    forward: LeastWork
    backward: LeastWork | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    length: int = 1


@dataclass(frozen=True)
class CaseSizes:
    """Sizes of a model.

    Attributes:
        width: Of a head.
        length: Tokens of a sample.
        parameters: Elements of a flat shard.
    """

    tokens: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    width: int
    length: int
    experts: int
    parameters: int


REAL = CaseSizes(16384, 4096, 14336, 128256, 32, 128, 8192, 8, 2**28)
"""About Llama 3 8B. A pass takes much longer than a launch, and its data exceeds the cache."""
MIDDLE = CaseSizes(512, 1024, 2048, 32064, 8, 128, 512, 8, 2**20)
"""For the check against fp64: the widths that are timed, but small enough for fp64."""
TINY = CaseSizes(32, 64, 128, 128, 2, 16, 16, 4, 4096)
"""For checking that everything runs."""
FINER = 8
"""Also measured: this many times as many experts, each narrower by the same factor."""


def draw_normal(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    """Return normal numbers on the default device. Zeros would run faster than real data."""
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def list_cases(s: CaseSizes) -> Iterator[KernelCase]:
    """Yield all cases of a size."""
    yield from _make_elementwise(s)
    yield from _make_losses(s)
    yield from _make_optimizer(s)
    yield from _make_attention(s)
    yield from _make_experts(s)
    yield from _make_experts(replace(s, experts=FINER * s.experts, ffn=s.ffn // FINER))
    yield from _make_quantise(s)
    yield from _make_fp8_experts(s)
    yield from _make_recurrence(s)
    yield from _make_codes(s)
    yield from _make_sparse_attention(s)


def _make_elementwise(s: CaseSizes) -> Iterator[KernelCase]:
    row = 2.0 * s.tokens * s.hidden
    for kind in ("rmsnorm", "layernorm"):

        def make_norm(kind: str = kind) -> tuple[Any, ...]:
            gain = draw_normal(s.hidden, dtype=torch.float32, grad=True)
            bias = (
                draw_normal(s.hidden, dtype=torch.float32, grad=True)
                if kind == "layernorm"
                else None
            )
            x, residual = (draw_normal(s.tokens, s.hidden, grad=True) for _ in range(2))
            return x, gain, bias, residual

        options = {"kind": kind}
        name = f"{kind} {s.hidden} + residual"
        yield KernelCase(
            "norm", name, make_norm, LeastWork(4 * row), LeastWork(4 * row), options, s.tokens
        )

    def make_swiglu() -> tuple[Any, ...]:
        return draw_normal(s.tokens, 2 * s.ffn, grad=True), "swiglu"

    wide = 2.0 * s.tokens * s.ffn
    yield KernelCase(
        "activation", f"swiglu {s.ffn}", make_swiglu, LeastWork(3 * wide), LeastWork(5 * wide)
    )

    def make_rotary() -> tuple[Any, ...]:
        x = draw_normal(s.tokens // s.length, s.length, s.heads, s.width, grad=True)
        angle = torch.randn(s.length, s.width // 2)
        return x, angle.cos(), angle.sin()

    heads = 2.0 * s.tokens * s.heads * s.width
    yield KernelCase(
        "rotary",
        f"{s.heads} heads",
        make_rotary,
        LeastWork(2 * heads),
        LeastWork(2 * heads),
        length=2,
    )

    def make_joint() -> tuple[Any, ...]:
        groups = max(s.heads // 4, 1)
        shape = (s.tokens // s.length, s.length, groups, 6, s.width)
        angle = torch.randn(s.length, s.width // 2)
        return draw_normal(*shape, grad=True), angle.cos(), angle.sin()

    yield KernelCase(
        "qkv_rotary",
        "groups of 4 heads",
        make_joint,
        LeastWork(2 * heads * 6 / 4),
        LeastWork(2 * heads * 6 / 4),
        length=2,
    )


def _make_losses(s: CaseSizes) -> Iterator[KernelCase]:
    tokens = s.tokens // 2
    logits = 2.0 * tokens * s.vocab

    def draw_labels() -> Tensor:
        return torch.randint(0, s.vocab, (tokens,))

    def make_arguments() -> tuple[Any, ...]:
        return draw_normal(tokens, s.vocab), draw_labels()

    name = f"vocabulary {s.vocab}"
    yield KernelCase("loss", name, make_arguments, LeastWork(3 * logits), length=s.vocab)


def _make_optimizer(s: CaseSizes) -> Iterator[KernelCase]:
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}

    def make_adamw() -> tuple[Any, ...]:
        wide = [draw_normal(s.parameters, dtype=torch.float32) for _ in range(3)]
        return (
            *wide,
            draw_normal(s.parameters, dtype=torch.float32).square(),
            draw_normal(s.parameters),
        )

    work = LeastWork(4.0 * 7 * s.parameters + 2.0 * s.parameters)
    yield KernelCase("adamw", "fp32, bf16 copy", make_adamw, work, options=numbers)

    def make_square_sum() -> tuple[Any, ...]:
        return (draw_normal(s.parameters, dtype=torch.float32),)

    yield KernelCase(
        "square_sum", "fp32", make_square_sum, LeastWork(4.0 * s.parameters), length=s.parameters
    )


def _make_attention(s: CaseSizes) -> Iterator[KernelCase]:
    def make(groups: int, window: int | None, packed: bool) -> Callable[[], tuple[Any, ...]]:
        def arguments() -> tuple[Any, ...]:
            documents = None
            if packed:
                documents = (torch.arange(s.length) // max(s.length // 8, 1))[None]
            where = torch.get_default_device()
            spans = find_spans(
                1,
                s.length,
                s.length,
                where,
                window=window,
                query_documents=documents,
                key_documents=documents,
            )
            heads = (
                draw_normal(1, s.length, n, s.width, grad=True) for n in (s.heads, groups, groups)
            )
            return (*heads, spans)

        return arguments

    pairs = s.length * (s.length + 1) / 2
    window = s.length // 8
    near = window * (window + 1) / 2 + (s.length - window) * window
    inside = 8 * (s.length // 8) * (s.length // 8 + 1) / 2
    groups = max(s.heads // 4, 1)
    for name, visibility, arguments in (
        ("causal", pairs, make(s.heads, None, False)),
        ("causal, grouped heads", pairs, make(groups, None, False)),
        ("window", near, make(groups, window, False)),
        ("packed", inside, make(groups, None, True)),
    ):
        product = 2.0 * visibility * s.heads * s.width
        title = f"{name}, head {s.width}, {s.length} tokens"
        forth, back = LeastWork(flops=2 * product), LeastWork(flops=5 * product)
        yield KernelCase("attention", title, arguments, forth, back, length=s.length * s.heads)

    def make_tile() -> tuple[Any, ...]:
        where = torch.get_default_device()
        spans = find_spans(1, s.length, s.length, where, causal=False)
        grouped = (draw_normal(1, s.length, n, s.width) for n in (s.heads, groups, groups))
        d_out, out = (draw_normal(1, s.length, s.heads, s.width) for _ in range(2))
        lse = torch.full((1, s.heads, s.length), 5.0 + math.log(s.length))
        return d_out, *grouped, out, lse, spans

    name = f"tile of a ring, head {s.width}, {s.length} tokens"
    work = LeastWork(flops=10.0 * s.length**2 * s.heads * s.width)
    yield KernelCase("attention_backward", name, make_tile, work, length=s.length * s.heads)


def _make_experts(s: CaseSizes) -> Iterator[KernelCase]:
    k = 2

    def make_router() -> tuple[Any, ...]:
        return draw_normal(s.tokens, s.experts, dtype=torch.float32, grad=True), k

    small = 4.0 * s.tokens * (s.experts + 2 * k)
    yield KernelCase(
        "router", f"{s.experts} experts", make_router, LeastWork(small), LeastWork(small + small)
    )

    def draw_choices() -> Tensor:
        return torch.randint(0, s.experts, (s.tokens, k)).int()

    def make_order() -> tuple[Any, ...]:
        return draw_choices(), s.experts

    yield KernelCase(
        "expert_order", f"{s.experts} experts", make_order, LeastWork(12.0 * s.tokens * k)
    )

    def make_rows(grown: bool) -> Callable[[], tuple[Any, ...]]:
        def arguments() -> tuple[Any, ...]:
            order_P, places_TK, _ = expert_order.run_reference_order(draw_choices(), s.experts)
            if not grown:
                return draw_normal(s.tokens, s.hidden, grad=True), order_P, places_TK
            return draw_normal(s.tokens * k, s.hidden, grad=True), order_P, places_TK

        return arguments

    row = 2.0 * s.tokens * s.hidden
    few = LeastWork((1 + k) * row)
    yield KernelCase("permute", f"{k} of {s.experts}", make_rows(False), few, few, length=k)
    yield KernelCase("unpermute", f"{k} of {s.experts}", make_rows(True), few, few, length=k)

    def make_grouped() -> tuple[Any, ...]:
        _, _, ends = expert_order.run_reference_order(draw_choices(), s.experts)
        x = draw_normal(s.tokens * k, s.hidden, grad=True)
        weights = draw_normal(s.experts, s.ffn, s.hidden).div_(s.hidden**0.5).requires_grad_()
        return x, weights, ends

    places = s.tokens * k
    product = count_products((places, s.ffn, s.hidden))
    backward = count_products((places, s.hidden, s.ffn), (s.ffn, s.hidden, places))
    yield KernelCase(
        "grouped_product",
        f"{s.experts} experts",
        make_grouped,
        product,
        backward,
        length=max(s.hidden, s.ffn, s.tokens),
    )

    def make_gradient() -> tuple[Any, ...]:
        _, _, ends = expert_order.run_reference_order(draw_choices(), s.experts)
        into = torch.randn(s.experts, s.ffn, s.hidden)
        return into, draw_normal(places, s.ffn), draw_normal(places, s.hidden), ends, True

    work = count_products((s.ffn, s.hidden, places))
    yield KernelCase(
        "grouped_gradient", f"{s.experts} experts", make_gradient, work, length=s.tokens
    )


def _make_quantise(s: CaseSizes) -> Iterator[KernelCase]:
    def draw(block: tuple[int, int] | None, transposed: bool) -> tuple[Any, ...]:
        x = draw_normal(s.tokens, s.hidden)
        return x.t() if transposed else x, torch.float8_e4m3fn, block

    # Numbers whose scale is elsewhere are read twice.
    for name, block, transposed, passes in (
        ("tensor", None, False, 5.0),
        ("tensor, transposed", None, True, 5.0),
        ("row", (1, 0), False, 3.0),
        ("row, transposed", (1, 0), True, 5.0),
        ("128 x 128", (128, 128), False, 3.0),
    ):
        work = LeastWork(passes * s.tokens * s.hidden)
        yield KernelCase("quantise", name, partial(draw, block, transposed), work)


def _make_fp8_experts(s: CaseSizes) -> Iterator[KernelCase]:
    """Yield the cases of experts in 8 bits. Shares of products refer to bf16, whose peak is half as
    high."""
    places, experts, blocks = 2 * s.tokens, s.experts, -(-s.hidden // 128)
    width = 128 * (-(-places // 128) + experts)

    def draw_ends() -> Tensor:
        return torch.randint(0, experts, (places,)).bincount(minlength=experts).cumsum(0).int()

    def draw_fp8(*shape: int) -> Tensor:
        return draw_normal(*shape, dtype=torch.float8_e4m3fn)

    def draw_scales(*shape: int) -> Tensor:
        return torch.rand(shape) / s.hidden**0.5

    def make_rows(sharing: str | None = None) -> tuple[Any, ...]:
        arguments = draw_normal(places, s.hidden), draw_ends(), torch.float8_e4m3fn
        return arguments if sharing is None else (*arguments, sharing)

    elements = float(places * s.hidden)
    yield KernelCase("quantise_experts", "tensor", make_rows, LeastWork(5 * elements))
    for name, sharing, passes in (("row", "column", 5.0), ("1 x 128", "block", 3.0)):
        yield KernelCase(
            "quantise_columns", name, partial(make_rows, sharing), LeastWork(passes * elements)
        )

    def make_product(alike: int, parts: int) -> tuple[Any, ...]:
        arguments = draw_fp8(places, s.hidden), draw_fp8(experts, s.ffn, s.hidden)
        return (
            *arguments,
            draw_scales(places, parts),
            draw_scales(experts, -(-s.ffn // alike), parts),
            draw_ends(),
        )

    def make_gradient(count: int) -> tuple[Any, ...]:
        operands = draw_fp8(s.ffn, width), draw_fp8(s.hidden, width)
        by = draw_scales(count, s.ffn), draw_scales(count, s.hidden)
        return torch.randn(experts, s.ffn, s.hidden), *operands, *by, draw_ends(), True

    work = LeastWork(flops=2.0 * places * s.ffn * s.hidden)
    for name, arguments, count in (("row", (1, 1), experts), ("128", (128, blocks), width // 128)):
        case = f"{name}, {experts} experts"
        yield KernelCase(
            "grouped_scaled_product", case, partial(make_product, *arguments), work, length=s.hidden
        )
        make_arguments = partial(make_gradient, count)
        yield KernelCase("grouped_scaled_gradient", case, make_arguments, work, length=places)


def _make_recurrence(s: CaseSizes) -> Iterator[KernelCase]:
    """Yield the cases of recurrent mixers. Their work is that of chunks of 64 tokens, without what
    inverts the systems."""
    documents = partial(torch.zeros, (1, s.length), dtype=torch.int32)

    def draw_falls(heads: int, *channels: int) -> Tensor:
        return torch.rand(1, s.length, heads, *channels).mul_(-0.1).requires_grad_()

    def draw_heads(groups: int, values: int) -> tuple[Tensor, ...]:
        key = torch.nn.functional.normalize(draw_normal(1, s.length, groups, s.width), dim=-1)
        query = draw_normal(1, s.length, groups, s.width, grad=True)
        return query, key.requires_grad_(), draw_normal(1, s.length, s.heads, values, grad=True)

    def make_delta_rule(groups: int, channels: int) -> tuple[Any, ...]:
        strength = torch.rand(1, s.length, s.heads).requires_grad_()
        falls = draw_falls(s.heads, channels)
        return *draw_heads(groups, s.width), strength, falls, documents()

    def make_ssd() -> tuple[Any, ...]:
        return *draw_heads(1, s.width // 2), draw_falls(s.heads), documents()

    rows, chunk = s.length * s.heads, 64
    # Of a chunk's tokens with each other: scores and system, what solves it, and what is read; and
    # reading the state twice and adding to it.
    near, far = 4 * chunk * s.width, 3 * s.width * s.width
    work = LeastWork(flops=2.0 * rows * (near + far))
    for name, groups, channels in (
        (f"decays of heads, {s.width} wide", max(s.heads // 2, 1), 1),
        (f"decays of channels, {s.width} wide", s.heads, s.width),
    ):
        make = partial(make_delta_rule, groups, channels)
        back = LeastWork(flops=2 * work.flops)
        yield KernelCase("delta_rule", name, make, work, back, length=s.length * s.width)
    less = LeastWork(flops=2.0 * rows * (3 * chunk * s.width // 2 + s.width * s.width))
    name = f"heads of {s.width // 2}, keys of {s.width}"
    back = LeastWork(flops=2 * less.flops)
    yield KernelCase("ssd", name, make_ssd, less, back, length=s.length * s.width)


def _make_codes(s: CaseSizes) -> Iterator[KernelCase]:
    """Yield the cases of weights that are kept as codes: a matrix of an MLP."""
    from megaframe.ops.block_codec import compute_levels

    length, block = s.hidden * s.ffn, 64

    def draw_bytes(count: int, least: int, end: int) -> Tensor:
        return torch.randint(least, end, (count,), dtype=torch.uint8)

    def make(kind: str, per_byte: int, group: int) -> tuple[Any, ...]:
        return (
            torch.empty(length, dtype=torch.bfloat16),
            draw_bytes(length // per_byte, 0, 255),
            torch.tensor(compute_levels(kind)),
            torch.rand(length // block // group),
            draw_bytes(length // block, 1, 256) if group > 1 else None,
        )

    for name, kind, per_byte, group in (
        ("nf4", "nf4", 2, 1),
        ("nf4, shares", "nf4", 2, 16),
        ("int8", "int8", 1, 1),
    ):
        absmax = (4 / group + (group > 1)) / block
        work = LeastWork(length * (1 / per_byte + absmax + 2))
        arguments = partial(make, kind, per_byte, group)
        yield KernelCase("decode_blocks", name, arguments, work, options={"block": block})


def _make_sparse_attention(s: CaseSizes) -> Iterator[KernelCase]:
    """Yield the cases of attention to the latents of chosen keys: the last queries of a sample,
    with the widths and the share of heads of DeepSeek-V3.2 on eight tensor ranks."""
    queries, heads, chosen = s.length // 8, max(s.heads // 2, 1), s.length // 4
    values, width = 4 * s.width, 4 * s.width + s.width // 2

    def draw_places() -> Tensor:
        scores = torch.rand(queries, s.length)
        last = torch.arange(s.length - queries, s.length)
        hidden = torch.arange(s.length) > last[:, None]
        return scores.masked_fill_(hidden, -1.0).topk(chosen).indices.int()

    def make() -> tuple[Any, ...]:
        query = draw_normal(queries, heads, width, grad=True)
        return query, draw_normal(s.length, width, grad=True), draw_places()

    def make_shares() -> tuple[Any, ...]:
        query, latents, places = make()
        sums = torch.rand(queries, heads).add_(math.log(chosen))
        return query.detach(), latents.detach(), places, sums

    name, pairs = f"{heads} heads, {chosen} of {s.length} keys", 2.0 * queries * heads * chosen
    options = {"value_width": values, "scale": width**-0.5}
    # Backward: the scores again, the gradients of shares, queries, keys and values.
    work = LeastWork(flops=pairs * (width + values))
    back = LeastWork(flops=pairs * (3 * width + 2 * values))
    length = max(width, queries * heads)
    yield KernelCase("sparse_attention", name, make, work, back, options, length)
    work = LeastWork(flops=pairs * width)
    yield KernelCase("attention_shares", name, make_shares, work, None, options, length)
