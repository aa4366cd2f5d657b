"""Tensor and sequence parallel ranks give the one-process answer to 1e-10 in fp64, alone and with
pipelines and data ranks: odd vocabulary, uneven groups and rows, tied and untied, every norm.
"""

import pytest
from training import MODELS, assert_same, run

SHAPES = {
    **MODELS,
    "smooth": {"position": "none", "logit_softcap": 3.0, "activation": "relu2", "bias": True},
    "window": {"window": 4, "qkv_bias": True, "kv_heads": 4, "ffn": 30},
}
TRAIN = {"smooth": {"label_smoothing": 0.1, "z_loss": 0.01}}
LAYOUTS = [
    (2, {"tensor": 2}),
    (4, {"tensor": 4}),
    (4, {"tensor": 2, "data": 2}),
    (4, {"tensor": 2, "pipeline": 2, "chunks": 2, "schedule": "interleaved"}),
    (4, {"tensor": 2, "pipeline": 2, "chunks": 2, "schedule": "zb-v"}),
]


@pytest.fixture(scope="module")
def expected(pool):
    return {
        name: pool.run(1, run, {**model, "layers": 4}, {"microbatch": 8, **TRAIN.get(name, {})})[0]
        for name, model in SHAPES.items()
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("ranks", "parallel"), LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, recompute, pool, expected):
    model = {**SHAPES[name], "layers": 4}
    train = {"microbatch": 1, "recompute": recompute, **TRAIN.get(name, {})}
    assert_same(pool.run(ranks, run, model, train, parallel), expected[name])
