"""Gated delta net, and a gate of shared experts, give the one-process answer to 1e-10 in fp64 under
tensor, context, pipeline, expert and data ranks, ZeRO and recompute, also if samples are packed and
pieces are shorter than what the convolution sees.

Tests `megaframe.context_parallel.states` and `megaframe.model.causal_convolution`.
"""

import pytest
from parity_runs import LAYOUTS as SHARED_LAYOUTS
from parity_runs import PIECES, PIECES_AND_AXES, make_layout_check, pair_in_turn
from slow_cases import mark_slow

DELTA = {"kind": "gated_delta_net", "key_dim": 5, "chunk": 3, "key_heads": 4}
KIMI = {"decay_rank": 3, "gate_rank": 4, "gate": "sigmoid"}
NEXT = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "kv_heads": 2,
    "blocks": [
        {"mixer": {**DELTA, "value_heads": 8, "value_dim": 6}},
        {"mixer": {"output_gate": "element", "qk_norm": True, "rotary_fraction": 0.5}},
    ],
}
SHAPES = {
    "next": NEXT,
    "packed-next": NEXT,
    "gated-experts": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "moe": {"experts": 4, "ffn": 10, "shared": 1, "shared_gate": True},
    },
    "packed-kimi": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "none",
        "blocks": [
            {"mixer": {**DELTA, **KIMI, "value_heads": 8}},
            {"mixer": "latent", "feed_forward": "moe"},
        ],
        "latent": {"kv_rank": 6, "head_dim": 3, "rotary_dim": 4, "value_dim": 5},
        "moe": {"experts": 4, "ffn": 10, "shared": 1, "score": "sigmoid"},
    },
    "packed-alone": {
        "norm": "rmsnorm",
        "position": "none",
        "blocks": [{"mixer": {**DELTA, "negative_eigenvalues": True, "convolution": 6}}],
    },
}
LAYOUTS = {
    **SHARED_LAYOUTS,
    **PIECES,
    "tensor of 4": (4, {"tensor": 4, "zero": 3}, {"recompute": "full"}),
    **PIECES_AND_AXES,
}
QUICK = [
    ("packed-kimi", "tensor, ring"),
    ("packed-alone", "nested"),
    ("packed-next", "tensor, ring"),
    ("gated-experts", "experts"),
]
CASES = pair_in_turn(SHAPES, LAYOUTS, QUICK)


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(("name", "layout"), mark_slow(CASES, except_for=QUICK))
def test_layouts_do_not_change_the_answer(name, layout, check_layout):
    ranks, parallel, train = LAYOUTS[layout]
    check_layout(name, ranks, parallel, **train)
