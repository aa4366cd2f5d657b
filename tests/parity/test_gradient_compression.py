"""Training with compressed gradients: the same answer if nothing is left out, and nearly as low a
loss if much is left out, because it is sent later.
"""

import math

import pytest
import torch
from parity_runs import MODELS, assert_same, run
from patience import PATIENCE
from slow_cases import mark_slow, slow
from tolerances import compute_roundoff

from megaframe.config import RunConfig
from megaframe.data.microbatch import Microbatch
from megaframe.distributed.collectives import all_reduce
from megaframe.distributed.mesh import Mesh, read_world_size
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.train_step import TrainStep

TOPK = {"compress": "topk", "compress_keep": 1.0}
POWER = {"compress": "powersgd", "compress_keep": 64}
OTHERS = [
    ({"data_replicate": 2, "zero": 2}, {"compress": "randomk", "compress_keep": 1.0}),
    ({"data_replicate": 2, "zero": 0}, {"compress": "threshold", "compress_keep": 1.0}),
]
"""Further codecs, which leave nothing out either."""
LAYOUTS = [{"data_replicate": replicas, "zero": zero} for replicas in (1, 2) for zero in range(4)]
LAYOUTS += [{"data_replicate": 4}, {"tensor": 2, "zero": 3}, {"pipeline": 2, "zero": 2}]
# Each stage with replicas, compressed in one way or the other.
QUICK = [
    ({"data_replicate": 2, "zero": zero}, keys)
    for zero, keys in enumerate((POWER, TOPK, TOPK, POWER))
]
IN_TURN = [(parallel, (TOPK, POWER)[i % 2]) for i, parallel in enumerate(LAYOUTS)]
QUICK += OTHERS
CASES = [*QUICK, *(case for case in IN_TURN if case not in QUICK)]


@pytest.fixture(scope="module")
def expected(run_alone):
    return run_alone(MODELS["gpt2"], {"microbatch": 8})


@pytest.mark.parametrize(("parallel", "keys"), mark_slow(CASES, except_for=QUICK))
def test_what_leaves_nothing_out_changes_no_answer(parallel, keys, pool, expected):
    keys = {**parallel, **keys}
    assert_same(pool.run(4, run, MODELS["gpt2"], {"microbatch": 2}, keys), expected)


@pytest.mark.parametrize(
    ("replicas", "node_size", "zero"),
    [(1, 4, 2), (2, 4, 2), (1, 2, 0), slow(1, 4, 0), slow(2, 4, 0), slow(1, 2, 2)],
)
def test_bf16_messages_cost_their_rounding(replicas, node_size, zero, pool, expected):
    """Within a node; between replicas; and in two steps, which round twice."""
    keys = {"reduce_precision": "bf16", "data_replicate": replicas, "zero": zero}
    keys["node_size"] = node_size
    for result in pool.run(4, run, MODELS["gpt2"], {"microbatch": 2}, keys):
        assert result.norms != expected.norms
        # Each gradient is rounded; in a norm, and in the loss that follows, errors average.
        half = compute_roundoff(torch.bfloat16) / 2
        assert result.norms == pytest.approx(expected.norms, rel=half)
        assert result.losses == pytest.approx(expected.losses, rel=half)


@pytest.mark.parametrize(
    ("keys", "allowed"),
    [({"compress": "fp16", "zero": 0}, 1e-3), ({"compress": "int4", "zero": 2}, 0.3)],
)
def test_messages_of_blocks_cost_their_rounding(keys, allowed, pool, expected):
    """In the first step, before what was left out arrives: a step of fp16 is a thousandth, and of
    four bits a seventh of the largest in a block."""
    for result in pool.run(2, run, MODELS["gpt2"], {"microbatch": 2}, keys):
        assert result.norms != expected.norms
        assert result.norms[0] == pytest.approx(expected.norms[0], rel=allowed)


RUN_STEPS, TAIL = 70, 10


def learn(parallel, feedback=True, optim=None, steps=RUN_STEPS):
    """Train on sequences that count in constant strides; return the mean loss of the last steps."""
    config = RunConfig(
        model={"layers": 1, "hidden": 32, "heads": 4, "vocab": 61},
        train={"seq": 16, "global_batch": 8, "microbatch": 4, "precision": "fp32"},
        optim={"lr": 0.012, "schedule": "constant", "warmup": 10, **(optim or {})},
        parallel=parallel,
    )
    mesh = Mesh(
        Layout.from_parallel(config.parallel, read_world_size()), device="cpu", timeout=PATIENCE
    )
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(0)
    if not feedback:
        for bucket in train_step.sharded_parameters.buckets:
            bucket._over_shard.residual = bucket._over_replicas.residual = None
    data = mesh.group("data")
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        start, stride = torch.randint(0, 61, (2, 8, 1), generator=generator)
        rows = (start + (1 + stride % 5) * torch.arange(17)) % 61
        own_rows = slice(data.index * (8 // data.size), (data.index + 1) * (8 // data.size))
        tokens, labels = rows[own_rows, :-1].contiguous(), rows[own_rows, 1:].contiguous()
        samples = torch.arange(8)[own_rows]
        parts = zip(tokens.split(4), labels.split(4), samples.split(4), strict=True)
        result = train_step.train([Microbatch(*tensors) for tensors in parts], step, 1 / 128)
        losses.append(float(all_reduce(result.loss / 128, mesh.world).wait()))
    mesh.finish()
    return sum(losses[-TAIL:]) / TAIL


START = math.log(61)
"""The loss of uniform guesses."""


@pytest.fixture(scope="module")
def uncompressed(pool):
    return pool.run(1, learn, {})[0]


# What always rounds; the others are compared with one process above.


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        slow({"reduce_precision": "bf16", "zero": 0}, 0.99),
        ({"compress": "int8", "zero": 2}, 0.99),
        slow({"compress": "topk", "compress_keep": 0.05, "zero": 0}, 0.6),
        slow({"compress": "powersgd", "compress_keep": 4, "zero": 2}, 0.8),
    ],
)
def test_compressed_training_converges(keys, share, pool, uncompressed):
    """In as many steps, the loss falls by at least `share` of its fall without compression."""
    assert uncompressed < START / 2
    loss = pool.run(2, learn, keys)[0]
    assert START - loss > share * (START - uncompressed)


@pytest.mark.slow
def test_without_error_feedback_it_is_worse(pool):
    keys = {"compress": "topk", "compress_keep": 0.002, "zero": 0}
    sgd = {"name": "sgd", "lr": 0.3, "weight_decay": 0.0}
    with_feedback, without = (
        pool.run(2, learn, keys, feedback, sgd, 150)[0] for feedback in (True, False)
    )
    assert with_feedback < without - 0.5
