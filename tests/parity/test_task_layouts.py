"""Scores of tasks during training, the same under every layout.

Tests `megaframe.training.task_evaluation`.
"""

import json
import random

import numpy as np
import pytest
import torch
from entry_runs import read_lines, read_losses, train
from fault_runs import log, main
from harness_tasks import write_tasks
from shared_fixtures import make_overrides
from tolerances import promised

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'megaframe[evaluate]'")

SHARED = {
    "model__vocab": 260,
    "model__position": "learned",
    "data__tokenizer": "bytes",
    "train__steps": 2,
    "train__microbatch": 1,
    "evaluate__tasks": "[choose, roll, generate]",
    "evaluate__every": 1,
    "evaluate__limit": 5,
}
LAYOUTS = [
    {"parallel.data": 2, "parallel.pipeline": 2, "parallel.zero": 3},
    {"parallel.tensor": 2, "parallel.context": 2},
    {"parallel.data": 4, "parallel.data_replicate": 2},
    {"parallel.pipeline": 2, "parallel.chunks": 1, "parallel.tensor": 2},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def scores_of_one_rank(pool, corpus, tasks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    pool.run(1, train, make_overrides(corpus, folder, **SHARED, evaluate__folder=tasks))
    return list_scores(folder / "run")


def list_scores(folder):
    """Return the scores in each line of a run's metrics."""
    return [
        {name: value for name, value in line.get("eval_tasks", {}).items()}
        for line in read_lines(folder)
    ]


def read_random_states():
    """Return the states of the generators that the harness seeds."""
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def flatten(scores):
    return {
        f"{task}/{name}": value for task, values in scores.items() for name, value in values.items()
    }


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS[1:])]
)
def test_scores_are_the_same_under_every_layout(
    pool, overrides, tasks, tmp_path, layout, scores_of_one_rank
):
    keys = {**SHARED, "evaluate__folder": tasks}
    pool.run(4, train, overrides(**keys) + [f"{name}={value}" for name, value in layout.items()])
    one, other = scores_of_one_rank, list_scores(tmp_path / "run")
    assert len(one) == 2 and one[0] != one[1]
    for expected, scores in zip(one, other, strict=True):
        assert set(expected) == {"choose", "roll", "generate"}
        assert flatten(scores) == promised(flatten(expected))


def test_training_and_its_random_numbers_stay_as_they_are(overrides, tasks, tmp_path):
    keys = {**SHARED, "evaluate__folder": tasks, "model__dropout": 0.1}
    keys["evaluate__shots"] = 0
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = read_random_states()
    assert main(overrides(**keys)) == 0
    assert read_random_states() == before
    assert main(overrides(**{**keys, "evaluate__tasks": "[]"}, run__dir=tmp_path / "plain")) == 0
    assert read_losses(tmp_path / "run") == promised(read_losses(tmp_path / "plain"))


def test_what_the_harness_cannot_do_is_said(pool, overrides, tasks, tmp_path, capfd):
    """An unknown task before the first step, on all ranks; a failure later does not end the run."""
    keys = {**SHARED, "evaluate__folder": tasks}
    assert pool.run(2, main, overrides(**{**keys, "evaluate__tasks": "[chose]"})) == [2, 2]
    assert main(overrides(**{**keys, "evaluate__tasks": "[chose]"})) == 2
    message = capfd.readouterr().err
    assert "evaluate.tasks: " in message and "there are: choose, generate, roll" in message
    assert main(overrides(**{**keys, "data__tokenizer": "null"})) == 2
    broken = write_tasks(tmp_path)
    (broken / "questions.jsonl").write_text(json.dumps({"other": 1}) + "\n")
    assert pool.run(2, main, overrides(**{**keys, "evaluate__folder": broken})) == [0, 0]
    text = log(tmp_path / "run")
    assert text.count("no scores of evaluate.tasks: ") == 2 and "2/2" in text
