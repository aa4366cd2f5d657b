"""Losses, transforms of samples and callbacks: named, documented and checked like other parts."""

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from repo_copy import ROOT

from megaframe.config import describe_all_keys, dump, explain, load
from megaframe.config.keys import get_config_keys
from megaframe.config.parts import ROLES
from megaframe.config.registry import Registry, use_registry
from megaframe.data.microbatch import IGNORE
from megaframe.data.transforms import Sample
from megaframe.errors import UserError
from megaframe.extensions import load_with_extensions

EXAMPLE = f"run.extensions=[{ROOT / 'examples/callback.py'}]"
MIDDLE = "{kind: fill_in_the_middle, prefix: 1, suffix: 2, middle: 3}"


@pytest.fixture(autouse=True)
def registry():
    with use_registry(Registry()):
        yield


def refuse(*options):
    with pytest.raises(UserError) as error:
        load_with_extensions(None, options)
    return str(error.value)


def test_parts_are_given_by_name_or_with_keys_and_read_back():
    config = load_with_extensions(
        None,
        [
            EXAMPLE,
            "train.loss=focal",
            f"data.transforms=[{MIDDLE}]",
            "run.callbacks=[early_stop, {kind: early_stop, patience: 9}]",
        ],
    )
    assert config.train.loss.gamma == 2.0
    assert [part.patience for part in config.run.callbacks] == [3, 9]
    plain = yaml.safe_load(dump(config))
    assert plain["train"]["loss"] == {"kind": "focal", "gamma": 2.0}
    assert plain["data"]["transforms"][0]["rate"] == 0.5
    assert type(config).model_validate(config.model_dump(mode="json")) == config
    assert hash(config) == hash(config.model_copy())


def test_keys_are_documented_and_checked():
    load_with_extensions(None, [EXAMPLE])
    assert "train.loss[focal].gamma\n  How much less" in explain("train.loss")
    text = explain("run.callbacks")
    assert "Takes a list, each early_stop, or keys of a part, of kind early_stop." in text
    assert "run.callbacks[early_stop].patience\n  Evaluations in a row" in text
    assert "data.transforms[fill_in_the_middle].rate" in explain("data.transforms")
    assert "early_stop" in describe_all_keys()
    for options, message in {
        "train.loss={kind: focal, gamma: 0.5}": "train.loss.gamma=0.5: takes a number >= 1",
        "train.loss=vocal": "train.loss=vocal: takes cross_entropy, focal, or keys of a part",
        "run.callbacks=[{kind: early_stop, patience: 0}]": "patience=0: takes a whole number >= 1",
        "run.callbacks=[{kind: early_stop, patients: 1}]": "patients: unknown key; did you mean",
        "run.callbacks=[late_stop]": "run.callbacks.0=late_stop: takes early_stop, or keys",
        "run.callbacks=[null]": "run.callbacks.0=null: takes early_stop",
        "data.transforms=[fill_in_the_middle]": "data.transforms.0.prefix: missing; it takes",
        "data.transforms=[early_stop]": "data.transforms.0=early_stop: takes fill_in_the_middle",
    }.items():
        assert message in refuse(EXAMPLE, options)


def test_without_extensions_there_are_none():
    assert "takes cross_entropy" in refuse("train.loss=focal")
    for key in ("data.transforms", "run.callbacks"):
        assert f"{key}.0=early_stop: takes a part of an extension" in refuse(f"{key}=[early_stop]")
        assert get_config_keys()[key].allowed == "a list, each a part of an extension"


def test_our_only_loss_is_the_default():
    default = load(None).train.loss
    assert (default,) == ROLES["loss"].ours and get_config_keys()["train.loss"].allowed == default


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"focal"', '"cross_entropy"', "the loss cross_entropy, which is a name of megaframe's"),
        ("def compute_losses", "def compute_loss", "FocalLossConfig lacks compute_losses"),
        ("def transform", "def change", "FillInTheMiddleConfig lacks transform"),
        ("def make_callback", "def make", "EarlyStopConfig lacks make_callback"),
        ("for part in (", "for part in (EarlyStopConfig, ", "registers the callback early_stop"),
    ],
)
def test_what_is_wrong_with_a_part_is_said_with_its_place(old, new, message, tmp_path):
    text = (ROOT / "examples/callback.py").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "own.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    actual = refuse(f"run.extensions=[{path}]")
    assert message in actual and f"{path}:" in actual


@given(st.integers(4, 30), st.integers(0, 2**32 - 1), st.booleans())
def test_a_token_keeps_its_weight_where_it_goes(length, seed, weighted):
    config = load_with_extensions(None, [EXAMPLE, f"data.transforms=[{MIDDLE}]"])
    part = config.data.transforms[0].model_copy(update={"rate": 1.0})
    random = np.random.default_rng(seed)
    text = np.arange(10, 10 + length + 1)
    weights = random.integers(0, 3, length).astype(np.float32)
    labels = np.where(weights == 0, IGNORE, text[1:])
    given_weights = weights if weighted else None
    sample = Sample(text[:-1], labels, np.zeros(length, np.int64), int(text[-1]), 0, given_weights)
    result = part.transform(sample, random)
    of_token = dict(zip(text[1:].tolist(), weights.tolist(), strict=True)) | {10: 1.0}
    learnt = result.labels[:-1] != IGNORE
    assert (result.tokens[1:][learnt] == result.labels[:-1][learnt]).all()
    following = result.tokens[1:].tolist()
    wanted = [of_token.get(token, 1.0) for token in following]
    assert learnt.tolist() == [weight > 0 for weight in wanted]
    if weighted:
        assert result.weights[:-1].tolist() == wanted
    assert sorted(result.tokens[result.tokens < 10].tolist()) in ([1], [1, 2], [1, 2, 3])
