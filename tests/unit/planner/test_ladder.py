"""Ladders: the runs that follow from one config, and the law that small runs are fitted to.

Tests `megaframe.planner.ladder` and `megaframe.planner.theory.loss_fit`.
"""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megaframe.config import load
from megaframe.errors import UserError
from megaframe.planner.ladder import Ladder
from megaframe.planner.parameter_counts import count_model_parameters
from megaframe.planner.theory.loss_fit import ComputeLaw, fit_compute_law

LLAMA = load("llama3-8b", ["model.vocab=32000", "train.seq=2048", "train.global_batch=256"])
DEMO = load(None, ["model.layers=4", "model.hidden=256", "model.heads=4", "model.vocab=100",
                   "model.ffn=768", "train.global_batch=16", "train.steps=100", "optim.warmup=10",
                   "optim.min_lr=1e-4", "optim.lr=1e-3", "optim.decay=80"])  # fmt: skip


@given(
    irreducible=st.floats(0.0, 3.0),
    factor=st.floats(0.5, 5.0),
    exponent=st.floats(0.03, 0.5),
    sizes=st.lists(st.floats(1.5, 8.0), min_size=3, max_size=5),
)
@example(irreducible=0.0, factor=1.0, exponent=0.484375, sizes=[2.0, 2.0, 2.0, 5.0])
def test_a_law_is_found_again_and_says_what_comes(irreducible, factor, exponent, sizes):
    flops = [1e12]
    for size in sizes:
        flops.append(flops[-1] * size)
    law = ComputeLaw(irreducible, factor, exponent, 1e13)
    losses = [law.compute_loss(size) for size in flops]
    fitted = fit_compute_law(flops[:-1], losses[:-1])
    for size, loss in zip(flops, losses, strict=True):
        assert fitted.compute_loss(size) == pytest.approx(loss, rel=1e-4)


def test_what_never_falls_below_nothing_is_no_negative_loss():
    """By these three losses alone E would be below 0."""
    law = fit_compute_law([1.0, 2.0, 4.0], [8.0, 4.5, 0.5])
    assert law.irreducible == 0.0 and law.compute_loss(1e6) > 0.0


def test_too_few_runs_and_losses_that_do_not_fall_are_refused():
    with pytest.raises(UserError, match=r"2 runs of different sizes are too few to fit the 3 numb"):
        fit_compute_law([1.0, 2.0, 2.0], [3.0, 2.0, 2.1])
    with pytest.raises(UserError, match=r"the losses 2, 2\.5, 3 do not fall with the FLOPs"):
        fit_compute_law([1.0, 2.0, 4.0], [2.0, 2.5, 3.0])


def test_a_config_is_the_rung_of_its_own_depth():
    rung = Ladder(DEMO, 20.0, 1).make_rung(4)
    own = {"model.hidden": "256", "model.heads": "4", "model.ffn": "768", "optim.lr": "0.001"}
    own |= {"train.global_batch": "16", "optim.min_lr": "0.0001", "model.mup_base_hidden": "256"}
    assert own.items() <= rung.keys.items()
    assert rung.parameters == count_model_parameters(DEMO.model, DEMO.train).total
    steps = int(rung.keys["train.steps"])
    assert rung.tokens == steps * 16 * DEMO.train.seq
    assert 0 <= 20 * rung.parameters - rung.tokens < 16 * DEMO.train.seq
    assert int(rung.keys["optim.warmup"]) == round(steps / 10)
    assert int(rung.keys["optim.decay"]) == round(0.8 * steps)


def test_one_dial_turns_everything():
    """Twice the depth: twice the widths, about 8 times the parameters and tokens, a batch that
    grows as FLOPs^0.3271, and a learning rate that grows with its root."""
    small, large = (Ladder(DEMO, 20.0, 1).make_rung(layers) for layers in (4, 8))
    for key in ("model.hidden", "model.heads", "model.kv_heads", "model.ffn"):
        assert int(large.keys[key]) == 2 * int(small.keys[key]), key
    growth = large.parameters / small.parameters
    assert growth == pytest.approx(8, rel=0.1)
    batch = int(large.keys["train.global_batch"]) / 16
    assert batch == pytest.approx(growth ** (2 * 0.3271), rel=0.05)
    rate = float(large.keys["optim.lr"]) / float(small.keys["optim.lr"])
    assert rate == pytest.approx(math.sqrt(batch), rel=1e-3)
    assert large.keys["model.mup_base_hidden"] == small.keys["model.mup_base_hidden"] == "256"


def test_batches_are_whole_microbatches_of_all_data_ranks():
    config = load(None, ["model.vocab=100", "train.global_batch=32", "train.microbatch=4"])
    for layers in (3, 6, 24):
        assert int(Ladder(config, 20.0, 2).make_rung(layers).keys["train.global_batch"]) % 8 == 0


def test_a_depth_without_a_width_names_the_nearest():
    with pytest.raises(UserError, match=r"6 layers have no width: .* multiples of 4; use 4 or 8$"):
        Ladder(LLAMA, 20.0, 1).make_rung(6)
    with pytest.raises(UserError, match=r"multiples of 4; use 4$"):
        Ladder(LLAMA, 20.0, 1).make_rung(1)


def test_too_few_rungs_name_a_ladder_that_is_one():
    message = (
        r"--depths 4,40 has 1 rungs below --target 16, and a law needs 3; use --depths 4,8,12$"
    )
    with pytest.raises(UserError, match=message):
        Ladder(LLAMA, 20.0, 1).make_rungs([4, 40], 16)
    with pytest.raises(UserError, match=r"use --depths 4,8,12 and --target 16$"):
        Ladder(LLAMA, 20.0, 1).make_rungs([4], 8)
    ladder = Ladder(LLAMA, 20.0, 1).make_rungs([12, 4, 8, 40, 8], 16)
    assert [rung.layers for rung in ladder] == [4, 8, 12, 16]


def test_tokens_that_make_no_step_name_how_many_do():
    with pytest.raises(UserError, match=r"are 2,675 tokens for 4 layers, less .* use 0\.01 or"):
        Ladder(DEMO, 0.001, 1).make_rung(4)
    with pytest.raises(UserError, match=r"model\.moe is set"):
        Ladder(load("mixtral-8x7b", ["model.vocab=100"]), 20.0, 1).make_rung(4)
