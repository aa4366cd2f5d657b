"""Every operator passes torch.library's checks, and kernels compile without a graph break."""

import pytest
import torch
from kernel_exactness import DEVICE, make_random
from megaframe_kernels.attention.spans import find_spans
from megaframe_kernels.experts import expert_order
from megaframe_kernels.registry import KERNELS
from megaframe_kernels.selection import select
from slow_cases import mark_slow
from tolerances import assert_near
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

ops = torch.ops.megaframe
CHOICES = select(KERNELS)
CHOSEN = torch.tensor([[0, 2], [1, 0], [2, 1]], dtype=torch.int32, device=DEVICE)
ORDER = expert_order.ExpertOrder(*expert_order.run_reference_order(CHOSEN, 3))


def make_leaf(*shape, seed=0, dtype=torch.float32):
    return make_random(*shape, seed=seed, dtype=dtype).requires_grad_()


def make_fp8(*shape):
    return make_random(*shape).to(torch.float8_e4m3fn)


def make_attention_arguments():
    spans = find_spans(1, 6, 6, DEVICE)
    heads = make_leaf(1, 6, 2, 16), make_leaf(1, 6, 1, 16, seed=1), make_leaf(1, 6, 1, 16, seed=2)
    return (*heads, *spans.tensors, make_leaf(2, seed=3), 0.5, 3.0)


def make_attention_backward_arguments():
    *heads, starts, stops, first, last, sinks, scale, softcap = make_attention_arguments()
    d_out, out, lse = (
        make_random(1, 6, 2, 16, seed=4),
        make_random(1, 6, 2, 16, seed=5),
        make_random(1, 2, 6),
    )
    tensors = d_out, *(x.detach() for x in heads), out, lse, starts, stops, first, last
    return (*tensors, sinks.detach(), scale, softcap)


def make_recurrence_arguments():
    heads = make_leaf(1, 6, 1, 4), make_leaf(1, 6, 1, 4, seed=1), make_leaf(1, 6, 2, 8, seed=2)
    strength, sums = make_leaf(1, 6, 2, seed=3), (-make_random(1, 6, 2, 1).abs()).requires_grad_()
    documents = torch.tensor([[0, 0, 1, 1, 1, 2]], dtype=torch.int32, device=DEVICE)
    return *heads, strength, sums, documents, make_leaf(1, 2, 4, 8, seed=5)


def make_recurrence_backward_arguments():
    *arguments, initial = (
        x.detach() if isinstance(x, torch.Tensor) else x for x in make_recurrence_arguments()
    )
    out, final, *kept = ops.recurrence(*arguments, initial)
    return out, final, *arguments, *kept


def make_sparse_arguments():
    places = torch.tensor([[0, -1], [1, 0], [2, 0]], dtype=torch.int32, device=DEVICE)
    return make_leaf(3, 2, 12), make_leaf(4, 12, seed=1), places, 8, 0.5


def make_sparse_backward_arguments():
    *tensors, width, scale = make_sparse_arguments()
    query, latents, places = (x.detach() for x in tensors)
    out, lse = ops.sparse_attention(query, latents, places, width, scale)
    return make_random(3, 2, 8), query, latents, places, out, lse, width, scale


def make_shares_arguments():
    _, query, latents, places, _, lse, width, scale = make_sparse_backward_arguments()
    return query, latents, places, lse, width, scale


