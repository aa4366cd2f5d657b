"""The memory plan, compared with the storages that are really kept.

Tests `megaframe.schedule.zero_buffers`.
"""

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from patience import PATIENCE
from saved_bytes import measure_block_bytes
from slow_cases import mark_slow, slow

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch, look_ahead
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.model.layer_inputs import LayerRoutines
from megaframe.pipeline_parallel.stage_pass import StagePass
from megaframe.planner.activations import compute_block_bytes
from megaframe.planner.memory import PlannedRank, compute_rank_memory
from megaframe.planner.parameter_counts import RankParameters, count_rank_parameters
from megaframe.schedule import Action, ActionKind, lower
from megaframe.training.train_step import TrainStep

LATENT = {"kv_rank": 16, "head_dim": 10, "rotary_dim": 4}
FORWARD = [Action(ActionKind.F, 0, 0)]
MODELS = [
    {"position": "learned"},
    {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2},
    {"activation": "relu2", "qk_norm": True, "norm": "rmsnorm"},
    {"activation": "gelu", "position": "none", "kv_heads": 1, "bias": True},
    {"kv_heads": 2, "position": "learned"},
    {"norm": "rmsnorm", "latent": {**LATENT, "query_rank": 24, "value_dim": 10}},
    {"latent": {**LATENT, "value_dim": 20}},
    {"latent": {**LATENT, "query_rank": 24, "value_dim": 14}},
    {"activation": "swiglu", "norm": "rmsnorm", "moe": {"experts": 8, "ffn": 24, "shared": 2}},
    {"moe": {"experts": 5, "ffn": 24, "top_k": 3, "balance": "none", "score": "softmax"}},
    {"kv_heads": 2, "blocks": [{"mixer": {"softcap": 5.0, "sinks": True}}]},
    {"kv_heads": 2, "blocks": [{"mixer": {"output_gate": "head"}}]},
    {"norm": "rmsnorm", "blocks": [{"mixer": {"output_gate": "element"}, "norms": "both"}]},
    {"blocks": [{"mixer": {"output_gate": "head"}, "parallel": "one_norm"}]},
    {"position": "none", "blocks": [{"mixer": {"sinks": True, "window": 5}}]},
    {
        "activation": "gelu",
        "norm": "rmsnorm",
        "moe": {"experts": 4, "top_k": 1, "balance": "global", "z_loss": 0.1},
    },
]


