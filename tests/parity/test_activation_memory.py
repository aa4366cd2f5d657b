"""Activation memory of a block in 16 bits: the storages that a whole stage keeps after its forward
pass, compared with the formulas of Korthikanti et al. (2022, Table 2).

In units of s b h bytes, a layer with fused attention keeps 34: in attention 11 (input of QKV 2; Q,
K, V 6; input of the projection 2; mask 1), in the MLP 19 (input 2, before GELU 8, after it 8, mask
1), and for the norms' inputs 4. megaframe keeps less, because it always recomputes both masks (2),
and with `selective` also the outputs of the norms and of GELU (12). With `full` only a block's
input (2) is left. Everything is divided by the tensor ranks, the norms' part because rows are.

Tests `megaframe.ops.workspace`.
"""

from itertools import chain

import pytest
import torch
from patience import PATIENCE
from slow_cases import slow

from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch, look_ahead
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.pipeline_parallel.stage_pass import StagePass
from megaframe.planner.memory import PlannedRank
from megaframe.planner.parameter_counts import RankParameters
from megaframe.schedule import Action, ActionKind
from megaframe.training.train_step import TrainStep

SEQ, BATCH, HIDDEN, HEADS = 128, 2, 256, 4
FORMULA = {"none": 34, "selective": 34, "full": 2}
COMPUTED_AGAIN = {"none": 2, "selective": 2 + 12, "full": 0}


def measure_saved_bytes(layers, recompute, tensor, dropout):
    """Return the bytes that a model keeps on this rank after a forward, and the planned bytes."""
    config = RunConfig(
        model={
            "layers": layers,
            "hidden": HIDDEN,
            "heads": HEADS,
            "vocab": 64,
            "norm": "layernorm",
            "activation": "gelu",
            "position": "learned",
            "dropout": dropout,
            "tie_embeddings": True,
        },
        train={
            "seq": SEQ,
            "global_batch": BATCH,
            "microbatch": BATCH,
            "precision": "bf16",
            "recompute": recompute,
        },
        parallel={"tensor": tensor},
    )
    mesh = Mesh(Layout(tensor=tensor), device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    stage = train_step.stages[0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scale = torch.ones((), dtype=torch.float64)
        stage.forward(StagePass(0), Microbatch(tokens, tokens, torch.arange(BATCH)), scale)
    for leaf in stage._activations[0].leaves:
        keep(leaf)
    for bucket in train_step.sharded_parameters.buckets:
        storages.pop(bucket.parameters[0].value.untyped_storage().data_ptr(), None)
    mesh.finish()
    actions = [Action(ActionKind.F, 0, 0)]
    planned = (
        PlannedRank(config, RankParameters(0, (), ()), 1, plan_stages(config), actions)
        .compute_memory()
        .activations
    )
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values()), planned


@pytest.mark.parametrize(("tensor", "dropout"), [slow(1, 0.0), (2, 0.1), slow(4, 0.0)])
@pytest.mark.parametrize("recompute", list(FORMULA))
def test_a_block_keeps_what_the_paper_says_less_what_is_computed_again(
    recompute, tensor, dropout, pool
):
    unit = SEQ * BATCH * HIDDEN / tensor
    # Each token also has a log-sum-exp for each head, and four statistics of its norms.
    statistics = 0 if recompute == "full" else 4 * HEADS
    statistics += 4 * 2 if recompute == "none" else 0
    exactly = (FORMULA[recompute] - COMPUTED_AGAIN[recompute]) * unit
    exactly += statistics * SEQ * BATCH / tensor
    two, three = (
        pool.run(tensor, measure_saved_bytes, layers, recompute, tensor, dropout)
        for layers in (2, 3)
    )
    for less, longer in zip(two, three, strict=True):
        actual, planned = longer[0] - less[0], longer[1] - less[1]
        assert actual == planned == exactly
        assert actual <= FORMULA[recompute] * unit
        assert actual == pytest.approx(
            (FORMULA[recompute] - COMPUTED_AGAIN[recompute]) * unit, rel=0.05
        )


MODELS = {
    "learned positions": {"position": "learned", "bias": True},
    "predictors": {"mtp_depth": 2, "norm": "rmsnorm", "kv_heads": 2},
    "tied predictors": {"mtp_depth": 1, "tie_embeddings": True, "position": "learned"},
    "windows": {"norm": "rmsnorm", "window": (4, None), "activation": "swiglu"},
}


def measure_stage(name, recompute, tensor):
    """Return all bytes that a whole model keeps on this rank between its forward and its backward
    pass, without its weights and the microbatch, and the planned bytes."""
    config = RunConfig(
        model={"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, **MODELS[name]},
        train={"seq": 8, "microbatch": 2, "precision": "bf16", "recompute": recompute},
        parallel={"tensor": tensor},
        kernels={"matmul": "torch"},
    )
    mesh = Mesh(Layout(tensor=tensor), device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    tokens, storages = torch.zeros(2, 8, dtype=torch.int64), {}
    microbatch = Microbatch(tokens, tokens, torch.arange(2))
    microbatch = look_ahead(microbatch, config.model.mtp_depth)

    def keep(tensor):
        if tensor.dim() and tensor.numel():
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    stage = train_step.stages[0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.forward(StagePass(0), microbatch, torch.ones((), dtype=torch.float64))
    activations = stage._activations[0]
    post_process, tables = activations.post_process, activations.inputs.rotary.values()
    for leaf in (*activations.leaves, *post_process.leaves, *post_process.d_normed):
        keep(leaf)
    weights = (bucket.parameters[0].value for bucket in train_step.sharded_parameters.buckets)
    for given in (*weights, tokens, *chain(*(far[:2] for far in microbatch.ahead))):
        storages.pop(given.untyped_storage().data_ptr(), None)
    mesh.finish()
    shapes = {table.sin.shape for table in tables}  # also of the negated table for backward
    kept = [value for value in storages.values() if value.shape not in shapes]
    kept += [each for table in tables for each in (table.cos, table.sin)]
    planned = PlannedRank(
        config, RankParameters(0, (), ()), 1, plan_stages(config), [Action(ActionKind.F, 0, 0)]
    ).compute_memory()
    return sum(value.untyped_storage().nbytes() for value in kept), planned.activations


@pytest.mark.parametrize(
    ("recompute", "tensor"), [slow("none", 1), ("selective", 2), slow("full", 2)]
)
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_keeps_what_its_parts_say_to_a_byte(name, recompute, tensor, pool):
    measured = pool.run(tensor, measure_stage, name, recompute, tensor)
    assert sum(kept for kept, _ in measured) == tensor * measured[0][1]
