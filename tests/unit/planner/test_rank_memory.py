"""The memory plan of a rank, which uses integers alone, compared with a step of the rank on meta
tensors."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repo_copy import ROOT
from slow_cases import mark_slow

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.config.registry import Registry, use_registry
from megaframe.extensions import load_extensions
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner import activations
from megaframe.planner.communication_volume import compute_communication_bytes
from megaframe.planner.memory import compute_rank_memory
from megaframe.schedule import lower
from megaframe.training.dry_run import describe_run
from megaframe.training.meta_step import run_meta_step

LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 4}
FEW_HEADS = {**LLAMA, "kv_heads": 2}
LATENT = {"kv_rank": 64, "head_dim": 32, "rotary_dim": 16, "value_dim": 32, "query_rank": 96}
MOE = {**LLAMA, "moe": {"experts": 16, "ffn": 160}}
SHORT, SHORT_MOE = {**LLAMA, "layers": 2}, {**MOE, "layers": 2}
SHARED = {**MOE, "layers": 4, "moe": {**MOE["moe"], "shared": 1, "first": 3}}
HANDED = {
    **{**LLAMA, "layers": 4, "layer_embeddings": 32, "tie_embeddings": True},
    "blocks": [
        {"mixer": {"window": 64, "qk_norm": True}},
        {"mixer": {"shared_keys": True, "window": 64}},
        {"mixer": {"shared_keys": True, "window": 64, "qk_norm": True}, "norms": "both"},
        {},
    ],
}
CHOICES = {
    **{"norm": "rmsnorm", "layers": 4, "latent": LATENT},
    "indexer": {"heads": 4, "head_dim": 32, "top_k": 64},
    "blocks": [{"mixer": "latent"}, *[{"mixer": {"kind": "latent", "shared_indexer": True}}] * 3],
}
LATENTS = {**CHOICES, "indexer": {**CHOICES["indexer"], "absorb": True, "loss": 1.0}}
STREAMS = {**LLAMA, "layers": 4, "streams": {"number": 4}}
V4 = {
    **{"kind": "compressed_attention", "query_rank": 96, "window": 64},
    **{"output_groups": 4, "output_rank": 64},
}
SPARSE_KEYS = {
    **{"tokens": 4, "overlap": True},
    "indexer": {"heads": 4, "head_dim": 32, "top_k": 16},
}
COMPRESSED = {
    **{"norm": "rmsnorm", "activation": "swiglu", "layers": 4},
    "blocks": [
        {
            "mixer": {**V4, "compression": SPARSE_KEYS},
            "feed_forward": {"kind": "moe", "router": "hash"},
        },
        {"mixer": {**V4, "compression": {"tokens": 32}}},
    ],
    "moe": {"experts": 16, "ffn": 160, "score": "sqrtsoftplus"},
}
INTERLEAVED = {"pipeline": 4, "chunks": 2, "schedule": "interleaved"}
CASES = {
    "one rank": (1, {}, {}, {}),
    "zero 1": (4, LLAMA, {}, {"zero": 1}),
    "zero 2, tied": (4, {**LLAMA, "tie_embeddings": True}, {}, {"zero": 2}),
    "zero 2, learned": (4, {"position": "learned", "bias": True}, {}, {"zero": 2}),
    "zero 3": (4, LLAMA, {"microbatch": 2}, {"zero": 3}),
    "zero 3, fp32": (4, LLAMA, {"precision": "fp32"}, {"zero": 3, "data_replicate": 2}),
    "blocks share buckets": (4, LLAMA, {}, {"zero": 1, "bucket_size": 500_000}),
    "blocks share buckets, zero 2": (4, LLAMA, {}, {"zero": 2, "bucket_size": 500_000}),
    "blocks share buckets, zero 3": (4, LLAMA, {}, {"zero": 3, "bucket_size": 500_000}),
    "whole blocks, zero 3, stages": (
        16,
        {**LLAMA, "layers": 12},
        {},
        {**INTERLEAVED, "zero": 3, "bucket_size": 200_000},
    ),
    "blocks with experts share buckets": (
        8,
        MOE,
        {},
        {"expert": 4, "zero": 2, "bucket_size": 2_000_000},
    ),
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
    "a block's weight pass later, zero 3": (
        4,
        SHORT,
        {},
        {"pipeline": 2, "schedule": "zb-h1", "zero": 3},
    ),
    "experts' weight passes later": (
        8,
        {**MOE, "layers": 4, "tie_embeddings": True},
        {},
        {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "zero": 2, "context": 2, "expert": 2},
    ),
    "weight passes later, blocks again": (
        4,
        {**LLAMA, "layers": 4},
        {"recompute": "full"},
        {"pipeline": 2, "schedule": "zb-h2", "tensor": 2, "zero": 1},
    ),
    "both ends on a rank, predictors, fp32": (
        8,
        {**LLAMA, "layers": 4, "mtp_depth": 1, "tie_embeddings": True},
        {"precision": "fp32"},
        {"pipeline": 2, "chunks": 2, "schedule": "dualpipe-v", "zero": 3},
    ),
    "learned positions, tensor": (
        4,
        {"position": "learned", "bias": True, "layers": 2},
        {},
        {"tensor": 2, "zero": 1},
    ),
    "norms of whole queries": (
        4,
        {**LLAMA, "qk_norm": "whole"},
        {"recompute": "full"},
        {"tensor": 4, "zero": 1},
    ),
    "ring without rotation": (2, {"position": "learned", "layers": 2}, {}, {"context": 2}),
    "heads for tokens": (
        4,
        {**SHORT, "qk_norm": True},
        {},
        {"context": 2, "context_kind": "all_to_all", "zero": 1},
    ),
    "heads for tokens in a ring, latent": (
        4,
        {"norm": "rmsnorm", "layers": 2, "latent": LATENT},
        {},
        {"context": 4, "context_kind": "nested", "context_heads": 2},
    ),
    "jittered experts, weight passes later": (
        8,
        {**MOE, "layers": 2, "moe": {**MOE["moe"], "jitter": 0.01, "shared": 1}},
        {},
        {"expert": 4, "zero": 1, "pipeline": 2, "schedule": "zb-h1"},
    ),
    "jittered experts": (
        4,
        {**MOE, "layers": 2, "moe": {**MOE["moe"], "jitter": 0.01}},
        {},
        {"expert": 4, "zero": 1},
    ),
    "latents normalised twice": (
        2,
        {"norm": "rmsnorm", "layers": 2, "latent": {**LATENT, "query_rank": None}},
        {"recompute": "selective"},
        {"pipeline": 2, "schedule": "zb-h1"},
    ),
    "handed over stages": (
        8,
        HANDED,
        {},
        {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "tensor": 2, "zero": 1},
    ),
    "handed, blocks again": (
        4,
        {**HANDED, "tie_embeddings": False},
        {"recompute": "full"},
        {"pipeline": 2, "zero": 2},
    ),
    "choices over stages": (
        8,
        CHOICES,
        {},
        {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "tensor": 2, "zero": 1},
    ),
    "choices, blocks again, fp32": (
        2,
        CHOICES,
        {"recompute": "full", "precision": "fp32"},
        {"pipeline": 2},
    ),
    "chosen latents": (
        8,
        LATENTS,
        {"microbatch": 2},
        {"pipeline": 2, "schedule": "zb-h1", "tensor": 2, "context": 2, "zero": 1},
    ),
    "handed, zero 3": (4, HANDED, {"recompute": "selective"}, {"tensor": 2, "zero": 3}),
    "several streams over stages": (
        8,
        STREAMS,
        {},
        {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "tensor": 2, "zero": 1},
    ),
    "several streams, blocks again": (4, STREAMS, {"recompute": "full"}, {"zero": 3}),
    "compressed keys": (
        8,
        COMPRESSED,
        {"recompute": "selective"},
        {"tensor": 2, "context": 2, "zero": 1},
    ),
    "norms of experts": (
        4,
        {**SHORT, "moe": {**MOE["moe"], "shared": 1, "own_norms": True, "expert_gain": True}},
        {},
        {"expert": 2, "zero": 1},
    ),
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
    "away, blocks share buckets": (
        4,
        {**LLAMA, "hidden": 128},
        {},
        {"zero": 1, "bucket_size": 10**9},
        {"offload": True},
    ),
    "away, pipeline": (8, LLAMA, {}, {"pipeline": 4, "tensor": 2}, {"offload": True}),
}
QUICK = ("handed over stages", "zero 2, tied", "context", "zb-v", "experts, zero 3")
"""Most axes, and each ZeRO stage that moves gradients."""


def make_config(world, model, train, parallel, optim=None):
    """Return a config with two microbatches for each data rank, or eight in a pipeline."""
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
    """Assert that bytes by axis follow the closed forms, where these hold: not over stages that
    share a table because of predictors, nor over data ranks at stage 3, with experts, or with heads
    that tensor ranks share."""
    model, zero = config.model, config.parallel.zero
    if layout.tensor > 1:
        assert counted["tensor"] == pytest.approx(planned["tensor"], rel=0.01)
    if layout.pipeline > 1 and not model.mtp_depth:
        assert counted["pipeline"] == pytest.approx(planned["pipeline"], rel=0.01)
    if layout.context > 1 and (layout.data > 1 or zero < 3):
        # Without data ranks, gradients and values move over context ranks alone.
        moved = planned["context"] + planned["data"] * (layout.data == 1)
        assert counted["context"] == pytest.approx(moved, rel=0.01)
    for axis in ("expert", "expert_tensor"):
        if layout.sizes[axis] > 1:
            assert counted[axis] == pytest.approx(planned[axis], rel=0.03)
    axes = "context+data" if layout.context > 1 else "data"
    if layout.data > 1 and zero < 3 and model.moe is None and model.kv_heads >= layout.tensor:
        assert counted[axes] == pytest.approx(planned["data"], rel=0.01)


def assert_counted(config, layout, ranks, *, traffic=False, numbers=0):
    """Assert that meta steps of these ranks agree with their plans: in memory, and with `traffic`
    also in bytes sent. numbers: bytes of the tokens' numbers, which the plan does not count."""
    train = config.train
    schedule = build_step_schedule(config, train.global_batch // train.microbatch // layout.data)
    plans, lowered = plan_stages(config), lower(schedule)
    for rank in ranks:
        step = run_meta_step(config, layout, rank)
        plan = compute_rank_memory(
            config, layout, plans, lowered, layout.get_coordinate(rank)["pipeline"]
        )
        buffers = plan.weights + plan.values + plan.gradients
        assert step.buffers == pytest.approx(buffers, rel=0.01)
        assert step.optimizer == pytest.approx(plan.optimizer, rel=0.01)
        assert step.host == pytest.approx(plan.host, rel=0.01)
        assert step.staging == pytest.approx(plan.buffers, rel=0.01)
        kept_bytes = plan.activations + plan.messages
        # Experts also keep the indices of their routes, and latents a whole part of the keys.
        small = config.model.moe is not None or config.model.latent is not None
        assert step.activations == pytest.approx(
            kept_bytes, rel=0.03 if small else 0.01, abs=numbers
        )
        total = step.buffers + step.optimizer + step.activations
        assert total == pytest.approx(buffers + plan.optimizer + kept_bytes, rel=0.01)
        if traffic:
            place = layout.get_coordinate(rank)["pipeline"]
            own_plans = [plans[stage] for stage in schedule.list_stages(place)]
            planned = compute_communication_bytes(config, layout, own_plans, lowered.ranks[place])
            assert_moved(step.traffic, planned, layout, config)


@pytest.fixture
def blocks_gone(monkeypatch):
    """Plan no recomputed activations: a meta step counts between actions, when they are gone."""
    monkeypatch.setattr(activations, "_compute_recompute_bytes", lambda *arguments: 0)


@pytest.mark.parametrize("name", mark_slow(CASES, except_for=QUICK))
def test_the_plan_is_what_a_rank_counts_within_one_percent(name, blocks_gone):
    world, *sections = CASES[name]
    config = make_config(world, *sections)
    # Ranks of one stage have equal parts of the same.
    ranks = {0, world - 1} if config.parallel.pipeline > 1 else {world - 1}
    assert_counted(config, Layout.from_parallel(config.parallel, world), ranks, traffic=True)


def test_a_table_that_only_tensor_ranks_divide_waits_for_what_nobody_divides(blocks_gone):
    """Its gradients have a buffer until two later reductions have begun, also of one rank."""
    model, parallel = {"position": "learned", "layers": 1}, {"tensor": 2, "zero": 2}
    config = make_config(2, model, {"seq": 1024}, parallel)
    assert_counted(config, Layout.from_parallel(config.parallel, 2), {0, 1})


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_parts_of_extensions_are_planned_as_ours_are(recompute, blocks_gone):
    """Norms that keep as much as their results, also in predictors and before the head."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{ROOT / 'examples/norm.py'}]"])
        blocks = [{"feed_forward": {"kind": "low_rank", "rank": 40}}, {"norms": "both"}]
        model = {"norm": "dynamic_tanh", "activation": "reglu", "layers": 2, "blocks": blocks}
        config = make_config(
            4, {**model, "mtp_depth": 1}, {"recompute": recompute}, {"tensor": 2, "zero": 2}
        )
        assert_counted(config, Layout.from_parallel(config.parallel, 4), {0, 3}, traffic=True)


SCHEDULES = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "zb-h2": 1, "interleaved": 2, "breadth-first": 2}
SCHEDULES |= {"zb-v": 2, "v-half": 2, "dualpipe-v": 2}
KINDS = [LLAMA, {"position": "learned", "bias": True}, {"norm": "rmsnorm", "latent": LATENT}, MOE]


@st.composite
def draw_runs(draw):
    """Draw the config and layout of a run, so wide that the tokens' numbers do not matter."""
    schedule, pipeline = draw(st.sampled_from(sorted(SCHEDULES))), draw(st.sampled_from([1, 2, 4]))
    chunks = SCHEDULES[schedule] if pipeline > 1 else 1
    sizes = {"tensor": draw(st.sampled_from([1, 2])), "context": draw(st.sampled_from([1, 2]))}
    data, kind = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(KINDS))
    layers = draw(st.sampled_from([1, 2])) * pipeline * chunks + draw(st.sampled_from([0, 1]))
    model = {**kind, "hidden": 1024, "ffn": 2048, "vocab": 8192, "layers": layers}
    model |= {"tie_embeddings": draw(st.booleans())}
    if "latent" not in kind:
        model |= {
            "kv_heads": draw(st.sampled_from([2, 4, 8])),
            "qk_norm": draw(st.sampled_from([False, True, "whole"])),
        }
    parallel = {**sizes, "pipeline": pipeline, "chunks": chunks}
    parallel |= {"schedule": schedule if pipeline > 1 else "1f1b"}
    parallel |= {"zero": draw(st.sampled_from([0, 1, 2, 3]))}
    parallel |= {"bucket_size": draw(st.sampled_from(["auto", 8_000_000, 30_000_000]))}
    parallel |= {"context_kind": draw(st.sampled_from(["ring", "all_to_all"]))}
    if "moe" in kind and data > 1:
        parallel |= {"expert": 2}
    train = {"precision": draw(st.sampled_from(["bf16", "fp32"]))}
    train |= {"recompute": draw(st.sampled_from(["none", "selective"]))}
    world = math.prod([*sizes.values(), pipeline, data])
    config = make_config(world, model, train, parallel)
    return config, Layout.from_parallel(config.parallel, world)


