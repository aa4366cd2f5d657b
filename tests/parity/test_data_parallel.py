"""Data parallel ranks give the one-process loss, norm and weights, to 1e-10 in fp64."""

import pytest
from bitwise import assert_same_bits
from parity_runs import GLOBAL_BATCH, MODELS, STEPS, assert_same, run
from slow_cases import mark_slow, slow


@pytest.mark.parametrize("recompute", [slow("none"), "selective", slow("full")])
@pytest.mark.parametrize("name", mark_slow(MODELS, except_for=["llama"]))
def test_ranks_and_microbatches_do_not_change_the_answer(name, recompute, pool):
    (expected,) = pool.run(1, run, MODELS[name], {"microbatch": 8, "recompute": "none"})
    assert len(set(expected.losses)) == STEPS
    for ranks, microbatch in ((1, 2), (2, 4), (2, 1), (4, 2), (4, 1)):
        train = {"microbatch": microbatch, "recompute": recompute}
        assert_same(pool.run(ranks, run, MODELS[name], train), expected)


def test_overlap_changes_no_bit(pool):
    train = {"microbatch": 1}
    serial, overlapped = (
        pool.run(4, run, MODELS["gpt2"], train, {"zero": 0}, serial) for serial in (True, False)
    )
    assert_same_bits(serial, overlapped, because="overlap moves waits, not what is computed")


def test_counted_bytes_are_the_closed_form(pool):
    (result, *_) = pool.run(4, run, MODELS["gpt2"], {"microbatch": 2}, {"zero": 0})
    elements = sum(
        result.whole(name).numel() for name in result.weights if not name.startswith("optimizer")
    )
    actual, calls = result.traffic
    buckets = 2 * 2 + 1 + 1 + 1  # two parts of two blocks, tokens, positions, all gains and biases
    expected = STEPS * 2 * elements * GLOBAL_BATCH * 3 // 4
    padding = STEPS * buckets * 20 * 64
    assert expected <= actual <= expected + padding
    assert calls == STEPS * buckets
