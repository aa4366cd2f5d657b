"""What is wrong with islands is named with both numbers, and with what to use instead
(`megaframe/validate/sync.py`, `megaframe/config/sync.py`)."""

import pytest

from megaframe.config import RunConfig, load
from megaframe.errors import UserError
from megaframe.validate.run import validate_config


def list_refusals(*overrides, world=4):
    keys = ["model.vocab=100", "train.global_batch=8", "train.microbatch=1", *overrides]
    try:
        validate_config(load(None, keys), world, data=False)
    except UserError as error:
        return str(error)
    return ""


TWO, SERVER = "parallel.islands=2", "sync.server=s"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((TWO,), ""),
        (("parallel.islands=3",), "islands=3 does not divide parallel.data=4; use 2 or 4"),
        ((TWO, "parallel.data_replicate=4"), "the 2 data ranks of each of parallel.islands=2"),
        (
            (TWO, "sync.every=5", "sync.delay=5"),
            "sync.delay=5 is not less than sync.every=5, so a fragment would still travel when it "
            "is due again; use sync.delay=4 or less, or sync.every=6 or more",
        ),
        ((TWO, "sync.every=3", "sync.fragments=4"), "fragments=4 is more than sync.every=3"),
        ((TWO, "model.layers=2", "sync.fragments=4"), "fragments=4 is more than model.layers=2"),
        ((TWO, "sync.compress_keep=0.1"), "has no effect with sync.compress=none; leave it out"),
        (
            (TWO, "sync.compress=topk", "sync.compress_keep=2"),
            "compress_keep=2 is more than all elements, of which sync.compress=topk sends a share",
        ),
        ((TWO, "faults.non_finite=replay"), "of parallel.islands=2; use skip, stop or roll_back"),
        ((TWO, "optim.ema=0.9"), "optim.ema=0.9 averages the weights of one island"),
        ((SERVER, "sync.islands=2"), ""),
        ((SERVER, TWO), "use parallel.islands=1 and sync.islands=2"),
        ((SERVER, "sync.island=1"), "sync.island=1 is none of sync.islands=1, which count from 0;"),
        (("sync.staleness=2",), "sync.staleness=2 needs sync.server; give it, or leave"),
        (("sync.consistency=asynchronous",), "sync.consistency=asynchronous needs sync.server"),
        ((SERVER, "sync.staleness=2"), "does not go with sync.consistency=bulk_synchronous"),
        ((SERVER, "sync.consistency=bounded_staleness"), "sync.staleness=None does not go with"),
        ((SERVER, "sync.fragments=2"), "sync.fragments=2 cannot be: with sync.server=s all"),
        ((SERVER, "sync.compress=int8"), "sync.compress=int8 cannot be: with sync.server=s"),
        ((SERVER, "optim.ema=0.9"), "have those that islands synchronise; leave it out"),
        (
            (SERVER, "train.batch_ramp={start: 4, increment: 4, samples: 100}"),
            "train.batch_ramp cannot be with sync.server=s: an island that joins later must know",
        ),
        ((TWO, "metrics.gradient_noise_every=2"), "and parallel.islands=2 sum them apart; use 0"),
    ],
)
def test_what_is_wrong_is_named(overrides, expected):
    refusals = list_refusals(*overrides)
    assert expected in refusals and bool(expected) == bool(refusals), refusals


def test_experts_must_fit_into_an_island():
    moe = "model.moe={experts: 4, ffn: 8}"
    refusals = list_refusals(TWO, "parallel.islands=4", moe, "parallel.expert=2")
    assert "does not divide the 1 ranks of a stage in each of parallel.islands=4" in refusals
    assert "use parallel.islands=2" in refusals


def test_defaults_follow_the_outer_optimizer():
    """Those of DiLoCo, and a plain average."""
    sections = ({}, {"optimizer": "sgd"}, {"delay": 3}, {"delay": 3, "mix": 0.1})
    found = [RunConfig(sync=section).sync for section in sections]
    assert [(sync.outer_lr, sync.outer_momentum) for sync in found[:2]] == [(0.7, 0.9), (1.0, 0.0)]
    assert [sync.kept_share for sync in found] == [0.0, 0.0, 0.5, 0.1]
