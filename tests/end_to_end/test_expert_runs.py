"""Whole runs with experts: resuming under other layouts, metrics, and starts from dense runs.

Tests `megaframe.metrics.expert_load` and `megaframe.training.initialize_from`.
"""

import pytest
from checkpoint_helpers import load_weights
from entry_runs import make_trainer, read_lines, train
from slow_cases import slow
from tolerances import assert_within, near, promised

from megaframe.config import load
from megaframe.training.rank_pool import RankFailure

EXPERTS = {
    "model__layers": 4,
    "model__activation": "swiglu",
    "model__moe": "{experts: 6, ffn: 12, shared: 1, first: 1, balance_rate: 0.05, jitter: 0.1, "
    "z_loss: 0.05}",
    "model__mtp_depth": 1,
    "optim__schedule": "constant",
    "train__microbatch": 1,
    "metrics__experts_every": 1,
}
LAYOUTS = (
    (1, {}),
    (4, {"expert": 4}),
    (4, {"pipeline": 2, "chunks": 2, "schedule": "zb-v", "expert": 2, "zero": 1}),
    (4, {"expert": 2, "expert_tensor": 2, "zero": 3, "dispatch": "all_gather"}),
    (4, {"context": 2, "expert": 4, "zero": 2, "dispatch": "hierarchical", "node_size": 2}),
)


LOSS = 8 * 16 * 61
"""Terms of a loss: tokens times words."""


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts_of_experts(pool, overrides, tmp_path):
    """Weights, optimizer state, the routers' knowledge of the load, and the metered load agree."""
    steps = 2 * len(LAYOUTS)
    pool.run(1, train, overrides(run__dir=tmp_path / "whole", train__steps=steps, **EXPERTS))
    for part, (ranks, parallel) in enumerate(LAYOUTS, 1):
        keys = {f"parallel__{key}": value for key, value in parallel.items()}
        options = {"train__steps": 2 * part, "checkpoint__every": 2, "checkpoint__resume": "latest"}
        pool.run(ranks, train, overrides(**EXPERTS, **options, **keys))
    for line, other in zip(
        read_lines(tmp_path / "run"), read_lines(tmp_path / "whole"), strict=True
    ):
        for key in ("loss", "aux_loss", "mtp_loss", "grad_norm"):
            assert line[key] == promised(other[key])
        for key in ("max_load", "entropy", "bias_norm"):
            assert line["experts"][key] == promised(other["experts"][key])
            assert len(line["experts"][key]) == 4
        assert line["experts"]["tokens"] == other["experts"]["tokens"]
        for place, row in line["experts"]["tokens"].items():
            assert sum(row) == 2 * line["tokens"]
            largest_share = max(row) / (sum(row) / 6)
            assert line["experts"]["max_load"][int(place)] == pytest.approx(largest_share)
            # With six experts, some of four ranks have two.
            assert 1.0 <= line["experts"]["rank_load"][int(place)] <= largest_share * 4 / 3 + 1e-9
    assert other["experts"]["rank_load"] == [1.0] * 4


def test_what_routers_add_to_the_loss_is_told_apart(pool, overrides, tmp_path):
    moe, none = "experts: 6, ffn: 12, balance: sequence", "balance_loss: 0"
    runs = {"with": f"{{{moe}, balance_loss: 0.1, z_loss: 0.05}}", "without": f"{{{moe}, {none}}}"}
    metrics = {}
    for name, experts in runs.items():
        keys = {**EXPERTS, "model__moe": experts, "train__steps": 1}
        pool.run(2, train, overrides(run__dir=tmp_path / name, **keys))
        (metrics[name],) = read_lines(tmp_path / name)
    assert metrics["with"]["aux_loss"] > 0.1 and metrics["without"]["aux_loss"] == 0
    main_loss = metrics["with"]["loss"] - metrics["with"]["aux_loss"]
    assert main_loss == near(metrics["without"]["loss"], LOSS)


@pytest.mark.slow
def test_how_experts_are_trained_may_change_and_what_they_are_may_not(pool, overrides, tmp_path):
    moe, before = "experts: 6, ffn: 12", "capacity: 4.0, z_loss: 0.5"
    keys = {**EXPERTS, "checkpoint__every": 1, "checkpoint__resume": "latest"}
    pool.run(
        1, train, overrides(**{**keys, "model__moe": f"{{{moe}, {before}}}", "train__steps": 1})
    )
    other = "balance_rate: 0.01, balance_loss: 0.01, z_loss: 0.1, jitter: 0.1, capacity: null"
    wrong = {"model__moe": f"{{{moe}, top_k: 1, {other}}}", "train__steps": 2}
    with pytest.raises(RankFailure) as error:
        pool.run(1, build_refused, overrides(**{**keys, **wrong}))
    assert "model.moe.top_k: 2 there, 1 here" in str(error.value)
    assert "balance_rate" not in str(error.value).partition("another run")[2]
    pool.run(1, train, overrides(**{**keys, "model__moe": f"{{{moe}, {other}}}"}))


