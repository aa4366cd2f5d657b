"""Weights of labels give the one-process answer to 1e-10 in fp64 under every kind of layout: the
losses of all ranks are divided by the sum of the weights of the global batch.

Tests `megaframe.data.label_weights` and `megaframe.data.microbatch`.
"""

from functools import cache

import pytest
from parity_runs import FEW, assert_same, choose_microbatch, run
from slow_cases import slow

MOE = {"experts": 4, "ffn": 12, "top_k": 2, "balance_rate": 0.05, "balance_loss": 0.1}
GATED = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
MODELS = {
    "ahead": {"mtp_depth": 2, "position": "learned", "tie_embeddings": True, "dropout": 0.1},
    "experts": {**GATED, "moe": {**MOE, "balance": "sequence", "z_loss": 0.05}},
}
RING = {"context": 2, "context_kind": "ring"}
LAYOUTS = [
    ("ahead", 4, {**RING, "tensor": 2}, {"recompute": "selective"}),
    slow("ahead", 4, {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "zero": 2}, {}),
    slow("ahead", 4, {"data": 2, "tensor": 2, "zero": 3}, {"recompute": "full"}),
    ("experts", 4, {"pipeline": 2, "expert": 2, "schedule": "zb-h1"}, {}),
    slow("experts", 4, {"tensor": 2, **RING, "expert": 2, "zero": 1}, {}),
]


@pytest.fixture(scope="module")
def train_weighted(pool):
    """train_weighted(name, ranks, train, parallel, stages) -> results of the ranks."""

    def train(name, ranks, keys, parallel, stages):
        model = {**MODELS[name], "layers": 2 * stages}
        rest = (None, None, "cpu", True)
        return pool.run(ranks, run, model, {**FEW, **keys}, parallel, False, False, True, *rest)

    return train


@pytest.fixture(scope="module")
def get_expected(train_weighted):
    return cache(lambda name, stages: train_weighted(name, 1, {}, {}, stages)[0])


@pytest.mark.parametrize(("name", "ranks", "parallel", "train"), LAYOUTS)
def test_layouts_do_not_change_the_answer(
    name, ranks, parallel, train, train_weighted, get_expected
):
    stages = parallel.get("pipeline", 1)
    train = {"microbatch": choose_microbatch(ranks, parallel), **train}
    results = train_weighted(name, ranks, train, parallel, stages)
    assert_same(results, get_expected(name, stages))
