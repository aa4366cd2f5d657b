"""Attention with bounded scores, sinks, gated outputs, norms of whole queries, LayerNorms of heads,
LongRoPE, ALiBi and chunks, a norm of embeddings, experts with scaled inputs, xIELU and a bias of
the output head give the one-process answer to 1e-10 in fp64 under tensor, context, pipeline and
data ranks, ZeRO and recompute. Two key heads are shared by neighbours of four tensor ranks. So do
keys and per-layer embeddings that are handed to later layers, experts with norms of their own,
several residual streams, LAuReL, and gates that are cut off.

Tests `megaframe.model.shared_keys`, `megaframe.model.layer_embedding`, `megaframe.model.streams`,
`megaframe.architecture.streams`, `megaframe.model.laurel`, `megaframe.architecture.laurel` and
`megaframe.model.activation_sparsity`.
"""

import pytest
from parity_runs import make_layout_check
from saved_bytes import measure_block
from slow_cases import mark_slow

SCORES = {"softcap": 2.0, "sinks": True}
LONG = {
    **{"kind": "longrope", "factor": 4.0, "original_length": 8},
    **{"short_factors": [1.0, 1.5], "long_factors": [2.0, 7.0]},
}
"""Samples are longer than this, and their parts on context ranks are not."""
LATER = {"rate": 0.5, "length": 4}
SHARED = {"shared_keys": True, "window": 5}
ROTATED_FIRST = {"qk_norm": True, "norm_after_rotation": True}
HALF = {"kind": "proportional", "proportion": 0.5}
SHAPES = {
    "scores": {
        "norm": "rmsnorm",
        "kv_heads": 2,
        "init_std": 0.5,  # scores reach the bound
        "blocks": [
            {"mixer": {**SCORES, "window": 4, "output_gate": "element", "rotary_scaling": LONG}},
            {
                "mixer": {**SCORES, "output_gate": "head", **ROTATED_FIRST, "query_scale": LATER},
                "norms": "both",
            },
        ],
    },
    "whole-norms": {
        **{"norm": "rmsnorm", "kv_heads": 2, "qk_norm": "whole", "bias": True},
        "rotary_scaling": {"kind": "dynamic", "factor": 2.0, "original_length": 8},
    },
    "layer-norms": {
        **{"kv_heads": 2, "head_bias": True, "activation": "relu", "qk_norm": "layernorm"},
        "blocks": [
            {"feed_forward": {"activation": "xielu"}},
            {"mixer": {"qk_norm": "layernorm_per_head"}},
        ],
    },
    "chunks": {
        **{"norm": "rmsnorm", "kv_heads": 2, "init_std": 0.5},
        "blocks": [
            {"mixer": {"qk_norm": "l2", "attention_chunk": 5}, "feed_forward": "moe"},
            {"mixer": {"rotary": False, "query_scale": {**LATER, "first": 1}}},
        ],
        "moe": {"experts": 4, "top_k": 1, "ffn": 16, "shared": 1, "scale_inputs": True},
    },
    "packed-chunks": {"blocks": [{"mixer": {"attention_chunk": 3}}]},
    "packed-sinks": {"blocks": [{"mixer": {"sinks": True, "kv_heads": 1}}]},
    "alibi": {
        **{"position": "none", "kv_heads": 2, "embedding_norm": True, "bias": True},
        "blocks": [
            {"mixer": {"alibi": 5, "alibi_form": "falcon", "kv_heads": 4}},
            {"mixer": {"alibi": 4, "window": 5}},
        ],
    },
    "values": {
        **{"norm": "rmsnorm", "kv_heads": 2, "rotary_fraction": 0.5, "qkv_bias": True},
        "blocks": [
            {"mixer": {"v_head_dim": 3, "window": 5, "sinks": True}},
            {
                "mixer": {
                    **{"v_head_dim": 6, "kv_heads": 1, "qk_norm": True, "output_gate": "element"},
                    **{"rotary_fraction": 1.0, "rotary_scaling": HALF},
                },
            },
        ],
    },
    "gemma-4": {
        **{"norm": "rmsnorm", "kv_heads": 4, "init_std": 0.5, "qk_norm": True},
        "blocks": [
            {"mixer": {"value_norm": True, "window": 5}, "norms": "both", "layer_scalar": True},
            {
                "mixer": {
                    **{"value_norm": True, "keys_as_values": True, "kv_heads": 1, "head_dim": 6},
                    **{"score_scale": 1.0, "rotary_scaling": HALF},
                },
                "layer_scalar": True,
            },
        ],
    },
    "gemma-4-experts": {
        **{"norm": "rmsnorm", "init_std": 0.5},
        "blocks": [{"feed_forward": "moe", "norms": "both"}, {"feed_forward": "moe"}],
        "moe": {"experts": 4, "ffn": 16, "shared": 2, "expert_gain": True, "own_norms": True},
    },
    "layer-embeddings": {
        **{"norm": "rmsnorm", "init_std": 0.5, "layer_embeddings": 6, "tie_embeddings": True},
        "blocks": [
            {"norms": "both", "layer_scalar": True, "mixer": {"window": 5}},
            {"mixer": SHARED},
        ],
    },
    "streams": {
        **{"norm": "rmsnorm", "init_std": 0.5, "streams": {"number": 3, "iterations": 5}},
        "blocks": [{"norms": "both", "mixer": {"window": 5}}, {"feed_forward": "moe"}],
        "moe": {"experts": 4, "ffn": 16, "shared": 1},
    },
    "gemma-3n": {
        **{"norm": "rmsnorm", "init_std": 0.5, "activation": "geglu", "layer_embeddings": 6},
        **{"streams": {"kind": "altup", "number": 3}, "layer_vocab": 9, "tie_embeddings": True},
        "blocks": [
            {
                **{"norms": "both", "laurel_rank": 5, "feed_forward": {"sparsity": 0.6}},
                "mixer": {"value_norm": True, "window": 5},
            },
            {"mixer": SHARED, "laurel_rank": 5},
        ],
    },
    "shared-keys": {  # of two layers without stages, and of the first three with stages of one
        **{"norm": "rmsnorm", "init_std": 0.5, "kv_heads": 2},
        "blocks": [
            {"mixer": {"qk_norm": True, "value_norm": True, "window": 5}},
            {"mixer": {**SHARED, "qk_norm": True, "output_gate": "head"}, "norms": "both"},
            {"mixer": {**SHARED, "sinks": True, "softcap": 2.0}},
            {"mixer": {"keys_as_values": True, "rotary_scaling": HALF}},
        ],
    },
}
RING, ALL_TO_ALL = {"context_kind": "ring"}, {"context_kind": "all_to_all"}
ZB_V = {"pipeline": 2, "chunks": 2, "schedule": "zb-v"}
TENSOR_AND_ZERO = (4, {"tensor": 2, "data": 2, "zero": 3}, "full")
NESTED = (4, {"context": 4, "context_kind": "nested", "context_heads": 2}, "none")
RING_AND_TENSOR = (4, {"context": 2, **RING, "tensor": 2}, "selective")
EXPERTS = (4, {"tensor": 2, "expert": 2, "data": 2, "zero": 3}, "selective")
STAGES = (4, {**ZB_V, "tensor": 2, "zero": 1}, "none")
LAYOUTS = [
    (2, {"tensor": 2, "tensor_chunks": 2}, "selective"),
    (2, {"data": 2, "zero": 2}, "none"),
    (4, {"tensor": 4}, "none"),
    TENSOR_AND_ZERO,
    NESTED,
    RING_AND_TENSOR,
    (4, {"context": 2, **ALL_TO_ALL, "data": 2, "zero": 1}, "full"),
    (4, {"context": 2, **ALL_TO_ALL, "tensor": 2}, "none"),
    STAGES,
    (4, {"pipeline": 2, "context": 2, **RING}, "selective"),
]
HANDED = ("shared-keys", "layer-embeddings", "streams", "gemma-3n")
"""Shapes whose messages between stages have more than one stream."""
CASES = [
    # Every second layout with each shape, the others with the next one.
    (name, *layout)
    for number, name in enumerate(SHAPES)
    for place, layout in enumerate(LAYOUTS)
    if (number + place) % 2 == 0 or (name in HANDED and layout == STAGES)
] + [(name, *EXPERTS) for name in ("gemma-4-experts", "streams")]
QUICK = [
    ("scores", *NESTED),
    ("whole-norms", *TENSOR_AND_ZERO),
    ("layer-norms", *LAYOUTS[2]),
    ("chunks", *RING_AND_TENSOR),
    ("packed-chunks", *NESTED),
    ("packed-sinks", *RING_AND_TENSOR),
    ("alibi", *NESTED),
    ("values", *RING_AND_TENSOR),
    ("gemma-4", *NESTED),
    ("gemma-4-experts", *EXPERTS),
    ("streams", *STAGES),
    ("streams", *EXPERTS),
    ("gemma-3n", *STAGES),
    ("shared-keys", *STAGES),
    ("layer-embeddings", *STAGES),
]


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(
    ("name", "ranks", "parallel", "recompute"), mark_slow(CASES, except_for=QUICK)
)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, recompute, check_layout):
    check_layout(name, ranks, parallel, recompute=recompute)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("gate", ["head", "element"])
def test_activations_and_bytes_are_the_closed_forms(gate, recompute, pool):
    """A block keeps what is planned, divided by the ranks. The gates gather the stream like any
    product of columns; sinks move nothing."""
    tensor, hidden = 2, 64
    mixer = {"output_gate": gate, "sinks": True, "softcap": 3.0, **ROTATED_FIRST}
    moved_by_gates = 3 * hidden * 2 * 2 * 16 * (tensor - 1) // tensor
    plain, gated = (
        pool.run(tensor, measure_block, {"blocks": [{"mixer": m}]}, recompute, tensor, 1)
        for m in ({}, mixer)
    )
    for (_, _, moved_plain), (saved, planned, moved) in zip(plain, gated, strict=True):
        assert saved == planned
        assert moved == moved_plain + moved_by_gates
