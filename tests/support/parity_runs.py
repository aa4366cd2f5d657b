"""Two optimizer steps of a tiny GPT under any layout, and comparison of their results."""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import torch
from patience import PATIENCE
from repo_copy import ROOT
from tolerances import PROMISE, assert_within, promised

from megaframe.config import RunConfig
from megaframe.config.registry import Registry, use_registry
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.device import set_deterministic
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.extensions import load_extensions
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.optim.optimizer import Optimizer
from megaframe.training.layer_check.parity import make_global_batch
from megaframe.training.train_step import TrainStep

GLOBAL_BATCH, STEPS = 8, 2
EXAMPLES = ROOT / "examples"
FEW = {"global_batch": 4, "microbatch": 2}
"""Fewer samples in two microbatches, for what communicates much in each of them. With a microbatch
of one there are enough for two data ranks with two microbatches each."""
MODELS = {
    "gpt2": {"position": "learned", "bias": True, "tie_embeddings": True, "dropout": 0.1},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2, "qk_norm": True},
}
LAYOUTS = {
    "tensor": (2, {"tensor": 2}, {}),
    "pipeline": (2, {"pipeline": 2}, {}),
    "context": (2, {"context": 2}, {}),
    "zero 0": (2, {"zero": 0}, {}),
    "zero 1": (2, {"zero": 1}, {}),
    "zero 2": (2, {"zero": 2}, {}),
    "zero 3": (2, {"zero": 3}, {}),
    "recompute": (1, {}, {"recompute": "full"}),
    "selective": (2, {"tensor": 2}, {"recompute": "selective"}),
    "all": (4, {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}, {"recompute": "selective"}),
}
"""By name: ranks, and keys of `parallel` and of `train`. Extensions are tried under each."""
_RING = {"context_kind": "ring"}
PIECES = {
    "ring of 4": (4, {"context": 4, **_RING}, {"recompute": "full"}),
    "all-to-all": (4, {"context": 4, "context_kind": "all_to_all"}, {"recompute": "selective"}),
    "nested": (4, {"context": 4, "context_kind": "nested", "context_heads": 2}, {}),
}
"""Samples in short pieces, for mixers that pass a state or their last tokens on."""
PIECES_AND_AXES = {
    "tensor, ring": (4, {"tensor": 2, "context": 2, **_RING}, {"recompute": "selective"}),
    "experts": (4, {"data": 2, "expert": 2, "tensor": 2}, {"recompute": "selective"}),
    "pipeline, ring": (4, {"pipeline": 2, "context": 2, **_RING}, {}),
}
"""The same beside another axis, and experts beside tensor ranks."""


@dataclass
class Result:
    """What one rank found. losses, norms: by step. evaluation: loss at the end. weights: by name,
    the (box, piece)s of this rank's weights and optimizer state. traffic: (bytes, calls) over data
    ranks. spans: (length, first, end) of each bucket and of what this rank updates of it."""

    losses: list
    norms: list
    evaluation: float
    weights: dict
    traffic: tuple
    spans: list

    def whole(self, name):
        """Return a tensor that this rank has whole."""
        ((_, weights),) = self.weights[name]
        return weights


