"""Processes that play the ranks of small worlds: what they answer, and what fails."""

import os
import signal
import time
from contextlib import closing
from functools import partial

import pytest
import torch
from patience import PATIENCE
from repo_copy import ROOT

from megaframe.config.registry import get_registry
from megaframe.extensions import load_extensions
from megaframe.training import rank_pool
from megaframe.training.rank_pool import RankFailure, RankPool


def name_rank(word):
    return f"{word} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"


def get_process():
    return os.getpid()


def fail_on(rank):
    if os.environ["RANK"] == str(rank):
        raise ValueError("is wrong")
    time.sleep(100)


def fail_later_on(rank):
    time.sleep(0.3 * (os.environ["RANK"] == str(rank)))
    raise ValueError("is wrong")


def end():
    os.kill(os.getpid(), signal.SIGKILL)


def set_variable(value):
    os.environ["PREPARED"] = value


def read_variable():
    return os.environ.get("PREPARED")


def use_threads(count, variable):
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(variable)
    torch.set_num_threads(count)


def test_each_rank_knows_its_place_and_processes_stay():
    with closing(RankPool(3)) as pool:
        assert pool.run(2, name_rank, "rank") == ["rank 0 of 2", "rank 1 of 2"]
        processes = pool.run(3, get_process)
        assert pool.run(3, name_rank, "rank")[2] == "rank 2 of 3"
        assert pool.run(3, get_process) == processes and len({*processes}) == 3


def ask_for_deterministic_algorithms():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    return before


def load_an_extension():
    before = [*get_registry().extensions]
    load_extensions(None, [f"run.extensions=[{ROOT / 'examples/optimizer.py'}]"])
    return before


DTYPES = (torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool)


def draw_tensors():
    """Return tensors of every kind, also empty, without dims, and in a part of another's memory."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn((4, 3), generator=generator).to(dtype) for dtype in DTYPES]
    return [view for x in whole for view in (x, x.t(), x[:0], x[1, 2], x[1:, :2])]


def test_tensors_arrive_with_every_bit(pool):
    (arrived,) = pool.run(1, draw_tensors)
    for tensor, expected in zip(arrived, draw_tensors(), strict=True):
        assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
        assert tensor.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("change", "before"), [(ask_for_deterministic_algorithms, False), (load_an_extension, [])]
)
def test_what_a_call_changes_is_not_there_in_the_next(change, before, pool):
    for _ in range(2):
        assert pool.run(1, change) == [before]


def test_a_failure_is_told_without_waiting_for_all_and_the_next_call_starts_anew():
    with closing(RankPool(2)) as pool:
        processes = pool.run(2, get_process)
        with pytest.raises(RankFailure, match=r"(?s)rank 1: Traceback.*ValueError: is wrong") as e:
            pool.run(2, fail_on, 1)
        assert [*e.value.failures] == [1]
        assert not {*processes} & {*pool.run(2, get_process)}


def test_a_process_that_ends_or_says_nothing_is_named():
    ended, silent = "rank 0: its process has ended", r"rank 0: no answer in 0.2 s"
    with closing(RankPool(1)) as pool, pytest.raises(RankFailure, match=ended):
        pool.run(1, end)
    with closing(RankPool(1, timeout=0.2)) as pool, pytest.raises(RankFailure, match=silent):
        pool.run(1, time.sleep, 100)


def test_a_failure_that_follows_another_one_does_not_hide_it(monkeypatch):
    """The first to tell may only have lost the one that is at fault."""
    monkeypatch.setattr(rank_pool, "_FOLLOWING_SECONDS", PATIENCE)
    with closing(RankPool(2)) as pool, pytest.raises(RankFailure) as error:
        pool.run(2, fail_later_on, 1)
    assert [*error.value.failures] == [0, 1]


def test_ranks_are_prepared_once():
    with closing(RankPool(1, partial(set_variable, "yes"))) as pool:
        assert pool.run(1, read_variable) == ["yes"]
    assert read_variable() is None


@pytest.mark.parametrize(("variable", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "3"}, 3)])
def test_ranks_have_one_thread_unless_more_are_asked_for(variable, threads):
    with closing(RankPool(1, partial(use_threads, 3, variable))) as pool:
        assert pool.run(1, torch.get_num_threads) == [threads]
