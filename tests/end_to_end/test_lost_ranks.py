"""Ranks that die, stop or never start: the others end in time, and name the one at fault."""

import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE, count_lines, wait_until
from rank_process import RankProcess, fail_at, hang_after, list_rank_environments
from slow_cases import slow

from megaframe.distributed.watchdog import blame_for_loss
from megaframe.errors import EXIT_LOST_RANKS, EXIT_USER_ERROR

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pretrain_gpt


@pytest.fixture
def launch(overrides, tmp_path):
    """launch(ranks, world, programs={}, **changes) -> processes; errors go to tmp_path/RANK."""
    started = []

    def make(ranks, world, programs=None, **changes):
        keys = overrides(**{"model__layers": 4, "train__steps": 10**6, **changes})
        for rank, environment in enumerate(list_rank_environments(world)):
            if rank in ranks:
                program = (programs or {}).get(rank, pretrain_gpt.main)
                errors = tmp_path / str(rank)
                started.append(
                    RankProcess(program, words=keys, environment=environment, errors=errors)
                )
        return started

    yield make
    for process in started:
        process.kill()


def wait_for_steps(folder, processes):
    wait_until(
        lambda: count_lines(folder / "run/metrics.jsonl") >= 3,
        *processes,
        describe=lambda: read_errors(folder, processes),
    )


def read_errors(folder, processes):
    """Return what each rank wrote to standard error."""
    return [(folder / str(rank)).read_text() for rank in range(len(processes))]


def end(processes):
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        assert process.wait(max(0.0, deadline - time.monotonic())) == EXIT_LOST_RANKS


@pytest.mark.parametrize(
    ("axes", "victim", "fault", "name"),
    [
        ((2, 2, 2), 3, signal.SIGKILL, "rank 3 (pipeline 1, data 1: stages 1, 3) is gone"),
        slow((2, 2, 1), 0, signal.SIGKILL, "rank 0 (pipeline 0, data 0: stage 0) is gone"),
        slow((3, 1, 1), 1, signal.SIGSTOP, "rank 1 (pipeline 1, data 0: stage 1) is gone or stuck"),
    ],
)
def test_a_rank_that_is_lost_is_named_by_all_others(axes, victim, fault, name, launch, tmp_path):
    """This includes ranks that communicate only with ranks that have left, and the loss of rank 0,
    which has the store."""
    pipeline, data, chunks = axes
    timeout = 5 if fault is signal.SIGSTOP else PATIENCE
    world = pipeline * data
    processes = launch(
        range(world),
        world,
        parallel__pipeline=pipeline,
        parallel__data=data,
        parallel__chunks=chunks,
        parallel__schedule="interleaved" if chunks > 1 else "1f1b",
        parallel__timeout=timeout,
        train__microbatch=1,
    )
    wait_for_steps(tmp_path, processes)
    lost = processes[victim]
    lost.send_signal(fault)
    others = [process for process in processes if process is not lost]
    end(others)
    for rank, text in enumerate(read_errors(tmp_path, processes)):
        if rank != victim:
            assert text.startswith(f"error: rank {rank}: {name}"), text
            assert "Traceback" not in text and text.count(" is gone") == 1
    if fault is signal.SIGSTOP:  # a rank that wakes up alone ends, too
        lost.send_signal(signal.SIGCONT)
        end([lost])


@pytest.mark.slow
def test_a_rank_that_hangs_in_its_own_code_is_named_and_says_where(launch, tmp_path):
    timeout = 5
    processes = launch(
        range(2), 2, {1: partial(hang_after, 3)}, parallel__pipeline=2, parallel__timeout=timeout
    )
    end(processes)
    other, stuck = read_errors(tmp_path, processes)
    name = "rank 1 (pipeline 1, data 0: stage 1) is alive, but stuck or too slow"
    assert other.startswith(f"error: rank 0: {name}")
    assert stuck.startswith(f"error: rank 1: {name}") and "in hang_forever" in stuck


@pytest.mark.parametrize("rank", [0, slow(1)])
@pytest.mark.parametrize(
    "place",
    [
        slow(("megaframe.training.trainer", "Trainer", "_build_step")),
        slow(("megaframe.checkpoint.manager", "CheckpointManager", "create_writers")),
        ("megaframe.training.batches", "Batches", "take_next"),
    ],
)
def test_a_mistake_that_one_rank_finds_before_it_sends_anything_is_said_once(
    place, rank, launch, tmp_path
):
    program = {rank: partial(fail_at, *place)}
    processes = launch(range(2), 2, program, parallel__pipeline=2, parallel__timeout=5)
    statuses = [process.wait(PATIENCE) for process in processes]
    assert (statuses[rank], statuses[1 - rank]) == (EXIT_USER_ERROR, EXIT_LOST_RANKS)
    texts = read_errors(tmp_path, processes)
    prefix = f"rank {rank}: " if rank else ""
    assert texts[rank] == f"error: {prefix}a mistake that only one rank finds\n"
    assert texts[1 - rank].startswith(f"error: rank {1 - rank}: rank {rank} (pipeline {rank}, ")
    assert texts[1 - rank].count("\n") == 1, texts[1 - rank]


def test_a_rank_that_never_comes_ends_the_others_with_a_message(launch, tmp_path):
    processes = launch([0, 1], 3, parallel__data=3, parallel__timeout=3, train__global_batch=12)
    end(processes)
    for text in read_errors(tmp_path, processes):
        assert "Traceback" not in text
        assert "the 3 ranks did not all meet at 127.0.0.1:" in text
        assert "within parallel.timeout=3 s" in text


ranks = st.integers(0, 7)


@given(
    dead=st.sets(ranks, min_size=1, max_size=3),
    late=st.sets(ranks, max_size=3),
    groups=st.lists(st.sets(ranks, min_size=2), min_size=1, max_size=8),
)
def test_the_dead_are_at_fault_and_never_those_who_lost_them_or_answer(dead, late, groups):
    """In every group with a dead rank, members lose contact with all others."""
    alive = set(range(8)) - dead
    reporting = alive - late
    lost = {}
    for group in groups:
        if group & dead:
            for rank in group & reporting:
                lost.setdefault(rank, set()).update(group - {rank})
    dead_senders = set().union(*lost.values()) & dead if lost else set()
    assert blame_for_loss(lost, answered=alive) == tuple(sorted(dead_senders))


def test_who_answers_is_at_fault_only_if_nobody_is_silent():
    assert blame_for_loss({0: [1, 2]}, answered={0, 2}) == (1,)
    assert blame_for_loss({0: [1], 2: [1]}, answered={0, 1, 2}) == (1,)
    assert blame_for_loss({0: [1], 1: [0]}, answered={0, 1}) == ()
