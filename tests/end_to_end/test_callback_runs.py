"""Whole runs with callbacks: what they see, what they add, and that all ranks end together.

Tests `megaframe.extensions.callback` and `megaframe.training.callbacks`.
"""

import contextlib
import io
import json
import math
import re
import signal

import pytest
from entry_runs import read_lines, read_losses, train
from fault_runs import log, main, put_nan_in_weights, put_nan_once, send_signal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repo_copy import ROOT
from slow_cases import slow
from tolerances import promised

RECORDING = {"run__extensions": f"[{ROOT / 'tests/support/recording_extension.py'}]"}
EXAMPLE = {"run__extensions": f"[{ROOT / 'examples/callback.py'}]"}


def name_callback(**keys):
    """Return the overrides of a run with one recording callback."""
    text = ", ".join(f"{key}: {value}" for key, value in {"kind": "recording", **keys}.items())
    return {**RECORDING, "run__callbacks": f"[{{{text}}}]"}


def read_calls(folder):
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def test_callbacks_are_called_in_order_with_metrics_of_a_known_step(pool, overrides, tmp_path):
    keys = {"train__steps": 6, "train__eval_every": 3, "checkpoint__every": 2, **name_callback()}
    assert pool.run(2, main, overrides(**keys)) == [0, 0]
    calls, losses = read_calls(tmp_path / "run"), read_losses(tmp_path / "run")
    others = [call for call in calls if call[0] != "after_save"]
    # Metrics of a step are known when the next one is done, or before a save.
    assert [call[:3] for call in others] == [
        ["before_step", 1, 0],
        ["before_step", 2, 0],
        ["after_step", 1, 1],
        ["after_step", 2, 2],
        ["before_step", 3, 2],
        ["after_evaluation", 3, 2],
        ["before_step", 4, 2],
        ["after_step", 3, 3],
        ["after_step", 4, 4],
        ["before_step", 5, 4],
        ["before_step", 6, 4],
        ["after_evaluation", 6, 4],
        ["after_step", 5, 5],
        ["after_step", 6, 6],
    ]
    for _, _, known, loss, _ in calls:
        assert loss == (losses[known - 1] if known else None)
    lines = read_lines(tmp_path / "run")
    evaluations = [more for method, _, _, _, more in others if method == "after_evaluation"]
    assert [e["eval_loss"] for e in evaluations] == [lines[2]["eval_loss"], lines[5]["eval_loss"]]
    assert [line["callbacks"]["recording"]["steps"] for line in lines] == [*range(1, 7)]
    saves = [(step, more["saved"]) for method, step, _, _, more in calls if method == "after_save"]
    assert [saved for _, saved in saves] == [2, 4, 6]
    assert all(step >= saved for step, saved in saves)
    assert "told of the save of step 6" in log(tmp_path / "run")


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=4, deadline=None
)
@given(
    steps=st.integers(1, 9),
    every=st.integers(0, 5),
    eval_every=st.integers(0, 4),
    cut=st.sampled_from(["", "stop", "signal", "nan"]),
    at=st.integers(1, 9),
)
def test_metrics_of_each_step_come_once_and_in_order(
    steps, every, eval_every, cut, at, pool, overrides, tmp_path_factory
):
    """However often a run saves and evaluates, and whether it is cut short and resumed, or goes
    back to a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    keys = {"run__dir": folder, "train__steps": steps, "train__eval_every": eval_every}
    keys |= {"checkpoint__every": every, "checkpoint__resume": "latest"}
    keys |= {"faults__non_finite": "roll_back" if every else "skip"}
    keys |= name_callback(stop_at=at if cut == "stop" else 0)
    faults = {"signal": (send_signal, 0, at, signal.SIGTERM), "nan": (put_nan_once, 0, at)}
    pool.run(1, main, overrides(**keys), *faults.get(cut, ()))
    if every:
        pool.run(1, main, overrides(**keys))
    lines, calls = read_lines(folder), read_calls(folder)
    done = [line["step"] for line in lines]
    assert done == [*range(1, len(done) + 1)] and (len(done) == steps or not every)
    assert [line["callbacks"]["recording"]["steps"] for line in lines] == done
    told = {}
    for _, step, known, loss, _ in (call for call in calls if call[0] == "after_step"):
        # Only a way back to a checkpoint repeats steps; they are then those of the lines.
        assert known == step and (step == len(told) + 1 or cut == "nan")
        told = {earlier: told[earlier] for earlier in told if earlier < step} | {step: loss}
    assert [*told] == done
    shown = [*told.values()]
    assert [math.isnan(loss) for loss in shown] == [loss is None for loss in read_losses(folder)]
    assert all(loss in (None, told[n]) for n, loss in enumerate(read_losses(folder), 1))


def test_all_ranks_stop_after_the_same_step_with_a_checkpoint(pool, overrides, tmp_path):
    pool.run(1, train, overrides(run__dir=tmp_path / "whole"))
    keys = {"checkpoint__every": 100, **name_callback(stop_at=4)}
    assert pool.run(2, main, overrides(parallel__tensor=2, **keys)) == [0, 0]
    losses = read_losses(tmp_path / "run")
    assert len(losses) == 7
    text = log(tmp_path / "run")
    assert "step 4: callback recording asks the run to stop: enough is enough" in text
    assert "after step 7 of 12 by callback recording in step 4: enough is enough" in text
    assert "not this" not in text and "checkpoint.resume=latest" in text
    # The callback remembers that it has asked; so the run goes on to its end, from step 7.
    keys["checkpoint__resume"] = "latest"
    assert pool.run(2, main, overrides(parallel__pipeline=2, **keys)) == [0, 0]
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "whole"))
    steps = [line["callbacks"]["recording"]["steps"] for line in read_lines(tmp_path / "run")]
    assert steps == [*range(1, 13)]


@pytest.mark.slow
def test_a_stop_without_checkpoints_saves_nothing(pool, overrides, tmp_path):
    assert pool.run(1, main, overrides(**name_callback(stop_at=2))) == [0]
    assert len(read_losses(tmp_path / "run")) == 5
    assert "nothing: checkpoint.every=0 saves no step" in log(tmp_path / "run")


def test_callbacks_go_back_with_the_run(pool, overrides, tmp_path):
    keys = {"checkpoint__every": 4, "faults__non_finite": "roll_back", "parallel__zero": 0}
    keys |= name_callback(stop_at=6)
    assert pool.run(2, main, overrides(**keys), put_nan_in_weights, 1, 6) == [0, 0]
    text, lines = log(tmp_path / "run"), read_lines(tmp_path / "run")
    assert "continuing from the checkpoint of step 4" in text
    assert [line["callbacks"]["recording"]["steps"] for line in lines] == [*range(1, 9)]
    # What was asked after step 6 was undone with it, and asked again.
    assert text.count("asks the run to stop") == 2


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("raise", r"fails after step 3: {file}:\d+: ZeroDivisionError: of nothing"),
        slow("name", r"fails after step 3: {file}:\d+: ValueError: 'a/b' .* a name has no slash"),
        slow("value", r"fails after step 3: {file}:\d+: ValueError: could not convert"),
        slow("state", r": its state is no plain data: Object of type set"),
        slow("list", r": its state is list, not a dict"),
        ("make", r"fails when it is made: {file}:\d+: KeyError: 'nothing'"),
        slow("no callback", r": make_callback returns int, not a Callback"),
    ],
)
def test_what_a_callback_does_wrong_ends_the_run_with_its_place(fail, message, overrides, pool):
    status, error = pool.run(
        1,
        run_and_read_error,
        overrides(checkpoint__every=2, train__steps=4, **name_callback(fail=fail)),
    )[0]
    assert status == 2
    file = re.escape(str(ROOT / "tests/support/recording_extension.py"))
    assert re.search("error: callback recording ?" + message.replace("{file}", file), error), error


def run_and_read_error(keys):
    """Return the exit status of a run, and what it has printed as its error."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        status = main(keys)
    return status, text.getvalue()