# Precisions, by which all bytes are multiplied, in turn.
@pytest.mark.parametrize(
    ("model", "recompute", "precision"),
    [
        (model, recompute, precision)
        if (place + (recompute == "none") + (precision == "fp32")) % 2
        else slow(model, recompute, precision)
        for place, model in enumerate(MODELS)
        for recompute, precision in product(("none", "selective"), ("fp32", "bf16"))
    ],
)
def test_a_block_keeps_what_the_plan_says(model, recompute, precision, build, make_microbatch):
    """Without the rows that experts compute again for the routines of this CPU."""
    train = {"precision": precision, "seq": 32, "recompute": recompute}
    routines = LayerRoutines(get_row_multiple=lambda x: 1)
    built = build({"layers": 1, "hidden": 64, **model}, routines, train=train)
    microbatch = make_microbatch(built.config)
    saved = measure_block_bytes(built.stage, microbatch, built.sharded_parameters.buckets)
    assert saved == compute_block_bytes(
        built.config.model, built.config.parallel, built.config.train, 0
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [{"norm": "rmsnorm", "kv_heads": 2}, {"position": "learned"}])
def test_a_predictor_keeps_what_the_plan_says(model, recompute, build, make_microbatch):
    """Compares two predictors with one. A predictor keeps a stream, the gradient of its loss, and
    what it was computed from."""
    saved_bytes = []
    for depth in (1, 2):
        built = build(
            {"layers": 1, "hidden": 64, "mtp_depth": depth, **model},
            train={"precision": "bf16", "seq": 32, "recompute": recompute},
        )
        microbatch = look_ahead(make_microbatch(built.config), depth)
        saved_tensors = {}

        def keep(tensor, saved_tensors=saved_tensors):
            saved_tensors[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            built.stage.forward(StagePass(0), microbatch, torch.ones((), dtype=torch.float64))
        of_end = built.stage._activations[0].post_process
        for tensor in (*of_end.leaves, *of_end.d_normed):
            keep(tensor)
        known = [bucket.parameters[0].value for bucket in built.sharded_parameters.buckets]
        known += [far.tokens_BS for far in microbatch.ahead]
        for tensor in known:
            saved_tensors.pop(tensor.untyped_storage().data_ptr(), None)
        saved_bytes.append(
            sum(tensor.untyped_storage().nbytes() for tensor in saved_tensors.values())
        )
        plan = PlannedRank(
            built.config, RankParameters(0, (), ()), 1, plan_stages(built.config), FORWARD
        ).compute_memory()
        saved_bytes.append(plan.activations)
    assert saved_bytes[2] - saved_bytes[0] == saved_bytes[3] - saved_bytes[1]


def measure_memory(precision, zero, model, optim=None, expert=1, bucket_size="auto"):
    """Train two steps -> the planned memory, the bytes of optimizer state, and the buffers."""
    config = RunConfig(
        model={"layers": 3, "hidden": 128, "heads": 4, "vocab": 500, "bias": True, **model},
        train={"seq": 8, "global_batch": 4, "microbatch": 1, "precision": precision},
        parallel={"zero": zero, "expert": expert, "bucket_size": bucket_size},
        optim=optim or {},
    )
    layout = Layout.from_parallel(config.parallel, read_world_size())
    mesh = Mesh(layout, device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    microbatches = [Microbatch(tokens, tokens, torch.arange(1))] * (4 // layout.data)
    for step in range(2):
        train_step.train(microbatches, step, 1.0)
    plans = plan_stages(config)
    parameter_counts, schedule = (
        count_rank_parameters(config.model, config.train, layout, plans),
        train_step.schedule.ranks[0],
    )
    plan = PlannedRank(
        config,
        parameter_counts,
        layout.data,
        plans,
        schedule,
        layout.expert_shard,
        unfrozen=count_rank_parameters(
            config.model, config.train, layout, plans, config.optim.frozen
        ),
        host=True,
    ).compute_memory()
    rules = [shard.rule for shard in train_step.optimizer.shards if shard.rule is not None]
    state = [tensor for rule in rules for tensor in rule.state.values()]
    mesh.finish()
    buffers = train_step.sharded_parameters.buffers
    sizes = SimpleNamespace(bytes=buffers.bytes, receive=buffers.receive_bytes)
    return plan, sum(tensor.nbytes for tensor in state), sizes


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("ranks", "tie", "precision"),
    [(4, True, "bf16"), slow(4, False, "fp32"), slow(1, True, "fp32")],
)
def test_state_is_what_is_allocated_within_one_percent(ranks, tie, precision, zero, pool):
    model = {"tie_embeddings": tie, "position": "learned"}
    for plan, state, buffers in pool.run(ranks, measure_memory, precision, zero, model):
        assert state == pytest.approx(plan.optimizer, rel=0.01)
        planned = plan.weights + plan.values + plan.gradients
        assert buffers.bytes == pytest.approx(planned, rel=0.01)
        assert buffers.receive == pytest.approx(plan.buffers, rel=0.01)


@pytest.mark.parametrize("zero", [1, slow(2), slow(3)])
def test_blocks_that_share_buckets_are_planned_within_one_percent(zero, pool):
    """Two of three blocks share buckets, for which as much room is needed."""
    for plan, _, buffers in pool.run(4, measure_memory, "bf16", zero, {}, None, 1, 300_000):
        planned = plan.weights + plan.values + plan.gradients
        assert buffers.bytes == pytest.approx(planned, rel=0.01)
        assert buffers.receive == pytest.approx(plan.buffers, rel=0.01)


@pytest.mark.parametrize("zero", [slow(0), slow(1), slow(2), 3])
def test_state_of_blocks_with_one_half_is_planned_within_one_percent(zero, pool):
    blocks = [{"feed_forward": "none"}, {"mixer": "none"}, {}]
    for plan, state, buffers in pool.run(4, measure_memory, "bf16", zero, {"blocks": blocks}):
        assert state == pytest.approx(plan.optimizer, rel=0.01)
        planned = plan.weights + plan.values + plan.gradients
        assert buffers.bytes == pytest.approx(planned, rel=0.01)
        assert 0.75 * plan.buffers <= buffers.receive <= 1.01 * plan.buffers


@pytest.mark.parametrize(
    ("zero", "expert"), mark_slow(product(range(4), (2, 4)), except_for=[(3, 2), (2, 4)])
)
def test_state_of_experts_is_planned_within_one_percent(zero, expert, pool):
    """With 4 expert ranks each expert has one rank, and is not divided."""
    model = {"moe": {"experts": 4, "ffn": 160, "first": 1}}
    for plan, state, buffers in pool.run(4, measure_memory, "bf16", zero, model, None, expert):
        assert state == pytest.approx(plan.optimizer, rel=0.01)
        planned = plan.weights + plan.values + plan.gradients
        assert buffers.bytes == pytest.approx(planned, rel=0.01)
        # Some receive buffers reuse free buffers.
        assert 0.75 * plan.buffers <= buffers.receive <= 1.01 * plan.buffers


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "lion"},
        {"name": "muon", "state": "bf16"},
        {"name": "sgd", "ema": 0.9},
        {"name": "sgd", "momentum": 0.0},
        {"state": "int8"},
    ],
)
def test_state_of_every_optimizer_is_planned_within_one_percent(optim, pool):
    for plan, state, _ in pool.run(2, measure_memory, "bf16", 1, {}, optim):
        assert state == pytest.approx(plan.optimizer, rel=0.01)