LABELS = torch.tensor([1, -100, 4], device=DEVICE)
CASES = {
    "norm": lambda: (
        make_leaf(2, 3, 8),
        make_leaf(2, 3, 8, seed=1),
        make_leaf(8),
        make_leaf(8, seed=2),
        True,
        1e-5,
    ),
    "activation": lambda: (make_leaf(3, 8), "swiglu"),
    "rotary": lambda: (make_leaf(1, 3, 2, 8), make_random(3, 4), make_random(3, 4, seed=1), False),
    "qkv_rotary": lambda: (make_leaf(1, 3, 2, 4, 8), make_random(3, 4), make_random(3, 4, seed=1)),
    "attention": make_attention_arguments,
    "attention_backward": make_attention_backward_arguments,
    "cross_entropy_parts": lambda: (make_random(3, 7), LABELS, 0, 7, 0.1, 5.0),
    "adamw_": lambda: (
        *(make_random(9, seed=i).abs() for i in range(4)),
        *(make_random(9).bfloat16(), None, None, 0.1, 0.9, 0.9, 1e-8, 0.1, 1),
    ),
    "square_sum": lambda: (make_random(50),),
    "router": lambda: (make_leaf(3, 8), 2, make_random(8), True, True),
    "expert_order": lambda: (torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), 3),
    "expert_gather": lambda: (make_random(3, 8), ORDER.order_P, 2),
    "expert_combine": lambda: (make_random(6, 8), ORDER.places_TK),
    "grouped_product": lambda: (make_random(6, 8), make_random(3, 4, 8), ORDER.ends_E),
    "grouped_weight_gradient": lambda: (
        make_random(6, 4),
        make_random(6, 8),
        make_random(3, 4, 8),
        ORDER.ends_E,
    ),
    "grouped_clear_": lambda: (make_random(8, 4), ORDER.ends_E),
    "grouped_gradient_": lambda: (
        *(make_random(3, 4, 8), make_random(6, 4), make_random(6, 8, seed=1), ORDER.ends_E, True),
    ),
    "cross_entropy_gradient_": lambda: (
        *(
            make_random(3),
            make_random(3, seed=1),
            make_random(3, 7, seed=2),
            LABELS,
            make_random(3),
            0,
            7,
            0.1,
            5.0,
        ),
    ),
    "quantise": lambda: (make_random(4, 32), torch.float8_e4m3fn, 1, 16),
    "quantise_experts": lambda: (make_random(6, 32), ORDER.ends_E, torch.float8_e5m2),
    "quantise_columns": lambda: (make_random(6, 32), ORDER.ends_E, torch.float8_e4m3fn, "block"),
    "grouped_scaled_product": lambda: (
        *(
            make_fp8(6, 16),
            make_fp8(3, 4, 16),
            make_random(6, 1),
            make_random(3, 4, 1),
            ORDER.ends_E,
            torch.float32,
        ),
    ),
    "grouped_scaled_gradient_": lambda: (
        *(
            make_random(3, 4, 8),
            make_fp8(4, 512),
            make_fp8(8, 512),
            make_random(3, 4),
            make_random(3, 8),
            ORDER.ends_E,
            True,
        ),
    ),
}
CASES["decode_blocks_"] = lambda: (
    *(make_random(24), torch.full((12,), 7, dtype=torch.uint8)),
    *(make_random(16), make_random(3), torch.full((6,), 9, dtype=torch.uint8), 4),
)
CASES["recurrence"] = make_recurrence_arguments
CASES["recurrence_backward"] = make_recurrence_backward_arguments
CASES["sparse_attention"] = make_sparse_arguments
CASES["sparse_attention_backward"] = make_sparse_backward_arguments
CASES["attention_shares"] = make_shares_arguments


CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""Checks of operators on 8-bit numbers. `test_schema` is left out: it multiplies its arguments to
see whether they were written, which torch cannot do in 8 bits."""


QUICK = ("norm", "attention", "cross_entropy_parts", "adamw_", "router", "expert_gather")
QUICK += ("grouped_product", "grouped_gradient_", "quantise", "grouped_scaled_product")
"""With a gradient, in place, with several results, on integers, and on 8 bits."""


@pytest.mark.parametrize("name", mark_slow(CASES, except_for=QUICK))
def test_operator_passes_the_checks_of_torch_library(name):
    arguments = CASES[name]()
    narrow = [
        x for x in arguments if isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn
    ]
    before = [x.clone() for x in narrow]
    checks = {"test_utils": CHECKS} if narrow else {}
    torch.library.opcheck(getattr(ops, name).default, arguments, **checks)
    for first, other in zip(narrow, before, strict=True):
        assert torch.equal(first.view(torch.uint8), other.view(torch.uint8))


NUMBERS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "step": 2}
"""Of a step of AdamW."""


def block(x, gain, gate_up, down, logits_weight, labels, spans, cos, sin):
    """Compute what a small transformer computes, with the chosen kernels."""
    normed, total = CHOICES["norm"](x, gain, None, x)
    heads = CHOICES["rotary"](normed.view(*x.shape[:2], 2, 16), cos, sin)
    out, _ = CHOICES["attention"](heads, heads, heads, spans)
    hidden = total + out.flatten(2)
    hidden = CHOICES["activation"](hidden @ gate_up, "swiglu") @ down
    flat = hidden.flatten(0, 1)
    weights, experts = CHOICES["router"](flat @ logits_weight[:4].t(), 2)
    order, places, ends = CHOICES["expert_order"](experts, 4)
    rows = CHOICES["permute"](flat, order, places)
    rows = CHOICES["grouped_product"](rows, logits_weight[:32].view(4, 8, 32)[:, :, :], ends)
    mixed = CHOICES["unpermute"](rows * weights.flatten()[order.long(), None], order, places)
    logits = torch.cat((mixed @ gate_up[:8], flat @ logits_weight.t()), 1)
    return functional.cross_entropy(logits, labels, reduction="sum")


def list_dispatched(function, *arguments):
    """Return the operators of the library that a call sends through torch's dispatcher."""
    with profile(activities=[ProfilerActivity.CPU]) as running:
        function(*arguments)
    return {event.name for event in running.events() if event.name.startswith("megaframe::")}


def test_what_nobody_traces_is_called_directly():
    def update(weights, grads, mean, square):
        CHOICES["adamw"](weights, grads, mean, square, None, **NUMBERS)
        CHOICES["quantise"](weights.view(3, 7), torch.float8_e4m3fn, (1, 0))
        CHOICES["loss"](weights.view(3, 7).clone(), LABELS, z_loss=0.1)
        into, rows, y = make_random(3, 4, 8), make_random(6, 8), make_random(6, 4)
        CHOICES["grouped_gradient"](into, y, rows, ORDER.ends_E, True)
        return CHOICES["square_sum"](grads)

    assert not list_dispatched(update, *(make_random(21, seed=i).abs() for i in range(4)))
    assert list_dispatched(ops.square_sum, make_random(8)) == {"megaframe::square_sum"}


def test_a_step_compiles_whole():
    def step(weights, grads, mean, square):
        CHOICES["adamw"](weights, grads, mean, square, None, **NUMBERS)
        quantised, scales = CHOICES["quantise"](weights.view(3, 7), torch.float8_e4m3fn, (1, 0))
        losses, d_logits = CHOICES["loss"](weights.view(3, 7).clone(), LABELS, z_loss=0.1)
        return CHOICES["square_sum"](grads), quantised.float() * scales, losses, d_logits

    tensors = [make_random(21, seed=i).abs() for i in range(4)]
    copies = [t.clone() for t in tensors]
    expected = step(*tensors)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for first, other in zip((*compiled(*copies), *copies), (*expected, *tensors), strict=True):
        assert torch.equal(first, other)


def test_a_block_compiles_whole():
    arguments = (
        *(make_leaf(1, 5, 32), make_leaf(32), make_leaf(32, 64), make_leaf(32, 32)),
        *(make_leaf(40, 32), torch.tensor([1, 2, -100, 0, 3])),
        *(find_spans(1, 5, 5, DEVICE), make_random(5, 8), make_random(5, 8, seed=1)),
    )
    leaves = [g for g in arguments if isinstance(g, torch.Tensor) and g.requires_grad]
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    results = [function(*arguments) for function in (block, compiled)]
    terms = 32 + 64 + 32 + 8 + 40  # of the products one after the other, up to the logits
    assert_near(*results, terms, label="loss")
    gradients = [torch.autograd.grad(result, leaves) for result in results]
    for place, (first, other) in enumerate(zip(*gradients, strict=True)):
        assert_near(first, other, 2 * terms, label=f"gradient {place}")
