"""Whole runs with compressed gradients: resuming, also under another layout."""

import pytest
from bitwise import assert_same_losses
from entry_runs import read_lines, read_losses, train
from slow_cases import slow

KINDS = {
    "int8": {},
    "topk": {"parallel__compress_keep": 0.05},
    "powersgd": {"parallel__compress_keep": 1},
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(slow("int8", (4, 2, 3)), slow("topk", (4, 2, 3)), ("powersgd", (4, 2, 3))),
        *(slow("int8", (2, 1, 0)), slow("topk", (2, 1, 2))),
    ],
)
def test_a_resumed_run_is_bitwise_one_that_never_stopped(kind, layout, pool, overrides, tmp_path):
    ranks, replicas, zero = layout
    keys = {
        "parallel__compress": kind,
        "parallel__zero": zero,
        "parallel__data_replicate": replicas,
        "train__precision": "fp32",
        "train__global_batch": 4,
        "train__microbatch": 1,
        "optim__schedule": "constant",
        "checkpoint__every": 3,
        **KINDS[kind],
    }
    pool.run(ranks, train, overrides(run__dir=tmp_path / "whole", train__steps=6, **keys))
    pool.run(ranks, train, overrides(train__steps=3, **keys))
    pool.run(ranks, train, overrides(train__steps=6, checkpoint__resume="latest", **keys))
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(
        losses, whole, because="a checkpoint has every bit of the state, and what was not sent"
    )
    assert "compression is dropped" not in (tmp_path / "run/run.log").read_text()


def test_another_layout_drops_what_was_not_sent_and_says_so(pool, overrides, tmp_path):
    keys = {"parallel__compress": "topk", "optim__schedule": "constant", "checkpoint__every": 3}
    pool.run(2, train, overrides(train__steps=3, **keys))
    resumed = overrides(
        train__steps=6, checkpoint__resume="latest", **{**keys, "train__microbatch": 1}
    )
    pool.run(4, train, resumed)
    assert "compression is dropped" in (tmp_path / "run/run.log").read_text()
    assert len(read_losses(tmp_path / "run")) == 6


def test_bytes_are_in_every_line(pool, overrides, tmp_path):
    """Without sharding, only gradients are sent, which compression makes smaller."""
    sent = {}
    for kind in ("none", "int8"):
        folder = tmp_path / kind
        keys = {"parallel__compress": kind, "parallel__zero": 0, "train__steps": 3}
        pool.run(2, train, overrides(run__dir=folder, **keys))
        sent[kind] = [line["bytes"] for line in read_lines(folder)]
        assert all(step.keys() == {"data", "world"} for step in sent[kind])
        assert sent[kind][1]["data"] == sent[kind][2]["data"]
    assert 0 < sent["int8"][2]["data"] < sent["none"][2]["data"] / 4
