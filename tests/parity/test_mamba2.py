"""Mamba-2, and blocks with one half, give the one-process answer to 1e-10 in fp64 under tensor,
context, pipeline, expert and data ranks, ZeRO and recompute, also if samples are packed and pieces
are shorter than what the convolution sees.

Tests `megaframe.model.mamba2`, `megaframe.architecture.mamba2`, `megaframe.architecture.decay` and
`megaframe.architecture.no_layer`.
"""

import pytest
from parity_runs import LAYOUTS as SHARED_LAYOUTS
from parity_runs import PIECES, PIECES_AND_AXES, make_layout_check, pair_in_turn
from slow_cases import mark_slow

MIXER = {"kind": "mamba2", "heads": 8, "head_dim": 3, "groups": 4, "state_dim": 5, "chunk": 3}
SHAPES = {
    "packed-bamba": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
        "blocks": [
            {"mixer": {**MIXER, "bias": True, "step_min": 0.02, "step_max": 0.05}},
            {"mixer": {"rotary_fraction": 0.5}},
        ],
    },
    "granite": {
        **{"norm": "rmsnorm", "activation": "swiglu", "position": "none"},
        "blocks": [
            {"mixer": {**MIXER, "norm": "before_gate"}, "feed_forward": "moe"},
            {"mixer": {**MIXER, "convolution_bias": False}},
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1},
    },
    "packed-nemotron": {
        **{"norm": "rmsnorm", "activation": "relu2", "position": "none", "layers": 4},
        "blocks": [
            {"mixer": MIXER, "feed_forward": "none"},
            {"mixer": "none", "feed_forward": "moe"},
            {"mixer": {"kv_heads": 2}, "feed_forward": "none"},
            {"mixer": "none"},
        ],
        "moe": {"experts": 4, "ffn": 10, "shared": 1},
    },
    "packed-falcon": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
        "blocks": [{"second_mixer": {**MIXER, "norm": "none"}}, {"second_mixer": MIXER}],
    },
    "packed-alone": {
        **{"norm": "rmsnorm", "position": "none"},
        "blocks": [{"mixer": {**MIXER, "convolution": 6, "norm": "none"}}],
    },
}
LAYOUTS = {
    **SHARED_LAYOUTS,
    **PIECES,
    "tensor of 4": (4, {"tensor": 4, "zero": 3}, {"recompute": "full"}),
    **PIECES_AND_AXES,
}
QUICK = [
    ("packed-alone", "nested"),
    ("packed-bamba", "zero 2"),
    ("granite", "selective"),
    ("packed-falcon", "tensor, ring"),
    ("packed-nemotron", "experts"),
    ("packed-nemotron", "zero 3"),
    ("packed-nemotron", "pipeline, ring"),
]
CASES = pair_in_turn(SHAPES, LAYOUTS, QUICK)


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(("name", "layout"), mark_slow(CASES, except_for=QUICK))
def test_layouts_do_not_change_the_answer(name, layout, check_layout):
    ranks, parallel, train = LAYOUTS[layout]
    check_layout(name, ranks, parallel, **train)