def test_what_is_dropped_is_in_the_metrics(pool, overrides, tmp_path):
    keys = {**EXPERTS, "model__moe": "{experts: 6, ffn: 12, capacity: 0.5}"}
    pool.run(2, train, overrides(train__steps=2, **keys))
    for line in read_lines(tmp_path / "run"):
        assert 0.5 <= line["experts"]["dropped"] < 1.0
    log = (tmp_path / "run/run.log").read_text()
    assert log.count("layout may change the answer: model.moe.capacity=0.5 (drops") == 1


DENSE = {"model__activation": "swiglu", "model__ffn": 24, "model__layers": 2}
KEPT = {"train__eval_every": 1, "train__eval_samples": 8}


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        slow(1, {}),
        (4, {"expert": 2, "expert_tensor": 2, "zero": 3}),
        slow(4, {"pipeline": 2, "expert": 2}),
    ],
)
def test_experts_that_start_from_a_dense_run_answer_as_it_did(
    ranks, parallel, pool, overrides, tmp_path
):
    keys = overrides(run__dir=tmp_path / "dense", **DENSE, **KEPT, checkpoint__every=4)
    pool.run(1, train, [*keys, "train.steps=4"])
    options = {f"parallel__{key}": value for key, value in parallel.items()}
    upcycled = overrides(
        model__moe="{experts: 4, top_k: 2}",
        checkpoint__weights=tmp_path / "dense/checkpoints",  # its latest checkpoint
        optim__lr=1e-12,
        optim__min_lr=0,
        train__steps=1,
        train__microbatch=1,
        **{**DENSE, **KEPT, **options},
    )
    pool.run(ranks, train, upcycled)
    (first_line,), (*_, dense) = read_lines(tmp_path / "run"), read_lines(tmp_path / "dense")
    # The step of 1e-12 moves a loss by as much times its gradient, whose sum is below 1000.
    assert first_line["eval_loss"] == pytest.approx(dense["eval_loss"], rel=0, abs=1e-12 * 1000)


def test_narrow_experts_start_from_parts_in_turn(pool, overrides, tmp_path):
    keys = overrides(run__dir=tmp_path / "dense", **DENSE, checkpoint__every=1)
    pool.run(1, train, [*keys, "train.steps=1"])
    checkpoint = tmp_path / "dense/checkpoints/step-00000001"
    upcycled = {"checkpoint__weights": checkpoint, "checkpoint__every": 1, "train__steps": 1}
    moe = {"model__moe": "{experts: 6, ffn: 8}", "optim__lr": 1e-12, "optim__min_lr": 0}
    longer = {"model__rotary_base": 50000.0, "model__window": "[8, null]"}
    pool.run(2, train, overrides(**DENSE, **upcycled, **moe, **longer, parallel__expert=2))
    dense, sparse = (
        load_weights(checkpoint),
        load_weights(tmp_path / "run/checkpoints/step-00000001"),
    )
    for expert in range(6):
        part = slice(expert % 3 * 8, expert % 3 * 8 + 8)
        up, down = (sparse[f"blocks.1.moe.experts.{name}.weight"] for name in ("up", "down"))
        for actual, expected in (
            (up[expert], dense["blocks.1.mlp.up.weight"][:, part]),
            (down[expert], dense["blocks.1.mlp.down.weight"][:, part]),
        ):
            assert_within(actual, expected, 1.2e-12, "a step of 1e-12, and its decay")


def test_what_cannot_be_upcycled_is_said_at_once(pool, overrides, tmp_path):
    keys = overrides(run__dir=tmp_path / "dense", **DENSE, checkpoint__every=1)
    pool.run(1, train, [*keys, "train.steps=1"])
    wrong = overrides(
        **{**DENSE, "model__ffn": 20},
        model__moe="{experts: 4, ffn: 16, shared: 1}",
        checkpoint__weights=tmp_path / "dense/checkpoints/step-00000001",
    )
    with pytest.raises(RankFailure) as error:
        pool.run(1, build_refused, wrong)
    for line in (
        "does not fit",
        "model.ffn: 24 there, 20 here",
        "model.moe.ffn=16 does not divide the model.ffn=20 whose parts experts are to be",
        "model.moe.shared=1 has nothing to start from; use model.moe.shared=0",
    ):
        assert line in str(error.value)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def build_refused(keys):
    """Build the trainer directly, so that a mistake is raised and not printed by the entry."""
    make_trainer(load(None, keys))
