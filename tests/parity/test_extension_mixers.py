"""Mixers from outside, the examples: equal to a plain reference, and the same under every layout to
1e-10 in fp64, like our own."""

from functools import cache

import pytest
import reference_model as reference
import torch
from parity_runs import (
    FEW,
    assert_same,
    choose_microbatch,
    make_global_batch,
    run,
    share,
    with_documents,
)
from parity_runs import LAYOUTS as SHARED_LAYOUTS
from patience import PATIENCE
from reference_mixers import FILES
from repo_copy import ROOT
from slow_cases import mark_slow, slow
from tolerances import assert_near

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.architecture.stages import plan_stages
from megaframe.config import RunConfig
from megaframe.config.registry import Registry, use_registry
from megaframe.data.microbatch import IGNORE, Microbatch, select_context_part
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.extensions import load_extensions
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.pipeline_parallel.stage_pass import StagePass
from megaframe.planner.candidates import SearchSpace
from megaframe.planner.communication_volume import compute_communication_bytes
from megaframe.planner.constants import get_family_constants
from megaframe.planner.layer_times import estimate_block_times
from megaframe.planner.layout_sizes import make_layout_sizes
from megaframe.planner.machine import Machine
from megaframe.planner.memory import PlannedRank
from megaframe.planner.parameter_counts import RankParameters
from megaframe.schedule import Action, ActionKind, lower
from megaframe.training.layer_check import find_lies, measure_layers
from megaframe.training.train_step import TrainStep

pytestmark = pytest.mark.numeric

EXAMPLES = ", ".join(str(ROOT / "examples" / file) for file in FILES.values())
MODEL = {"norm": "rmsnorm", "position": "none"}
LINEAR = {"kind": "gated_linear", "chunk": 3}
MODELS = {
    "linear": {**MODEL, "blocks": [{"mixer": LINEAR}]},
    "differential": {
        "norm": "rmsnorm",
        "blocks": [{"mixer": "differential"}, {"mixer": {"kind": "differential", "window": 4}}],
    },
    "not rotated": {**MODEL, "bias": True, "blocks": [{"mixer": "differential"}]},
}
DESCRIBED = {
    **MODELS,
    "chunks beyond pieces": {**MODEL, "blocks": [{"mixer": "gated_linear"}]},
    "adapters": {**MODEL, "blocks": [{"mixer": LINEAR}], "adapters": {"rank": 3}},
}
"""Models whose descriptions are compared."""
RING, ALL_TO_ALL = {"context_kind": "ring"}, {"context_kind": "all_to_all"}
NESTED = {"context_kind": "nested", "context_heads": 2}
LAYOUTS = {
    **SHARED_LAYOUTS,
    "zero-bubble": (2, {"pipeline": 2, "schedule": "zb-h1"}, {}),
    "ring of 4": (4, {"context": 4, **RING}, {"recompute": "full"}),
    "all-to-all": (4, {"context": 4, **ALL_TO_ALL}, {"recompute": "selective"}),
    "nested": (4, {"context": 4, **NESTED}, {}),
    "tensor, ring": (4, {"tensor": 2, "context": 2, **RING}, {"recompute": "selective"}),
    "tensor, all-to-all": (4, {"tensor": 2, "context": 2, **ALL_TO_ALL}, {}),
    "tensor, pipeline": (4, {"tensor": 2, "pipeline": 2, "zero": 2}, {"recompute": "full"}),
}


def load_examples():
    load_extensions(None, [f"run.extensions=[{EXAMPLES}]"])


def run_with(name, train, parallel, packed):
    """Train two steps of a model with an example's mixer."""
    train = {**FEW, "microbatch": choose_microbatch(read_world_size(), parallel), **train}
    with use_registry(Registry()):
        load_examples()
        return run(MODELS[name], train, parallel, packed=packed)


@pytest.fixture(scope="module")
def get_expected(pool):
    """Return a function from a model, and whether samples are packed, to what one rank gets."""
    return cache(lambda name, packed: pool.run(1, run_with, name, {}, {}, packed)[0])


QUICK = [
    ("linear", "nested", True),
    ("linear", "zero 3", False),
    ("differential", "tensor, all-to-all", True),
]
CASES = [
    # Every layout with one model in turn, and with packed samples in turn.
    (name, layout, packed)
    for number, name in enumerate(MODELS)
    for place, layout in enumerate(LAYOUTS)
    for packed in (False, True)
    if ((number + place) % len(MODELS) == 0 and packed == bool(place % 2))
    or (name, layout, packed) in QUICK
]


@pytest.mark.parametrize(("name", "layout", "packed"), mark_slow(CASES, except_for=QUICK))
def test_layouts_do_not_change_the_answer(name, layout, packed, pool, get_expected):
    ranks, parallel, train = LAYOUTS[layout]
    results = pool.run(ranks, run_with, name, train, parallel, packed)
    assert_same(results, get_expected(name, packed))


