"""A rank that plays alone counts what the same rank counts among real ones over gloo."""

import pytest

from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.mesh import Mesh, world_size
from megaframe.rehearsal import Ledger, counted_step, rehearse

MODEL = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 256}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
MOE = {"moe": {"experts": 8, "ffn": 32, "top_k": 2}}


def made(model, train, parallel, optim=None):
    return RunConfig(
        model={**MODEL, **model},
        train={"seq": 32, "global_batch": 8, "microbatch": 1, "precision": "bf16", **train},
        parallel={"node_size": 2, **parallel},
        optim=optim or {},
    )


def among_others(*sections):
    """What a rank of a real world counts."""
    config = made(*sections)
    mesh = Mesh(Layout.from_parallel(config.parallel, world_size()), device="cpu", timeout=60)
    with Ledger() as ledger:
        found = counted_step(config, mesh, ledger)
    mesh.close()
    return found


CASES = {
    "data": ({}, {}, {}),
    "zero 2": ({}, {}, {"zero": 2}),
    "zero 3, llama": (LLAMA, {"recompute": "selective"}, {"zero": 3}),
    "zero 1, replicas": (LLAMA, {"recompute": "full"}, {"zero": 1, "data_replicate": 2}),
    "tensor": (LLAMA, {}, {"tensor": 4}),
    "tensor x data": ({"bias": True}, {"precision": "fp32"}, {"tensor": 2, "zero": 1}),
    "ring": (LLAMA, {}, {"context": 2, "zero": 1}),
    "heads": (LLAMA, {}, {"context": 2, "context_kind": "all_to_all", "tensor": 2}),
    "pipeline": ({"tie_embeddings": True}, {}, {"pipeline": 4}),
    "zb-v": (LLAMA, {}, {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "tensor": 2}),
    "interleaved": ({}, {}, {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "zero": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_alone_or_among_others_a_rank_counts_the_same(name, pool):
    real = pool.run(4, among_others, *CASES[name])
    config = made(*CASES[name])
    layout = Layout.from_parallel(config.parallel, 4)
    for rank, found in enumerate(real):
        alone = rehearse(config, layout, rank)
        print(rank, found, alone, sep="\n")
        assert alone.traffic == found.traffic
        assert alone.buffers == found.buffers
        assert alone.optimizer == found.optimizer
        assert alone.actions == found.actions
        # A CPU keeps the statistics of layernorm in fewer bits.
        assert alone.kept == pytest.approx(found.kept, rel=0.01)
