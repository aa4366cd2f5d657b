"""Gated short convolution gives the one-process answer to 1e-10 in fp64 under tensor, context,
pipeline, expert and data ranks, ZeRO and recompute, also if samples are packed, pieces are shorter
than what the convolution sees, and tensor ranks have unequal numbers of channels.

Tests `megaframe.architecture.causal_convolution`, `megaframe.model.causal_convolution` and
`megaframe.model.gated_short_convolution`.
"""

import pytest
from parity_runs import LAYOUTS as SHARED_LAYOUTS
from parity_runs import PIECES, PIECES_AND_AXES, make_layout_check, pair_in_turn
from slow_cases import mark_slow

MIXER = {"kind": "gated_short_convolution"}
ALONE = {"norm": "rmsnorm", "position": "none", "blocks": [{"mixer": {**MIXER, "convolution": 6}}]}
SHAPES = {
    "packed-lfm2": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
        "blocks": [{"mixer": {**MIXER, "bias": True}}, {"mixer": {"qk_norm": True}}],
    },
    "lfm2_moe": {
        **{"norm": "rmsnorm", "activation": "swiglu", "tie_embeddings": True},
        "blocks": [{"mixer": MIXER}, {"mixer": MIXER, "feed_forward": "moe"}],
        "moe": {"experts": 4, "ffn": 10, "normalise_eps": 0.1},
    },
    "packed-alone": ALONE,
}
LAYOUTS = {
    **SHARED_LAYOUTS,
    **PIECES,
    "tensor of 3": (3, {"tensor": 3, "zero": 3}, {"recompute": "selective"}),
    **PIECES_AND_AXES,
}
QUICK = [("packed-alone", "nested"), ("packed-lfm2", "tensor, ring"), ("lfm2_moe", "experts")]
CASES = [
    *(case for case in pair_in_turn(SHAPES, LAYOUTS, QUICK) if case[1] != "tensor of 3"),
    ("packed-alone", "tensor of 3"),
]


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(("name", "layout"), mark_slow(CASES, except_for=QUICK))
def test_layouts_do_not_change_the_answer(name, layout, check_layout):
    ranks, parallel, train = LAYOUTS[layout]
    check_layout(name, ranks, parallel, **train)
