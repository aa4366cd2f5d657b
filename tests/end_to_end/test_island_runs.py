"""Whole runs of islands: a resumed one is the same, another number of islands goes on, and lines
say what travelled between them (`megaframe/training/island_checkpoint.py`)."""

from pathlib import Path

import pytest
from bitwise import assert_same_losses
from entry_runs import read_lines, read_losses, train
from local_server import LocalServer

from megaframe.checkpoint import find_checkpoint, open_checkpoint
from megaframe.config import load
from megaframe.optim.parameter_server.coordinator import describe_model
from megaframe.training import island_setup

KEYS = {
    "parallel__islands": 2,
    "sync__every": 4,
    "sync__fragments": 2,
    "sync__delay": 2,
    "sync__compress": "int4",
    "optim__schedule": "constant",
    "train__precision": "fp32",
    "train__steps": 9,
    "train__global_batch": 4,
    "train__microbatch": 1,
    "checkpoint__every": 5,
}
"""After step 5 one fragment travels, and all messages have left something out."""


@pytest.fixture
def stopped(pool, overrides):
    """A run of two islands that has saved a checkpoint in the middle."""
    pool.run(2, train, overrides(**KEYS, train__stop_after=5))


def test_a_resumed_run_is_bitwise_one_that_never_stopped(stopped, pool, overrides, tmp_path):
    pool.run(2, train, overrides(**KEYS, checkpoint__resume="latest"))
    pool.run(2, train, overrides(run__dir=tmp_path / "whole", **KEYS))
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(
        losses, whole, because="a checkpoint has every island's state, and what is on its way"
    )
    sent = [line["bytes"]["islands"] for line in read_lines(tmp_path / "whole")]
    # A fragment leaves after steps 2, 4, 6 and 8; a step later its sums are sent back. The last
    # step sends what travels, and the mean of all weights.
    assert [size > 0 for size in sent] == [step not in (1,) for step in range(1, 10)]
    assert sent[-1] > sent[-2]
    assert (
        "layout may change the answer: parallel.islands=2"
        in (tmp_path / "whole/run.log").read_text()
    )


@pytest.mark.parametrize(
    ("ranks", "changes", "note"),
    [
        (2, {"parallel__islands": 1}, "2 islands are averaged; that of the outer optimizer is dr"),
        (4, {"parallel__islands": 4}, "each of 4 islands begins with the mean of the weights"),
        (4, {"parallel__tensor": 2, "parallel__zero": 3}, "resumed from step 5"),
    ],
)
def test_any_number_of_islands_continues(ranks, changes, note, stopped, pool, overrides, tmp_path):
    keys = {**KEYS, **changes, "train__steps": 12}
    pool.run(ranks, train, overrides(**keys, checkpoint__resume="latest"))
    losses = read_losses(tmp_path / "run")
    assert len(losses) == 12 and losses[5] < losses[0] + 0.1 and losses[-1] < losses[0]
    assert note in (tmp_path / "run/run.log").read_text()
    if keys["parallel__islands"] > 1:
        with open_checkpoint(find_checkpoint(tmp_path / "run/checkpoints", "latest")) as checkpoint:
            assert len(checkpoint.state["islands"]) == keys["parallel__islands"]


def test_one_rank_becomes_two_islands(pool, overrides, tmp_path):
    pool.run(1, train, overrides(**{**KEYS, "parallel__islands": 1}, train__stop_after=5))
    pool.run(2, train, overrides(**KEYS, checkpoint__resume="latest"))
    log = (tmp_path / "run/run.log").read_text()
    assert "2 islands begin with the weights and the optimizer state of the checkpoint" in log
    assert len(read_losses(tmp_path / "run")) == 9


SERVER = {
    "sync__server": "local",
    "sync__islands": 2,
    "sync__every": 3,
    "sync__delay": 1,
    "sync__timeout": 0.2,
    "train__steps": 10,
    "train__global_batch": 4,
    "checkpoint__every": 4,
}


def train_with_server(folder, *runs):
    """Run the entry for each list of overrides, one after the other, with a server in this
    process, whose actors end with each run."""
    with pytest.MonkeyPatch.context() as patch:
        for overrides in runs:
            config = load(None, overrides)
            server = LocalServer(Path(folder), describe_model(config), config.sync, 2)
            patch.setattr(island_setup, "RayServer", lambda *_, server=server: server)
            train(overrides)


def test_an_island_of_a_server_continues_bitwise_and_another_goes_on_with_it(
    pool, overrides, tmp_path
):
    """The first is alone at first: the other is waited for once."""
    whole = overrides(run__dir=tmp_path / "whole", **SERVER)
    pool.run(1, train_with_server, tmp_path / "server", whole)
    parts = [
        overrides(**SERVER, train__stop_after=4),
        overrides(**SERVER, checkpoint__resume="latest", train__stop_after=8),
        overrides(run__dir=tmp_path / "other", **{**SERVER, "sync__island": 1}),
    ]
    pool.run(1, train_with_server, tmp_path / "server2", *parts)
    assert_same_losses(
        read_losses(tmp_path / "run"),
        read_losses(tmp_path / "whole")[:8],
        because="the server is where it was, and the checkpoint has the island's state",
        but=["train.stop_after"],
    )
    # After two rounds of three steps the third is open, or ends without the new one.
    begun = read_lines(tmp_path / "other")[0]["step"] - 1
    assert begun in (6, 9)
    log = (tmp_path / "other/run.log").read_text()
    assert f"joins the other islands at step {begun}, with their weights" in log
