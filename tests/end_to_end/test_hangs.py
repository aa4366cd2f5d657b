"""Hangs end in time, and name the rank, the step and the action that hold up the others."""

import re
import time

import fault_runs
import pytest
from patience import PATIENCE
from rank_process import RankProcess, list_rank_environments
from repo_copy import ROOT

from megaframe.errors import EXIT_LOST_RANKS

LIMIT = 2.0


@pytest.fixture
def hang(overrides, tmp_path):
    """hang(world, fault, rank, *arguments, **changes) -> what each rank wrote, after all ended.

    ends: the expected exit statuses; by default that of lost ranks.
    """

    def make(world, *fault, ends=None, **changes):
        limits = {"faults__step_timeout": PATIENCE, "parallel__timeout": 300}
        changes = {**limits, "train__microbatch": 2, **changes}
        limit = LIMIT if changes["faults__step_timeout"] else 0
        arguments = (fault_runs.run_alone, limit, overrides(**changes), *fault)
        started = [
            RankProcess(*arguments, environment=environment, errors=tmp_path / str(rank))
            for rank, environment in enumerate(list_rank_environments(world))
        ]
        deadline = time.monotonic() + PATIENCE
        try:
            for process, status in zip(started, ends or [EXIT_LOST_RANKS] * world, strict=True):
                actual = process.wait(max(0.0, deadline - time.monotonic()))
                assert actual == status, (tmp_path / "0").read_text()
        finally:
            for process in started:
                process.kill()
        return [(tmp_path / str(rank)).read_text() for rank in range(world)]

    return make


def read_stacks(tmp_path):
    return {path.name: path.read_text() for path in (tmp_path / "run/faults").glob("rank-*.txt")}


@pytest.mark.slow
def test_a_sleeping_loader(hang, tmp_path):
    messages = hang(2, fault_runs.sleep_in_data_on_one_rank, None, 3, 1)
    activity = (
        "step 4 took more than faults.step_timeout=2 s: rank 1 (pipeline 0, data 1: stage 0) at "
        "step 4, data, waiting for no rank | rank 0: step 4, action 0B1, waiting in "
        "reduce_scatter over data with rank 1\n"
    )
    for rank, text in enumerate(messages):
        assert text.startswith(f"error: rank {rank}: {activity}"), text
    stack_files = read_stacks(tmp_path)
    assert "in sleep_in_data" in messages[1] or "in <lambda>" in messages[1]
    assert (
        "in advance" in stack_files["rank-00000.txt"]
        and "<lambda>" in stack_files["rank-00001.txt"]
    )


@pytest.mark.slow
def test_a_callback_that_does_not_return(hang):
    extension = ROOT / "tests/support/recording_extension.py"
    keys = {"run__extensions": f"[{extension}]"}
    messages = hang(2, run__callbacks="[{kind: recording, fail: sleep}]", **keys)
    # The line of step 3 is written after step 4. Rank 1 is then in step 5 or about to begin it, and
    # either rank may be the first that is late.
    late = r"(callback recording after step 3|step [45]) took more than faults.step_timeout=2 s: "
    late += r"rank 0 \([^)]*\) at callback recording after step 3, waiting for no rank"
    for text in messages:
        assert re.search(late, text) and "recording_extension.py" in messages[0], text


def test_a_stage_that_sleeps_in_a_pass(hang):
    messages = hang(2, fault_runs.sleep_in_backward, 1, 3, parallel__pipeline=2)
    activity = (
        r"rank 1 \(pipeline 1, data 0: stage 1\) at step 4, action 1B0, waiting for no rank \| "
    )
    activity += r"rank 0: step 4, action 0B0, waiting in receive over pipeline from rank 1"
    for text in messages:
        assert re.search(activity, text), text


@pytest.mark.slow
def test_a_single_process(hang):
    (text,) = hang(1, fault_runs.sleep_in_data, 0, 2)
    assert "rank 0 (pipeline 0, data 0: stage 0) at step 3, data" in text and "<lambda>" in text


@pytest.mark.slow
def test_collectives_in_another_order(hang, tmp_path):
    """The ranks restart once, because the network may be the cause, but not a second time."""
    keys = {"checkpoint__resume": "latest", "checkpoint__every": 2}
    for text in hang(2, fault_runs.start_another_collective, 1, 3, **keys):
        assert "rank 1 (pipeline 0, data 1: stage 0) at step 4, waiting in all_reduce over" in text
        assert "step 4, action 0B1, waiting in reduce_scatter over data with rank 1" in text
        assert "faults.check_collectives=true" in text
    assert fault_runs.log(tmp_path / "run").count("restarted in the same processes") == 1


@pytest.mark.slow
def test_an_error_of_a_rank_is_not_taken_for_one_of_the_network(hang):
    keys = {"checkpoint__resume": "latest", "checkpoint__every": 2}
    other, faulty = hang(2, fault_runs.end_with_an_error, 1, 3, ends=(EXIT_LOST_RANKS, 1), **keys)
    assert "ValueError: a mistake of its own" in faulty
    assert other.startswith("error: rank 0: rank 1 (pipeline 0, data 1: stage 0) is gone"), other


def test_another_shape_is_named_before_it_starts(hang):
    keys = {"faults__check_collectives": True, "faults__step_timeout": 0, "data__mask_eod": True}
    for text in hang(2, fault_runs.sum_another_shape, 1, 3, **keys):
        assert re.search(
            r"error: rank \d: the ranks over data do not start the same thing: rank \d "
            r"start(s|ed) all_reduce of torch.(float32 \[5\]|float64 \[\]) in action data "
            r"at [\w/]+\.py:\d+, rank \d started all_reduce of torch.(float32 \[5\]|float64 "
            r"\[\]) in action data at [\w/]+\.py:\d+",
            text,
        ), text


@pytest.mark.slow
def test_one_send_too_many_is_named(hang):
    keys = {"faults__check_collectives": True, "parallel__pipeline": 2, "faults__step_timeout": 0}
    for text in hang(2, fault_runs.send_once_too_often, 0, 3, **keys):
        assert "the ranks over pipeline do not start the same thing" in text
        sent = r"send of torch.float32 \[7\] to rank 1 at tests/support/fault_runs.py:\d+"
        waiting = r"receive of torch.float64 \[32, 16\] from rank 0 in action 1RECV_F0 at meg"
        assert re.search(sent, text) and re.search(waiting, text), text
