"""The default balance on skewed data: experts become equally busy, and the loss does not suffer."""

import numpy as np
import pytest
import torch

from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.train_step import TrainStep

ROWS, SEQ, VOCAB, STEPS, LAST = 32, 32, 61, 180, 20


def make_skewed_batch(step):
    """Return a microbatch of sequences that count by one of four strides, from a start that follows
    Zipf's law, with a tenth of noise."""
    generator = np.random.default_rng(step)
    often = 1 / np.arange(1, VOCAB)
    start = generator.choice(VOCAB - 1, (ROWS, 1), p=often / often.sum())
    stride = 1 + generator.choice(4, (ROWS, 1), p=[0.7, 0.2, 0.07, 0.03])
    tokens = (start + stride * np.arange(SEQ + 1)) % (VOCAB - 1)
    noise = generator.random(tokens.shape) < 0.1
    tokens = torch.from_numpy(
        np.where(noise, generator.integers(0, VOCAB - 1, tokens.shape), tokens)
    )
    samples = torch.arange(ROWS) + ROWS * step
    return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), samples)


def measure_training(balance):
    """Return, over the last steps, the mean loss and the worst layer's largest load relative to the
    mean."""
    config = RunConfig(
        model={
            **{"layers": 2, "hidden": 32, "heads": 2, "vocab": VOCAB},
            "moe": {"experts": 8, "ffn": 32, "balance": balance},
        },
        train={"seq": SEQ, "global_batch": ROWS, "microbatch": ROWS, "precision": "fp32"},
        optim={"lr": 1e-3, "schedule": "constant", "warmup": 10},
    )
    mesh = Mesh(Layout(), device="cpu")
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    losses, loads = [], {}
    for step in range(STEPS):
        result = train_step.train([make_skewed_batch(step)], step, 1 / (ROWS * SEQ))
        if step >= STEPS - LAST:
            losses.append(float(result.loss) / (ROWS * SEQ))
            for name, load, _ in train_step.sharded_parameters.list_expert_loads():
                loads[name] = loads.get(name, 0.0) + load
    return np.mean(losses), max(float(load.max() / load.mean()) for load in loads.values())


@pytest.mark.slow
def test_the_default_balances_a_skewed_stream_without_hurting_the_loss(pool):
    (skewed,), (without,) = (pool.run(1, measure_training, balance) for balance in ("bias", "none"))
    (loss, load), (loss_without, load_without) = skewed, without
    assert load < 1.1 < 1.2 < load_without
    assert loss == pytest.approx(loss_without, rel=0.01)