def make_config(name, train, parallel, layers=2, **model):
    """Load the examples and return a config with the mixer of one."""
    load_examples()
    return RunConfig(
        model={
            **{"layers": layers, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2},
            **{**DESCRIBED[name], **model},
        },
        train={"seq": 10, "global_batch": 3, "microbatch": 3, "precision": "fp64", **train},
        parallel=parallel,
        kernels={"matmul": "torch"},
    )


def build(config):
    """Build what this rank runs."""
    layout = Layout.from_parallel(config.parallel, read_world_size())
    mesh = Mesh(layout, device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    return mesh, train_step


@pytest.fixture
def registry():
    with use_registry(Registry()) as registry:
        yield registry


@pytest.mark.parametrize(
    ("recompute", "documents"),
    [
        *(("none", False), ("selective", True), ("full", False)),
        *(slow("none", True), slow("selective", False), slow("full", True)),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_a_plain_reference(name, recompute, documents, registry):
    config = make_config(name, {"recompute": recompute}, {})
    mesh, train_step = build(config)
    batch = make_global_batch(config.model, config.train, 0)
    if documents:
        batch = with_documents(batch, 0)
    valid = int((batch.labels_BS != IGNORE).sum())
    weights = {}
    buckets = train_step.sharded_parameters.buckets
    for bucket in buckets:
        for parameter, _, piece in bucket.iterate_pieces(bucket.weights, bucket.master_span):
            weights[parameter.spec.name] = piece.clone().requires_grad_()
    expected = reference.loss(weights, config, batch)
    expected.backward()
    train_step.sharded_parameters.start_step()
    (stage,) = train_step.stages.values()
    loss = stage.forward(StagePass(0), batch, torch.tensor(1 / valid, dtype=torch.float64)) / valid
    stage.backward(StagePass(0))
    mesh.finish()
    terms = 2 * (8 * 16 + 10) + 37 + 30  # from a token to a gradient
    assert_near(loss, expected, terms)
    size = max(float(weight.grad.abs().max()) for weight in weights.values())
    for bucket in buckets:
        for parameter, _, grad in bucket.iterate_pieces(bucket.grad_sums, bucket.master_span):
            wanted = weights[parameter.spec.name].grad
            assert_near(grad, wanted, terms, size=size, label=parameter.spec.name)


@pytest.mark.parametrize("name", MODELS)
def test_what_comes_later_changes_nothing_as_generation_needs(name, registry):
    config = make_config(name, {}, {})
    mesh, train_step = build(config)
    (stage,) = train_step.stages.values()
    tokens = make_global_batch(config.model, config.train, 0).tokens_BS[:1]

    def compute_hidden(length):
        part = tokens[:, :length]
        return stage.compute_hidden(Microbatch(part, part, torch.zeros(1, dtype=torch.int64)))

    whole = compute_hidden(10)
    for length in (1, 2, 7):
        assert_near(compute_hidden(length), whole[:length], 2 * (8 * 16 + 10))
    mesh.finish()


def measure(*arguments):
    with use_registry(Registry()):
        return measure_layers(make_config(*arguments))


@pytest.mark.parametrize("name", mark_slow(DESCRIBED, except_for=["linear"]))
@pytest.mark.parametrize(
    ("ranks", "parallel", "recompute", "precision"),
    [
        slow(1, {}, "selective", "fp64"),
        slow(2, {"tensor": 2}, "none", "bf16"),
        (2, {"context": 2, **RING}, "none", "bf16"),
        slow(2, {"context": 2, **ALL_TO_ALL}, "selective", "fp64"),
    ],
)
def test_descriptions_are_exact(name, recompute, precision, ranks, parallel, pool, registry):
    train = {"seq": 12, "microbatch": 2, "global_batch": 2}
    train |= {"precision": precision, "recompute": recompute}
    arguments = name, train, parallel
    lies = find_lies(make_config(*arguments), pool.run(ranks, measure, *arguments))
    assert not lies, "\n" + "\n".join(map(str, lies))


CONTEXT = [
    slow(2, {"context": 2, **RING}, "none"),
    slow(4, {"context": 4, **RING}, "selective"),
    slow(4, {"context": 4, **ALL_TO_ALL}, "full"),
    (4, {"context": 4, **NESTED}, "none"),
    slow(4, {"tensor": 2, "context": 2, **RING}, "none"),
    slow(4, {"tensor": 2, "context": 2, **ALL_TO_ALL}, "selective"),
]


def make_long_config(name, recompute, parallel, layers=2):
    """Return a config whose samples all context ranks divide evenly."""
    train = {"seq": 16, "microbatch": 2, "global_batch": 4, "recompute": recompute}
    return make_config(name, train, parallel, layers)


def count_sent(*arguments):
    """Train a step, and return the bytes that this rank has sent over the context axis."""
    with use_registry(Registry()):
        config = make_long_config(*arguments)
    mesh, train_step = build(config)
    train_step.train(
        share(make_global_batch(config.model, config.train, 0), 2, 0, 1, ragged=False), 0, 1.0
    )
    context = train_step.context
    groups = {id(group): group for group in (context.heads, context.ring.group)}
    sent = sum(group.traffic.take()[0] for group in groups.values())
    mesh.finish()
    return sent


@pytest.mark.parametrize(("ranks", "parallel", "recompute"), CONTEXT)
@pytest.mark.parametrize("name", MODELS)
def test_bytes_over_the_context_axis_are_planned_exactly(
    name, ranks, parallel, recompute, pool, registry
):
    config = make_long_config(name, recompute, parallel)
    schedule = build_step_schedule(config, 2)
    planned = compute_communication_bytes(
        config,
        Layout.from_parallel(config.parallel, ranks),
        plan_stages(config),
        lower(schedule).ranks[0],
    )
    sent = pool.run(ranks, count_sent, name, recompute, parallel)
    assert sum(sent) == pytest.approx(ranks * planned["context"], rel=1e-12)


def measure_kept(*arguments):
    """Return the bytes that a forward pass keeps on this rank."""
    with use_registry(Registry()):
        config = make_long_config(*arguments)
    mesh, train_step = build(config)
    storages = {}

    def keep(tensor):
        if tensor.dim():
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    (stage,) = train_step.stages.values()
    ((part, *_),) = [share(make_global_batch(config.model, config.train, 0), 2, 0, 1, ragged=False)]
    part = select_context_part(part, train_step.context.index, train_step.context.size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.forward(StagePass(0), part, torch.ones((), dtype=torch.float64))
    for leaf in stage._activations[0].leaves:
        keep(leaf)
    for bucket in train_step.sharded_parameters.buckets:
        storages.pop(bucket.parameters[0].value.untyped_storage().data_ptr(), None)
    mesh.finish()
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def plan_kept(*arguments):
    """Return the bytes that are planned."""
    config = make_long_config(*arguments)
    parameters, actions = RankParameters(0, (), ()), [Action(ActionKind.F, 0, 0)]
    return (
        PlannedRank(config, parameters, 1, plan_stages(config), actions)
        .compute_memory()
        .activations
    )


KEPT = [
    ("linear", 2, {"context": 2, **RING}, "selective"),
    ("differential", 4, {"context": 4, **ALL_TO_ALL}, "full"),
    ("linear", 4, {"context": 4, **NESTED}, "none"),
    ("differential", 4, {"tensor": 2, "context": 2, **ALL_TO_ALL}, "selective"),
]


@pytest.mark.parametrize(("name", "ranks", "parallel", "recompute"), KEPT)
@pytest.mark.slow
def test_the_plan_is_what_two_more_layers_keep_to_a_byte(
    name, ranks, parallel, recompute, pool, registry
):
    # Planned first: what is measured for the plan is kept, and no rank measures it again.
    planned_less, planned_more = (plan_kept(name, recompute, parallel, layers) for layers in (2, 4))
    two, four = (
        pool.run(ranks, measure_kept, name, recompute, parallel, layers) for layers in (2, 4)
    )
    for less, more in zip(two, four, strict=True):
        assert more - less == planned_more - planned_less > 0


@pytest.mark.slow
def test_the_plan_s_time_and_search_follow_the_description(registry):
    load_examples()
    model = {**{"layers": 4, "hidden": 1024, "heads": 8, "vocab": 4096}, **MODELS["linear"]}
    config = RunConfig(model=model, train={"seq": 4096, "global_batch": 16, "microbatch": 1})
    cluster = load_cluster("h100-ib")
    candidates = SearchSpace(config, 32, cluster).list_candidates()
    assert {1, 2, 4, 8} >= {*candidates.tensor.tolist()} > {1}  # eight heads
    assert {*candidates.context.tolist()} > {1}

    def estimate(context, **mixer):
        changed = {**model, "blocks": [{"mixer": {**LINEAR, **mixer}}]}
        run = RunConfig(model=changed, train=config.train, parallel={"context": context})
        layout = Layout.from_parallel(run.parallel, context)
        sizes = make_layout_sizes(run.parallel, run.train, layout)
        return estimate_block_times(Machine(run, cluster, get_family_constants("h100"), sizes), 0)

    assert float(estimate(1).context.total) == 0.0
    two, four = (estimate(context) for context in (2, 4))
    assert 0.0 < float(two.context.total) < float(four.context.total)
    assert float(four.compute.total) < float(two.compute.total)
    # Larger chunks have more products within them.
    assert float(estimate(1, chunk=4096).compute.total) > float(estimate(1, chunk=64).compute.total)
