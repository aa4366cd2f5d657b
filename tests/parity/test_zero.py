"""ZeRO 1, 2 and 3, with one copy or replicas, do not change the answer: 1e-10 in fp64, alone and
with tensor, context and pipeline ranks, recompute and many microbatches.
"""

import pytest
import torch
from bitwise import assert_same_bits
from parity_runs import MODELS, assert_same, run
from patience import PATIENCE
from slow_cases import mark_slow, slow

from megaframe.architecture.spec import Box, Constant, ParamSpec
from megaframe.data_parallel.bucket import Bucket, BucketSharding
from megaframe.data_parallel.buffers import BufferPool
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.optim.elementwise import (
    ElementwiseRule,
    GradientDescent,
    GroupRates,
    Momentum,
    MomentumOptions,
)
from megaframe.optim.optimizer_state import MomentStorage
from megaframe.optim.state_dtype import make_state_codecs
from megaframe.optim.update_rule import OptimizerShard, UpdateStep
from megaframe.parameters.parameter import PRECISIONS, Parameter

INTERLEAVED = {"pipeline": 2, "chunks": 2, "schedule": "interleaved"}
DATA = (2, {}, {"microbatch": 2})
MORE_DATA = (4, {}, {"microbatch": 1})
REPLICAS = (4, {"data_replicate": 2}, {"microbatch": 1})
TENSOR = (4, {"tensor": 2}, {"microbatch": 2, "recompute": "selective"})
CONTEXT = (4, {"context": 2}, {"microbatch": 1})
ZB_V = (4, {**INTERLEAVED, "schedule": "zb-v"}, {"microbatch": 1})
LAYOUTS = [
    DATA,
    (2, {}, {"microbatch": 1, "recompute": "full"}),
    MORE_DATA,
    REPLICAS,
    (4, {"data_replicate": 4}, {"microbatch": 2}),
    TENSOR,
    (4, {"tensor": 4}, {"microbatch": 2}),
    CONTEXT,
    (4, {"context": 4}, {"microbatch": 4}),
    (4, INTERLEAVED, {"microbatch": 1, "recompute": "full"}),
    ZB_V,
    (4, {"pipeline": 2, "schedule": "gpipe"}, {"microbatch": 1}),
]


WHOLE = {"microbatch": 8}

# Each stage with data ranks alone; with two copies and beside other axes stage 3, which shards
# everything.
QUICK = [("gpt2", *DATA, zero) for zero in range(4)]
QUICK += [("gpt2", *layout, 3) for layout in (REPLICAS, TENSOR, ZB_V)]
CASES = [
    # Every layout with two stages, one on each model; random runs draw all of them together.
    *QUICK,
    *(("gpt2", *layout, (0, 3, 1, 2)[i % 4]) for i, layout in enumerate(LAYOUTS)),
    *(("llama", *layout, (3, 2, 0, 1)[i % 4]) for i, layout in enumerate(LAYOUTS)),
]
CASES = [case for number, case in enumerate(CASES) if case not in CASES[:number]]


SHARED = [
    # Two blocks of four together; all of them; whole blocks of two stages.
    slow(2, {"bucket_size": 5000}, 1),
    slow(2, {"bucket_size": 5000}, 3),
    slow(4, {"bucket_size": 10**6}, 0),
    slow(4, {"bucket_size": 10**6}, 2),
    (4, {"bucket_size": 2500, **INTERLEAVED}, 3),
    slow(4, {"bucket_size": 5000, "pipeline": 2, "schedule": "zb-h1"}, 2),
]


@pytest.mark.parametrize(("ranks", "parallel", "zero"), SHARED)
def test_blocks_that_share_buckets_do_not_change_the_answer(ranks, parallel, zero, pool, run_alone):
    model = {**MODELS["llama"], "layers": 4}
    parallel = {**parallel, "zero": zero}
    assert_same(pool.run(ranks, run, model, {"microbatch": 1}, parallel), run_alone(model, WHOLE))


@pytest.mark.parametrize(
    ("name", "ranks", "parallel", "train", "zero"), mark_slow(CASES, except_for=QUICK)
)
def test_stages_do_not_change_the_answer(name, ranks, parallel, train, zero, pool, run_alone):
    model = {**MODELS[name], "layers": 2 * parallel.get("chunks", 1)}
    results = pool.run(ranks, run, model, train, {**parallel, "zero": zero})
    assert_same(results, run_alone(model, WHOLE))


@pytest.mark.parametrize(
    ("stages", "precision"), [(1, "bf16"), (2, "fp32"), slow(1, "fp32"), slow(2, "bf16")]
)
def test_with_one_data_rank_the_default_changes_no_bit(stages, precision, pool):
    train = {"microbatch": 2, "precision": precision}
    full, default = (
        pool.run(stages, run, MODELS["gpt2"], train, {"pipeline": stages, **zero})
        for zero in ({"zero": 0}, {})
    )
    assert_same_bits(default, full, because="one data rank has nothing to shard")


def update_tiny_tensors(zero):
    """Update a tensor of three elements twice by SGD with rate 1; each rank's gradient is the rank
    plus one -> after each update, its values and those of a tensor without gradients."""
    mesh = Mesh(Layout(data=read_world_size()), device="cpu", timeout=PATIENCE)
    used, unused = (
        Parameter(ParamSpec(name, (3,), Constant(100.0), role="matrix")) for name in ("a", "b")
    )
    storage, rates = MomentStorage(*make_state_codecs("master")), GroupRates()
    bucket = Bucket(
        [used, unused],
        [Box((0,), (3,))] * 2,
        PRECISIONS["fp64"],
        BucketSharding(mesh.group("data_shard", "context"), mesh.group("data_replicate"), zero),
        BufferPool(mesh.device),
    )
    sgd = [Momentum(MomentumOptions(0.0, False, rates), storage), GradientDescent(rates)]
    shard = OptimizerShard(bucket, ElementwiseRule(bucket.weights, sgd, storage))
    bucket.initialize_weights(0)
    shard.begin()
    values = []
    for number in (1, 2):
        bucket.start_step()
        used.add(torch.full((3,), mesh.rank + 1.0, dtype=torch.float64))
        bucket.reduce(last=True)
        bucket.wait()
        step = UpdateStep(number, 1.0, torch.ones((), dtype=torch.float64), torch.zeros(()))
        shard.start_update(step)
        bucket.gather()
        bucket.wait_for_values()
        values.append((used.value.tolist(), unused.value.tolist()))
        bucket.release()
    mesh.finish()
    return values


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tensors_smaller_than_the_group_and_unused_ones(zero, ranks, pool):
    step = ranks * (ranks + 1) / 2
    expected = [([100.0 - n * step] * 3, [100.0] * 3) for n in (1, 2)]
    assert pool.run(ranks, update_tiny_tensors, zero) == [expected] * ranks
