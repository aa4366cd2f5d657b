"""Context parallel ranks give the one-process answer to 1e-10 in fp64, for every kind, alone and
with tensor, pipeline and data ranks. No number of pieces used here divides ten tokens: with four
ranks, the last pieces hold nothing but padding.

Tests `megaframe.context_parallel.ring`.
"""

import json

import pytest
from bitwise import assert_same_bits
from entry_runs import make_trainer
from parity_runs import FEW, MODELS, assert_same, make_global_batch, make_layout_check, run, share
from patience import PATIENCE
from slow_cases import mark_slow, slow
from tolerances import promised

from megaframe.config import RunConfig, load
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics import StepTimer
from megaframe.training.train_step import TrainStep

SHAPES = {
    **MODELS,
    "window": {"window": 4, "qkv_bias": True, "kv_heads": 4, "head_dim": 6},
    "packed": {"position": "learned", "kv_heads": 1, "dropout": 0.2},
    "packed-windows": {"window": (3, None), "kv_heads": 2, "logit_softcap": 3.0},
}
RING, ALL_TO_ALL = {"context_kind": "ring"}, {"context_kind": "all_to_all"}
NESTED = {"context_kind": "nested", "context_heads": 2}
KINDS = [
    (4, {"context": 4, **RING}, "full"),
    (4, {"context": 4, **ALL_TO_ALL}, "selective"),
    (4, {"context": 4, **NESTED}, "none"),
]
"""Tested with every shape, because each kind treats masks, heads and positions differently."""
LAYOUTS = [
    (2, {"context": 2, **RING}, "none"),
    (2, {"context": 2, **ALL_TO_ALL}, "full"),
    (4, {"context": 2, **RING, "tensor": 2}, "none"),
    (4, {"context": 2, **ALL_TO_ALL, "tensor": 2}, "full"),
    (4, {"context": 2, **RING, "data": 2}, "selective"),
    (4, {"context": 2, **RING, "pipeline": 2, "chunks": 2, "schedule": "zb-v"}, "none"),
]
CASES = [(name, *kind) for kind in KINDS for name in SHAPES]
CASES += [(list(SHAPES)[i % len(SHAPES)], *layout) for i, layout in enumerate(LAYOUTS)]
# The shape with every kind of mask, in every kind of exchange; and the other one of the shapes with
# documents beside tensor ranks.
QUICK = [*(("packed-windows", *kind) for kind in KINDS), ("packed", *LAYOUTS[3])]


@pytest.fixture(scope="module")
def check(pool):
    return make_layout_check(pool, SHAPES)


@pytest.mark.parametrize(
    ("name", "ranks", "parallel", "recompute"), mark_slow(CASES, except_for=QUICK)
)
def test_layouts_do_not_change_the_answer(name, ranks, parallel, recompute, check):
    check(name, ranks, parallel, recompute=recompute)


@pytest.mark.parametrize("parallel", [{**RING, "context": 4}, slow({**ALL_TO_ALL, "context": 2})])
def test_samples_of_different_lengths(parallel, pool):
    model, train = MODELS["llama"], {**FEW, "microbatch": 1}
    (unmixed,) = pool.run(1, run, model, train, None, False, True)
    assert_same(pool.run(4, run, model, train, parallel, False, True), unmixed)


# Nested ranks have a ring, too.
@pytest.mark.parametrize("kind", [NESTED, slow(RING)])
def test_overlap_changes_no_bit(kind, pool):
    parallel = {"context": 4, **kind}
    arguments = {**SHAPES["packed-windows"], "layers": 2}, FEW, parallel
    serial, overlapped = (
        pool.run(4, run, *arguments, serial, False, True) for serial in (True, False)
    )
    assert_same_bits(serial, overlapped, because="overlap moves waits, not what is computed")


def train(overrides):
    """Run the trainer on this rank, from the config to the metrics."""
    trainer = make_trainer(load(None, overrides))
    trainer.run()
    trainer.mesh.close()


