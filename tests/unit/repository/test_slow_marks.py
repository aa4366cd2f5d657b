"""`make test` leaves out what is marked `slow`, and still shows every mechanism: something of each
test file, each value of each choice under which a run must give the same answer, and each axis.
"""

import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Le
from slow_cases import COLLECTED

from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.schedule import SCHEDULE_NAMES

TESTS = Path(__file__).resolve().parents[2]
ALL_SLOW = {
    "end_to_end/test_expert_balance.py",
    "end_to_end/test_model_command.py",
    "unit/tools/test_ray.py",
    "unit/tools/test_slurm.py",
}
"""Files without a quick test: a training run until experts are balanced, the stages of `make
model`, and engines, which may not be installed: a cluster of Ray, and one of Slurm, which holds a
job for a minute before it runs it again."""
SCHEDULES = "parity/test_pipeline_parallel.py::test_schedules_do_not_change_the_answer"
PARITY = "parity/test_{}.py::test_layouts_do_not_change_the_answer"
SHOWN_BY = {
    "parallel.schedule": (SCHEDULES, "schedule"),
    "parallel.context_kind": (PARITY.format("context_parallel"), "context_kind"),
    "parallel.dispatch": (PARITY.format("expert_parallel"), "dispatch"),
    "parallel.zero": ("parity/test_zero.py::test_stages_do_not_change_the_answer", "zero"),
    "parallel.compress": ("parity/test_gradient_compression.py", "compress"),
    "train.precision": ("end_to_end/test_pretrain.py::test_every_precision_learns", "precision"),
    "train.recompute": (PARITY.format("tensor_parallel"), "recompute"),
    "train.fp8": ("unit/ops/test_fp8.py::test_layouts", "scaling"),
    "optim.name": ("parity/test_optimizers.py::test_a_tied_embedding", "optim"),
    "optim.state": ("parity/test_optimizers.py::test_fewer_bits", "state"),
}
"""The test whose cases have every value of a key but its default, and the value's name in them."""


def collect_all(config):
    """Return all tests that could run here: those of this run, if it is of everything."""
    if config.args == config.getini("testpaths"):
        return config.stash[COLLECTED]

    class Collected:
        def pytest_collection_finish(self, session):
            self.items = session.items

    collected = Collected()
    # What failed before is no matter here, and its file belongs to the run that this one is in.
    arguments = ["--collect-only", "-p", "no:cacheprovider", str(TESTS)]
    paths = [*sys.path]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(arguments, plugins=[collected])
    # Its end takes from the path what this run imports from, also in processes of its own.
    sys.path[:] = paths
    assert status == 0, output.getvalue()
    return collected.items


@pytest.fixture(scope="module")
def quick(pytestconfig):
    """Return {file::test: for each case that is not slow, the (name, value) of its parameters}, for
    all tests that could run here."""
    cases_by_test = {}
    for item in collect_all(pytestconfig):
        file = item.path.relative_to(TESTS).as_posix()
        cases = cases_by_test.setdefault(f"{file}::{getattr(item, 'originalname', item.name)}", [])
        if item.get_closest_marker("slow") is None:
            parameters = getattr(item, "callspec", None)
            cases.append({*list_pairs("", parameters.params)} if parameters else set())
    return cases_by_test


def list_pairs(name, value):
    """Yield (name, value) of everything in a parameter, however deep in mappings and sequences."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from list_pairs(key, inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from list_pairs(name, inner)
    elif isinstance(value, str | int):
        yield name, value


def list_values(key):
    """Return the values of a key, as the config and the schedules' own list have them."""
    if key == "parallel.schedule":
        return {*SCHEDULE_NAMES}
    section, name = key.split(".")
    field = RunConfig.model_fields[section].annotation.model_fields[name]
    if key == "parallel.zero":
        limits = {type(limit): limit for limit in field.metadata}
        return {*range(limits[Ge].ge, limits[Le].le + 1)}
    kinds = get_args(field.annotation)
    # Next to a choice there may be parts of extensions.
    choices = next((kind for kind in kinds if get_origin(kind) is Literal), field.annotation)
    # All parity is tested in fp64.
    return {*get_args(choices)} - {field.default, "fp64"}


def test_every_file_shows_something(quick):
    files = {test.partition("::")[0] for test in quick}
    files_with_cases = {test.partition("::")[0] for test, cases in quick.items() if cases}
    assert files - files_with_cases == ALL_SLOW & files
    assert all((TESTS / file).exists() for file in ALL_SLOW)


@pytest.mark.parametrize("key", SHOWN_BY)
def test_every_value_of_a_choice_is_shown(key, quick):
    prefix, name = SHOWN_BY[key]
    cases = [case for test, some in quick.items() if test.startswith(prefix) for case in some]
    assert list_values(key) <= {value for case in cases for at, value in case if at == name}


def test_every_axis_is_compared(quick):
    cases = [case for test, some in quick.items() if "change_the_answer" in test for case in some]
    axes_shown = {
        name for case in cases for name, value in case if isinstance(value, int) and value > 1
    }
    assert {*Layout.__dataclass_fields__} <= axes_shown


def test_make_test_leaves_out_what_is_slow_and_nothing_else():
    """CI runs everything."""
    makefile = (TESTS.parent / "Makefile").read_text()
    recipes = dict(re.findall(r"^(test\S*):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    marks = {target: re.findall(r'-m "(.+?)"', recipe) for target, recipe in recipes.items()}
    assert marks["test"] == ["not slow"] and marks["test-all"] == []
    assert "make test-all" in (TESTS.parent / ".ci/run").read_text()
