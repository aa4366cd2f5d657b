"""A fault in what a part says of itself is one message with part, method, file and line.

Tests `megaframe.config.part_calls`.
"""

import pytest

from megaframe.architecture.model_blocks import describe_norm
from megaframe.architecture.optimizer_state import count_moments
from megaframe.architecture.output_head import compute_loss_bytes_per_logit
from megaframe.config.registry import Registry, use_registry
from megaframe.data.blended_dataset import BlendedDataset
from megaframe.errors import UserError
from megaframe.extensions import load_with_extensions
from megaframe.optim.lr_schedule import compute_learning_rate
from megaframe.validate.run import find_mistakes

NORM = '''
from dataclasses import dataclass
from typing import Literal
from megaframe.architecture.layer import SavedActivations
from megaframe.architecture.norm import NormDescription
from megaframe.extensions import NormPart

@dataclass(frozen=True)
class Nothing(NormDescription):
    sizes: object = ()
    saved_statistics = SavedActivations()

    def declare_parameters(self, name):
        return iter(())

    def compute(self, x):
        return x

class Mine(NormPart):
    kind: Literal["mine"] = "mine"
    """Norms nothing."""

    def describe(self, model):
        return Nothing(model.hidden)

def register(registry):
    registry.register(Mine)
'''


@pytest.fixture(autouse=True)
def registry():
    with use_registry(Registry()):
        yield


@pytest.fixture
def load_own(tmp_path):
    def load_own(text, *options):
        path = tmp_path / "own.py"
        path.write_text(text, encoding="utf-8")
        options = [f"run.extensions=[{path}]", *options, "model.vocab=64"]
        return load_with_extensions(None, options)

    return load_own


@pytest.mark.parametrize(
    ("replaced", "by", "message"),
    [
        ("return Nothing(model.hidden)", "return 3", "returns int, which is no NormDescription"),
        ("return Nothing(model.hidden)", "return 1 / 0", "own.py:24: ZeroDivisionError: division"),
        ("compute", "calculate", "returns Nothing, which lacks compute(x, *parameters)"),
        ("declare_parameters", "declare", "own.py:24: TypeError: Can't instantiate abstract class"),
        ("sizes: object = ()", "sizes: object = ([],)", "cannot be compared by value (unhashable"),
        ("return x", "return 2 * x", None),
    ],
)
def test_a_norm_is_checked_like_a_mixer(replaced, by, message, load_own):
    config = load_own(NORM.replace(replaced, by), "model.norm=mine")
    if message is None:
        assert find_mistakes(config, 1, data=False) == []
        return
    with pytest.raises(UserError) as error:
        describe_norm(config.model)
    text = str(error.value)
    assert message in text and "mine: Mine.describe" in text and "own.py:23" in text


def test_a_norm_of_our_own_kind_needs_no_code(load_own):
    text = NORM.replace("class Nothing(NormDescription)", "class Nothing(RMSNormDescription)")
    text = text.replace("import NormDescription", "import RMSNormDescription")
    text = text.replace("compute", "calculate").replace("(model.hidden)", "(model.hidden, 1e-3)")
    assert describe_norm(load_own(text, "model.norm=mine").model).eps == 1e-3


PART = '''
from typing import Literal
from megaframe.extensions import {base}

class Mine({base}):
    kind: Literal["mine"] = "mine"
    """Says what is not so."""

    def {method}(self, *arguments):
        {body}

    def {other}(self, *arguments):
        return None

def register(registry):
    registry.register(Mine)
'''


def count_losses(config):
    return compute_loss_bytes_per_logit(config.model, config.train, 4)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "own.py:10: ZeroDivisionError: division by zero"),
        ("return 'two'", "returns str, which is no "),
    ],
)
@pytest.mark.parametrize(
    ("base", "option", "method", "other", "ask"),
    [
        (
            "ActivationPart",
            "model.activation",
            "count_saved",
            "compute",
            lambda config: find_mistakes(config, 1, data=False),
        ),
        ("LossPart", "train.loss", "count_logit_tensors", "compute_losses", count_losses),
        (
            "OptimizerPart",
            "optim.name",
            "count_moments",
            "make_transforms",
            lambda config: count_moments(config.optim),
        ),
        (
            "SchedulePart",
            "optim.schedule",
            "compute_share",
            "nothing",
            lambda config: compute_learning_rate(config.optim, config.optim.warmup, 9),
        ),
    ],
)
def test_what_other_parts_say_is_checked(base, option, method, other, ask, body, message, load_own):
    text = PART.format(base=base, method=method, other=other, body=body)
    config = load_own(text, f"{option}=mine")
    with pytest.raises(UserError) as error:
        ask(config)
    text = str(error.value)
    assert message in text and f"mine: Mine.{method}" in text and "own.py:9" in text


TRANSFORM = PART.format(
    base="DataTransformPart", method="includes_validation", other="transform", body="return 'yes'"
)


def test_whether_validation_is_changed_is_checked(load_own, corpus):
    sources = f"data.sources=[{{path: {corpus}, split: [0.5, 0.5, 0.0]}}]"
    config = load_own(TRANSFORM, sources, "data.transforms=[mine]", "train.seq=8")
    with pytest.raises(UserError, match=r"Mine.includes_validation \(.*own.py:9\) returns str"):
        BlendedDataset(config.model, config.train, config.data, "validation", 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"Mine.make_transforms \(.*own.py:9\) fails at .*own.py:10: ZeroDivision"),
        ("return None", r"Mine.make_transforms \(.*own.py:9\) returns NoneType, which is no list"),
        ("return [3]", r"returns a list with int, which is no UpdateTransform"),
    ],
)
def test_what_an_optimizer_is_made_of_is_checked(body, message, load_own, build):
    text = PART.format(
        base="OptimizerPart", method="make_transforms", other="count_moments", body=body
    )
    load_own(text, "optim.name=mine")
    with pytest.raises(UserError, match=message):
        build(optim={"name": "mine"})
