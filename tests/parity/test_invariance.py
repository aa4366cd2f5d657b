"""The options under which layouts give different answers. The table in docs/design.md says by how
much, and a run says so at its start; both are checked against two steps in fp64.
"""

from pathlib import Path

import pytest
from parity_runs import MODELS, run
from slow_cases import mark_slow
from tolerances import PROMISE

from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.training.dry_run import describe_run
from megaframe.validate.invariance import describe_layout_dependence, find_layout_dependence

DESIGN = Path(__file__).resolve().parents[2] / "docs/design.md"
COLUMNS = [(2, {}, 4), (2, {"tensor": 2}, 4), (2, {"pipeline": 2}, 4), (1, {}, 2)]
"""(ranks, layout, microbatch) of each column of the table."""
SHARDS = {"hidden": 128, "heads": 2, "ffn": 128}
"""Wide enough for blocks of 128, which two tensor ranks divide."""
MODEL_OF = {"train.fp8": SHARDS, "model.moe.capacity": {"bias": False}}


def read_table():
    """Return {option: its cells} of the table."""
    promise = DESIGN.read_text().partition("## The promise")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in promise.splitlines() if line[:3] == "| `"]
    return {row[0].strip("`"): row[2:] for row in rows}


def make_sections(option):
    """Return the config sections that set an option."""
    key, _, value = option.partition("=")
    section, name = key.split(".", 1)
    if name == "moe.capacity":
        moe = {"experts": 4, "ffn": 12, "top_k": 2, "capacity": float(value)}
        return {"model": {"moe": moe, **MODEL_OF[key]}}
    return {"model": MODEL_OF.get(key, {}), section: {name: value}}


def run_option(pool, sections, ranks, parallel, microbatch):
    """Train two steps with an option; return the results of all ranks."""
    parallel = {**parallel, **sections.get("parallel", {})}
    train = {**sections.get("train", {}), "microbatch": microbatch}
    model = {**MODELS["gpt2"], **sections["model"]}
    return pool.run(ranks, run, model, train, parallel, False, False, False, sections.get("optim"))


def measure_difference(results, expected):
    """Return the largest difference of a weight."""
    return max(
        float((piece - expected.whole(name)[box.slices]).abs().max())
        for rank in results
        for name, pieces in rank.weights.items()
        if not name.startswith("optimizer.")
        for box, piece in pieces
    )


# A limit and a scale are quick.
@pytest.mark.parametrize(
    "option", mark_slow(read_table(), except_for=["model.moe.capacity=0.5", "train.fp8=tensor"])
)
def test_the_table_says_how_far_answers_come_apart(option, pool):
    """The table is right within a factor of three."""
    sections = make_sections(option)
    (expected,) = run_option(pool, sections, 1, {}, 4)
    for cell, column in zip(read_table()[option], COLUMNS, strict=True):
        difference = measure_difference(run_option(pool, sections, *column), expected)
        if cell == "same":
            assert difference < PROMISE, column
        else:
            assert PROMISE < float(cell) / 3 < difference < 3 * float(cell), column


@pytest.mark.parametrize("option", read_table())
def test_each_is_named_when_it_is_used(option):
    sections = make_sections(option)
    config = RunConfig(
        **{**sections, "model": {"vocab": 37, **MODELS["gpt2"], **sections["model"]}}
    )
    (exception,) = find_layout_dependence(config)
    assert exception.startswith(f"{option} (")


def test_all_of_a_run_stand_in_one_line_and_a_run_without_any_says_nothing():
    model = {"vocab": 37, "bias": True}
    config = RunConfig(model=model, optim={"name": "lion"}, parallel={"compress": "topk"})
    (line,) = describe_layout_dependence(find_layout_dependence(config))
    assert line.startswith("layout may change the answer: parallel.compress=topk (")
    assert "; optim.name=lion (" in line
    assert describe_run(config, Layout(data=2)).splitlines()[-1] == line
    for calm in ({}, {"state": "bf16"}, {"name": "muon"}):
        calm_run = RunConfig(model=model, optim=calm)
        assert not list(describe_layout_dependence(find_layout_dependence(calm_run)))
