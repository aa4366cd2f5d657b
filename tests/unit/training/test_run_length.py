"""The steps of a run whose length is given in epochs."""

import json
import tempfile
from fractions import Fraction
from pathlib import Path

import pytest
from entry_runs import make_trainer
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE
from token_files import write_token_file

from megaframe.config import dump, load
from megaframe.config.batch_ramp import compute_batch_size
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.training.auto_layout import resolve_config
from megaframe.training.run_length import decide_steps
from megaframe.training.trainer import Trainer

SEQ = 16


def write_samples(prefix, samples):
    """Write a token file with this many samples; return its prefix."""
    return write_token_file(prefix, [[[n % 61 for n in range(samples * SEQ + 1)]]])


@pytest.fixture
def decide(overrides, tmp_path):
    """decide(samples, **keys) -> config with its steps decided, and the line about them."""

    def decide(*samples, data=True, **keys):
        weights = keys.pop("weights", [1] * len(samples))
        sources = [
            {"path": write_samples(tmp_path / f"tokens{n}", count), "weight": weight}
            for n, (count, weight) in enumerate(zip(samples, weights, strict=True))
        ]
        keys = {"data__sources": json.dumps(sources), "data__split": "[1, 0, 0]", **keys}
        words = [word for word in overrides(**keys) if word != "train.steps=12"]
        config, notes = decide_steps(load(None, words), data=data)
        return config, " ".join(notes)

    return decide


@given(
    st.integers(1, 60),
    st.decimals("0.01", 4, places=2),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 90),
)
def test_the_steps_are_the_fewest_that_reach_the_samples(samples, epochs, rises, start, ramp):
    top, goal = start * (1 + rises), Fraction(str(epochs)) * samples
    with tempfile.TemporaryDirectory() as folder:
        path = write_samples(Path(folder) / "tokens", samples)
        keys = [
            f"data.epochs={epochs}",
            f"data.sources=[{{path: {path}}}]",
            "data.split=[1, 0, 0]",
            f"train.seq={SEQ}",
            f"train.global_batch={top}",
            f"train.batch_ramp={{start: {start}, increment: {start}, samples: {ramp}}}",
        ]
        config, _ = decide_steps(load(None, keys))
    seen = [0]
    while seen[-1] < goal:
        seen.append(seen[-1] + compute_batch_size(config.train, seen[-1]))
    assert config.train.steps == len(seen) - 1


def test_a_line_says_how_long_the_run_is(decide):
    config, line = decide(100, data__epochs=0.1)
    assert config.train.steps == 2
    assert line == "data.epochs=0.1, 10 samples, takes 2 steps"


def test_an_epoch_is_the_samples_of_all_sources(decide):
    config, line = decide(30, 10, data__epochs=2)
    assert config.train.steps == 80 / 8 and line.endswith("takes 10 steps")
    assert decide(30, 10, weights=[3, 1], data__epochs=2)[0].train.steps == 10


def test_a_config_may_hold_both_if_they_agree(decide, overrides, tmp_path):
    config, _ = decide(40, data__epochs=2)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert resolve_config(load(str(path), ["kernels.matmul=torch"]), 1)[0].train.steps == 10
    expected = (
        r"train\.steps=10 and data\.epochs=3 disagree: data\.epochs=3, 120 samples, takes 15 steps;"
        r" use train\.steps=15, leave train\.steps out, or use data\.epochs=null"
    )
    with pytest.raises(UserError, match=expected):
        resolve_config(load(str(path), ["data.epochs=3", "train.steps=10"]), 1)


