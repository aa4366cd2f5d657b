"""Data parallel ranks give the one-process answer, loss, norm and weights, to 1e-10 in fp64."""

import pytest
import torch

from megaframe.comm import all_reduce
from megaframe.config import RunConfig
from megaframe.engine import Engine
from megaframe.layout import Layout
from megaframe.mesh import Mesh, world_size
from megaframe.meter.timers import StepTimer
from megaframe.microbatch import IGNORE, Microbatch
from megaframe.model import Stage
from megaframe.optim.optimizer import Optimizer
from megaframe.schedule import generate, lower

GLOBAL_BATCH, STEPS = 8, 3
MODELS = {
    "gpt2": {"position": "learned", "bias": True, "tie_embeddings": True, "dropout": 0.1},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "kv_heads": 2, "qk_norm": True},
}


def run(model, train, serial):
    """Three optimizer steps of this rank's share -> losses, norms, weights by name."""
    ranks = world_size()
    config = RunConfig(
        model={"layers": 2, "hidden": 16, "heads": 4, "vocab": 37, "init_std": 0.2, **model},
        train={"seq": 10, "global_batch": GLOBAL_BATCH, "precision": "fp64", "steps": 9, **train},
        optim={"lr": 0.01, "clip": 0.5, "warmup": 2},
    )
    mesh = Mesh(Layout(data=ranks), device="cpu", serial=serial, timeout=60)
    group = mesh.group("data")
    stage = Stage(config)
    optimizer = Optimizer(config, mesh, stage.units)
    optimizer.initialise(config.run.seed)
    engine = Engine({0: stage}, optimizer, StepTimer().time)
    losses, norms = [], []
    for step in range(STEPS):
        whole = global_batch(config, step)
        valid = int((whole.labels_BS != IGNORE).sum())
        mine = share(whole, config.train.microbatch, group.index, group.size)
        actions = lower(generate("1f1b", 1, 1, len(mine))).ranks[0]
        outcome = engine.run(actions, mine, step, 1.0 / valid)
        losses.append(float(all_reduce(outcome.loss / valid, group).wait()))
        norms.append(outcome.update.grad_norm)
    traffic = group.traffic.take()
    weights = {name: piece.clone() for name, _, _, piece in optimizer.tensors()}
    mesh.close()
    return losses, norms, weights, traffic


def global_batch(config, step):
    """Random tokens; the masks are uneven: some samples have hardly any loss."""
    generator = torch.Generator().manual_seed(step)
    shape = (GLOBAL_BATCH, config.train.seq)
    tokens = torch.randint(0, config.model.vocab, shape, generator=generator)
    labels = torch.randint(0, config.model.vocab, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < torch.linspace(0, 0.95, 8)[:, None]] = IGNORE
    return Microbatch(tokens, labels, torch.arange(8) + step * GLOBAL_BATCH)


def share(batch, microbatch, rank, ranks):
    pieces = range(rank * microbatch, GLOBAL_BATCH, ranks * microbatch)
    return [
        Microbatch(
            *(t[i : i + microbatch] for t in (batch.tokens_BS, batch.labels_BS, batch.samples_B))
        )
        for i in pieces
    ]


def assert_same(found, expected, tolerance):
    for values, wanted in zip(found[:2], expected[:2], strict=True):
        assert values == pytest.approx(wanted, rel=tolerance, abs=0)
    assert found[2].keys() == expected[2].keys()
    for name, weights in expected[2].items():
        torch.testing.assert_close(found[2][name], weights, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_and_microbatches_do_not_change_the_answer(name, recompute, pool):
    (expected,) = pool.run(1, run, MODELS[name], {"microbatch": 8, "recompute": "none"}, False)
    assert len(set(expected[0])) == STEPS
    for ranks, microbatch in ((1, 2), (2, 4), (2, 1), (4, 2), (4, 1)):
        train = {"microbatch": microbatch, "recompute": recompute}
        for found in pool.run(ranks, run, MODELS[name], train, False):
            assert_same(found, expected, 1e-10)


def test_overlap_changes_no_bit(pool):
    train = {"microbatch": 1}
    serial = pool.run(4, run, MODELS["gpt2"], train, True)
    overlapped = pool.run(4, run, MODELS["gpt2"], train, False)
    for one, other in zip(serial, overlapped, strict=True):
        assert one[:2] == other[:2]
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def test_counted_bytes_are_the_closed_form(pool):
    (one, *_) = pool.run(4, run, MODELS["gpt2"], {"microbatch": 2}, False)
    elements = sum(t.numel() for name, t in one[2].items() if not name.startswith("optimizer."))
    found, calls = one[3]
    buckets, losses = 2 + 2, STEPS * 2 * 8 * 3 // 4
    wanted = STEPS * 2 * elements * 8 * 3 // 4 + losses
    padding = STEPS * buckets * 20 * 64
    assert wanted <= found <= wanted + padding
    assert calls == STEPS * (buckets + 1)
