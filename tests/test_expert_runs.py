"""Whole runs with experts: a checkpoint of one layout goes on under others, and what is metered."""

import pytest
from test_pretrain import lines, train

EXPERTS = {
    "model__layers": 4,
    "model__activation": "swiglu",
    "model__moe": "{experts: 6, ffn: 12, shared: 1, first: 1, balance_rate: 0.05, jitter: 0.1}",
    "model__mtp_depth": 1,
    "optim__schedule": "constant",
    "train__microbatch": 1,
    "meter__experts_every": 1,
}
LAYOUTS = (
    (1, {}),
    (4, {"expert": 4}),
    (2, {"tensor": 2, "expert": 2}),
    (4, {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "expert": 2, "zero": 1}),
    (4, {"expert": 2, "expert_tensor": 2, "zero": 3, "dispatch": "all_gather"}),
    (4, {"context": 2, "expert": 4, "zero": 2, "dispatch": "hierarchical", "node_size": 2}),
    (4, {"data_replicate": 2, "zero": 3, "dispatch": "deduplicated", "expert": 2}),
)


def test_a_run_goes_on_under_other_layouts_of_experts(pool, overrides, tmp_path):
    """Weights, optimizer state and what routers know of the load; and the load that is metered."""
    steps = 2 * len(LAYOUTS)
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", train__steps=steps, **EXPERTS))
    for part, (ranks, parallel) in enumerate(LAYOUTS, 1):
        keys = {f"parallel__{key}": value for key, value in parallel.items()}
        more = {"train__steps": 2 * part, "checkpoint__every": 2, "checkpoint__resume": "latest"}
        pool.run(ranks, train, overrides(**EXPERTS, **more, **keys))
    for line, other in zip(lines(tmp_path / "run"), lines(tmp_path / "whole"), strict=True):
        for key in ("loss", "mtp_loss", "grad_norm"):
            assert line[key] == pytest.approx(other[key], rel=1e-10)
        for key in ("max_load", "entropy", "bias_norm"):
            assert line["experts"][key] == pytest.approx(other["experts"][key], rel=1e-10)
            assert len(line["experts"][key]) == 4
        assert line["experts"]["tokens"] == other["experts"]["tokens"]
        for place, row in line["experts"]["tokens"].items():
            assert sum(row) == 2 * line["tokens"]
            worst = max(row) / (sum(row) / 6)
            assert line["experts"]["max_load"][int(place)] == pytest.approx(worst)
            # Of six experts some of four ranks have two.
            assert 1.0 <= line["experts"]["rank_load"][int(place)] <= worst * 4 / 3 + 1e-9
    assert other["experts"]["rank_load"] == [1.0] * 4


def test_what_is_dropped_is_metered(pool, overrides, tmp_path):
    keys = {**EXPERTS, "model__moe": "{experts: 6, ffn: 12, capacity: 0.5}"}
    pool.run(2, train, overrides(train__steps=2, **keys))
    for line in lines(tmp_path / "run"):
        assert 0.5 <= line["experts"]["dropped"] < 1.0
    assert "model.moe.capacity=0.5" in (tmp_path / "run/run.log").read_text()
