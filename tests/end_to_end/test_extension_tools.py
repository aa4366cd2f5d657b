"""Tools with extensions that take a user's own config load what it names. An author can check a
layer."""

import json
import sys
from contextlib import closing
from functools import partial

import pytest
from programs import load_program
from repo_copy import ROOT
from tool_process import run_tool

from megaframe.config.registry import Registry, use_registry
from megaframe.errors import UserError
from megaframe.extensions import load_named_extensions, load_with_extensions
from megaframe.run_queue.sweep import Sweep
from megaframe.training.layer_check.layouts import SmallRun
from megaframe.training.rank_pool import RankPool

LAYER = '''
from dataclasses import dataclass
from typing import Literal

import torch

from megaframe.architecture.layer import FeedForwardDescription, SavedActivations
from megaframe.architecture.linear import LinearSpec
from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.extensions import FeedForwardPart
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Linear


class Squares(FeedForwardPart):
    kind: Literal["squares"] = "squares"
    """Two products with a square between them."""

    def describe(self, model, output_std):
        return SquaresDescription(model.hidden, 2 * model.hidden, model.init_std, output_std)


@dataclass(frozen=True)
class GainDescription:
    width: int

    def declare_parameters(self, name):
        yield ParamSpec(f"{name}.gain", (self.width,), Constant(1.0), role="gain", axes=AXES)


@dataclass(frozen=True)
class SquaresDescription(FeedForwardDescription):
    hidden: int
    width: int
    std: float
    output_std: float

    name = "squares"

    @property
    def parts(self):
        return {
            "up": LinearSpec((self.hidden,), (self.width,), self.std, split=0),
            "gain": GainDescription(self.width),
            "down": LinearSpec((self.width,), (self.hidden,), self.output_std, split=1),
        }

    def count_saved(self, parallel, recompute):
        return SavedActivations(SAVED * self.width)

    @property
    def inner_elements(self):
        return self.width

    @property
    def widest(self):
        return self.width

    def make_layer(self, name, run):
        return SquaresLayer(name, self.parts, run)


class SquaresLayer(Module):
    def __init__(self, name, parts, run):
        self.up = Linear(f"{name}.up", parts["up"], run.tensor)
        (self.gain,) = map(Parameter, parts["gain"].declare_parameters(f"{name}.gain"))
        self.down = Linear(f"{name}.down", parts["down"], run.tensor)

    def __call__(self, x, norm, context, state):
        up = self.up(x, state.deferred, norm)
        return self.down(up * up * USE, state.deferred)


def register(registry):
    registry.register(Squares)
'''
RIGHT = {"AXES": '{0: "tensor"}', "SAVED": "3", "USE": "self.gain.use()"}
LIES = {**RIGHT, "SAVED": "2"}
# The mean of all gains, without those of the other tensor rank.
WRONG = {**LIES, "USE": "self.gain.use().sum() / self.gain.spec.shape[0]"}


@pytest.fixture
def write(tmp_path):
    def write(words):
        text = LAYER
        for word, value in words.items():
            text = text.replace(word, value)
        path = tmp_path / "own.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def call(tool, *words):
    done = run_tool(f"tools/{tool}", *words)
    return done.returncode, done.stdout + done.stderr


sys.path.append(str(ROOT / "tools"))  # at the end: tools bear names of installed packages


BLOCKS = "model.blocks=[{feed_forward: squares}]"
SMALL = ("model.layers=2", "model.hidden=16", "model.heads=2", "model.vocab=64")


def test_a_plan_knows_the_parts_of_its_config(write):
    own = f"run.extensions=[{write(RIGHT)}]"
    status, text = call("plan.py", "--gpus", 2, own, *SMALL, BLOCKS)
    assert status == 0 and "seconds of a step" in text, text
    status, text = call("plan.py", "--gpus", 2, *SMALL, BLOCKS)
    assert status == 2 and "squares" in text


def test_sweeps_and_the_network_lab_know_the_parts_of_their_config(write, tmp_path):
    words = [*SMALL, BLOCKS, f"run.dir={tmp_path}"]
    own = f"run.extensions=[{write(RIGHT)}]"
    find_run_folder = load_program("tools/netlab.py").find_run_folder
    with use_registry(Registry()):
        sweep = Sweep.parse([own, *words], ["optim.lr=[0.01, 0.02]"], None)
        assert own in sweep.words
        assert find_run_folder(["pretrain_gpt.py", own, *words]) == tmp_path
    for read in (
        lambda: Sweep.parse(words, ["optim.lr=[0.01]"], None),
        lambda: find_run_folder(["pretrain_gpt.py", *words]),
    ):
        with use_registry(Registry()), pytest.raises(UserError, match="squares"):
            read()


@pytest.mark.slow
def test_trials_and_launched_ranks_load_what_the_config_names(write, overrides, tmp_path):
    words = [
        *overrides(train__steps=2, checkpoint__every=2, run__dir=tmp_path / "sweep"),
        *(BLOCKS, f"run.extensions=[{write(RIGHT)}]"),
    ]
    status, text = call("run_queue.py", "--sweep", "optim.lr=[0.01]", "--", *words)
    assert status == 0, text
    records = json.loads((tmp_path / "sweep/queue.json").read_text())["runs"]
    assert records["lr=0.01"]["state"] == "done"
    again = [*words, f"run.dir={tmp_path / 'run'}", "checkpoint.resume=latest"]
    status, text = call("launch/node.py", "--no-doctor", *again)
    assert status == 0, text
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2
    words.pop()
    for tool, options in (
        ("run_queue.py", ("--sweep", "optim.lr=[0.01]", "--")),
        ("launch/node.py", ()),
    ):
        status, text = call(tool, *options, *words, "checkpoint.resume=latest")
        assert status == 2 and "squares" in text, text


CHECK = ("--config", "configs/demo.yaml", *SMALL, BLOCKS)
CASES = {
    "right": (RIGHT, 0, ["blocks.1.squares", "SquaresDescription", "all of it is so"]),
    "wrong": (
        WRONG,
        1,
        [
            *("X ", "blocks.0.squares (SquaresDescription): bytes kept", "own.py:"),
            *("X parallel.tensor=2: largest difference ", "is allowed"),
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_author_checks_a_layer_by_a_command(case, write):
    words, status, texts = CASES[case]
    found, text = call("check_layers.py", *CHECK, f"run.extensions=[{write(words)}]")
    assert found == status, text
    assert all(each in text for each in texts), text


def test_a_check_under_two_layouts_says_what_is_wrong(write, capsys):
    path = write(WRONG)
    tool = load_program("tools/check_layers.py")
    ranks = RankPool(2, partial(load_named_extensions, [path]))
    with use_registry(Registry()), closing(ranks):
        config = load_with_extensions(None, [*SMALL, BLOCKS, f"run.extensions=[{path}]"])
        small = SmallRun(config.model, config.optim, config.run)
        lies = tool.check_descriptions(small.list_measured_layouts()[:1], ranks)
        failures = tool.check_parity(small.list_parity_layouts()[:2], ranks)
    printed = capsys.readouterr().out
    assert "blocks.1.squares" in printed and "SquaresDescription" in printed
    assert any("blocks.0.squares (SquaresDescription): bytes kept" in each for each in lies)
    assert all("own.py:" in each for each in lies if "SquaresDescription" in each)
    (failure,) = failures
    assert failure.startswith("X parallel.tensor=2: largest difference ")
