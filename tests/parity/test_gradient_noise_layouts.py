"""The squared norms from which gradient noise is estimated are those of plain torch, to 1e-10 in
fp64, under every layout.

Tests `megaframe.data_parallel.small_batches`.
"""

from functools import cache

import pytest
import reference_model
import torch
from parity_runs import MODELS, share
from patience import PATIENCE
from slow_cases import slow
from tolerances import promised

from megaframe.config import RunConfig
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data_parallel.small_batches import SmallBatches
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.model.model_chunk import list_model_specs
from megaframe.training.layer_check.parity import make_global_batch
from megaframe.training.train_step import TrainStep

PLAIN = {**MODELS["gpt2"], "dropout": 0.0}
MOE = {
    **MODELS["llama"],
    "moe": {"experts": 4, "ffn": 12, "top_k": 2, "shared": 1, "balance": "none"},
}
SHAPES = {
    "gpt2": PLAIN,
    "four layers": {**PLAIN, "layers": 4},
    "llama": MODELS["llama"],
    "experts": MOE,
    "predictors": {**MODELS["llama"], "mtp_depth": 1},
    "one head": {**MODELS["llama"], "kv_heads": 1},
}
CASES = [
    ("gpt2", {"data": 2, "zero": 0}, {}),
    ("gpt2", {"data": 2, "zero": 3}, {}),
    ("gpt2", {"data": 2, "zero": 2, "schedule": "gpipe"}, {"microbatch": 4}),
    ("gpt2", {"data": 2, "tensor": 2, "zero": 1}, {}),
    ("gpt2", {"data": 2, "pipeline": 2, "zero": 2}, {}),
    slow("four layers", {"data": 2, "pipeline": 2, "schedule": "zb-v", "chunks": 2}, {}),
    slow("gpt2", {"data": 4, "data_replicate": 2, "zero": 0}, {}),
    slow("gpt2", {"data": 4, "data_replicate": 4, "zero": 1}, {}),
    slow("llama", {"data": 2, "pipeline": 2, "zero": 0, "schedule": "zb-h1"}, {}),
    ("llama", {"data": 2, "context": 2, "zero": 3}, {}),
    slow("llama", {"data": 2, "context": 2, "zero": 0, "context_kind": "all_to_all"}, {}),
    slow("llama", {"data": 4, "data_replicate": 2, "zero": 2}, {}),
    slow("llama", {"data": 2, "zero": 3, "bucket_size": 10**9}, {}),
    ("one head", {"data": 2, "tensor": 2, "zero": 2}, {}),
    slow("predictors", {"data": 2, "pipeline": 2, "zero": 1}, {}),
    ("experts", {"data": 2, "tensor": 2, "zero": 2}, {}),
    slow("experts", {"data": 2, "tensor": 2, "expert": 2, "zero": 3}, {}),
    slow("experts", {"data": 2, "tensor": 2, "expert": 2, "expert_tensor": 2}, {}),
    ("experts", {"data": 4, "expert": 2, "zero": 2}, {}),
    slow("experts", {"data": 4, "expert": 4}, {}),
    slow("experts", {"data": 2, "context": 2, "expert": 2, "zero": 1}, {}),
]


def make_config(model, train, parallel):
    return RunConfig(
        model={"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2, **model},
        train={"seq": 10, "global_batch": 8, "precision": "fp64", "steps": 9, **train},
        optim={"lr": 0.01, "clip": 0.5},
        parallel=parallel,
        metrics={"gradient_noise_every": 1},
    )


def measure(config, step=0):
    """Return the squared norms of a step by kind, (small, whole), with the initial weights."""
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cpu", timeout=PATIENCE
    )
    data = mesh.group("data")
    train_step = TrainStep(config, mesh)
    train_step.optimizer.initialize(config.run.seed)
    batch = make_global_batch(config.model, config.train, step)
    own = share(batch, config.train.microbatch, data.index, data.size, False)
    valid = int((batch.labels_BS != IGNORE).sum())
    norms = train_step.train(own, step, 1.0 / valid, measured=True).update.squared_norms
    sums = [all_reduce(part, mesh.world).wait().tolist() for part in (norms.small, norms.whole)]
    kinds = train_step.sharded_parameters.small_batches.kinds
    mesh.finish()
    return dict(zip(kinds, zip(*sums, strict=True), strict=True))


