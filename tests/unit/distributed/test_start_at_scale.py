"""What many ranks cost the store, the system and each other: counted, not timed."""

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import store_clients as scale_runs
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import slow
from torch.distributed import HashStore

from megaframe.distributed import gloo_sockets
from megaframe.distributed.failure_verdict import (
    MAX_REQUESTS_PER_SECOND,
    FailureVerdict,
    compute_polling_interval,
    decode_ranks,
    encode_ranks,
)
from megaframe.distributed.rendezvous import find_fresh_store
from megaframe.errors import UserError
from megaframe.io.local_rendezvous import find_free_port
from megaframe.layout import Layout

ROOT = Path(__file__).resolve().parents[3]
LOOKING = {("check", "alarm"), ("check", "verdict"), ("check", "all left")}


def leave_out_looks(requests):
    return {request: number for request, number in requests.items() if request not in LOOKING}


@pytest.mark.parametrize("fault", ["lost", slow("late")])
def test_one_rank_reads_what_all_have_written_and_each_other_asks_for_the_verdict(fault, pool):
    """So a verdict about N ranks costs a number of requests proportional to N, and what a rank
    reads does not grow with N. Where ranks become late one after the other, a judge waits for the
    last, and others may begin a second round meanwhile, which has one judge as well."""
    read = {}
    for world in (64, 128):
        (clients,) = pool.run(1, scale_runs.lose, world, 5, fault)
        assert {ranks for ranks, *_ in clients.values()} == {(5,)}
        reporting = {4, 6, 7} if fault == "lost" else clients.keys()
        judges, rounds = [], 1
        for rank, (_, _, requests, size) in clients.items():
            once = {("append", "answered"): 1, ("get", "verdict"): 1, ("add", "left"): 1}
            if fault == "late":
                # Not every rank is late when it hears that another one is.
                may = [("set", "alarm"), *(("add", f"judge/{number}") for number in range(2))]
                once |= {key: min(1, requests[key]) for key in may}
                rounds = max(rounds, 1 + (requests["add", "judge/1"] > 0))
            elif rank in reporting:
                once |= {("append", "lost"): 1, ("set", "alarm"): 1, ("add", "judge/0"): 1}
            result = Counter(leave_out_looks(requests)) - Counter(once)
            if rank == 0:  # it has the store, and waits until all others have left
                result.pop(("add", "left"), None)
            if any(key in ("answered", "lost") for _, key in result):
                judges.append(rank)
            else:
                assert not result - Counter({("set", "all left"): 1, ("get", "verdict"): 1}), rank
                read.setdefault(world, set()).add(size)
        assert 1 <= len(judges) <= rounds
        assert sum(requests["set", "all left"] for _, _, requests, _ in clients.values()) == 1
    assert max(read[64]) < 600 and max(read[128]) < max(read[64]) + 10


@pytest.mark.slow
def test_if_the_judge_is_lost_another_rank_judges(pool):
    (clients,) = pool.run(1, scale_runs.lose, 16, 5, "lost", True)
    assert {ranks for ranks, *_ in clients.values()} == {(5,)}
    assert sum(requests["compare_set", "verdict"] for _, _, requests, _ in clients.values()) == 1


def test_a_start_costs_rank_0_one_answer_to_all(pool):
    for world in (32, 64):
        (requests,) = pool.run(1, scale_runs.start, world)
        first, *others = requests
        assert sum(n for (kind, _), n in first.items() if kind in ("set", "multi_set")) == 2
        for requests_of_rank in others:
            assert (
                sum(n for (kind, _), n in requests_of_rank.items() if kind not in ("check", "get"))
                == 1
            )


def test_who_does_not_come_is_named():
    store = HashStore()
    store.append("never", "")
    with pytest.raises(RuntimeError, match=r"^ranks 1, 2, 3 did not answer within 0.05 s$"):
        find_fresh_store(store, 0, 4, 0.05)


def test_very_many_ranks_look_less_often():
    assert compute_polling_interval(1.0, 4096) == 1.0 and compute_polling_interval(0.1, 64) == 0.1
    for world in (1, 4096, 10**5):
        assert world / compute_polling_interval(0.1, world) <= MAX_REQUESTS_PER_SECOND


