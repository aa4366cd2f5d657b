"""Mixers from outside, the examples: equal to a plain reference, and the same under every layout to
1e-10 in fp64, like our own."""

import pytest
import reference_model as reference
import torch
from parity_runs import FEW, assert_same, make_global_batch, run, with_documents
from repo_copy import ROOT
from tolerances import assert_near

from megaframe.config import RunConfig
from megaframe.config.registry import Registry, use_registry
from megaframe.data.microbatch import IGNORE
from megaframe.distributed.mesh import Mesh
from megaframe.extensions import load_extensions
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.train_step import TrainStep

pytestmark = pytest.mark.numeric

EXAMPLES = {
    "linear": "gated_linear_attention.py",
}
MODEL = {"norm": "rmsnorm", "position": "none"}
LINEAR = {"kind": "gated_linear", "chunk": 3}
MODELS = {
    "linear": {**MODEL, "blocks": [{"mixer": LINEAR}]},
}
RING, ALL_TO_ALL = {"context_kind": "ring"}, {"context_kind": "all_to_all"}
NESTED = {"context_kind": "nested", "context_heads": 2}
LAYOUTS = {
    "tensor": (2, {"tensor": 2}, {}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "zero-bubble": (2, {"pipeline": 2, "schedule": "zb-h1"}, {}),
    "ring": (2, {"context": 2, **RING}, {}),
    "ring of 4": (4, {"context": 4, **RING}, {"recompute": "full"}),
    "all-to-all": (4, {"context": 4, **ALL_TO_ALL}, {"recompute": "selective"}),
    "nested": (4, {"context": 4, **NESTED}, {}),
    "zero 0": (2, {"zero": 0}, {}),
    "zero 1": (2, {"zero": 1}, {}),
    "zero 2": (2, {"zero": 2}, {}),
    "zero 3": (2, {"zero": 3}, {}),
    "recompute": (1, {}, {"recompute": "full"}),
    "selective": (2, {"tensor": 2}, {"recompute": "selective"}),
    "tensor, ring": (4, {"tensor": 2, "context": 2, **RING}, {"recompute": "selective"}),
    "tensor, all-to-all": (4, {"tensor": 2, "context": 2, **ALL_TO_ALL}, {}),
    "tensor, pipeline": (4, {"tensor": 2, "pipeline": 2, "zero": 2}, {"recompute": "full"}),
}


def load_example(name):
    load_extensions(None, [f"run.extensions=[{ROOT / 'examples' / EXAMPLES[name]}]"])


def run_with(name, train, parallel, packed):
    """Train two steps of a model with an example's mixer."""
    with use_registry(Registry()):
        load_example(name)
        return run(MODELS[name], {**FEW, **train}, parallel, packed=packed)


@pytest.fixture(scope="module")
def expected(pool):
    return {
        (name, packed): pool.run(1, run_with, name, {"microbatch": 4}, {}, packed)[0]
        for name in MODELS
        for packed in (False, True)
    }


@pytest.mark.quick(when=lambda layout, packed: packed == (layout not in ("tensor", "zero 3")))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_layouts_do_not_change_the_answer(name, layout, packed, pool, expected):
    ranks, parallel, train = LAYOUTS[layout]
    results = pool.run(ranks, run_with, name, train, parallel, packed)
    assert_same(results, expected[name, packed])


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_a_plain_reference(name, recompute, documents):
    with use_registry(Registry()):
        load_example(name)
        config = RunConfig(
            model={
                **{"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2},
                **MODELS[name],
            },
            train={
                **{"seq": 10, "global_batch": 3, "microbatch": 3},
                **{"precision": "fp64", "recompute": recompute},
            },
        )
        mesh = Mesh(Layout(), device="cpu", timeout=60)
        train_step = TrainStep(config, mesh, StepTimer().time)
        train_step.optimizer.initialize(1)
        batch = make_global_batch(config, 0)
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
        loss = stage.forward(0, batch, torch.tensor(1 / valid, dtype=torch.float64)) / valid
        stage.backward(0)
        mesh.close()
    terms = 2 * (8 * 16 + 10) + 37 + 30  # from a token to a gradient
    assert_near(loss, expected, terms)
    size = max(float(weight.grad.abs().max()) for weight in weights.values())
    for bucket in buckets:
        for parameter, _, grad in bucket.iterate_pieces(bucket.grad_sums, bucket.master_span):
            wanted = weights[parameter.spec.name].grad
            assert_near(grad, wanted, terms, size=size, label=parameter.spec.name)
