"""Gated delta nets, Mamba-2, gated short convolutions, blocks with one half and a gate of shared
experts give the one-process answer to 1e-10 in fp64 under tensor, context, pipeline, expert and
data ranks, ZeRO and recompute, also if samples are packed, pieces are shorter than what a
convolution sees, tensor ranks have unequal numbers of channels, and they share a group of heads.

Tests `megaframe.context_parallel.states`, `megaframe.model.causal_convolution`,
`megaframe.architecture.causal_convolution`, `megaframe.architecture.gated_delta_net`,
`megaframe.model.gated_delta_net`, `megaframe.architecture.gated_short_convolution`,
`megaframe.model.gated_short_convolution`, `megaframe.model.mamba2`,
`megaframe.architecture.mamba2`, `megaframe.architecture.decay` and
`megaframe.architecture.no_layer`.
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
DELTA_NETS = {
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
    "packed-delta": {
        "norm": "rmsnorm",
        "position": "none",
        "blocks": [{"mixer": {**DELTA, "negative_eigenvalues": True, "convolution": 6}}],
    },
}
MAMBA = {"kind": "mamba2", "heads": 8, "head_dim": 3, "groups": 4, "state_dim": 5, "chunk": 3}
ONE = {"groups": 1}
MAMBA2 = {
    "packed-bamba": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
        "blocks": [
            {"mixer": {**MAMBA, "bias": True, "step_min": 0.02, "step_max": 0.05}},
            {"mixer": {"rotary_fraction": 0.5}},
        ],
    },
    "granite": {
        **{"norm": "rmsnorm", "activation": "swiglu", "position": "none"},
        "blocks": [
            {"mixer": {**MAMBA, **ONE, "norm": "before_gate"}, "feed_forward": "moe"},
            {"mixer": {**MAMBA, **ONE, "convolution_bias": False}},
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1},
    },
    "packed-nemotron": {
        **{"norm": "rmsnorm", "activation": "relu2", "position": "none", "layers": 4},
        "blocks": [
            {"mixer": {**MAMBA, "groups": 2, "bias": True}, "feed_forward": "none"},
            {"mixer": "none", "feed_forward": "moe"},
            {"mixer": {"kv_heads": 2}, "feed_forward": "none"},
            {"mixer": "none"},
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1},
    },
    "packed-falcon": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
        "blocks": [{"second_mixer": {**MAMBA, "norm": "none"}}, {"second_mixer": MAMBA}],
    },
    "packed-mamba2": {
        **{"norm": "rmsnorm", "position": "none"},
        "blocks": [{"mixer": {**MAMBA, "convolution": 6, "norm": "none"}}],
    },
}
CONVOLUTION = {"kind": "gated_short_convolution"}
ALONE = {
    "norm": "rmsnorm",
    "position": "none",
    "blocks": [{"mixer": {**CONVOLUTION, "convolution": 6}}],
}
CONVOLUTIONS = {
    "packed-lfm2": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
        "blocks": [{"mixer": {**CONVOLUTION, "bias": True}}, {"mixer": {"qk_norm": True}}],
    },
    "lfm2_moe": {
        **{"norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": True},
        "blocks": [{"mixer": CONVOLUTION}, {"mixer": CONVOLUTION, "feed_forward": "moe"}],
        "moe": {"experts": 4, "ffn": 10, "normalise_eps": 0.1},
    },
    "packed-convolution": ALONE,
}
SHAPES = {**DELTA_NETS, **MAMBA2, **CONVOLUTIONS}
LAYOUTS = {
    **SHARED_LAYOUTS,
    **PIECES,
    "tensor of 4": (4, {"tensor": 4, "zero": 3}, {"recompute": "full"}),
    **PIECES_AND_AXES,
    "tensor of 3": (3, {"tensor": 3, "zero": 3}, {"recompute": "selective"}),
}
QUICK = [
    ("packed-kimi", "tensor, ring"),
    ("packed-delta", "nested"),
    ("packed-next", "tensor, ring"),
    ("gated-experts", "experts"),
    ("packed-mamba2", "nested"),
    ("packed-bamba", "zero 2"),
    ("granite", "selective"),
    ("packed-falcon", "tensor, ring"),
    ("packed-nemotron", "experts"),
    ("packed-nemotron", "zero 3"),
    ("packed-nemotron", "pipeline, ring"),
    ("packed-convolution", "nested"),
    ("packed-lfm2", "tensor, ring"),
    ("lfm2_moe", "experts"),
]
UNEVEN = ("packed-convolution", "tensor of 3")
"""Whole heads cannot be divided like this, and channels can."""
CASES = [
    (name, layout)
    for shapes in (DELTA_NETS, MAMBA2, CONVOLUTIONS)
    for name, layout in pair_in_turn(shapes, LAYOUTS, QUICK)
    if layout != "tensor of 3" and (layout != "tensor of 4" or shapes is not CONVOLUTIONS)
] + [UNEVEN]


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(("name", "layout"), mark_slow(CASES, except_for=QUICK))
def test_layouts_do_not_change_the_answer(name, layout, check_layout):
    ranks, parallel, train = LAYOUTS[layout]
    check_layout(name, ranks, parallel, **train)
