"""Adapters give the one-process answer to 1e-10 in fp64 under tensor, context, pipeline, expert and
data ranks, ZeRO and recompute: of a column linear A is whole and B divided, of a row linear the
reverse, and dropout of A's inputs depends on tokens and channels alone."""

import pytest
from parity_runs import make_layout_check
from slow_cases import slow

DROPS = {"rank": 3, "alpha": 5.0, "dropout": 0.3}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
SHAPES = {
    "packed-llama": {**LLAMA, "adapters": DROPS},
    "biased": {"bias": True, "dropout": 0.1, "adapters": {"rank": 2, "targets": ("value", "down")}},
    "magnitudes": {**LLAMA, "bias": True, "adapters": {**DROPS, "dora": True}},
    "first layer": {"adapters": {**DROPS, "layers": (0,)}},
    "latent": {
        "latent": {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5, "query_rank": 12},
        "adapters": DROPS,
    },
    "delta": {
        "blocks": [
            {"mixer": {"kind": "gated_delta_net", "key_dim": 4, "decay_rank": 4, "gate_rank": 4}},
            {"mixer": {"kind": "mamba2", "groups": 2, "state_dim": 4, "chunk": 3}},
        ],
        "adapters": DROPS,
    },
}
MOE = {"experts": 4, "ffn": 12, "top_k": 2}
OF_EXPERTS = {"adapters": {"rank": 3, "alpha": 5.0}}
SHAPES |= {
    "experts": {**LLAMA, "moe": {**MOE, "shared": 1}, **OF_EXPERTS},
    "scaled experts": {"moe": {**MOE, "scale_inputs": True, "expert_bias": True}, **OF_EXPERTS},
}
EXPERTS_AND_TENSOR = {"data": 2, "expert": 2, "expert_tensor": 2, "tensor": 2}
CASES = [
    ("experts", 4, EXPERTS_AND_TENSOR, {}),
    ("scaled experts", 2, {"expert": 2, "zero": 3}, {"recompute": "selective"}),
    slow("experts", 4, {"expert_tensor": 2, "data": 4, "zero": 3}, {}),
    slow("experts", 4, {"pipeline": 2, "data": 2, "expert": 2, "schedule": "zb-h1"}, {}),
    *(slow("scaled experts", 4, {"expert_tensor": 2, "zero": zero}, {}) for zero in (0, 1, 2)),
    ("packed-llama", 2, {"tensor": 2, "tensor_chunks": 2}, {"recompute": "selective"}),
    ("packed-llama", 4, {"tensor": 4, "zero": 3}, {"recompute": "full"}),
    ("packed-llama", 4, {"pipeline": 2, "tensor": 2, "schedule": "zb-h1"}, {}),
    ("magnitudes", 4, {"tensor": 2, "data": 2, "zero": 3}, {"recompute": "selective"}),
    slow("magnitudes", 4, {"pipeline": 2, "tensor": 2, "schedule": "zb-h1"}, {"recompute": "full"}),
    ("biased", 4, {"context": 2, "data": 2, "zero": 2}, {}),
    ("first layer", 2, {"zero": 3}, {}),
    slow("packed-llama", 4, {"context": 2, "tensor": 2}, {"recompute": "selective"}),
    *(slow("biased", 2, {"zero": zero}, {}) for zero in (0, 1, 2, 3)),
    slow("latent", 4, {"tensor": 2, "context": 2}, {"recompute": "selective"}),
    slow("latent", 2, {"tensor": 2, "zero": 3}, {}),
    slow("delta", 2, {"tensor": 2}, {"recompute": "selective"}),
    slow("delta", 2, {"context": 2}, {}),
]


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(("name", "ranks", "parallel", "train"), CASES)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, train, check_layout):
    check_layout(name, ranks, parallel, **train)