def test_a_run_is_the_same_and_goes_on_under_other_layouts(pool, overrides, tmp_path):
    """Compares losses and evaluations of a run on documents that starts with nested ranks and
    resumes on a ring with data ranks. The last sample of an evaluation is on one data rank only.
    Documents end where the index says on one rank, and after their last token on many."""
    nested = {"parallel__context": 4, "parallel__context_kind": "nested"}
    nested["parallel__context_heads"] = 2
    ring = {"parallel__context": 2, "checkpoint__resume": "latest"}
    metrics = {}
    for name, parts in {"one": [(1, {})], "many": [(4, nested), (4, ring)]}.items():
        folder = tmp_path / name
        for steps, (ranks, parallel) in zip((4, 6)[-len(parts) :], parts, strict=True):
            keys = overrides(
                run__dir=folder,
                train__seq=18,
                train__steps=steps,
                train__global_batch=4,
                train__microbatch=2,
                train__eval_every=2,
                train__eval_samples=13,
                optim__schedule="constant",
                checkpoint__every=4,
                data__mask_eod=True,
                data__reset_attention=True,
                data__reset_positions=True,
                data__document_ends=60 if name == "many" else "index",
                **parallel,
            )
            pool.run(ranks, train, keys)
        records = (folder / "metrics.jsonl").read_text().splitlines()
        metrics[name] = [json.loads(line) for line in records]
    assert len(metrics["one"]) == 6
    for single, many in zip(metrics["one"], metrics["many"], strict=True):
        keys = {"loss", "grad_norm", "eval_loss", "tokens"}
        assert single.keys() & keys == many.keys() & keys
        for key in single.keys() & keys:
            assert many[key] == promised(single[key])


LAYERS, HIDDEN, HEADS, KV_HEADS, SEQ, BATCH = 3, 16, 4, 2, 16, 4


def measure_traffic(parallel):
    """Train one step -> this rank's place in the ring, and (bytes, calls) of its ring and of its
    exchange of heads."""
    config = RunConfig(
        model={
            "layers": LAYERS,
            "hidden": HIDDEN,
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "vocab": 37,
        },
        train={"seq": SEQ, "global_batch": BATCH, "microbatch": 2, "precision": "fp64"},
        parallel=parallel,
    )
    mesh = Mesh(Layout.from_parallel(config.parallel, 4), device="cpu", timeout=PATIENCE)
    train_step = TrainStep(config, mesh, StepTimer().time)
    train_step.optimizer.initialize(1)
    train_step.train(
        share(make_global_batch(config.model, config.train, 0), 2, 0, 1, ragged=False), 0, 1.0
    )
    context = train_step.context
    of_ring, of_heads = context.ring.group.traffic.take(), context.heads.traffic.take()
    summary = context.ring.index, of_ring, of_heads
    mesh.finish()
    return summary


@pytest.mark.parametrize(
    ("kind", "ring", "heads"), [(RING, 4, 1), (ALL_TO_ALL, 1, 4), (NESTED, 2, 2)]
)
def test_bytes_are_the_closed_form(kind, ring, heads, pool):
    """Forward, rank r of a ring of R ranks sends the keys and values of R - 1 ranks to the rank t
    before it, but only half of those of the t ranks before t. Backward, it sends those of R - 1
    ranks to the next rank, but only half of those of the first rank, if it is among them; and the
    gradients of the keys of all other ranks, but only half for the r ranks before r. An exchange of
    heads sends all but a rank's own share of queries, keys, values and output, twice. If there are
    fewer key heads than ranks, each rank gets one."""
    tokens, microbatches, width = 2 * SEQ // 4, BATCH // 2, 8 * HIDDEN // HEADS
    group_heads = max(KV_HEADS, heads)
    around = 2 * tokens * heads * (group_heads // heads) * width
    across = 2 * tokens * (2 * HEADS + 2 * group_heads) * width * (heads - 1) // heads
    times = LAYERS * microbatches
    for r, of_ring, of_heads in pool.run(4, measure_traffic, {"context": 4, **kind}):
        halves = (r - 1) % ring + (r + 1 < ring) + r
        sent = (3 * (ring - 1) - halves / 2) * around if ring > 1 else 0
        assert of_ring == (times * sent, times * 3 * (ring - 1))
        assert of_heads == (times * across * (heads > 1), times * 4 * (heads > 1))