FROZEN = {
    "all but the last block": ["embedding.*", "blocks.0.*", "blocks.1.*", "head.weight"],
    "all vectors": ["*.gain", "*.bias"],
    "all but attention": ["*.mlp.*", "embedding.*", "head.*"],
    "predictors": ["predictors.*", "blocks.3.*"],
}


@pytest.mark.parametrize(
    ("frozen", "zero"),
    mark_slow(
        product(FROZEN, range(4)),
        except_for=[("all but the last block", 1), ("all but attention", 3), ("predictors", 2)],
    ),
)
def test_frozen_parameters_have_neither_gradients_nor_state(frozen, zero, pool):
    model = {"mtp_depth": 1} if frozen == "predictors" else {}
    optim = {"frozen": FROZEN[frozen]}
    for plan, state, buffers in pool.run(4, measure_memory, "bf16", zero, model, optim):
        assert state == pytest.approx(plan.optimizer, rel=0.01)
        planned = plan.weights + plan.values + plan.gradients
        assert buffers.bytes == pytest.approx(planned, rel=0.01), (plan, buffers)


def test_a_backward_that_is_not_split_frees_what_it_used():
    """Checks a stage that splits only some of its backwards, as with dualpipe-v."""
    config = RunConfig(model={"layers": 1, "vocab": 64}, train={"seq": 8, "recompute": "full"})
    first, second = ((Action(ActionKind.F, 0, n), Action(ActionKind.B, 0, n)) for n in (0, 1))
    split = [*first, Action(ActionKind.W, 0, 0)]
    plans = plan_stages(config)
    single_activations = (
        PlannedRank(config, RankParameters(0, (), ()), 1, plans, split).compute_memory().activations
    )
    assert (
        PlannedRank(config, RankParameters(0, (), ()), 1, plans, [*second, *split])
        .compute_memory()
        .activations
        == single_activations
    )


def test_a_tied_table_is_kept_while_noise_is_measured():
    """By each of the two ranks that have it, and only in a pipeline."""
    kept = {}
    for every in (0, 5):
        for pipeline in (1, 3):
            config = RunConfig(
                model={"layers": 3, "hidden": 16, "heads": 2, "vocab": 100, "tie_embeddings": True},
                train={"seq": 8, "global_batch": 6, "microbatch": 1},
                parallel={"pipeline": pipeline},
                metrics={"gradient_noise_every": every},
            )
            schedule, plans = lower(build_step_schedule(config, 3)), plan_stages(config)
            layout = Layout(pipeline=pipeline, data=2)
            for rank in range(pipeline):
                memory = compute_rank_memory(config, layout, plans, schedule, rank)
                kept[every, pipeline, rank] = memory.gradients
    more = {key[1:]: kept[key] - kept[(0, *key[1:])] for key in kept if key[0]}
    table = 100 * 16 * 4
    assert more == {(1, 0): 0, (3, 0): table, (3, 1): 0, (3, 2): table}
