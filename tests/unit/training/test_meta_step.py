"""A rank on meta tensors counts the same as this rank in a real world over gloo."""

import pytest
import torch
from patience import PATIENCE
from slow_cases import mark_slow, slow
from torch import Tensor

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.ops.meta_tensors import MetaTensorMode
from megaframe.training.meta_step import AllocationTracker, measure_step, run_meta_step

MODEL = {"hidden": 64, "heads": 4, "vocab": 320}
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2}
MOE = {"moe": {"experts": 8, "ffn": 32, "top_k": 2}}


def make_config(model, train, parallel, optim=None):
    layers = max(2, parallel.get("pipeline", 1) * parallel.get("chunks", 1))
    return RunConfig(
        model={**MODEL, "layers": layers, **model},
        train={"seq": 32, "global_batch": 4, "microbatch": 1, "precision": "bf16", **train},
        parallel={"node_size": 2, **parallel},
        optim=optim or {},
    )


def measure_among_others(*sections):
    """Return what a rank of a real world counts."""
    config = make_config(*sections)
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cpu", timeout=PATIENCE
    )
    with AllocationTracker() as ledger:
        step = measure_step(config, mesh, ledger)
    mesh.finish()
    return step


CASES = {
    "data": ({}, {}, {}),
    "zero 2": ({}, {}, {"zero": 2}),
    "zero 3, llama": (LLAMA, {"recompute": "selective"}, {"zero": 3}),
    "shared buckets": (LLAMA, {}, {"zero": 3, "bucket_size": 10**6}),
    "bf16 in steps": ({}, {}, {"zero": 1, "reduce_precision": "bf16"}),
    "zero 1, replicas": (LLAMA, {"recompute": "full"}, {"zero": 1, "data_replicate": 2}),
    "tensor": (LLAMA, {}, {"tensor": 4}),
    "tensor x data": ({"bias": True}, {"precision": "fp32"}, {"tensor": 2, "zero": 1}),
    "ring": ({**LLAMA, "window": (4, None)}, {}, {"context": 2, "zero": 1}),
    "heads": (
        {**LLAMA, "window": (None, 4)},
        {},
        {"context": 2, "context_kind": "all_to_all", "tensor": 2},
    ),
    "pipeline": ({"tie_embeddings": True}, {}, {"pipeline": 4}),
    "zb-v": (LLAMA, {}, {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "tensor": 2}),
    "interleaved": ({}, {}, {"pipeline": 2, "chunks": 2, "schedule": "interleaved", "zero": 2}),
    "muon": ({}, {}, {"zero": 1}, {"name": "muon"}),
    "muon, few heads": (LLAMA, {}, {"tensor": 4, "zero": 1}, {"name": "muon", "ema": 0.9}),
    "muon, zero 3": (LLAMA, {}, {"tensor": 2, "context": 2, "zero": 3}, {"name": "muon"}),
}
QUICK = ("ring", "zb-v", "muon")
"""Each axis, and the optimizer that sends weights."""
WITH_EXPERTS = {
    "experts": (MOE, {}, {"expert": 4}),
    "experts, zero 3": ({**MOE, **LLAMA}, {}, {"expert": 2, "expert_tensor": 2, "zero": 3}),
    "gathered": (MOE, {}, {"expert": 2, "dispatch": "all_gather"}),
    "by nodes": (MOE, {}, {"expert": 4, "dispatch": "hierarchical"}),
    "once a node": (MOE, {}, {"expert": 4, "dispatch": "deduplicated"}),
}


@pytest.mark.parametrize("name", mark_slow(CASES, except_for=QUICK))
def test_alone_or_among_others_a_rank_counts_the_same(name, pool):
    real = pool.run(4, measure_among_others, *CASES[name])
    config = make_config(*CASES[name])
    layout = Layout.from_parallel(config.parallel, 4)
    for rank, measured in ((0, real[0]), (3, real[3])):
        predicted = run_meta_step(config, layout, rank)
        assert predicted.traffic == measured.traffic
        assert (predicted.buffers, predicted.optimizer) == (measured.buffers, measured.optimizer)
        assert predicted.actions == measured.actions
        # A CPU keeps layernorm's statistics in fewer bits; gloo keeps sent messages until the end
        # of the step.
        sent = measured.traffic.get("pipeline", 0)
        assert (
            0.99 * measured.activations - sent
            <= predicted.activations
            <= 1.01 * measured.activations
        )


@pytest.mark.parametrize("name", mark_slow(WITH_EXPERTS, except_for=["experts, zero 3"]))
def test_experts_are_counted_as_if_equally_busy(name, pool):
    real = pool.run(4, measure_among_others, *WITH_EXPERTS[name])
    config = make_config(*WITH_EXPERTS[name])
    layout = Layout.from_parallel(config.parallel, 4)
    predicted = run_meta_step(config, layout, 0)
    for measured in real:
        assert predicted.traffic.keys() == measured.traffic.keys()
        for axes, size in measured.traffic.items():
            assert predicted.traffic[axes] == pytest.approx(size, rel=0.25), axes
        total = measured.buffers + measured.staging
        assert predicted.buffers <= total and predicted.buffers == pytest.approx(
            measured.buffers, rel=0.1
        )
        assert predicted.optimizer == measured.optimizer
        assert predicted.activations == pytest.approx(measured.activations, rel=0.1)


def test_what_is_put_away_is_not_counted_and_what_needs_a_gpu_is_left_out():
    def count_saved_bytes(**train):
        config = make_config(LLAMA, {"recompute": "full", **train}, {})
        return run_meta_step(config, Layout(), 0).activations

    inputs = 2 * 32 * 64 * 2  # two blocks, in bf16
    assert count_saved_bytes() - count_saved_bytes(offload=True) == inputs
    assert count_saved_bytes(cuda_graph=True, compile="inductor") == count_saved_bytes()


def test_shapes_that_do_not_fit_are_found_again_and_again():
    """Also after calls with valid shapes, and for calls in place."""
    with MetaTensorMode():
        for right in (torch.empty(3), torch.empty(4), torch.empty(4)):
            left = torch.empty(2, 3)
            if len(right) == 3:
                assert (left + right).shape == left.add_(right).shape == (2, 3)
                continue
            for call in (torch.add, Tensor.add_):
                with pytest.raises(RuntimeError):
                    call(left, right)


@pytest.mark.parametrize("rank", [slow(0), 3000, slow(4095)])
def test_any_rank_of_a_large_world(rank):
    """The gigabytes of the rank are counted, but not allocated."""
    config = RunConfig(
        model={"layers": 16, "hidden": 8192, "heads": 64, "vocab": 50000, **LLAMA},
        train={"seq": 4096, "global_batch": 512, "microbatch": 1, "recompute": "selective"},
        parallel={"tensor": 8, "pipeline": 8, "context": 2, "zero": 1, "node_size": 8},
    )
    layout = Layout.from_parallel(config.parallel, 4096)
    step = run_meta_step(config, layout, rank)
    assert step.buffers > 2**30
    assert step.traffic["tensor"] > 2**30
    with pytest.raises(ValueError, match="4096"):
        run_meta_step(config, layout, 4096)
