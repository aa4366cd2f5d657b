"""`--explain` and `--help`: each key's values, its default and its purpose."""

import pytest

from megaframe.config import explain, listing
from megaframe.config.describe import WIDTH, keys, nearest
from megaframe.errors import UserError


@pytest.mark.parametrize("name", list(keys()))
def test_every_key_is_documented(name):
    key, text = keys()[name], explain(name)
    assert key.text.endswith(".")
    assert text.splitlines()[0] == name
    assert " ".join(text.split()).find(key.text) >= 0
    if key.section is None:
        assert f"Takes {key.allowed}." in " ".join(text.split())
        assert ("Required." if key.field.is_required() else f"Default: {key.default}.") in text


def test_the_listing_names_every_key_that_holds_a_value_aligned():
    text = listing()
    assert max(map(len, text.splitlines())) <= WIDTH
    names = [
        line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2] > " "
    ]
    assert names == [key.name for key in keys().values() if key.section is None]
    for block in text.split("\n\n"):
        starts = {
            len(line) - len(line[2:].split(None, 2)[-1])
            for line in block.splitlines()[1:]
            if line[2] > " " and "[" not in line
        }
        assert len(starts) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.seq", "a whole number >= 1"),
        ("run.seed", "a whole number from 0 to 9223372036854775807"),
        (
            "model.window",
            "a whole number >= 1 or null or a list, each a whole number >= 1 or null",
        ),
        ("model.dropout", "a number >= 0 and < 1"),
        ("model.rotary_fraction", "a number > 0 and <= 1"),
        ("model.rotary_scaling.factor", "a number >= 1"),
        ("parallel.zero", "a whole number from 0 to 3"),
        ("train.precision", "one of fp32, bf16, fp16, fp64"),
        ("checkpoint.resume", "text or null"),
        ("data.split", "a list of 3, each a number from 0 to 1"),
        (
            "data.sources",
            "a list, each {path: text, weight: a number > 0 (default 1.0), "
            "split: null or a list of 3, each a number from 0 to 1 (default null)}",
        ),
    ],
)
def test_what_a_key_takes(name, words):
    assert keys()[name].allowed == words


def test_a_section_is_explained_key_by_key():
    text = explain("train")
    assert text.startswith("train\n")
    assert "\ntrain.batch_ramp.start\n" in text
    assert "optim." not in text


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("train.stesp", "train.steps"),
        ("trian.steps", "train.steps"),
        ("train.lr", "optim.lr"),
        ("lr", "optim.lr"),
        ("model.num_layers", "model.layers"),
        ("optim.warmup_steps", "optim.warmup"),
        ("parallel.tensor_size", "parallel.tensor"),
        ("seed", "run.seed"),
        ("optimizer", "optim"),
    ],
)
def test_the_nearest_key(wrong, right):
    assert nearest(wrong) == right
    with pytest.raises(UserError, match=rf"{wrong} is not a config key; did you mean {right}\?"):
        explain(wrong)