@pytest.mark.slow
def test_the_example_stops_early(pool, overrides, tmp_path):
    keys = {
        "run__callbacks": "[{kind: early_stop, patience: 2}]",
        "train__steps": 30,
        "train__eval_every": 1,
        "train__global_batch": 2,
        "train__microbatch": 2,
        "optim__lr": 1.0,
        **EXAMPLE,
    }
    assert pool.run(1, main, overrides(**keys)) == [0]
    lines = read_lines(tmp_path / "run")
    evaluations = [line["eval_loss"] for line in lines]
    ratios = [line["callbacks"]["early_stop"]["ratio_to_best"] for line in lines]
    best = [min(evaluations[: n + 1]) for n in range(len(lines))]
    assert ratios == [loss / least for loss, least in zip(evaluations, best, strict=True)]
    # The last line is of the step in which all ranks got to know.
    assert len(lines) < 30 and all(ratio > 1 for ratio in ratios[-3:-1])
    assert "2 evaluations were no better than" in log(tmp_path / "run")


BOTH = f"[{ROOT / 'examples/callback.py'}, {ROOT / 'tests/support/recording_extension.py'}]"
TRANSFORMS = "[{kind: fill_in_the_middle, prefix: 58, suffix: 59, middle: 60}, masking]"
PARTS = {
    "run__extensions": BOTH,
    "train__loss": "{kind: focal, gamma: 3}",
    "data__transforms": TRANSFORMS,
    "model__mtp_depth": 2,
    "train__steps": 4,
    "optim__schedule": "constant",
}
"""The second transform makes tokens without a label, the depths look ahead in whole samples."""


@pytest.fixture
def expected_losses(pool, overrides, tmp_path):
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", **PARTS))
    return read_losses(tmp_path / "whole")


@pytest.mark.parametrize(
    "keys",
    [
        {"parallel__context": 2, "data__prefetch": 0},
        slow({"parallel__zero": 3}),
        slow({"parallel__tensor": 2}),
        slow({"parallel__pipeline": 2}),
        slow({"parallel__zero": 0, "train__recompute": "full"}),
    ],
    ids=str,
)
def test_a_loss_and_transforms_are_those_of_one_rank(
    keys, pool, overrides, tmp_path, expected_losses
):
    pool.run(2, train, overrides(**PARTS, **keys))
    assert read_losses(tmp_path / "run") == promised(expected_losses)


@pytest.mark.slow
def test_a_loss_and_transforms_continue_under_another_layout(
    pool, overrides, tmp_path, expected_losses
):
    keys = {**PARTS, "checkpoint__every": 2}
    first = {**keys, "train__steps": 2, "parallel__tensor": 2}
    pool.run(2, train, overrides(**first))
    pool.run(2, train, overrides(**keys, checkpoint__resume="latest", parallel__zero=2))
    assert read_losses(tmp_path / "run") == promised(expected_losses)


def test_the_loss_is_divided_by_the_labels_that_are_left(pool, overrides, tmp_path):
    """A new model knows nothing: its loss is the logarithm of the vocabulary, however many labels
    are masked."""
    keys = {"train__steps": 1, "data__transforms": "[masking]", "model__init_std": 1e-3}
    pool.run(1, train, overrides(**keys, **RECORDING))
    assert read_losses(tmp_path / "run") == [pytest.approx(math.log(61), abs=0.01)]
