"""Faults of stand-ins for GPUs: hangs, lost connections, broken and slow devices; the doctor."""

import json
import pickle
import re

import pytest
from bitwise import assert_same_losses
from entry_runs import read_losses
from fake_cuda.client import PLAIN, SMALL, assert_no_problem
from slow_cases import slow
from torch.distributed.flight_recorder import fr_trace

from megaframe.errors import EXIT_LOST_RANKS

FAILING = {
    **SMALL,
    **PLAIN,
    "run__device": "cuda",
    "parallel__pipeline": 2,
    "train__steps": 7,
    "train__eval_every": 0,
    "checkpoint__every": 2,
    "checkpoint__resume": "latest",
}


@pytest.fixture
def failing(fake_gpu, overrides, tmp_path):
    """failing(fault, rank) -> what was printed, for a run of two ranks with a fault in step 6.
    limit: the seconds that a step may take from then on."""

    def run(fault, rank, limit=1, fails=False, **changes):
        words = fault, str(rank), "5", str(limit), *overrides(**FAILING | changes)
        return fake_gpu.run("fake_cuda.fake_failures:pretrain", *words, world=2, fails=fails)

    return run


def test_a_transfer_that_hangs_is_aborted_and_the_run_goes_on(
    failing, fake_gpu, overrides, tmp_path
):
    fake_gpu.run("pretrain_gpt:main", *overrides(**FAILING, run__dir=tmp_path / "whole"), world=2)
    output = failing("hang", 1)
    assert_no_problem(fake_gpu)
    assert (
        "restarted in the same processes (1 of faults.restarts=3): step 6 took more than" in output
    )
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(losses, whole, because="a checkpoint has every bit of the state")
    assert output.count("flight record in ") == 2


@pytest.mark.slow
def test_a_communicator_that_fails_is_aborted_and_the_run_goes_on(failing, fake_gpu):
    """The host is not told by its transfers; the time limits are too long to help."""
    output = failing("lose_connection", 0, limit=100)
    assert_no_problem(fake_gpu)
    assert re.search(r"restarted in the same .*: step 6 failed, NCCL reports COMM_ERROR in", output)


@pytest.mark.slow
def test_a_device_with_an_error_that_stays_ends_the_run(failing, fake_gpu, tmp_path):
    output = failing("fail_device", 1, fails=True)
    assert fake_gpu.statuses == [EXIT_LOST_RANKS] * 2
    assert "restarted" not in output and "step 6 took more than faults.step_timeout=1 s" in output


@pytest.mark.slow
def test_torchs_analyser_reads_the_flight_records_of_a_hang(failing, tmp_path):
    failing("hang", 1, checkpoint__resume="null", fails=True)
    folder = tmp_path / "run/faults"
    assert sorted(path.name for path in folder.glob("nccl-*")) == ["nccl-rank-0", "nccl-rank-1"]
    fr_trace.main([str(folder), "-p", "nccl-rank-", "-o", str(tmp_path / "found")])
    _, database = pickle.loads((tmp_path / "found").read_bytes())
    unmatched = [call for call in database.ncclcalls if call.collective_id is None]
    assert len(database.collectives) > 20  # which all ranks have started
    assert {call.global_rank for call in unmatched} == {
        1
    }  # the first rank waits in another transfer


PACED = {
    **SMALL,
    **PLAIN,
    "run__device": "cuda",
    "train__microbatch": 1,
    "train__steps": 21,
    "train__eval_every": 0,
    "faults__straggler_factor": 1.5,
}


@pytest.mark.parametrize(
    ("pace", "expected"),
    [
        slow((1e3, 5e3, 1e3, 20e3), {"1"}, id="device"),
        pytest.param((1e3, 5e3, 4e3, 5e3), set(), id="hidden-host"),
        slow((1e3, 5e3, 40e3, 5e3), {"1"}, id="host"),
    ],
)
def test_a_slow_device_is_named_and_not_a_host_that_its_device_hides(
    fake_gpu, overrides, pace, expected
):
    """pace: nanoseconds in which the host launches and the device runs a piece of work, of the
    first rank and of the second."""
    words = [*map(str, pace), *overrides(**PACED)]
    output = fake_gpu.run("fake_cuda.fake_failures:pretrain_at_a_pace", *words, world=2)
    pattern = r"rank (\d) is slow: [\d.]+ s of [FB] per step on its device, .* launched it in"
    assert {*re.findall(pattern, output)} == expected, output


DOCTOR = ["settings", "links", "rings", "collectives", "abort"]
COMPARED = ["layout: context, ring", "layout: pipeline, zb-v"]


@pytest.mark.parametrize("names", [DOCTOR, slow(COMPARED)])
def test_the_doctor_finds_that_ranks_work_together(fake_gpu, tmp_path, names):
    fake_gpu.run("fake_cuda.fake_failures:doctor", str(tmp_path), *names, world=2)
    for rank in (0, 1):
        lines = map(json.loads, (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines())
        result_lines = [line for line in lines if "check" in line]
        assert {line["part"] for line in result_lines} == {*names}
        assert not [line for line in result_lines if line["passed"] is False]
    assert fake_gpu.list_kinds() <= {"wait"}, fake_gpu.reports
