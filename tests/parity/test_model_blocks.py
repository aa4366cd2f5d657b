"""Every key of `model.blocks` that no other test of parity sets gives the one-process answer to
1e-10 in fp64: four blocks of different kinds, with two rotary bases and layers without rotation."""

import pytest
from bitwise import assert_same_bits
from parity_runs import FEW, assert_same, run
from slow_cases import slow

BLOCKS = [
    {
        "norms": "after",
        "residual_scale": 0.5,
        "mixer": {"rotary": False, "score_scale": 0.3, "qkv_bias": True},
        "feed_forward": {"activation": "swiglu_clamped", "bias": True, "ffn": 18},
    },
    {
        "parallel": "one_norm",
        "mixer": {
            **{"heads": 8, "head_dim": 6, "bias": True},
            **{"rotary_base": 100.0, "rotary_fraction": 0.34},
        },
        "feed_forward": {"activation": "geglu", "up_bias": True},
    },
    {
        "parallel": "two_norms",
        "norms": "both",
        "mixer": {"rotary_base": 5000.0, "qk_norm": True},
        "feed_forward": {"activation": "relu2", "down_bias": True},
    },
    {"norms": "none", "residual_scale": 0.7, "mixer": {"window": 3}},
]
MODEL = {"layers": 4, "kv_heads": 2, "ffn": 24, "embedding_scale": 3.0, "blocks": BLOCKS}
LAYOUTS = [
    slow(2, {"tensor": 2, "tensor_chunks": 2}, "selective"),
    slow(2, {"data": 2, "zero": 3}, "full"),
    (2, {"context": 2, "context_kind": "ring"}, "none"),
    slow(4, {"tensor": 4}, "none"),
    slow(4, {"context": 2, "context_kind": "all_to_all", "tensor": 2, "zero": 1}, "selective"),
    (4, {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "tensor": 2}, "selective"),
]


@pytest.mark.parametrize(("ranks", "parallel", "recompute"), LAYOUTS)
def test_layouts_do_not_change_the_answer(ranks, parallel, recompute, pool, run_alone):
    train = {**FEW, "recompute": recompute}
    assert_same(pool.run(ranks, run, MODEL, train, parallel), run_alone(MODEL, FEW))


DENSE = {"activation": "geglu", "ffn": 20}
LATENT = {"latent": {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}}
LATENT_WINDOW = {"kind": "latent", "window": 4}
MIXER = {"rotary_base": 500.0, "rotary_fraction": 0.5, "qk_norm": True, "qkv_bias": True}
SHORTHANDS = {
    "dense": (
        {**MIXER, **DENSE, "window": (4, None)},
        {"blocks": [{"mixer": {**MIXER, "window": w}, "feed_forward": DENSE} for w in (4, None)]},
    ),
    "experts": (
        {"moe": {"experts": 4, "ffn": 10, "every": 2}},
        {"moe": {"experts": 4, "ffn": 10}, "blocks": [{}, {"feed_forward": "moe"}]},
    ),
    "latent": ({**LATENT, "window": 4}, {**LATENT, "blocks": [{"mixer": LATENT_WINDOW}]}),
}


@pytest.mark.parametrize("name", SHORTHANDS)
def test_keys_of_the_model_give_the_bits_of_their_blocks(name, pool):
    short, long = (pool.run(1, run, model, FEW) for model in SHORTHANDS[name])
    assert_same_bits(short, long, because="it is one model, spelled in two ways")
