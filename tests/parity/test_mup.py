"""No layout changes what a model in muP learns, under any optimizer: 1e-10 in fp64. At the widths
of its base model it learns what the standard parametrisation does.
"""

import pytest
from parity_runs import EXAMPLES, FEW, assert_same, choose_microbatch, run, run_with
from slow_cases import mark_slow

MUP = {"parametrisation": "mup", "mup_base_hidden": 4, "mup_base_head_dim": 2}
MODELS = {
    "tied": {"position": "learned", "tie_embeddings": True, "head_bias": True, "qk_norm": True},
    "experts": {
        **{"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
        "moe": {"experts": 4, "ffn": 8, "shared": 1, "shared_gate": True},
    },
    "latent": {
        "latent": {"kv_rank": 6, "query_rank": 5, "head_dim": 4, "rotary_dim": 2, "value_dim": 4},
        "mtp_depth": 1,
    },
    "delta net": {
        "blocks": [{"mixer": "gated_delta_net"}, {"mixer": {"output_gate": "head"}}],
        "norm": "rmsnorm",
    },
}
OPTIMIZERS = {
    "adamw": {"eps": 1e-3, "weight_decay": 0.5, "ema": 0.7},
    "muon": {"name": "muon", "weight_decay": 0.5},
    "sgd": {"name": "sgd", "nesterov": True, "weight_decay": 0.5},
    "lion": {"name": "lion", "weight_decay": 0.5},
}
LAYOUTS = {
    "zero 3": (2, {"zero": 3}, {}),
    "tensor": (2, {"tensor": 2, "zero": 1}, {"recompute": "full"}),
    "tensor and pipeline": (4, {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}, {}),
    "two chunks": (2, {"pipeline": 2, "chunks": 2, "schedule": "zb-v"}, {}),
    "context": (4, {"context": 2, "zero": 2}, {"recompute": "selective"}),
    "replicas": (4, {"data_replicate": 2, "zero": 3}, {}),
    "experts": (4, {"expert": 2, "tensor": 2, "zero": 2}, {}),
}
QUICK = [
    ("tied", "tensor and pipeline", "muon"),
    ("experts", "experts", "adamw"),
    ("latent", "context", "sgd"),
    ("tied", "two chunks", "lion"),
    ("delta net", "tensor", "muon"),
]
CASES = [
    *QUICK,
    *(
        (model, layout, optim)
        for number, model in enumerate(MODELS)
        for place, layout in enumerate(LAYOUTS)
        for optim in [[*OPTIMIZERS][(number + place) % len(OPTIMIZERS)]]
        if layout != "experts" or model == "experts"
        if (model, layout, optim) not in QUICK
    ),
]


@pytest.mark.parametrize(("name", "layout", "optim"), mark_slow(CASES, except_for=QUICK), ids=str)
def test_no_layout_changes_what_is_learnt(name, layout, optim, pool, run_alone):
    (ranks, parallel, options), rest = LAYOUTS[layout], (False, False, False, OPTIMIZERS[optim])
    model = {**MUP, **MODELS[name], "layers": 4 if "pipeline" in parallel else 2}
    train = {**FEW, "microbatch": choose_microbatch(ranks, parallel), **options}
    results = pool.run(ranks, run, model, train, parallel, *rest)
    assert_same(results, run_alone(model, {**FEW, "microbatch": 4}, {}, *rest))


@pytest.mark.parametrize("state", [{"state": "bf16"}, {"state": "int8"}], ids=str)
def test_fewer_bits_of_state_are_those_of_one_process(state, pool):
    """Groups of other learning rates are other buckets, of which each rank has its parts."""
    model, train = {**MUP, **MODELS["tied"]}, {**FEW, "microbatch": 1}
    arguments = model, train, {"zero": 2}, False, False, False, {"name": "muon", **state}
    (expected,) = pool.run(1, run, model, {**train, "microbatch": 4}, {}, *arguments[3:])
    assert_same(pool.run(4, run, *arguments), expected)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_the_base_model_learns_what_the_standard_one_does(optim, pool):
    base = {"parametrisation": "mup", "mup_base_hidden": 16, "mup_base_head_dim": 4}
    model = MODELS["tied"] | MODELS["experts"]
    arguments = FEW, {}, False, False, False, OPTIMIZERS[optim]
    (standard,) = pool.run(1, run, model, *arguments)
    assert_same(pool.run(1, run, {**base, **model}, *arguments), standard)


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_another_width_learns_otherwise(optim, pool):
    """So that what is compared above depends on the parametrisation at all."""
    arguments = FEW, {}, False, False, False, OPTIMIZERS[optim]
    (standard,) = pool.run(1, run, MODELS["tied"], *arguments)
    with pytest.raises(AssertionError):
        assert_same(pool.run(1, run, {**MUP, **MODELS["tied"]}, *arguments), standard)


def test_an_optimizer_from_outside_has_the_rates_that_it_scales_like(pool):
    example, optim = str(EXAMPLES / "optimizer.py"), {"name": {"kind": "adabelief"}}
    optim["name"]["belief_eps"] = 1e-6
    model = {**MUP, **MODELS["experts"]}
    (expected,) = pool.run(1, run_with, example, model, {"microbatch": 4}, {}, optim)
    train, parallel = {"microbatch": 2}, {"tensor": 2, "zero": 1}
    assert_same(pool.run(4, run_with, example, model, train, parallel, optim), expected)
