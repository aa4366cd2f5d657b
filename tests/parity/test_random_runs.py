"""Random legal runs give the answer of one rank to 1e-10 in fp64: models of any parts, on 1 to 8
ranks. The generator draws every key that keeps the promise, and makes a failure small.
"""

from collections import defaultdict
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import get_args

import parity_fuzz
import pytest
import random_runs
from hypothesis import given, settings
from hypothesis import seed as seed_with
from parity_runs import run_with_rounded_weights
from planted_faults import run_without_summing_gains
from pydantic import ValidationError
from random_runs import (
    AXES,
    NOT_DRAWN,
    NOT_PROMISED,
    RandomRun,
    find_part_names,
    repair,
    use_examples,
)
from section_strategies import make_strategy

from megaframe.config import MoEConfig, RunConfig
from megaframe.config.blocks import BlockConfig
from megaframe.config.model import IndexerConfig
from megaframe.config.registry import get_registry
from megaframe.schedule import SCHEDULE_NAMES
from megaframe.training.rank_pool import RankPool
from megaframe.validate.run import find_mistakes

DRAWN_ROLES = {"mixer", "feed_forward", "norm", "activation", "loss", "optimizer"}


def test_layouts_do_not_change_the_answer(pool):
    check = parity_fuzz.ParityCheck(pool)
    parity_fuzz.search(check, 3, seed=1, ranks=4)
    assert check.runs == 3 and check.decided_by_rounding == 0


@pytest.mark.slow
def test_thirty_runs_on_up_to_eight_ranks():
    """`make parity-fuzz` runs more of them."""
    pool = RankPool(8)
    try:
        check = parity_fuzz.ParityCheck(pool)
        parity_fuzz.search(check, 30, seed=2)
    finally:
        pool.close()
    assert check.runs == 30 and check.decided_by_rounding <= 2


STEEP = {
    "model": {
        "blocks": [{"mixer": "gated_linear", "feed_forward": "low_rank"}],
        **{"ffn": 18, "activation": "swiglu_clamped", "embedding_scale": 0.5, "mtp_depth": 1},
        **{"layers": 3, "hidden": 16, "heads": 8, "vocab": 11},
    },
    "train": {"seq": 9, "global_batch": 1, "microbatch": 1},
    "parallel": {},
    "optim": {"name": "adamw", "eps": 1e-3},
    "run": {"extensions": [str(path) for path in random_runs.EXAMPLES]},
}
"""Weights that change by 1e-16 change the second norm of its gradients by 2e-8."""
SHALLOW = {
    **{"model": {"layers": 1, "norm": "rmsnorm"}, "train": {"global_batch": 4}},
    "optim": {"name": "sgd"},
}


def test_a_run_that_rounding_decides_is_counted_apart(pool):
    """Its weights are rounded otherwise; whether a layout does so is up to the processor."""
    check = parity_fuzz.ParityCheck(pool, run_with_rounded_weights)
    check.check(RandomRun(1, STEEP))
    assert check.decided_by_rounding == 1
    with pytest.raises(AssertionError):  # but not if it differs without that
        parity_fuzz.ParityCheck(pool, run_without_summing_gains).check(
            RandomRun(2, {**SHALLOW, "parallel": {"tensor": 2}})
        )