def test_the_length_that_is_given_last_replaces_the_other(decide, overrides, tmp_path):
    """One that extends a config, or a command line, has the last word about `train.steps` and
    `data.epochs` as it has about any key."""
    config, _ = decide(40, data__epochs=2)
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    (tmp_path / "longer.yaml").write_text("extends: config.yaml\ndata: {epochs: 3}\n")
    for name, words in (("config", ["data.epochs=3"]), ("longer", [])):
        longer = resolve_config(load(f"{tmp_path}/{name}.yaml", words), 1)[0]
        assert (longer.train.steps, longer.data.epochs) == (15, 3)
    shorter = load(str(tmp_path / "longer.yaml"), ["train.steps=4"])
    assert (shorter.train.steps, shorter.data.epochs) == (4, None)
    unchanged = load(str(path), ["data.epochs=null"])
    assert (unchanged.train.steps, unchanged.data.epochs) == (10, None)


def test_a_plan_needs_the_files_or_the_steps(decide, tmp_path):
    gone = json.dumps([{"path": str(tmp_path / "gone")}])
    with pytest.raises(UserError, match=r"data\.epochs=2: the token files .* train\.steps=N"):
        decide(data=False, data__epochs=2, data__sources=gone)
    config, line = decide(data=False, data__epochs=2, data__sources=gone, train__steps=7)
    assert config.train.steps == 7 and "data.epochs=2 is taken for train.steps=7" in line
    assert decide(40, data=False, data__epochs=2)[0].train.steps == 10
    with pytest.raises(UserError, match="gone"):
        decide(data__epochs=2, data__sources=gone, train__steps=7)


def test_lengths_that_no_run_has_are_refused(decide, overrides):
    with pytest.raises(UserError, match=r"data\.epochs=1e\+300.* at most 8e\+11 epochs"):
        decide(10, data__epochs=1e300)
    for wrong in (0, -1, "nan", "inf"):
        with pytest.raises(UserError, match=r"data\.epochs"):
            load(None, overrides(data__epochs=wrong))
    ramp = "{start: 1, increment: 1, samples: 1000000000000}"
    keys = {"train__global_batch": 10**12, "train__batch_ramp": ramp, "data__epochs": 1}
    words = [word for word in overrides(**keys) if word != "train.steps=12"]
    with pytest.raises(UserError, match=r"train\.global_batch=1000000000000"):
        resolve_config(load(None, words), 1)
    words = overrides(data__sources=[], data__epochs=1)
    with pytest.raises(UserError, match=r"1 mistake in the config\s+data\.sources is empty"):
        resolve_config(load(None, words), 1)


def test_a_trainer_refuses_epochs_without_steps(overrides):
    words = [word for word in overrides(data__epochs=1) if word != "train.steps=12"]
    config = load(None, words)
    mesh = Mesh(resolve_config(config, 1)[1], device="cpu", timeout=PATIENCE)
    with pytest.raises(UserError, match=r"data\.epochs=1: not decided"):
        Trainer(config, mesh)
    mesh.close()


def test_a_resumed_run_counts_what_it_has_seen_under_another_batch(overrides, tmp_path):
    path = write_samples(tmp_path / "tokens", 50)
    keys = {"data__sources": f"[{path}]", "data__split": "[1, 0, 0]", "checkpoint__every": 3}

    def train(stop=None, **changes):
        words = overrides(data__epochs=1, **{**keys, **changes})
        trainer = make_trainer(load(None, [w for w in words if w != "train.steps=12"]))
        if stop is not None:
            trainer._is_leaving = lambda: trainer.step >= stop
        trainer.run()
        trainer.mesh.close()
        return trainer.step, trainer.loader.state["samples"]

    assert train(stop=3) == (3, 24)
    assert train(train__global_batch=4, checkpoint__resume="latest") == (3 + 7, 24 + 7 * 4)
    log = (tmp_path / "run/run.log").read_text()
    assert "data.epochs=1, 50 samples, takes 10 steps after the 24 of 3 steps before" in log
    assert f"4 samples, 64 tokens a step, {52 * 16} in the run" in log
    train(train__global_batch=4, checkpoint__resume="latest")
    log = (tmp_path / "run/run.log").read_text()
    assert "step 10 of train.steps=10; to train longer, raise data.epochs" in log