def run(
    model,
    train=None,
    parallel=None,
    serial=False,
    ragged=False,
    packed=False,
    optim=None,
    kernels=None,
    device="cpu",
    weighted=False,
):
    """Train two steps on this rank. ragged: samples have four different lengths, so each must be
    its own microbatch. packed: each sample is several documents. kernels: implementations by name.
    device: as in `run.device`. weighted: labels have weights."""
    config = RunConfig(
        model={"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2, **model},
        train={
            "seq": 10,
            "global_batch": GLOBAL_BATCH,
            "precision": "fp64",
            "steps": 9,
            **(train or {}),
        },
        optim={"lr": 0.01, "clip": 0.5, "warmup": 2, **(optim or {})},
        parallel=parallel or {},
        kernels=kernels or {},
    )
    layout = Layout.from_parallel(config.parallel, read_world_size())
    mesh = Mesh(layout, device=device, serial=serial, timeout=PATIENCE)
    group, everywhere = mesh.group("data"), mesh.world
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(config.run.seed)
    losses, norms = [], []
    for step in range(STEPS):
        batch = on(mesh.device, make_global_batch(config.model, config.train, step))
        if packed:
            batch = on(mesh.device, with_documents(batch, step))
        if weighted:
            generator = torch.Generator().manual_seed(step)
            weights = 4 * torch.rand(batch.tokens_BS.shape, generator=generator)
            batch = on(mesh.device, replace(batch, weights_BS=weights))
        shares = [
            share(batch, config.train.microbatch, index, group.size, ragged)
            for index in range(group.size)
        ]
        own_share = shares[group.index]
        valid = sum(float(microbatch.sum_label_weights()) for rank in shares for microbatch in rank)
        result = train_step.train(own_share, step, 1.0 / valid)
        losses.append(float(all_reduce(result.loss / valid, everywhere).wait()))
        norms.append(float(result.update.grad_norm))
    traffic = group.traffic.take()
    evaluation = float(all_reduce(train_step.evaluate(own_share).sum(), everywhere).wait()) / valid
    weights = {}
    for name, _, box, piece in train_step.optimizer.list_tensors():
        weights.setdefault(name, []).append((box, piece.to("cpu", copy=True)))
    spans = [
        (bucket.length, bucket.master_span.start, bucket.master_span.stop)
        for bucket in train_step.sharded_parameters.buckets
    ]
    mesh.finish()
    return Result(losses, norms, evaluation, weights, traffic, spans)


def run_with_extensions(extensions, function, *arguments):
    """Call a function on this rank with the parts of extensions, given by their files."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{', '.join(extensions)}]"])
        return function(*arguments)


def run_with_rounded_weights(*arguments, seed=0):
    """`run` from weights that differ by less than their rounding, drawn from a seed. What differs
    in its result as well is decided by rounding, and shows nothing of layouts."""
    initialize = Optimizer.initialize

    def initialize_and_round(self, run_seed):
        initialize(self, run_seed)
        generator = torch.Generator().manual_seed(seed)
        for name, _, _, piece in self.list_tensors():
            if not name.startswith("optimizer."):
                noise = torch.randn(piece.shape, generator=generator, dtype=piece.dtype)
                piece.mul_(1 + torch.finfo(piece.dtype).eps * noise)

    with patch.object(Optimizer, "initialize", initialize_and_round):
        return run(*arguments)


@contextmanager
def deterministic():
    """Within it a GPU adds up in one order what several tokens look up; otherwise bits differ."""
    if torch.cuda.is_available():
        set_deterministic()
    yield
    torch.set_deterministic_debug_mode("default")


def on(device, batch):
    """Return the batch on a device."""
    tensors = {
        name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
    }
    return replace(batch, **{name: value.to(device) for name, value in tensors.items()})


def with_documents(batch, step):
    """Return the batch, divided into documents at random places; positions restart in each."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = batch.tokens_BS.shape
    starts = torch.rand(shape, generator=generator) < 0.25
    order = torch.arange(shape[1]).expand(shape)
    first = torch.where(starts, order, 0).cummax(1).values
    return replace(batch, positions_BS=order - first, documents_BS=starts.cumsum(1))


def share(batch, microbatch, rank, ranks, ragged):
    """Return the microbatches of one data rank."""
    microbatches = []
    for i in range(rank * microbatch, len(batch.tokens_BS), ranks * microbatch):
        length = batch.tokens_BS.shape[1] - (i % 4 if ragged else 0)
        rows = slice(i, i + microbatch)
        positions, documents, weights = (
            None if of_all is None else of_all[rows, :length]
            for of_all in (batch.positions_BS, batch.documents_BS, batch.weights_BS)
        )
        tokens, labels = batch.tokens_BS[rows, :length], batch.labels_BS[rows, :length]
        microbatches.append(
            Microbatch(
                tokens, labels, batch.samples_B[rows], positions, documents, weights_BS=weights
            )
        )
    return microbatches


def assert_same(results, expected):
    """Assert that all ranks agree with the one-process result, and together hold all of it."""
    gathered = {}
    for rank in results:
        for label in ("losses", "norms", "evaluation"):
            values, reference = getattr(rank, label), getattr(expected, label)
            assert values == promised(reference), f"{label}: {values}, on one rank {reference}"
        for name, pieces in rank.weights.items():
            full = gathered.setdefault(name, torch.full_like(expected.whole(name), torch.nan))
            for box, weights in pieces:
                full[box.slices] = weights
    assert gathered.keys() == expected.weights.keys()
    for name, weights in gathered.items():
        reference = expected.whole(name)
        allowed = PROMISE * find_size(name.partition("/")[0], expected)
        assert_within(weights, reference, allowed, "what is promised of layouts", name)


def pair_in_turn(shapes, layouts, quick):
    """Return (shape, layout) for every layout with one shape in turn, and those that are `quick`.
    Experts' layout needs a shape with experts."""
    return [
        (name, layout)
        for number, name in enumerate(shapes)
        for place, layout in enumerate(layouts)
        if (number + place) % len(shapes) == 0 or (name, layout) in quick
        if layout != "experts" or "moe" in shapes[name]
    ]


def choose_microbatch(ranks, parallel):
    """Return how many of the `FEW` samples are in a microbatch: all that a data rank has, and one
    in a pipeline. That gradients of several microbatches add up is shown by layouts of ours."""
    if "pipeline" in parallel:
        return 1
    return 4 * parallel.get("tensor", 1) * parallel.get("context", 1) // ranks


def make_layout_check(pool, shapes):
    """Return check(name, ranks, parallel, **train): two steps of one of the models, with two layers
    for each stage, are those of one process. `packed...` are names of models on documents. A
    microbatch is that of `choose_microbatch`."""

    def train_shape(name, ranks, train, parallel, stages):
        model = {**shapes[name], "layers": 2 * stages}
        packed = name.startswith("packed")
        train = {**FEW, "microbatch": choose_microbatch(ranks, parallel), **train}
        return pool.run(ranks, run, model, train, parallel, False, False, packed)

    @cache
    def get_expected(name, stages):
        return train_shape(name, 1, {}, {}, stages)[0]

    def check(name, ranks, parallel, **train):
        stages = parallel.get("pipeline", 1)
        results = train_shape(name, ranks, train, parallel, stages)
        assert_same(results, get_expected(name, stages))

    return check


def find_size(kind, expected):
    """Return the size to which the promise is relative. For weights and their average it is one:
    steps of AdamW are large also where a gradient is only rounding. For a moment it is the largest
    of its kind: gradients that cancel are as inexact as others."""
    if kind not in ("optimizer.mean", "optimizer.square", "optimizer.momentum"):
        return 1.0
    moments = [name for name in expected.weights if name.startswith(f"{kind}/")]
    return max(float(expected.whole(name).abs().max()) for name in moments)


def build_train_step(parallel, precision, microbatch=2, **optim):
    config = RunConfig(
        model={"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2},
        train={"seq": 10, "global_batch": 8, "microbatch": microbatch, "precision": precision},
        optim={"lr": 0.01, **optim},
        parallel=parallel,
    )
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cpu", timeout=PATIENCE
    )
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    data = mesh.group("data")
    return (
        mesh,
        train_step,
        share(
            make_global_batch(config.model, config.train, 0),
            microbatch,
            data.index,
            data.size,
            False,
        ),
    )


def run_with(example, model, train, parallel, optim):
    """Train two steps with an example's parts."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{example}]"])
        return run(model, {**FEW, **train}, parallel, optim=optim)
