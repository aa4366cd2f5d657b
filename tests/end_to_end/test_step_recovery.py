"""Bad numbers, bad data and bad memory: named, survived, and without a trace on the loss curve.

Tests `megaframe.resilience.recovery` and `megaframe.resilience.spike_policy`.
"""

import re

import pytest
from bitwise import assert_same_losses
from entry_runs import read_lines, read_losses
from fault_runs import (
    flip_bit,
    log,
    main,
    must_look_ahead,
    put_nan_in_sample,
    put_nan_in_weights,
    put_nan_once,
    put_wrong_labels,
    slow_data_down,
)
from tolerances import promised

from megaframe.errors import EXIT_BAD_DEVICE, EXIT_NOT_FINITE

EVERY = {"checkpoint__every": 4, "checkpoint__keep": 10, "parallel__zero": 0}
"""Every rank has all weights, so that one rank's can be damaged, and compared with the others'."""


@pytest.fixture
def run(pool, overrides, tmp_path):
    """run(name, ranks, *fault, **changes) -> results of the ranks; the run is in tmp_path/name."""

    def make(name, ranks, *fault, **changes):
        keys = overrides(run__dir=tmp_path / name, **changes)
        return pool.run(ranks, main, keys, *fault)

    return make


ROLLED_BACK = "the steps are run again from a checkpoint, which has every bit"
UNBROKEN = {}


@pytest.fixture
def unbroken_losses(run, tmp_path):
    """Return the losses of an undisturbed run on two ranks, which is made once."""
    if not UNBROKEN:
        assert run("whole", 2, **EVERY) == [0, 0]
        UNBROKEN["losses"] = read_losses(tmp_path / "whole")
    return UNBROKEN["losses"]


def test_a_fault_that_passes_is_replayed_and_leaves_no_trace(run, unbroken_losses, tmp_path):
    assert run("run", 2, put_nan_once, 1, 6, faults__non_finite="replay", **EVERY) == [0, 0]
    same = "the step is run again from the same bits"
    assert_same_losses(read_losses(tmp_path / "run"), unbroken_losses, because=same)
    assert re.search(
        r"step 7: gradients of .* are not finite \(first in the forward pass of microbatch 0, "
        r"stage 0, on rank 1, of samples 52, 53, 54, 55\); finite when rerun: a transient fault",
        log(tmp_path / "run"),
    )


def test_a_fault_that_stays_is_named_with_its_block(run, tmp_path):
    damage = (put_nan_in_sample, None, 45, 1)
    keys = {"faults__non_finite": "replay", "train__microbatch": 2, **EVERY}
    assert run("run", 2, *damage, **keys) == [0, 0]
    text = log(tmp_path / "run")
    where = "microbatch 1, stage 0, block 1, on rank 0, of samples 44, 45"
    assert f"the same when rerun: first in the forward pass of {where}" in text
    assert [line["step"] for line in read_lines(tmp_path / "run") if line["skipped"]] == [6]


def test_poisoned_weights_are_left_behind(run, unbroken_losses, tmp_path):
    """Skipping steps could not repair the weights; a rollback does, and loses no step."""
    assert run("run", 2, put_nan_in_weights, 1, 6, faults__non_finite="roll_back", **EVERY) == [
        0,
        0,
    ]
    assert_same_losses(read_losses(tmp_path / "run"), unbroken_losses, because=ROLLED_BACK)
    text = log(tmp_path / "run")
    assert "its data is tried once more; continuing from the checkpoint of step 4" in text
    lost = [line["lost_seconds"]["repeat"] for line in read_lines(tmp_path / "run")]
    assert all(lost[step - 1] > 0 for step in (5, 6)) and not lost[3]


