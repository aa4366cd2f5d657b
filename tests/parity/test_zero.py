"""What data ranks divide (ZeRO 1, 2, 3, in one copy or in replicas) changes no answer: 1e-10 in
fp64, alone and with tensor, context and pipeline ranks, recompute and many microbatches.
"""

import pytest
from training import MODELS, assert_same, run

INTERLEAVED = {"pipeline": 2, "chunks": 2, "schedule": "interleaved"}
LAYOUTS = [
    (2, {}, {"microbatch": 4}),
    (2, {}, {"microbatch": 1, "recompute": "full"}),
    (4, {}, {"microbatch": 1}),
    (4, {"data_replicate": 2}, {"microbatch": 1}),
    (4, {"data_replicate": 4}, {"microbatch": 2}),
    (4, {"tensor": 2}, {"microbatch": 2, "recompute": "selective"}),
    (4, {"tensor": 4}, {"microbatch": 2}),
    (4, {"context": 2}, {"microbatch": 1}),
    (4, {"context": 4}, {"microbatch": 4}),
    (4, INTERLEAVED, {"microbatch": 1, "recompute": "full"}),
    (4, {**INTERLEAVED, "schedule": "zb-v"}, {"microbatch": 1}),
    (4, {"pipeline": 2, "schedule": "gpipe"}, {"microbatch": 1}),
]


@pytest.fixture(scope="module")
def expected(pool):
    return {
        name: pool.run(1, run, {**model, "layers": 4}, {"microbatch": 8})[0]
        for name, model in MODELS.items()
    }


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "parallel", "train"), LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_stages_do_not_change_the_answer(name, ranks, parallel, train, zero, pool, expected):
    found = pool.run(ranks, run, {**MODELS[name], "layers": 4}, train, {**parallel, "zero": zero})
    assert_same(found, expected[name])
