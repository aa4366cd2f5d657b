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
from megaframe_kernels.experts import permute
from torch import Tensor


@dataclass(frozen=True)
class LeastWork:
    """Work of one pass: bytes moved, and floating-point operations if those decide. products: rows,
    columns and depth of the bare products, if the pass consists of whole ones."""

    bytes: float = 0.0
    flops: float = 0.0
    products: tuple[tuple[int, int, int], ...] = ()


def products(*shapes: tuple[int, int, int]) -> LeastWork:
    """Return the work of a pass that consists only of products."""
    return LeastWork(flops=sum(2.0 * m * n * k for m, n, k in shapes), products=shapes)


@dataclass(frozen=True)
class KernelCase:
    """Arguments for a kernel, and the least work.

    arguments: makes them, requiring gradients where they have one. backward: None if nothing has a
    gradient. length: of the longest sum.
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
    """Sizes of a model. width: of a head. length: tokens of a sample. parameters: elements of a
    flat shard."""

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


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    """Return normal numbers on the default device. Zeros would run faster than real data."""
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def cases(s: CaseSizes) -> Iterator[KernelCase]:
    """Yield all cases of a size."""
    yield from _elementwise(s)
    yield from _losses(s)
    yield from _optimizer(s)
    yield from _attention(s)
    yield from _experts(s)
    yield from _experts(replace(s, experts=FINER * s.experts, ffn=s.ffn // FINER))
    yield from _quantise(s)
    yield from _experts_in_eight_bits(s)


def _elementwise(s: CaseSizes) -> Iterator[KernelCase]:
    row = 2.0 * s.tokens * s.hidden
    for kind in ("rmsnorm", "layernorm"):

        def norm(kind: str = kind) -> tuple[Any, ...]:
            gain = random(s.hidden, dtype=torch.float32, grad=True)
            bias = random(s.hidden, dtype=torch.float32, grad=True) if kind == "layernorm" else None
            x, residual = (random(s.tokens, s.hidden, grad=True) for _ in range(2))
            return x, gain, bias, residual

        options = {"kind": kind}
        name = f"{kind} {s.hidden} + residual"
        yield KernelCase(
            "norm", name, norm, LeastWork(4 * row), LeastWork(4 * row), options, s.tokens
        )

    def swiglu() -> tuple[Any, ...]:
        return random(s.tokens, 2 * s.ffn, grad=True), "swiglu"

    wide = 2.0 * s.tokens * s.ffn
    yield KernelCase(
        "activation", f"swiglu {s.ffn}", swiglu, LeastWork(3 * wide), LeastWork(5 * wide)
    )

    def rotary() -> tuple[Any, ...]:
        x = random(s.tokens // s.length, s.length, s.heads, s.width, grad=True)
        angle = torch.randn(s.length, s.width // 2)
        return x, angle.cos(), angle.sin()

    heads = 2.0 * s.tokens * s.heads * s.width
    yield KernelCase(
        "rotary", f"{s.heads} heads", rotary, LeastWork(2 * heads), LeastWork(2 * heads), length=2
    )


def _losses(s: CaseSizes) -> Iterator[KernelCase]:
    tokens = s.tokens // 2
    logits = 2.0 * tokens * s.vocab

    def labels() -> Tensor:
        return torch.randint(0, s.vocab, (tokens,))

    def in_place() -> tuple[Any, ...]:
        return random(tokens, s.vocab), labels()

    name = f"vocabulary {s.vocab}"
    yield KernelCase("loss", name, in_place, LeastWork(3 * logits), length=s.vocab)


def _optimizer(s: CaseSizes) -> Iterator[KernelCase]:
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}

    def flat() -> tuple[Any, ...]:
        wide = [random(s.parameters, dtype=torch.float32) for _ in range(3)]
        return (*wide, random(s.parameters, dtype=torch.float32).square(), random(s.parameters))

    work = LeastWork(4.0 * 7 * s.parameters + 2.0 * s.parameters)
    yield KernelCase("adamw", "fp32, bf16 copy", flat, work, options=numbers)

    def span() -> tuple[Any, ...]:
        return (random(s.parameters, dtype=torch.float32),)

    yield KernelCase("square_sum", "fp32", span, LeastWork(4.0 * s.parameters), length=s.parameters)


def _attention(s: CaseSizes) -> Iterator[KernelCase]:
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
            heads = (random(1, s.length, n, s.width, grad=True) for n in (s.heads, groups, groups))
            return (*heads, spans)

        return arguments

    pairs = s.length * (s.length + 1) / 2
    window = s.length // 8
    near = window * (window + 1) / 2 + (s.length - window) * window
    inside = 8 * (s.length // 8) * (s.length // 8 + 1) / 2
    groups = max(s.heads // 4, 1)
    for name, seen, arguments in (
        ("causal", pairs, make(s.heads, None, False)),
        ("causal, grouped heads", pairs, make(groups, None, False)),
        ("window", near, make(groups, window, False)),
        ("packed", inside, make(groups, None, True)),
    ):
        product = 2.0 * seen * s.heads * s.width
        whole = f"{name}, head {s.width}, {s.length} tokens"
        forth, back = LeastWork(flops=2 * product), LeastWork(flops=5 * product)
        yield KernelCase("attention", whole, arguments, forth, back, length=s.length * s.heads)

    def tile() -> tuple[Any, ...]:
        where = torch.get_default_device()
        spans = find_spans(1, s.length, s.length, where, causal=False)
        grouped = (random(1, s.length, n, s.width) for n in (s.heads, groups, groups))
        d_out, out = (random(1, s.length, s.heads, s.width) for _ in range(2))
        lse = torch.full((1, s.heads, s.length), 5.0 + math.log(s.length))
        return d_out, *grouped, out, lse, spans

    name = f"tile of a ring, head {s.width}, {s.length} tokens"
    work = LeastWork(flops=10.0 * s.length**2 * s.heads * s.width)
    yield KernelCase("attention_backward", name, tile, work, length=s.length * s.heads)


def _experts(s: CaseSizes) -> Iterator[KernelCase]:
    k = 2

    def router() -> tuple[Any, ...]:
        return random(s.tokens, s.experts, dtype=torch.float32, grad=True), k

    small = 4.0 * s.tokens * (s.experts + 2 * k)
    yield KernelCase(
        "router", f"{s.experts} experts", router, LeastWork(small), LeastWork(small + small)
    )

    def chosen() -> Tensor:
        return torch.randint(0, s.experts, (s.tokens, k)).int()

    def order() -> tuple[Any, ...]:
        return chosen(), s.experts

    yield KernelCase("expert_order", f"{s.experts} experts", order, LeastWork(12.0 * s.tokens * k))

    def rows(grown: bool) -> Callable[[], tuple[Any, ...]]:
        def arguments() -> tuple[Any, ...]:
            order_P, places_TK, _ = permute.run_reference_order(chosen(), s.experts)
            if not grown:
                return random(s.tokens, s.hidden, grad=True), order_P, places_TK
            weights = torch.rand(s.tokens, k).requires_grad_()
            return random(s.tokens * k, s.hidden, grad=True), weights, order_P, places_TK

        return arguments

    row = 2.0 * s.tokens * s.hidden
    few = LeastWork((1 + k) * row)
    yield KernelCase("permute", f"{k} of {s.experts}", rows(False), few, few, length=k)
    back = LeastWork((1 + 2 * k) * row)
    yield KernelCase("unpermute", f"{k} of {s.experts}", rows(True), few, back, length=s.hidden)

    def grouped(moved: bool) -> Callable[[], tuple[Any, ...]]:
        def arguments() -> tuple[Any, ...]:
            order_P, places_TK, ends = permute.run_reference_order(chosen(), s.experts)
            x = random(s.tokens if moved else s.tokens * k, s.hidden, grad=True)
            weights = random(s.experts, s.ffn, s.hidden).div_(s.hidden**0.5).requires_grad_()
            return (x, weights, ends, order_P, places_TK) if moved else (x, weights, ends)

        return arguments

    places = s.tokens * k
    product = products((places, s.ffn, s.hidden))
    both = products((places, s.hidden, s.ffn), (s.ffn, s.hidden, places))
    for name, moved in ((f"{s.experts} experts", False), (f"{s.experts} experts, gather", True)):
        options = {"gather": True} if moved else {}
        length = max(s.hidden, s.ffn, s.tokens)
        yield KernelCase("grouped_product", name, grouped(moved), product, both, options, length)

    def gradient() -> tuple[Any, ...]:
        _, _, ends = permute.run_reference_order(chosen(), s.experts)
        into = torch.randn(s.experts, s.ffn, s.hidden)
        return into, random(places, s.ffn), random(places, s.hidden), ends, True

    work = products((s.ffn, s.hidden, places))
    yield KernelCase("grouped_gradient", f"{s.experts} experts", gradient, work, length=s.tokens)


def _quantise(s: CaseSizes) -> Iterator[KernelCase]:
    for name, block in (("tensor", None), ("row", (1, 0)), ("128 x 128", (128, 128))):

        def arguments(block: tuple[int, int] | None = block) -> tuple[Any, ...]:
            return random(s.tokens, s.hidden), torch.float8_e4m3fn, block

        passes = 5.0 if block is None else 3.0
        yield KernelCase("quantise", name, arguments, LeastWork(passes * s.tokens * s.hidden))


def _experts_in_eight_bits(s: CaseSizes) -> Iterator[KernelCase]:
    """Yield the cases of experts in 8 bits. Shares of products refer to bf16, whose peak is half as
    high."""
    places, experts, blocks = 2 * s.tokens, s.experts, -(-s.hidden // 128)
    width = 128 * (-(-places // 128) + experts)

    def ends() -> Tensor:
        return torch.randint(0, experts, (places,)).bincount(minlength=experts).cumsum(0).int()

    def eight(*shape: int) -> Tensor:
        return random(*shape, dtype=torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape) / s.hidden**0.5

    def rows(sharing: str | None = None) -> tuple[Any, ...]:
        given = random(places, s.hidden), ends(), torch.float8_e4m3fn
        return given if sharing is None else (*given, sharing)

    moved = float(places * s.hidden)
    yield KernelCase("quantise_experts", "tensor", rows, LeastWork(5 * moved))
    for name, sharing, passes in (("row", "column", 5.0), ("1 x 128", "block", 3.0)):
        yield KernelCase(
            "quantise_columns", name, partial(rows, sharing), LeastWork(passes * moved)
        )

    def product(alike: int, parts: int) -> tuple[Any, ...]:
        given = eight(places, s.hidden), eight(experts, s.ffn, s.hidden)
        return *given, scales(places, parts), scales(experts, -(-s.ffn // alike), parts), ends()

    def gradient(count: int) -> tuple[Any, ...]:
        operands = eight(s.ffn, width), eight(s.hidden, width)
        by = scales(count, s.ffn), scales(count, s.hidden)
        return torch.randn(experts, s.ffn, s.hidden), *operands, *by, ends(), True

    work = LeastWork(flops=2.0 * places * s.ffn * s.hidden)
    for name, given, count in (("row", (1, 1), experts), ("128", (128, blocks), width // 128)):
        case = f"{name}, {experts} experts"
        yield KernelCase(
            "grouped_scaled_product", case, partial(product, *given), work, length=s.hidden
        )
        made = partial(gradient, count)
        yield KernelCase("grouped_scaled_gradient", case, made, work, length=places)