@pytest.mark.slow
@settings(max_examples=20)
@given(run=draw_runs(), ends=st.sampled_from([0, -1]))
def test_any_run_is_planned_as_it_counts(run, ends):
    """Context ranks copy their part of the tokens' numbers of a step, which is more than 1% if a
    stage has hardly any blocks."""
    config, layout = run
    tokens = config.train.global_batch * config.train.seq // (layout.data * layout.context)
    numbers = 32 * tokens * (layout.context > 1)
    assert_counted(config, layout, {ends % layout.world}, numbers=numbers)


def test_factors_travel_twice_and_the_gradients_behind_them_go():
    """PowerSGD sends factors in two transfers; with ZeRO 2, whole gradients exist only until these
    are done, for a few parts at a time."""
    model, layout = {**LLAMA, "layers": 16}, Layout(data=4)
    sizes = []
    for zero in (1, 2):
        config = make_config(4, model, {}, {"zero": zero, "compress": "powersgd"})
        schedule = lower(build_step_schedule(config, 2))
        step = run_meta_step(config, layout, 0)
        plan = compute_rank_memory(config, layout, plan_stages(config), schedule, 0)
        buffers = plan.weights + plan.values + plan.gradients
        assert step.buffers == pytest.approx(buffers, rel=0.01)
        sizes.append(step.buffers)
    assert sizes[1] < 0.85 * sizes[0]


def test_a_dry_run_says_what_is_on_the_host_and_counts_it_for_no_gpu():
    away, on_device = (
        make_config(4, LLAMA, {}, {"zero": 1}, {"offload": offload}) for offload in (True, False)
    )

    def sizes(config, **options):
        rows = describe_run(config, Layout(data=4), **options).partition("memory per rank")[2]
        rows_read = (row.rsplit(maxsplit=2) for row in rows.splitlines()[1:])
        return {kind.strip(): float(size) for kind, size, _ in rows_read}

    gpu, plain = sizes(away), sizes(on_device)
    state_bytes = plain["weights"] + plain["optimizer"]
    assert gpu["weights"] == gpu["optimizer"] == 0
    assert gpu["on the host"] == pytest.approx(state_bytes, abs=0.002) and state_bytes > 0.01
    assert gpu["total"] == pytest.approx(plain["total"] - state_bytes + gpu["buffers"], abs=0.002)
    on_host = {"cluster": load_cluster("cpu")}
    assert sizes(away, **on_host) == sizes(on_device, **on_host)  # here all memory is the host's
