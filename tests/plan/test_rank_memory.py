"""The memory plan of a rank, from integers alone, against a rank that is played alone."""

import math

import pytest

from megaframe.config import RunConfig
from megaframe.describe import describe
from megaframe.layout import Layout
from megaframe.plan.held import rank_memory
from megaframe.plan.moved import moved
from megaframe.plan.schedules import step_schedule
from megaframe.plan.stages import stage_plans
from megaframe.rehearsal import rehearse
from megaframe.schedule import lower

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 4}
FEW_HEADS = {**LLAMA, "kv_heads": 2}
LATENT = {"kv_rank": 64, "head_dim": 32, "rotary_dim": 16, "value_dim": 32, "query_rank": 96}
MOE = {**LLAMA, "moe": {"experts": 16, "ffn": 160}}
SHORT, SHORT_MOE = {**LLAMA, "layers": 2}, {**MOE, "layers": 2}
SHARED = {**MOE, "layers": 4, "moe": {**MOE["moe"], "shared": 1, "first": 3}}
INTERLEAVED = {"pipeline": 4, "chunks": 2, "schedule": "interleaved"}
CASES = {
    "one rank": (1, {}, {}, {}),
    "zero 1": (4, LLAMA, {}, {"zero": 1}),
    "zero 2, tied": (4, {**LLAMA, "tie_embeddings": True}, {}, {"zero": 2}),
    "zero 2, learned": (4, {"position": "learned", "bias": True}, {}, {"zero": 2}),
    "zero 3": (4, LLAMA, {"microbatch": 2}, {"zero": 3}),
    "zero 3, fp32": (4, LLAMA, {"precision": "fp32"}, {"zero": 3, "data_replicate": 2}),
    "tensor": (8, LLAMA, {}, {"tensor": 4}),
    "shared heads": (8, FEW_HEADS, {}, {"tensor": 4, "zero": 1}),
    "context": (8, LLAMA, {"recompute": "selective"}, {"context": 2, "zero": 2}),
    "pipeline": (8, LLAMA, {}, {"pipeline": 4, "zero": 1}),
    "interleaved": (16, LLAMA, {}, {**INTERLEAVED, "zero": 1, "tensor": 2}),
    "zb-v": (8, LLAMA, {}, {"pipeline": 4, "chunks": 2, "schedule": "zb-v"}),
    "experts": (8, MOE, {}, {"expert": 4, "zero": 1}),
    "experts, zero 3": (16, MOE, {}, {"expert": 4, "expert_tensor": 2, "zero": 3}),
    "latent": (
        8,
        {"norm": "rmsnorm", "latent": LATENT, "mtp_depth": 1},
        {},
        {"zero": 1, "tensor": 2, "pipeline": 2},
    ),
    "zero 2, a block a stage": (8, {**LLAMA, "layers": 4}, {}, {"pipeline": 4, "zero": 2}),
    "zero 3, a block a chunk": (16, {**LLAMA, "layers": 6}, {}, {**INTERLEAVED, "zero": 3}),
    "zero 2, tied, learned": (
        4,
        {"position": "learned", "tie_embeddings": True, "layers": 2},
        {},
        {"zero": 2},
    ),
    "muon": (4, SHORT, {}, {"zero": 1, "tensor": 2}, {"name": "muon", "ema": 0.9}),
    "muon, experts": (
        8,
        SHORT_MOE,
        {},
        {"expert": 4, "zero": 2},
        {"name": "muon", "state": "bf16"},
    ),
    "muon, experts, tensor": (8, SHORT_MOE, {}, {"tensor": 2, "zero": 1}, {"name": "muon"}),
    "shared experts, tensor": (8, SHARED, {}, {"tensor": 2, "expert": 2}),
    "powersgd, few heads": (8, FEW_HEADS, {}, {"tensor": 4, "zero": 1, "compress": "powersgd"}),
    "powersgd": (8, SHARED, {}, {"expert": 4, "zero": 1, "compress": "powersgd"}),
    "topk, replicas": (8, SHARED, {}, {"zero": 3, "data_replicate": 2, "compress": "topk"}),
    "away": (4, LLAMA, {}, {}, {"offload": True}),
    "away, zero 1, tied": (
        4,
        {**LLAMA, "tie_embeddings": True},
        {},
        {"zero": 1},
        {"offload": True, "name": "lion", "ema": 0.9},
    ),
    "away, zero 3": (4, LLAMA, {}, {"zero": 3}, {"offload": True, "state": "bf16"}),
    "away, zero 3, fp32": (4, LLAMA, {"precision": "fp32"}, {"zero": 3}, {"offload": True}),
    "away, experts": (8, MOE, {}, {"expert": 4, "zero": 2}, {"offload": True, "state": "int8"}),
    "away, pipeline": (8, LLAMA, {}, {"pipeline": 4, "tensor": 2}, {"offload": True}),
}