@pytest.mark.slow
def test_masked_tokens_are_counted_a_step_ahead_and_after_a_way_back_too(run, tmp_path):
    keys = {**EVERY, "data__mask_eod": True, "train__eval_every": 5}
    assert run("whole", 2, must_look_ahead, None, **keys) == [0, 0]
    assert run("one", 1, **keys) == [0]
    assert read_losses(tmp_path / "one") == promised(read_losses(tmp_path / "whole"))
    rolling_back = {"faults__non_finite": "roll_back", **keys}
    assert run("back", 2, put_nan_in_weights, 1, 6, **rolling_back) == [0, 0]
    whole = read_losses(tmp_path / "whole")
    assert_same_losses(read_losses(tmp_path / "back"), whole, because=ROLLED_BACK)
    twice = {**rolling_back, "faults__non_finite": "replay"}
    assert run("twice", 2, put_nan_once, 1, 6, **twice) == [0, 0]
    assert_same_losses(read_losses(tmp_path / "twice"), whole, because=ROLLED_BACK)


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_that_fails_twice_is_left_out_under_any_layout(ranks, run, tmp_path):
    damage = (put_nan_in_sample, None, 45, 1)
    keys = {"faults__non_finite": "roll_back", **EVERY}
    assert run("run", ranks, *damage, **keys) == [0] * ranks
    metrics = read_lines(tmp_path / "run")
    assert [line["step"] for line in metrics] == [*range(1, 13)]
    assert not any(line["skipped"] for line in metrics)
    assert "it failed twice, and its data is left out; continuing from" in log(tmp_path / "run")


@pytest.mark.slow
def test_a_run_may_stop_at_the_first_bad_step(run, tmp_path):
    damage = (put_nan_in_sample, None, 45, 1)
    ends = run("run", 2, *damage, faults__non_finite="stop", **EVERY)
    assert ends == [EXIT_NOT_FINITE] * 2
    text = log(tmp_path / "run")
    assert "step 6: gradients of " in text and "samples 44, 45" in text


def test_a_run_gives_up_after_many_bad_steps_in_a_row(run, tmp_path):
    keys = {"train__steps": 30, **EVERY}
    assert run("run", 1, put_nan_in_weights, 0, 2, **keys) == [EXIT_NOT_FINITE]
    text = log(tmp_path / "run")
    assert (
        "; update skipped" in text
        and "cut short                 after step 22: 20 consecutive" in text
    )


@pytest.mark.slow
def test_a_spike_is_left_out_and_the_decision_survives_a_layout(run, tmp_path):
    """The step with the bad data trains on the next data instead."""
    keys = {"train__steps": 40, "train__global_batch": 32, "train__microbatch": 8}
    keys |= {"optim__lr": 0.03, "faults__spike_factor": 1.2, "checkpoint__every": 10}
    spike = (put_wrong_labels, None, 32 * 34, 32)
    for name, ranks in (("one", 1), ("two", 2)):
        assert run(name, ranks, *spike, **keys) == [0] * ranks
        text = log(tmp_path / name)
        assert "step 35: its loss is " in text
        assert "its data is left out; continuing from the checkpoint of step 30" in text
    assert read_losses(tmp_path / "one") == promised(read_losses(tmp_path / "two"))
    assert run("calm", 1, **keys) == [0]
    calm, disturbed = read_losses(tmp_path / "calm"), read_losses(tmp_path / "one")
    assert_same_losses(disturbed[:34], calm[:34], because="nothing was wrong until then")
    assert disturbed[34] != calm[34] and max(disturbed[34:]) < 1.2 * disturbed[33]


def test_a_flipped_bit_is_found_named_and_undone(run, unbroken_losses, tmp_path):
    """With two replicas it cannot be known which one was wrong."""
    assert run("run", 2, flip_bit, 1, 6, faults__compare_every=4, **EVERY) == [0, 0]
    assert_same_losses(read_losses(tmp_path / "run"), unbroken_losses, because=ROLLED_BACK)
    text = log(tmp_path / "run")
    assert "step 8: weights on ranks 0, 1, of which one must be wrong, differ" in text
    assert "step 8: all replicas are equal when rerun; the difference on ranks 0, 1" in text


@pytest.mark.slow
def test_a_device_that_flips_bits_again_is_named(run, tmp_path):
    keys = {"faults__compare_every": 4, "train__microbatch": 1, **EVERY}
    assert run("run", 4, flip_bit, 2, 6, True, **keys) == [EXIT_BAD_DEVICE] * 4
    assert "step 8: weights on rank 2 differ from their replicas" in log(tmp_path / "run")


def test_a_slow_rank_is_named(run, tmp_path):
    keys = {"faults__straggler_factor": 3.0, "train__steps": 21}
    assert run("run", 2, slow_data_down, 1, 0.05, **keys) == [0, 0]
    slow_ranks = re.findall(r"rank (\d) is slow: [\d.]+ s of (\w+) per step", log(tmp_path / "run"))
    assert ("1", "data") in slow_ranks