@given(st.sets(st.integers(0, 60)))
def test_ranks_survive_their_runs(ranks):
    assert set(decode_ranks(encode_ranks(ranks))) == ranks
    verdict = FailureVerdict(
        tuple(sorted(ranks)), "text", late=True, silent=tuple(sorted(ranks))[:2]
    )
    assert FailureVerdict.decode(verdict.encode()) == verdict


@pytest.mark.parametrize("axes", [("data",), ("tensor",), ("data", "tensor"), ("pipeline",)])
def test_a_report_about_a_group_is_short_however_large_the_group(axes):
    layout = Layout(tensor=8, data=128, pipeline=16)
    assert len(json.dumps(encode_ranks(layout.list_members(777, *axes)))) < 20


def test_a_control_group_connects_only_the_ranks_that_talk(pool):
    """Of four data ranks: the data group connects all pairs, and each control group a ring."""
    for connected, texts, broken in pool.run(4, scale_runs.make_groups):
        assert connected == [3, 3 + 2, 3 + 2, 3 + 2 + 2]
        assert texts == ["", "x", "xx", "xxx"]
        assert "lost contact over pipeline x data x context x tensor" in broken


@pytest.mark.parametrize("lazily", [False, True])
def test_the_requests_of_a_gloo_group_are_those_of_its_closed_form(lazily, pool):
    """For a group of g ranks, each asks 1 + 3g times, or once and 3 times for each rank it talks
    to."""
    for world in (3, 4):
        for counts in pool.run(world, scale_runs.count_gloo_requests, lazily, find_free_port()):
            assert counts == ([1, 3 * 2] if lazily else [1 + 3 * world, 0])


class TestOpenFiles:
    def test_the_soft_limit_is_raised_if_it_is_too_low(self):
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened = len(os.listdir("/proc/self/fd"))
        low = opened + gloo_sockets._RESERVE + 100
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, before[1]))
            gloo_sockets.reserve_open_files(50, "they")
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low, before[1])
            gloo_sockets.reserve_open_files(200, "they")
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def test_the_soft_limit_of_the_launcher_is_raised(self):
        program = "import resource, sys; sys.stdin.read(); print(resource.getrlimit(7))"
        command = [sys.executable, "-I", "-S", "-c", program]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as other:
            hard = resource.prlimit(other.pid, resource.RLIMIT_NOFILE, (64, 500))[1]
            gloo_sockets.reserve_open_files(100, "they", other.pid)
            assert other.communicate()[0] == "(500, 500)\n" and hard >= 500

    def test_what_the_system_does_not_allow_is_an_error_with_the_remedy(self):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with pytest.raises(UserError) as error:
            gloo_sockets.reserve_open_files(hard, "the connections of 9 ranks")
        text = str(error.value)
        assert text.startswith("the connections of 9 ranks need up to ") and f" is {hard}." in text
        enough = int(text.partition("ulimit -Hn ")[2].split("`")[0])
        assert hard < enough <= 4 * hard and f"LimitNOFILE={enough} " in text
        assert f"--ulimit nofile={enough}:{enough} for a container" in text

    def test_a_run_is_refused_before_anything_is_connected(self, pool):
        for message in pool.run(2, read_refusal):
            assert ("need up to" in message and "rank 0" in message) or message == "lost"


def read_refusal():
    """Make a mesh of two ranks whose first has room for no more files."""
    from megaframe.distributed.mesh import Mesh
    from megaframe.errors import LostRanks

    reserve, gloo_sockets._RESERVE = gloo_sockets._RESERVE, 10**9 * (os.environ["RANK"] == "0")
    try:
        Mesh(Layout(data=2), device="cpu", timeout=2.0).close()
    except UserError as error:
        return str(error)
    except LostRanks:
        return "lost"
    finally:
        gloo_sockets._RESERVE = reserve
    return "made"


@pytest.mark.slow
def test_the_right_rank_is_named_by_all_for_every_fault():
    """Sixty-four clients, with ranks that are killed and stopped for real."""
    command = [sys.executable, "benchmarks/cpu/start_at_scale.py", "--clients", "64", "--processes"]
    process = subprocess.run(
        [*command, "2", "--timeout", "3", "--quiet", "0"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    for fault, number in (("lost", 63), ("hung", 63), ("slow", 64), ("store", 63)):
        (line,) = [line for line in process.stdout.splitlines() if line.startswith(fault)]
        assert f"{number} of {number}" in line
