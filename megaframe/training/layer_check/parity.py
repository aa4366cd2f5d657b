"""Two steps of training under a layout, and how far they are from those of one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megaframe.architecture.spec import Box
from megaframe.config import ModelConfig, RunConfig, TrainConfig
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.training.train_step import TrainStep

PROMISE = 1e-10
"""The most by which numbers in fp64 may differ (docs/design.md)."""
_STEPS = 2


@dataclass(frozen=True)
class TrainedSteps:
    """What a rank has after its steps.

    Attributes:
        losses: Mean loss of each step.
        norms: Norm of all gradients.
        tensors: This rank's pieces of weights and optimizer state, by name.
    """

    losses: list[float]
    norms: list[float]
    tensors: dict[str, list[tuple[Box, Tensor]]]


def train_two_steps(config: RunConfig) -> TrainedSteps:
    """Train on random tokens. All ranks of the layout call this together."""
    layout = Layout.from_parallel(config.parallel, read_world_size())
    mesh = Mesh(layout, device="cpu", timeout=config.parallel.timeout)
    data = mesh.group("data")
    train_step = TrainStep(config, mesh, note=lambda line: None)
    train_step.optimizer.initialize(config.run.seed)
    losses, norms = [], []
    for step in range(_STEPS):
        batch = make_global_batch(config.model, config.train, step)
        valid = int((batch.labels_BS != IGNORE).sum())
        own = [
            _select_sample(batch, i)
            for i in range(data.index, config.train.global_batch, data.size)
        ]
        result = train_step.train(own, step, 1.0 / valid)
        losses.append(float(all_reduce(result.loss / valid, mesh.world).wait()))
        norms.append(float(result.update.grad_norm))
    tensors: dict[str, list[tuple[Box, Tensor]]] = {}
    for name, _, box, piece in train_step.optimizer.list_tensors():
        tensors.setdefault(name, []).append((box, piece.clone()))
    mesh.finish()
    return TrainedSteps(losses, norms, tensors)


def make_global_batch(model: ModelConfig, train: TrainConfig, step: int) -> Microbatch:
    """Return a global batch of random tokens. Labels are uneven: some samples have few."""
    generator = torch.Generator().manual_seed(step)
    samples = train.global_batch
    shape = (samples, train.seq)
    tokens, labels = torch.randint(0, model.vocab or 1, (2, *shape), generator=generator)
    hidden = torch.rand(shape, generator=generator) < torch.linspace(0, 0.95, samples)[:, None]
    labels = labels.masked_fill(hidden, IGNORE)
    return Microbatch(tokens, labels, torch.arange(samples) + step * samples)


def _select_sample(batch: Microbatch, number: int) -> Microbatch:
    rows = slice(number, number + 1)
    return Microbatch(batch.tokens_BS[rows], batch.labels_BS[rows], batch.samples_B[rows])


def find_largest_difference(
    results: Sequence[TrainedSteps], expected: TrainedSteps
) -> tuple[float, str]:
    """Return the largest difference of a layout from one rank, relative to the size of the numbers,
    and what differs.

    Args:
        results: Of all ranks of the layout.
        expected: Of one rank.
    """
    # Of the largest of its kind: gradients that cancel are as inexact as others.
    sizes: dict[str, float] = defaultdict(lambda: 1e-30)
    for name, ((_, whole),) in expected.tensors.items():
        kind = name.partition("/")[0]
        sizes[kind] = max(sizes[kind], float(whole.abs().max()))
    differences = [(0.0, "nothing")]
    for result in results:
        for what in ("losses", "norms"):
            pairs = zip(getattr(result, what), getattr(expected, what), strict=True)
            name = {"losses": "the loss", "norms": "the norm of the gradients"}[what]
            differences += [(abs(a - b) / max(abs(b), 1e-30), name) for a, b in pairs]
        for name, pieces in result.tensors.items():
            ((_, whole),) = expected.tensors[name]
            size = sizes[name.partition("/")[0]]
            for box, piece in pieces:
                distance = float((piece - whole[box.slices]).abs().max()) if piece.numel() else 0.0
                differences.append((distance / size, name))
    return max(differences)
