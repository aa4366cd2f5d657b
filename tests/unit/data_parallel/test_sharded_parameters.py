"""Which blocks share buckets: the same on every rank of a real world's mesh, and in the plan.

Tests `megaframe.data_parallel.bucket_layout`.
"""

import pytest
import torch

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.ops.meta_tensors import MetaTensorMode
from megaframe.planner.parameter_counts import count_rank_parameters
from megaframe.training.train_step import TrainStep

LAYERS = 8
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2, "ffn": 200}
MOE = {**LLAMA, "moe": {"experts": 6, "ffn": 48, "first": 2, "shared": 1}}


def list_groups(config, layout, rank):
    """Return the blocks that have buckets of a rank in common, without the predictors'."""
    with MetaTensorMode():
        mesh = Mesh(layout, alone=rank)
        train_step = TrainStep(config, mesh, StepTimer().time)
    groups = set()
    for bucket in train_step.sharded_parameters.buckets:
        if bucket.parameters[0].spec.role == "matrix":
            names = [p.spec.name.split(".") for p in bucket.parameters]
            blocks = {int(name[1]) for name in names if name[0] == "blocks"}
            groups.add(tuple(sorted(blocks & {*range(LAYERS)})))
    mesh.finish()
    return sorted(groups - {()})


@pytest.mark.parametrize(
    ("model", "parallel", "world"),
    [
        (LLAMA, {"zero": 1}, 2),
        (LLAMA, {"zero": 3, "tensor": 3}, 6),
        (LLAMA, {"pipeline": 2, "chunks": 2, "schedule": "interleaved"}, 4),
        (MOE, {"tensor": 2, "expert": 4, "zero": 2}, 8),
        ({**LLAMA, "mtp_depth": 1, "tie_embeddings": True}, {"zero": 2}, 2),
    ],
)
def test_all_ranks_and_the_plan_put_the_same_blocks_together(model, parallel, world):
    for least in ("auto", 20_000, 60_000, 10**9):
        config = RunConfig(
            model={"layers": LAYERS, "hidden": 48, "heads": 6, "vocab": 100, **model},
            train={"seq": 32, "global_batch": 8, "microbatch": 1},
            parallel={"node_size": 8, "bucket_size": least, **parallel},
        )
        layout = Layout.from_parallel(config.parallel, world)
        plans, schedule = plan_stages(config), build_step_schedule(config, 2)
        for rank in {0, 1, world - 1}:
            place = layout.get_coordinate(rank)["pipeline"]
            own_plans = [plans[stage] for stage in schedule.list_stages(place)]
            blocks = [layer for plan in own_plans for layer in plan.blocks]
            planned = count_rank_parameters(
                config.model, config.train, layout, own_plans
            ).group_blocks(config.parallel, own_plans)
            expected_groups = sorted(tuple(blocks[of.start : of.stop]) for of in planned)
            actual_groups = list_groups(config, layout, rank)
            # Experts have buckets of their own, of those of the blocks that have any.
            within = [
                [part for part in actual_groups if {*part} <= {*group}] for group in expected_groups
            ]
            assert sum(map(len, within)) == len(actual_groups), (least, rank)
            for whole, parts in zip(expected_groups, within, strict=True):
                assert whole in parts, (least, rank)
            if least == 10**9:  # all of a stage
                assert len(planned) == sum(bool(plan.blocks) for plan in own_plans)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_that_is_alone_copies_neither_gradients_nor_values(zero):
    config = RunConfig(
        model={"layers": 2, "hidden": 16, "heads": 4, "vocab": 40},
        train={"seq": 8, "global_batch": 4, "microbatch": 1, "precision": "bf16"},
        parallel={"zero": zero},
    )
    mesh = Mesh(Layout.from_parallel(config.parallel, 1), device="cpu")
    train_step = TrainStep(config, mesh, StepTimer().time)
    sharded = train_step.sharded_parameters
    sharded.initialize_weights(0)
    train_step.optimizer.begin()
    held = sharded.buffers.bytes
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    train_step.train([Microbatch(tokens, tokens, torch.arange(1))] * 4, 0, 1.0)
    for bucket in sharded.trained:
        storages = {p.grad.untyped_storage().data_ptr() for p in bucket.parameters}
        assert storages == {bucket.grad_sums.untyped_storage().data_ptr()}
        values = {p.value.untyped_storage().data_ptr() for p in bucket.parameters}
        assert values == {bucket.rounded.untyped_storage().data_ptr()} or bucket.rounded is None
    assert sharded.buffers.bytes == held, "nothing was borrowed during the step"
    mesh.finish()