def test_weights_are_rounded_otherwise_each_time(pool):
    arguments = SHALLOW["model"], SHALLOW["train"], {}, False, False, False, SHALLOW["optim"]
    first, again, other = (
        pool.run(1, partial(run_with_rounded_weights, seed=seed), *arguments)[0]
        .whole("head.weight")
        .tolist()
        for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.slow
def test_a_planted_fault_is_found_and_made_small(pool, monkeypatch):
    """It is found by running. What is tried to make it small is judged by what all runs with this
    fault have, tensor ranks, and the smallest is run again."""
    parity_check, found = parity_fuzz.ParityCheck(pool, run_without_summing_gains), []

    def check(random_run):
        if not found:
            with suppress(AssertionError):
                parity_check.check(random_run)
                return
            found.append(random_run)
        # One line fails: hypothesis makes failures of other lines small apart from each other.
        assert random_run.sections["parallel"].get("tensor", 1) == 1

    with pytest.raises(parity_fuzz.ParityFailure) as failure:
        parity_fuzz.search(SimpleNamespace(check=check, runs=0), 100, seed=2, ranks=4)
    smallest = failure.value.random_run
    model, parallel = smallest.sections["model"], smallest.sections["parallel"]
    # Whether it gets from 4 ranks to 2 is up to what the seed draws.
    assert (parallel["tensor"], model["layers"]) == (2, 1)
    assert "blocks" not in model and not smallest.packed and not smallest.ragged
    arguments = str(failure.value).rpartition("run only this: ")[2].split()[2:]
    monkeypatch.setattr("sys.argv", ["parity_fuzz.py", *arguments])
    assert parity_fuzz.main() == 0  # without the fault
    monkeypatch.setattr(parity_fuzz, "run", run_without_summing_gains)
    with pytest.raises(AssertionError):
        parity_fuzz.main()


@pytest.fixture(scope="module")
def drawn():
    """Return random runs, of which few were refused by the checks of a config. From many seeds:
    hypothesis varies what it has drawn from one."""
    runs, repaired = [], []

    def repair_and_count(sections, ranks):
        repaired.append(repair(sections, ranks))
        return repaired[-1]

    @settings(parity_fuzz.SETTINGS, max_examples=24)
    @given(random_runs.random_runs())
    def draw(random_run):
        runs.append(random_run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_runs, "repair", repair_and_count)
        with use_examples():
            for seed in range(20):
                seed_with(seed)(draw)()
    assert repaired.count(False) <= 0.02 * len(repaired)
    return runs


@pytest.mark.slow
def test_random_runs_are_legal(drawn):
    with use_examples():
        for run in drawn:
            assert not find_mistakes(RunConfig(**run.sections), run.ranks, data=False)


@pytest.mark.slow
def test_every_part_of_the_examples_that_models_and_optimizers_have_is_drawn(drawn):
    with use_examples():
        expected = {name for role, name in get_registry().parts if role in DRAWN_ROLES}
        assert expected and expected == set().union(*(find_part_names(r.sections) for r in drawn))


def collect_values(value, path, values):
    """Add each value in a config to the set of its path; items of a list have that of the list, and
    a second mixer that of the first one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            key = "mixer" if key == "second_mixer" else key
            collect_values(inner, f"{path}.{key}" if path else key, values)
    elif isinstance(value, list):
        for inner in value:
            collect_values(inner, path, values)
    else:
        values[path].add(value)


def list_paths(section, prefix, skipped=()):
    """Return the paths of all keys of a section and those inside it, and in what unions offer."""
    paths = []
    for name, field in section.model_fields.items():
        if name in skipped:
            continue
        inner = find_sections(field.annotation)
        paths += [path for kind in inner for path in list_paths(kind, f"{prefix}.{name}")]
        paths += [] if inner else [f"{prefix}.{name}"]
    return paths


def find_sections(annotation):
    """Return the section classes in a type."""
    if hasattr(annotation, "model_fields"):
        return [annotation]
    return [kind for member in get_args(annotation) for kind in find_sections(member)]


@pytest.mark.slow
def test_every_key_is_drawn(drawn):
    values = defaultdict(set)
    for run in drawn:
        collect_values(run.sections, "", values)
    sections = {
        name: RunConfig.model_fields[name].annotation for name in NOT_DRAWN if "." not in name
    }
    expected = [
        path
        for name, section in sections.items()
        for path in list_paths(section, name, {*NOT_DRAWN[name], *NOT_PROMISED.get(name, ())})
    ]
    expected += list_paths(BlockConfig, "model.blocks", {"second_mixer"})
    expected += list_paths(IndexerConfig, "model.indexer")
    expected += list_paths(MoEConfig, "model.moe", NOT_PROMISED["model.moe"])
    # Scaling is drawn as a whole: most single keys of it are refused beside most others.
    expected = [path for path in expected if ".rotary_scaling." not in path]
    missing = sorted(path for path in set(expected) if path not in values)
    assert not missing
    assert values["parallel.schedule"] >= {*SCHEDULE_NAMES}
    assert values["parallel.zero"] == {0, 1, 2, 3}
    assert {"attention", "latent"} <= values["model.blocks.mixer.kind"]
    for axis in (*AXES, "expert", "expert_tensor", "data_replicate"):
        assert len(values[f"parallel.{axis}"]) > 1, axis
    for path in expected:
        choices = find_choices(path)
        assert choices <= values[path] | {None}, path


def find_choices(path):
    """Return the values of a key that is a choice of words; empty for others."""
    section = RunConfig
    for name in path.split("."):
        field = getattr(section, "model_fields", {}).get(name)
        if field is None:
            return set()
        section = field.annotation
    return {*get_args(section)} if all(isinstance(a, str) for a in get_args(section)) else set()


def test_what_does_not_fit_is_left_out():
    sections = {
        "model": {"vocab": 11, "hidden": 8, "heads": 2, "rotary_fraction": 0.5, "head_dim": 6},
        "train": {"global_batch": 2, "offload": True, "mtp_weight": 0.5},
        "parallel": {"tensor_chunks": 2},
    }
    assert repair(sections, 1)
    assert sections["train"] == {"global_batch": 2}
    assert sections["model"] == {"vocab": 11, "hidden": 8, "heads": 2, "head_dim": 6}
    sections["model"]["layers"] = 1
    sections["parallel"] = {"pipeline": 2}
    assert not repair(sections, 2)


def test_a_type_without_known_values_is_named():
    with pytest.raises(TypeError, match=r"no values are known for .*bytes.*give a strategy"):
        make_strategy(bytes, {})
    with pytest.raises(ValidationError):
        RunConfig(**RandomRun(sections={"model": {"nothing": 1}}).sections)