def list_initial_weights(config):
    mesh = Mesh(Layout(), device="cpu")
    train_step = TrainStep(config, mesh)
    train_step.optimizer.initialize(config.run.seed)
    tensors = train_step.optimizer.list_tensors()
    weights = {name: piece.clone() for name, spec, _, piece in tensors if name == spec.name}
    mesh.finish()
    return weights


@cache
def compute_sample_gradients(name):
    """Return the gradients of each sample of the first batch by plain torch, as its part of the
    batch's mean: {parameter: [samples, ...]}."""
    config = make_config(SHAPES[name], {}, {})
    batch = make_global_batch(config.model, config.train, 0)
    valid = (batch.labels_BS != IGNORE).sum()
    weights = list_initial_weights(config)
    trained = {
        spec.name for spec in list_model_specs(config.model, config.train) if spec.role != "balance"
    }
    leaves = {n: w.requires_grad_(n in trained) for n, w in weights.items()}
    gradients = {n: [] for n in sorted(trained)}
    for i in range(config.train.global_batch):
        rows = slice(i, i + 1)
        sample = Microbatch(batch.tokens_BS[rows], batch.labels_BS[rows], batch.samples_B[rows])
        counted = (sample.labels_BS != IGNORE).sum()
        if not counted:  # it has no gradient, and the reference divides by this number
            for rows_of in gradients.values():
                rows_of.append(None)
            continue
        loss = reference_model.loss(leaves, config, sample) * counted / valid
        of_sample = torch.autograd.grad(
            loss, [leaves[n] for n in gradients], allow_unused=True, materialize_grads=True
        )
        for n, gradient in zip(gradients, of_sample, strict=True):
            gradients[n].append(gradient)
    return {
        n: torch.stack([torch.zeros_like(weights[n]) if r is None else r for r in rows])
        for n, rows in gradients.items()
    }


def find_kind(spec, config, layout):
    """Return over what a parameter is measured, None if it is not; from the layout alone."""
    divided = config.parallel.zero >= 2 and spec.role not in ("gain", "bias")
    if any(axis.startswith("expert") for axis in spec.axes.values()):
        ranks = max(1, layout.expert * layout.expert_tensor // (layout.tensor * layout.context))
        if ranks == layout.data:
            return None
        return SmallBatches(ranks, divided and layout.expert_shard > 1)
    tied = (config.model.tie_embeddings or config.model.mtp_depth) and layout.pipeline > 1
    is_tied = spec.name == "embedding.tokens.weight" and tied
    alone = layout.data_shard * layout.context == 1
    return SmallBatches(1, divided and not is_tied and not alone)


def compute_expected(name, config, layout):
    """Return what `measure` returns, from the gradients of the samples."""
    gradients = compute_sample_gradients(name)
    expected = {}
    size, ranks = config.train.microbatch, layout.data
    for spec in list_model_specs(config.model, config.train):
        kind = find_kind(spec, config, layout) if spec.role != "balance" else None
        if kind is None:
            continue
        by_sample = gradients[spec.name]
        # Sample i is in microbatch i // (size * ranks) of data rank i // size % ranks.
        by_place = by_sample.unflatten(0, (-1, ranks, size)).sum(2)
        by_batch = by_place.unflatten(1, (-1, kind.data_ranks)).sum(2)
        parts = by_batch.flatten(0, 1) if kind.by_microbatch else by_batch.sum(0)
        small, whole = expected.get(kind, (0.0, 0.0))
        whole += float(by_sample.sum(0).square().sum())
        expected[kind] = small + float(parts.square().sum()), whole
    return expected


@pytest.mark.parametrize(("name", "parallel", "train"), CASES)
def test_measured_norms_are_those_of_plain_torch(name, parallel, train, pool):
    config = make_config(SHAPES[name], {"microbatch": 2, **train}, parallel)
    sizes = {k: v for k, v in parallel.items() if k in Layout.__dataclass_fields__}
    layout = Layout(**sizes)
    (measured, *_) = pool.run(layout.world, measure, config)
    expected = compute_expected(name, config, layout)
    for kind, values in measured.items():
        assert values == promised(expected.get(kind, (0.0, 0.0))), kind
    assert expected.keys() <= measured.keys()
