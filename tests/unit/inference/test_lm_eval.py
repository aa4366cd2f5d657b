"""lm-evaluation-harness on a checkpoint: tasks from local files agree with megaframe's scores."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from evaluation_runs import run
from harness_tasks import QUESTIONS, TEXTS, write_tasks
from tolerances import near

from megaframe.checkpoint import parse_path
from megaframe.data.tokenizer import load_tokenizer
from megaframe.inference.evaluation import TokenSequence, score
from megaframe.inference.generation import load_stage

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'megaframe[evaluate]'")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return a folder with three tasks: multiple choice, scoring of texts, and generation."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_tasks_from_local_files_give_what_our_own_scores_give(
    saved_run,
    tasks,
    monkeypatch,
    capsys,
):
    arguments = ("--checkpoint", saved_run, "--tasks", "choose,roll,generate", "--include", tasks)
    run(monkeypatch, *arguments, "--json")
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]
    _, stage = load_stage(parse_path(str(saved_run)))
    encode = load_tokenizer("bytes").encode

    def nats(before, after):
        passage = TokenSequence(np.array([*before, *after]), len(before))
        return score(stage, [passage], context=16, stride=16)[0].nats

    right = 0
    for row in QUESTIONS:
        costs = [nats(encode(row["q"]), encode(f" {option}")) for option in row["options"]]
        right += int(np.argmin(costs)) == row["answer"]
    assert results["choose"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    bits = sum(nats([256], encode(text)) for text in TEXTS) / np.log(2)
    size = sum(len(text.encode()) for text in TEXTS)
    assert results["roll"]["bits_per_byte,none"] == near(bits / size, 4, torch.float32)
    assert results["generate"]["exact_match,none"] == 0


def test_an_unknown_task_is_named_with_those_that_are_there(saved_run, tasks, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--checkpoint", saved_run, "--tasks", "chose", "--include", tasks)
    assert "no such task; there are: choose, generate, roll" in capsys.readouterr().err


def test_a_text_is_generated_up_to_the_end_that_a_task_names(saved_run):
    from megaframe.inference.lm_eval import HarnessModel, LocalModel

    _, stage = load_stage(parse_path(str(saved_run)))
    model = HarnessModel(LocalModel(stage, context=16, batch=2), load_tokenizer("bytes"))

    def generate(*options):
        asked = [("some", {"max_gen_toks": 8, **keys}) for keys in options]
        return model.generate_until([SimpleNamespace(args=args) for args in asked])

    (text,) = generate({})
    assert 0 < len(text) <= 8
    assert generate({"until": [text[3:5]]}, {"until": text[2:4]}, {}) == [text[:3], text[:2], text]