def made(world, model, train, parallel, optim=None):
    """A config whose data ranks have two microbatches each, in pipelines eight."""
    parts = [parallel.get(axis, 1) for axis in ("tensor", "context", "pipeline")]
    each = (8 if parts[-1] > 1 else 2) * train.get("microbatch", 1)
    return RunConfig(
        model={"layers": 8, "hidden": 256, "heads": 8, "vocab": 4096, **model},
        train={
            "seq": 256,
            "global_batch": each * world // math.prod(parts),
            "microbatch": 1,
            **train,
        },
        parallel={"node_size": 8, **parallel},
        optim=optim or {},
    )


def assert_moved(counted, planned, layout, config):
    """Bytes by axis as the closed forms have them, where they are closed: not for tables that two
    ends share, nor for heads that tensor ranks share."""
    model, zero = config.model, config.parallel.zero
    if layout.tensor > 1:
        assert counted["tensor"] == pytest.approx(planned["tensor"], rel=0.01)
    if layout.pipeline > 1 and not model.mtp_depth:
        assert counted["pipeline"] == pytest.approx(planned["pipeline"], rel=0.01)
    axes = "context+data" if layout.context > 1 else "data"
    if layout.data > 1 and zero < 3 and model.moe is None and model.kv_heads >= layout.tensor:
        assert counted[axes] == pytest.approx(planned["data"], rel=0.01)


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_what_a_rank_counts_within_one_percent(name):
    world, *sections = CASES[name]
    config = made(world, *sections)
    layout = Layout.from_parallel(config.parallel, world)
    train = config.train
    schedule = step_schedule(config, train.global_batch // train.microbatch // layout.data)
    plans, lowered = stage_plans(config), lower(schedule)
    for rank in {0, world - 1}:
        found = rehearse(config, layout, rank)
        plan = rank_memory(config, layout, plans, lowered, layout.coordinate(rank)["pipeline"])
        buffers = plan.weights + plan.values + plan.gradients
        assert found.buffers == pytest.approx(buffers, rel=0.01)
        assert found.optimizer == pytest.approx(plan.optimizer, rel=0.01)
        assert found.host == pytest.approx(plan.host, rel=0.01)
        assert found.rooms == pytest.approx(plan.rooms, rel=0.01)
        kept = plan.activations + plan.messages
        # Experts also keep the numbers of their routes, and latents a part of the keys whole.
        small = {"moe", "latent"} & sections[0].keys()
        assert found.kept == pytest.approx(kept, rel=0.03 if small else 0.01)
        total = found.buffers + found.optimizer + found.kept
        here = [plans[stage] for stage in schedule.stages(layout.coordinate(rank)["pipeline"])]
        planned = moved(config, layout, here, lowered.ranks[layout.coordinate(rank)["pipeline"]])
        assert_moved(found.traffic, planned, layout, config)
        assert total == pytest.approx(buffers + plan.optimizer + kept, rel=0.01)


def test_a_dry_run_says_what_is_on_the_host_and_counts_it_for_no_gpu():
    away, here = (
        made(4, LLAMA, {}, {"zero": 1}, {"offload": offload}) for offload in (True, False)
    )

    def sizes(config, **options):
        rows = describe(config, Layout(data=4), **options).partition("memory per rank")[2]
        found = (row.rsplit(maxsplit=2) for row in rows.splitlines()[1:])
        return {kind.strip(): float(size) for kind, size, _ in found}

    gpu, plain = sizes(away), sizes(here)
    kept = plain["weights"] + plain["optimizer"]
    assert gpu["weights"] == gpu["optimizer"] == 0
    assert gpu["on the host"] == pytest.approx(kept, abs=0.002) and kept > 0.01
    assert gpu["total"] == pytest.approx(plain["total"] - kept + gpu["rooms"], abs=0.002)
    assert sizes(away, host=True) == sizes(here, host=True)  # where all memory is the host's
