"""Latent attention gives the one-process answer to 1e-10 in fp64 under tensor, context, pipeline
and data ranks, ZeRO and recompute. The weights that make the latents are whole on every tensor
rank; their gradients, and those of the latents' norms, are summed over tensor ranks. So does sparse
attention, with the keys that its indexer chooses and the loss that trains it, also where later
layers, of the same stage or the next, attend to the same keys.

Tests `megaframe.distributed.differentiable` and `megaframe.tensor_parallel.head_products`.
"""

import pytest
from parity_runs import FEW, make_layout_check, run
from saved_bytes import measure_block
from slow_cases import slow
from tolerances import PROMISE, assert_within, promised

LATENT = {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4}
YARN = {"kind": "yarn", "factor": 40, "original_length": 64, "high_frequency": 32}
SHARED = {"kind": "latent", "shared_indexer": True}
SHAPES = {
    "deepseek": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "latent": {**LATENT, "query_rank": 12, "value_dim": 5},
        "rotary_scaling": {**YARN, "mscale": 0.5, "mscale_all_dim": 0.8},
    },
    "packed-lite": {"latent": {**LATENT, "value_dim": 14}, "window": (None, 4), "dropout": 0.1},
    "packed-sparse": {
        **{"latent": {**LATENT, "query_rank": 12, "value_dim": 5}, "dropout": 0.1},
        "indexer": {"heads": 3, "head_dim": 6, "top_k": 3, "loss": 0.5},
        "blocks": [{"mixer": "latent"}, {"mixer": SHARED}],
    },
    "sparse": {
        **{"latent": {**LATENT, "query_rank": 12, "value_dim": 5}, "norm": "rmsnorm"},
        "indexer": {"heads": 2, "head_dim": 6, "top_k": 4, "loss": 0.5},
        "moe": {"experts": 4, "ffn": 10},
        "blocks": [
            {"mixer": "latent", "feed_forward": "moe"},
            {"mixer": SHARED, "feed_forward": "moe"},
            {"mixer": SHARED, "feed_forward": "moe"},
            {"mixer": "latent", "feed_forward": "moe"},
        ],
    },
    "frozen-sparse": {
        **{"latent": {**LATENT, "query_rank": 12, "value_dim": 5}, "norm": "rmsnorm"},
        "indexer": {"heads": 2, "head_dim": 6, "top_k": 4},
    },
    "dense-warm-up": {
        "latent": {**LATENT, "query_rank": 12, "value_dim": 5},
        "indexer": {"heads": 2, "head_dim": 6, "top_k": 4, "loss": 0.5, "dense": True},
    },
}
for name in ("packed-sparse", "sparse", "frozen-sparse"):
    sparse = SHAPES[name]
    indexer = {**sparse["indexer"], "absorb": True}
    SHAPES[name.replace("sparse", "absorbed")] = {**sparse, "indexer": indexer}
RING, ALL_TO_ALL = {"context_kind": "ring"}, {"context_kind": "all_to_all"}
NESTED = {"context": 4, "context_kind": "nested", "context_heads": 2}
ZB_V = {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "tensor": 2, "zero": 1}
CASES = [
    ("packed-lite", 2, {"tensor": 2, "tensor_chunks": 2}, "selective"),
    slow("deepseek", 4, {"tensor": 4, "zero": 3}, "full"),
    ("deepseek", 4, NESTED, "none"),
    slow("packed-lite", 4, NESTED, "none"),
    slow("packed-lite", 4, {"context": 2, **RING, "tensor": 2}, "full"),
    slow("packed-lite", 4, {"context": 2, **ALL_TO_ALL, "data": 2, "zero": 2}, "selective"),
    slow("deepseek", 4, ZB_V, "none"),
    slow("deepseek", 4, {"pipeline": 2, "context": 2, **RING}, "selective"),
    ("packed-sparse", 4, {"context": 2, **RING, "tensor": 2, "zero": 3}, "selective"),
    ("sparse", 4, {"pipeline": 2, "expert": 2, "zero": 1}, "full"),
    slow("sparse", 4, NESTED, "none"),
    slow("packed-sparse", 4, {"context": 2, **ALL_TO_ALL, "tensor": 2}, "none"),
    slow("sparse", 4, ZB_V, "selective"),
    slow("frozen-sparse", 4, {"tensor": 2, "context": 2, **RING, "zero": 2}, "selective"),
    slow("dense-warm-up", 2, {"tensor": 2}, "none"),
    ("packed-absorbed", 4, {"context": 2, **RING, "tensor": 2, "zero": 3}, "selective"),
    slow("absorbed", 4, {"pipeline": 2, "expert": 2, "zero": 1}, "full"),
    slow("absorbed", 4, NESTED, "none"),
    slow("packed-absorbed", 4, {"context": 2, **ALL_TO_ALL, "tensor": 2}, "none"),
    slow("frozen-absorbed", 4, ZB_V, "selective"),
]


@pytest.fixture(scope="module")
def check_layout(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(("name", "ranks", "parallel", "recompute"), CASES)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, recompute, check_layout):
    check_layout(name, ranks, parallel, recompute=recompute)


def test_latents_of_chosen_keys_are_their_keys_and_values(pool):
    """Multiplied in another order: the same losses and weights after two steps."""
    heads, latents = (
        pool.run(1, run, SHAPES[f"packed-{name}"], FEW, {}, False, False, True, {"eps": 1e-3})[0]
        for name in ("sparse", "absorbed")
    )
    assert latents.losses == [promised(loss) for loss in heads.losses]
    for name in heads.weights:
        assert_within(latents.whole(name), heads.whole(name), PROMISE, "1e-10", name)


def test_without_a_loss_nothing_of_an_indexer_changes(pool):
    """Not by weight decay either, which moves whatever has a gradient, even of 0."""
    unhurried, hasty = (
        pool.run(1, run, SHAPES["frozen-sparse"], FEW, {}, False, False, False, {"lr": rate})[0]
        for rate in (1e-3, 1e-1)
    )
    names = {name for name in hasty.weights if not name.startswith("optimizer.")}
    indexed = {name for name in names if ".indexer." in name}
    moved = {
        name
        for name in names
        if float((hasty.whole(name) - unhurried.whole(name)).abs().max()) > 1e-6
    }
    assert len(indexed) == 2 * 4 and moved == names - indexed
    assert not any(".indexer." in name for name in {*hasty.weights} - names)


@pytest.mark.parametrize("recompute", [slow("none"), "selective"])
@pytest.mark.parametrize("rank", [24, None])
def test_activations_and_bytes_are_the_closed_forms(rank, recompute, pool):
    """A block keeps what is planned, divided by the ranks. The forward pass gathers the latents, or
    the stream if queries have no latent. The backward pass scatters their gradients and gathers
    them again, except the rotated part of the keys. The output, the MLP and the model's ends move
    as many bytes as in any model."""
    tensor, hidden, losses = 2, 64, 2 * (1 + 2) * 4
    latent = {"query_rank": rank, "kv_rank": 16, "head_dim": 10, "rotary_dim": 4, "value_dim": 12}
    results = pool.run(tensor, measure_block, {"latent": latent}, recompute, tensor, 1)
    elements = 3 * ((rank or hidden) + 16) + 2 * 4 + (2 + 5 + 4) * hidden
    for saved, planned, bytes_sent in results:
        assert saved == planned
        assert bytes_sent == (elements * 2 + losses) * 2 * 16 * (tensor - 1) // tensor
