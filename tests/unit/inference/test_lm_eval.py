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
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.preprocessing.train_tokenizer import ControlTokens, train_byte_bpe
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError
from megaframe.inference.chat import find_chat_format
from megaframe.inference.evaluation import Score, TokenSequence, score
from megaframe.inference.generation import SampledIds, load_stage

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'megaframe[evaluate]'")

TEMPLATE = (
    "{% for m in messages %}<|a|>{{ m.content }}<|z|>{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return a folder with three tasks: multiple choice, scoring of texts, and generation."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def test_tasks_from_local_files_give_what_our_own_scores_give(
    saved_run, tasks, monkeypatch, capsys
):
    arguments = ("--checkpoint", saved_run, "--tasks", "choose,roll,generate", "--include", tasks)
    run(monkeypatch, *arguments, "--json")
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"]
    stage = load_stage(parse_path(str(saved_run)))
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

    stage = load_stage(parse_path(str(saved_run)))
    model = HarnessModel(LocalModel(stage, context=16, batch=2), load_tokenizer("bytes"))

    def generate(*options):
        asked = [("some", {"max_gen_toks": 8, **keys}) for keys in options]
        return model.generate_until([SimpleNamespace(args=args) for args in asked])

    (text,) = generate({})
    assert 0 < len(text) <= 8
    assert generate({"until": [text[3:5]]}, {"until": text[2:4]}, {}) == [text[:3], text[:2], text]


class Recorder:
    """A model that keeps what it is asked, and ends each answer with its first token."""

    def __init__(self, end):
        self.passages, self.prompts, self._end = [], [], end

    def score(self, passages):
        self.passages += passages
        return [Score(len(passage.tokens) - passage.first, 1) for passage in passages]

    def sample(self, requests):
        for number, request in enumerate(requests):
            self.prompts.append(request.start)
            assert request.is_complete([*request.start, self._end])
            yield SampledIds(number, [*request.start, self._end], True)


def test_a_task_asks_as_a_user_of_a_chat(tasks, tmp_path):
    """Control tokens come from the template alone and end an answer; choices follow the prompt."""
    from megaframe.inference.lm_eval import TaskOptions, evaluate_tasks

    control = ControlTokens(others=("<|a|>", "<|z|>"), answer_end="<|z|>", template=TEMPLATE)
    (tmp_path / "text.txt").write_text("question yes no maybe " * 20)
    train_byte_bpe([CorpusFile(str(tmp_path / "text.txt"))], str(tmp_path / "t"), 270, 1, control)
    name = f"hf:{tmp_path}/t/tokenizer.json"
    tokenizer = load_tokenizer(name)
    chat = find_chat_format(name, tokenizer)
    end = tokenizer.find_id("<|z|>")
    model = Recorder(end)
    evaluate_tasks(model, tokenizer, TaskOptions(["choose", "generate"], str(tasks)), chat)
    prompts = [chat.encode([[{"role": "user", "content": row["q"]}]])[0] for row in QUESTIONS]
    assert prompts[0].count(end) == 1 and sorted(model.prompts) == sorted(prompts)
    expected = [
        ([*prompt, *tokenizer.encode(option)], len(prompt))
        for prompt, row in zip(prompts, QUESTIONS, strict=True)
        for option in row["options"]
    ]
    assert sorted((p.tokens.tolist(), p.first) for p in model.passages) == sorted(expected)
    broken = write_tasks(tmp_path)
    (broken / "questions.jsonl").write_text(json.dumps({**QUESTIONS[0], "q": "<|z|>"}) + "\n")
    with pytest.raises(UserError, match=r"has <\|z\|>, the name of a control token"):
        evaluate_tasks(model, tokenizer, TaskOptions(["choose"], str(broken)), chat)
