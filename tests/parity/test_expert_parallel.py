"""Experts give the one-process answer to 1e-10 in fp64 under every layout: each dispatch method and
each balance, with tensor, context, pipeline and data ranks, ZeRO and recompute.

Tests `megaframe.model.moe.layer` and `megaframe.model.moe.router`.
"""

import pytest
from bitwise import assert_same_bits
from parity_runs import FEW, assert_same, run
from slow_cases import slow

MOE = {"experts": 6, "ffn": 12, "top_k": 2, "balance_rate": 0.05, "balance_loss": 0.1}
GATED = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
BIASES = {"expert_bias": True, "router_bias": True}
MODELS = {
    "bias": {**GATED, "moe": {**MOE, **BIASES, "shared": 1}},
    "sequence": {**GATED, "moe": {**MOE, "balance": "sequence", "score": "softmax", "every": 2}},
    "global": {"moe": {**MOE, "balance": "global", "z_loss": 0.05, "jitter": 0.2, "first": 1}},
    "groups": {
        **GATED,
        "activation": "swiglu_clamped",
        "moe": {
            **{**MOE, **BIASES, "experts": 8, "groups": 4, "top_groups": 2, "top_k": 3},
            "balance": "none",
        },
    },
}
FOUR = {"expert": 4}
TWO_EACH = {"global_batch": 8}
"""Gives each of four data ranks two microbatches."""
V_SHAPED = {"pipeline": 2, "chunks": 2, "schedule": "dualpipe-v", "expert_overlap": True}
LAYOUTS = [
    slow("bias", 2, {"expert": 2}, {}),
    slow("bias", 2, {"expert_tensor": 2}, {"recompute": "selective"}),
    slow("bias", 2, {"tensor": 2, "expert": 2}, {"recompute": "full"}),
    ("bias", 4, {"tensor": 2, "expert": 2, "expert_tensor": 2, "zero": 1}, {}),
    slow("bias", 4, {"context": 2, "expert": 4, "zero": 3}, {"recompute": "full"}),
    slow("bias", 4, {"pipeline": 2, "expert": 2, "chunks": 2, "schedule": "zb-v"}, {}),
    ("bias", 4, {**V_SHAPED, "expert": 2, "zero": 2}, {"recompute": "full"}),
    slow("global", 4, {**V_SHAPED, "expert": 2, "dispatch": "all_gather"}, {}),
    slow("sequence", 2, {"context": 2, "expert": 2}, {"microbatch": 4}),
    slow("sequence", 4, {"tensor": 2, "context": 2, "expert": 2, "zero": 2}, {}),
    ("sequence", 4, {**FOUR, "dispatch": "all_gather"}, {"recompute": "selective", **TWO_EACH}),
    ("global", 4, {"tensor": 2, "expert": 4, "dispatch": "hierarchical", "node_size": 2}, {}),
    slow("global", 4, {"data_replicate": 2, "expert": 2, "zero": 3}, TWO_EACH),
    slow("global", 4, {"pipeline": 2, "tensor": 2, "expert_tensor": 2}, {"recompute": "full"}),
    ("groups", 4, {**FOUR, "dispatch": "deduplicated", "node_size": 2}, {}),
    slow("groups", 4, {"expert": 2, "expert_tensor": 2, "dispatch": "all_gather"}, {}),
    slow("groups", 4, {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "expert": 2}, {}),
]
"""Those that are not slow: beside tensor (also of experts), context and pipeline ranks; and each
other dispatch method."""


def shape_model(name, parallel):
    """Return a model with two layers for each pipeline rank."""
    return {**MODELS[name], "layers": 2 * parallel.get("pipeline", 1)}


@pytest.mark.parametrize(("name", "ranks", "parallel", "train"), LAYOUTS)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, train, pool, run_alone):
    model, train = shape_model(name, parallel), {**FEW, "microbatch": 1, **train}
    whole = {"global_batch": train["global_batch"], "microbatch": train["global_batch"]}
    assert_same(pool.run(ranks, run, model, train, parallel), run_alone(model, whole))


@pytest.mark.slow
def test_samples_of_unequal_length_on_each_rank(pool):
    model, train = shape_model("sequence", {}), {"microbatch": 1}
    unmixed = pool.run(1, run, model, train, {}, False, True)[0]
    assert_same(pool.run(4, run, model, train, {"expert": 4}, False, True), unmixed)


def test_overlap_changes_no_bit(pool):
    parallel = {"tensor": 2, "expert": 2}
    arguments = shape_model("bias", parallel), {**FEW, "microbatch": 2}, parallel
    results = [pool.run(2, run, *arguments, serial) for serial in (False, True)]
    assert_same_bits(*results, because="overlap moves waits, not what is computed")
