"""Attention to compressed keys, routers by hashes of tokens, grouped output products and limits of
SwiGLU give the one-process answer to 1e-10 in fp64 under tensor, context, pipeline, expert and data
ranks, ZeRO and recompute, also if samples are packed and pieces of them are shorter than windows.

Tests `megaframe.architecture.compressed_attention`, `megaframe.architecture.hash_table`,
`megaframe.model.compressed_attention`, `megaframe.model.compressor`,
`megaframe.model.group_products` and `megaframe.ops.window_attention`.
"""

import pytest
from parity_runs import make_layout_check
from slow_cases import slow

KEYS = {
    **{"kind": "compressed_attention", "query_rank": 7, "window": 3},
    **{"output_groups": 4, "output_rank": 3},
}
SPARSE = {
    **{"tokens": 2, "overlap": True},
    "indexer": {"heads": 4, "head_dim": 6, "top_k": 2},
}
SHARED = {"norm": "rmsnorm", "init_std": 0.5, "rotary_fraction": 0.5}
V4 = {
    **{**SHARED, "activation": "swiglu", "activation_limit": 0.5, "streams": {"number": 2}},
    "blocks": [
        {
            "mixer": {**KEYS, "compression": SPARSE},
            "feed_forward": {"kind": "moe", "router": "hash"},
        },
        {"mixer": {**KEYS, "compression": {"tokens": 3}}, "feed_forward": "moe"},
    ],
    "moe": {"experts": 4, "ffn": 10, "shared": 1, "score": "sqrtsoftplus"},
}
LONG = {"tokens": 4, "overlap": True}
"""Keys of more tokens than the pieces of a sample have."""
SHAPES = {
    "v4": V4,
    "packed-v4": V4,
    "keys": {**SHARED, "blocks": [{"mixer": {**KEYS, "window": 6, "compression": LONG}}]},
    "packed-keys": {**SHARED, "blocks": [{"mixer": {**KEYS, "compression": SPARSE}}]},
}
RING, ALL_TO_ALL = {"context_kind": "ring"}, {"context_kind": "all_to_all"}
NESTED = {"context": 4, "context_kind": "nested", "context_heads": 2}
CASES = [
    ("packed-v4", 4, {"context": 2, **RING, "tensor": 2, "zero": 3}, "selective"),
    ("v4", 4, {"pipeline": 2, "expert": 2, "zero": 1}, "full"),
    ("keys", 4, NESTED, "none"),
    slow("packed-keys", 4, NESTED, "none"),
    slow("v4", 4, {"data": 2, "tensor": 2, "expert": 2, "zero": 2}, "none"),
    slow("packed-keys", 4, {"context": 2, **ALL_TO_ALL, "tensor": 2}, "none"),
]


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(("name", "ranks", "parallel", "recompute"), CASES)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, recompute, check_layout):
    check_layout(name, ranks, parallel, recompute=recompute)
