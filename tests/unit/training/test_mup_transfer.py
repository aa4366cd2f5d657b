"""muP on models of several widths: the coordinate check, and learning rates that transfer (Yang et
al. 2022, "Tensor Programs V"), where the standard parametrisation fails both.
"""

import math
from functools import partial
from unittest.mock import patch

import pytest
import torch
from slow_cases import mark_slow

from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.train_step import TrainStep

pytestmark = pytest.mark.numeric

VOCAB, SAMPLES, SEQ = 64, 8, 32
OPTIMIZERS = {
    "adamw": {"name": "adamw"},
    "muon": {"name": "muon"},
    "lion": {"name": "lion"},
    "sgd": {"name": "sgd"},
}
PARTS = {
    "plain": {"norm": "rmsnorm"},
    "tied": {"tie_embeddings": True, "position": "learned", "bias": True},
    "experts": {"moe": {"experts": 4, "score": "softmax", "balance": "global"}},
    "latent": {"latent": {"kv_rank": 24, "head_dim": 12, "rotary_dim": 4, "value_dim": 16}},
    "delta net": {"blocks": [{"mixer": "gated_delta_net"}], "norm": "rmsnorm"},
    "wide heads": {"heads": 4},
}
RATES = {"adamw": 2.0**-7, "muon": 2.0**-7, "lion": 2.0**-9, "sgd": 2.0**-4}


def make_batch(step):
    """Return sequences in which each token leaves four choices for the next one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ + 1), generator=generator)
    for place in range(SEQ):
        noise = torch.randint(4, (SAMPLES,), generator=generator)
        tokens[:, place + 1] = (3 * tokens[:, place] + noise) % VOCAB
    return Microbatch(tokens[:, :-1].clone(), tokens[:, 1:].clone(), torch.arange(SAMPLES))


def make_train_step(width, optim, parametrisation, base=64, **model):
    mup = {"parametrisation": "mup", "mup_base_hidden": base} if parametrisation == "mup" else {}
    if mup and "heads" in model:  # they become wider instead of more
        mup["mup_base_head_dim"] = base // model["heads"]
    shape = {"layers": 2, "hidden": width, "heads": width // 16, "vocab": VOCAB}
    config = RunConfig(
        model={**shape, **model, **mup},
        train={"seq": SEQ, "global_batch": SAMPLES, "microbatch": SAMPLES, "precision": "fp32"},
        optim={"schedule": "constant", "clip": 0, "weight_decay": 0, **optim},
    )
    mesh = Mesh(Layout(), device="cpu")
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(config.run.seed)
    return mesh, train_step


def train(train_step, steps):
    """Return the loss per token of each step."""
    losses = []
    for step in range(steps):
        batch = make_batch(step)
        result = train_step.train([batch], step, 1.0 / batch.labels_BS.numel())
        losses.append(float(result.loss) / batch.labels_BS.numel())
    return losses


def measure_streams(train_step):
    """Return the stream before the blocks and after each of them, and the logits."""
    (stage,) = train_step.stages.values()
    blocks, batch, streams = stage.blocks, make_batch(1000), []
    for count in range(len(blocks) + 1):
        with patch.object(stage, "blocks", blocks[:count]):
            streams.append(stage.compute_hidden(batch))
    return [*streams, stage.compute_logits(streams[-1])]


def measure_changes(width, optim, parametrisation, **model):
    """Return the root mean square of what three steps change of each stream and of the logits."""
    mesh, train_step = make_train_step(width, optim, parametrisation, **model)
    before = measure_streams(train_step)
    train(train_step, 3)
    changes = [
        float((new - old).square().mean().sqrt())
        for new, old in zip(measure_streams(train_step), before, strict=True)
    ]
    mesh.finish()
    return changes


def fit_slope(widths, sizes):
    """Return the exponent of the best power law by least squares."""
    x, y = ([math.log(value) for value in values] for values in (widths, sizes))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)


def measure_slopes(widths, name, parts, parametrisation):
    optim = {**OPTIMIZERS[name], "lr": RATES[name]}
    changes = [measure_changes(w, optim, parametrisation, **PARTS[parts]) for w in widths]
    return [fit_slope(widths, sizes) for sizes in zip(*changes, strict=True)]


CHECKS = [
    *(("plain", name) for name in OPTIMIZERS),
    *((parts, "adamw") for parts in PARTS if parts != "plain"),
    *((parts, "sgd") for parts in ("tied", "experts", "latent")),
]


@pytest.mark.parametrize(
    ("parts", "name"), mark_slow(CHECKS, except_for=[("plain", "adamw"), ("experts", "adamw")])
)
def test_what_steps_change_does_not_grow_with_the_width(parts, name):
    widths = (64, 128, 256, 512) if name != "muon" else (64, 128, 256)
    assert max(map(abs, measure_slopes(widths, name, parts, "mup"))) < 0.2
    assert max(measure_slopes(widths[:3], name, parts, "standard")) > 0.4


SWEEPS = {  # A factor of 4 apart.
    "adamw": [2.0**-8, 2.0**-6, 2.0**-4],
    "muon": [2.0**-8, 2.0**-6, 2.0**-4],
    "sgd": [2.0**-4, 2.0**-2, 2.0**0],
    "lion": [2.0**-8, 2.0**-6, 2.0**-4],
}


def find_best_rate(width, name, parametrisation):
    losses = {}
    for rate in SWEEPS[name]:
        optim = {**OPTIMIZERS[name], "lr": rate}
        mesh, train_step = make_train_step(width, optim, parametrisation, 32, norm="rmsnorm")
        losses[rate] = sum(train(train_step, 20)[-4:])
        mesh.finish()
    return min(losses, key=lambda rate: losses[rate])


@pytest.mark.parametrize("name", mark_slow(SWEEPS, except_for=["adamw"]))
def test_the_best_learning_rate_is_the_same_over_widths(name):
    find = partial(find_best_rate, name=name)
    assert {find(width, parametrisation="mup") for width in (32, 128)} == {SWEEPS[name][1]}
    assert find(128, parametrisation="standard") == SWEEPS[name][0]
