"""Tools with extensions: those that take a user's own config load what it names, and those that
read a checkpoint load only what their command line names. An author can check a layer."""

import subprocess
import sys

import pytest
from entry_runs import train
from repo_copy import ROOT

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
UNSUMMED = {**RIGHT, "USE": "self.gain.use().sum() / self.gain.spec.shape[0]"}


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


def call(tool, *words, cwd=ROOT):
    command = [sys.executable, str(ROOT / "tools" / tool), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


BLOCKS = "model.blocks=[{feed_forward: squares}]"
SMALL = ("model.layers=2", "model.hidden=16", "model.heads=2", "model.vocab=64")


def test_a_plan_knows_the_parts_of_its_config(write):
    own = f"run.extensions=[{write(RIGHT)}]"
    status, text = call("plan.py", "--gpus", 2, own, *SMALL, BLOCKS)
    assert status == 0 and "seconds of a step" in text, text
    status, text = call("plan.py", "--gpus", 2, *SMALL, BLOCKS)
    assert status == 2 and "squares" in text


def test_tools_load_no_part_because_a_checkpoint_has_it(write, overrides, tmp_path, pool):
    path = write(RIGHT)
    run = overrides(
        train__steps=2,
        checkpoint__every=2,
        run__extensions=f"[{path}]",
        model__blocks="[{feed_forward: squares}]",
        data__tokenizer="bytes",
        model__vocab=257,
    )
    pool.run(1, train, run)
    saved = tmp_path / "run/checkpoints/step-00000002"
    words = ("--checkpoint", saved, "--prompt", "a", "--tokens", 2)
    status, text = call("generate.py", *words)
    assert status == 2 and f"or to a tool --extension {path}" in text, text
    status, text = call("generate.py", *words, "--extension", path)
    assert status == 0, text


CHECK = ("--config", "configs/demo.yaml", *SMALL, BLOCKS)


@pytest.mark.quick(when=lambda words, status, texts: status == 0)
@pytest.mark.parametrize(
    ("words", "status", "texts"),
    [
        (RIGHT, 0, ["blocks.1.squares", "SquaresDescription", "all of it is so"]),
        (LIES, 1, ["X ", "blocks.0.squares (SquaresDescription): bytes kept", "own.py:"]),
        (UNSUMMED, 1, ["X parallel.tensor=2: largest difference ", "is allowed"]),
    ],
    ids=["right", "lies", "unsummed"],
)
def test_an_author_checks_a_layer(words, status, texts, write):
    found, text = call("check_layers.py", *CHECK, f"run.extensions=[{write(words)}]")
    assert found == status, text
    assert all(each in text for each in texts), text
