"""A budget of chips and time: what it buys, and the model that it is best spent on."""

import math
import re
from itertools import pairwise

import pytest

from megaframe.config import load
from megaframe.errors import UserError
from megaframe.planner.budget import SizeTable, choose_batch, plan_budget
from megaframe.planner.budget_request import parse_budget
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.model_sizes import scale_model
from megaframe.planner.parameter_counts import count_model_parameters
from megaframe.planner.theory.scaling_laws import (
    LAWS,
    compute_batch_tokens,
    compute_tokens_per_parameter,
)

CONFIG = load("llama3-8b", ["model.vocab=32000", "train.seq=2048"])
LAW = ("chinchilla", LAWS["chinchilla"])


def make_table(text, config=CONFIG):
    budget = parse_budget(text)
    constants = get_cluster_constants(budget.cluster)
    config = config.replace(train={"global_batch": choose_batch(config.train, budget)})
    return SizeTable(config, budget, constants, {"recompute": "none"})


def test_the_shape_of_a_config_is_found_again_and_models_grow_with_their_layers():
    assert scale_model(CONFIG.model, CONFIG.model.layers) == CONFIG.model
    sizes = [scale_model(CONFIG.model, layers) for layers in range(1, 80)]
    counts = [count_model_parameters(model, CONFIG.train).total for model in sizes]
    assert counts == sorted(counts)
    for model in sizes:
        assert model.heads % model.kv_heads == 0 and model.hidden == model.heads * model.head_dim
    for layers, model in enumerate(sizes[15:], 16):
        assert model.hidden / layers == pytest.approx(128, rel=0.13)


@pytest.mark.parametrize("key", ["moe", "latent"])
def test_a_model_whose_widths_do_not_follow_is_refused(key):
    config = load({"moe": "mixtral-8x7b", "latent": "deepseek-v2"}[key], [f"model.{key}.ffn=64"]
                  if key == "moe" else ["model.moe=null"])  # fmt: skip
    with pytest.raises(UserError, match=rf"model\.{key} is set.*--config llama3-8b"):
        scale_model(config.model, 4)


@pytest.mark.parametrize(
    ("text", "gpus", "chip", "hours"),
    [
        ("64 h100 for 7 days", 64, "h100", 168),
        ("1,024 b200-ib for 2 weeks", 1024, "b200", 336),
        ("8 A100-80GB for 1.5 hours", 8, "a100-80gb", 1.5),
        ("1 h100 for 30 minutes", 1, "h100", 0.5),
        ("8 h100 for $1,000", 8, "h100", 50),
        ("8 h100-ib for 1000 dollars", 8, "h100", 50),
    ],
)
def test_budgets_are_read(text, gpus, chip, hours):
    budget = parse_budget(text)
    assert (budget.gpus, budget.cluster.chip.name) == (gpus, chip)
    assert budget.seconds == pytest.approx(3600 * hours)
    assert budget.dollars == pytest.approx(gpus * hours * budget.cluster.price)
    assert budget.kilowatt_hours == pytest.approx(gpus * hours * budget.cluster.chip.watts / 1e3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64 h1000 for 7 days", "chip h1000 is unknown; use h100"),
        ("64 h100", 'is not understood; write it as "64 h100 for 7 days"'),
        ("64 h100 for 7 fortnights", "fortnights is no time; write it as"),
        ("64 h100 for $7 days", "is not understood"),
        ("0 h100 for 7 days", "0 chips buy nothing; use 1 to"),
        ("64 h100 for 0 days", "0 buys nothing; use more than 0"),
        ("200000 h100 for 7 days", "200000 chips are more than the 131072 of cluster h100-ib"),
        ("8 t4 for $100", "cluster t4 has no price.*give price in its description, or a time"),
    ],
)
def test_a_budget_that_buys_nothing_is_told_what_would(text, message):
    with pytest.raises(UserError, match=message):
        parse_budget(text)


def test_the_budget_and_the_cluster_name_the_same_chip():
    assert parse_budget("8 h100 for 1 day", "h100-roce").cluster.name == "h100-roce"
    with pytest.raises(UserError, match="cluster b200-ib has the chip b200, not h100"):
        parse_budget("8 h100 for 1 day", "b200-ib")


@pytest.mark.parametrize("name", sorted(LAWS))
def test_the_size_has_as_many_tokens_for_each_parameter_as_the_law_wants(name):
    table, law = make_table("64 h100 for 4 days"), LAWS[name]
    best = table.find_best(law, 1.0)
    larger = table.compute(best.config.model.layers + 1)
    assert best.has_enough_tokens(law, 1.0) and not larger.has_enough_tokens(law, 1.0)
    counted = best.count_for(law)
    wanted = compute_tokens_per_parameter(law, 6 * counted * best.tokens)
    assert wanted <= best.tokens / counted < 1.5 * wanted  # within a step of a layer


def test_more_over_training_trains_a_smaller_model_on_more_tokens():
    table = make_table("8 h100 for 30 days")
    sizes = [table.find_best(LAW[1], dial) for dial in (1.0, 4.0, 16.0)]
    for large, small in pairwise(sizes):
        assert small.parameters < large.parameters and small.tokens > large.tokens
        assert small.tokens / small.parameters == pytest.approx(
            4 * large.tokens / large.parameters, rel=0.5
        )


def test_the_batch_is_near_the_rule_and_divided_by_the_chips():
    budget = parse_budget("48 h100 for 10 days")
    batch = choose_batch(CONFIG.train, budget)
    flops = 0.4 * budget.cluster.chip.get_sustained_flops("bf16") * 48 * 864000
    wanted = compute_batch_tokens(flops) / CONFIG.train.seq
    assert abs(math.log2(batch / wanted)) <= 0.5 and batch % 48 == 0


def test_a_plan_of_a_budget_spends_it():
    budget = parse_budget("8 h100 for 2 days")
    constants = get_cluster_constants(budget.cluster)
    plan = plan_budget(budget, CONFIG, constants, LAW, fixed={"recompute": "none"})
    own = plan_budget(
        budget, CONFIG, constants, LAW, fixed={"recompute": "none"}, given=["train.global_batch"]
    )
    assert own.space.config.train.global_batch == CONFIG.train.global_batch
    assert plan.space.config.train.global_batch == choose_batch(CONFIG.train, budget)
    train, prediction = plan.space.config.train, plan.result.best.prediction
    trained = train.steps * prediction.step_seconds
    assert 0.98 < trained / budget.seconds < 1.0  # the rest is lost to failures
    assert plan.result.best.config.optim.lr != CONFIG.optim.lr
    text = "\n".join(plan.explanation.lines)
    assert "$960 at $2.5 an hour; 268.8 kWh at most" in text
    assert f"{train.steps:,} steps of {train.global_batch} samples" in text
    laws = [row[0] for row in plan.explanation.rows]
    assert laws[0] == "chinchilla" and {*laws} == {*LAWS}


def test_too_little_is_told_how_long_would_be_enough():
    table = make_table("1 h100 for 1 minutes")
    constants = table.constants
    with pytest.raises(UserError, match=r"1 h100 for 1 minutes buy nothing") as error:
        plan_budget(table.budget, CONFIG, constants, LAW)
    (enough,) = re.findall(r"use (1 h100 for [\d.,]+ \w+) or more", str(error.value))
    assert make_table(enough).find_best(LAW[1], 1.0) is not None


def test_a_model_that_no_more_chips_hold_is_said_to_be_too_small():
    table = make_table("1 t4 for 20000 weeks", load("llama3-8b", ["train.precision=fp16"]))
    best = table.find_best(LAW[1], 1.0)
    assert table.is_largest_that_fits(best)
