"""Evaluation on held-out text: every token counts once, and the loss equals the trainer's."""

import base64
import json
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from entry_runs import read_lines, train
from evaluation_runs import make_numbers, run, write
from hypothesis import given
from hypothesis import strategies as st
from tolerances import near

from megaframe.checkpoint import parse_path
from megaframe.data.microbatch import IGNORE, Microbatch
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.tokenizer import load_tokenizer
from megaframe.data.training_shares import divide_for_evaluation
from megaframe.errors import UserError
from megaframe.inference.evaluation import (
    TokenSequence,
    read_sequence,
    read_split,
    score,
    split_windows,
)
from megaframe.inference.generation import load_run_tokenizer, load_stage

pytestmark = pytest.mark.numeric


LOGITS = 4
"""Roundings to fp32 of a token's loss, whose logits and partition are about as large as itself."""


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_windows_count_every_token_once_and_with_all_that_fits_before_it(length, context, data):
    stride, first = data.draw(st.integers(1, context)), data.draw(st.integers(1, length))
    windows = list(split_windows(TokenSequence(np.zeros(length, np.int64), first), context, stride))
    counted = [place + 1 for w in windows for place in range(w.first, w.end)]
    assert counted == list(range(first, length))
    assert all(0 <= w.begin <= w.first < w.end <= w.begin + context for w in windows)
    for before, window in pairwise(windows):
        assert window.first == before.end and window.end - window.begin == context
        assert window.end - window.first <= stride


@pytest.mark.parametrize(
    ("layout", "heed"),
    [
        ({"parallel__tensor": 2}, {}),
        ({"train__label_smoothing": 0.1, "train__z_loss": 0.05, "model__logit_softcap": 2.0}, {}),
        (
            {"parallel__zero": 3},
            {"data__reset_attention": True, "data__reset_positions": True, "data__mask_eod": True},
        ),
    ],
)
def test_the_loss_is_that_of_the_trainers_evaluation(layout, heed, pool, overrides, tmp_path):
    trained_documents = [np.append(make_numbers(n, 60, 60), 60) for n in range(8)]
    held_out = [np.append(make_numbers(9, 59, 60), 60), np.append(make_numbers(10, 36, 60), 60)]
    source = write(tmp_path / "all", [*trained_documents, *held_out])
    write(tmp_path / "held", held_out)  # 97 tokens are six windows of 16 and one token
    options = {"train__steps": 2, "train__eval_every": 2, "checkpoint__every": 2}
    sources = {"data__sources": f"[{{path: {source}}}]"}
    pool.run(2, train, overrides(**options, **sources, **layout, **heed))
    stage = load_stage(parse_path(str(tmp_path / "run/checkpoints")))
    config = stage.config
    passage = read_sequence(CorpusFile(str(tmp_path / "held.bin")), None)
    (passage_score,) = score(stage, [passage], context=16, stride=16, data=config.data)
    assert passage_score.tokens == 96 - bool(heed)
    assert passage_score.loss == near(
        read_lines(tmp_path / "run")[-1]["eval_loss"], LOGITS, torch.float32
    )
    ((name, same),) = read_split(config.model, config.train, config.data, "validation")
    assert name == "all" and np.array_equal(same.tokens, passage.tokens)
    assert np.array_equal(same.beginnings, passage.beginnings)
    with pytest.raises(UserError, match=r"of the test split.*use --data-split") as error:
        next(read_split(config.model, config.train, config.data, "test"))
    # What it says works.
    shares = [float(share) for share in str(error.value).split()[-3:]]
    divided = config.model_copy(update={"data": divide_for_evaluation(config.data, shares)})
    ((_, rest),) = read_split(divided.model, divided.train, divided.data, "test")
    ((_, less),) = read_split(divided.model, divided.train, divided.data, "validation")
    assert np.array_equal([*less.tokens, *rest.tokens], same.tokens)
    low = load_stage(parse_path(str(tmp_path / "run/checkpoints")), precision="bf16")
    (rounded,) = score(low, [passage], context=16, stride=16, data=config.data)
    assert rounded.loss == pytest.approx(passage_score.loss, rel=0.01) and rounded != passage_score


def test_an_evaluation_without_a_label_is_said_and_the_run_goes_on(pool, overrides, tmp_path):
    """The validation documents have one token each, so every label begins a document."""
    trained_documents = [np.append(make_numbers(n, 30, 60), 60) for n in range(80)]
    source = write(tmp_path / "all", [*trained_documents, *([60] for _ in range(20))])
    options = {"train__steps": 2, "train__eval_every": 1, "data__mask_eod": True}
    pool.run(2, train, overrides(**options, data__sources=f"[{{path: {source}}}]"))
    assert "eval_loss" not in read_lines(tmp_path / "run")[-1]
    logged = (tmp_path / "run/run.log").read_text()
    assert "no evaluation token has a label" in logged


@pytest.mark.parametrize("fp8", ["tensor", "row", "block"])
def test_scales_of_8_bits_do_not_depend_on_the_batch(build, fp8):
    stage = build(train={"fp8": fp8, "precision": "bf16", "seq": 12}).stage
    passages = [TokenSequence(make_numbers(n, 9 + 5 * n, 37)) for n in range(3)]
    by_batch = [score(stage, passages, context=12, stride=12, batch=b) for b in (1, 2, 8)]
    assert by_batch[0] == by_batch[1] == by_batch[2]


def test_a_stride_of_one_gives_every_token_a_whole_window_before_it(build):
    stage = build().stage
    tokens = torch.from_numpy(make_numbers(0, 40, 37))
    (passage_score,) = score(stage, [TokenSequence(tokens.numpy())], context=12, stride=1, batch=5)
    nats = 0.0
    for position in range(1, 40):
        before = tokens[max(0, position - 12) : position][None]
        labels = torch.full_like(before, IGNORE)
        labels[0, -1] = tokens[position]
        nats += float(stage.evaluate(Microbatch(before, labels, torch.zeros(1, dtype=int))))
    assert passage_score.nats == near(nats, LOGITS, torch.float32) and passage_score.tokens == 39


def test_passages_beside_each_other_change_nothing(build):
    stage = build().stage
    passages = [TokenSequence(make_numbers(n, 3 + 7 * n, 37), 1 + n) for n in range(5)]
    done = []
    together = score(
        stage, passages, context=12, stride=6, batch=4, report=lambda *now: done.append(now)
    )
    total = sum(part.tokens for part in together)
    assert done == sorted(done) and done[-1] == (total, total) and len(done) > 1
    apart = [score(stage, [passage], context=12, stride=6, batch=1)[0] for passage in passages]
    for first, other in zip(together, apart, strict=True):
        assert first.tokens == other.tokens and first.nats == near(
            other.nats, LOGITS, torch.float32
        )
    total = sum(together[1:], together[0])
    assert total.tokens == sum(len(passage.tokens) - passage.first for passage in passages)


def test_equal_logits_give_the_logarithm_of_the_vocabulary(build, tmp_path):
    stage = build({"vocab": 257}, train={"label_smoothing": 0.1, "z_loss": 0.1}).stage
    stage.head.weight.value.zero_()
    text = tmp_path / "two.jsonl"
    text.write_text('{"text": "grüße"}\n{"text": "a much longer line of text"}\n')
    tokenizer = load_tokenizer("bytes")
    passage = read_sequence(CorpusFile(str(text)), tokenizer)
    (passage_score,) = score(stage, [passage], context=12, stride=4)
    size = len("grüße".encode()) + len("a much longer line of text")
    assert (passage_score.tokens, passage_score.bytes) == (size + 2, size)
    assert passage_score.loss == near(math.log(257), LOGITS, torch.float32)
    assert passage_score.perplexity == near(257, 6 * LOGITS, torch.float32) and passage_score.greedy
    assert passage_score.bits_per_byte == near(
        math.log2(257) * (size + 2) / size, LOGITS, torch.float32
    )


def test_the_tool_prints_files_and_all_of_them(saved_run, tmp_path, monkeypatch, capsys):
    first_path, two = tmp_path / "one.txt", tmp_path / "two.jsonl"
    first_path.write_text("a text of its own\n")
    two.write_text('{"text": "another"}\n')
    run(monkeypatch, "--checkpoint", saved_run, "--text", first_path, two, "--stride", 4, "--json")
    results = json.loads(capsys.readouterr().out)["text"]
    assert [results[str(path)]["tokens"] for path in (first_path, two)] == [19, 8]
    assert results["all"]["tokens"] == 27
    mean = (19 * results[str(first_path)]["loss"] + 8 * results[str(two)]["loss"]) / 27
    assert results["all"]["loss"] == pytest.approx(mean)
    run(monkeypatch, "--checkpoint", saved_run, "--text", first_path, "--precision", "bf16")
    assert "perplexity" in capsys.readouterr().out
    run(
        monkeypatch,
        "--checkpoint",
        saved_run,
        "--split",
        "validation",
        "--text",
        first_path,
        "--json",
    )
    results = json.loads(capsys.readouterr().out)["text"]
    assert (
        results["data"]["tokens"] == 79
    )  # of two documents of 40 tokens; the first token is not predicted
    assert results["all"]["tokens"] == 79 + results[str(first_path)]["tokens"]


def test_what_cannot_be_evaluated_is_said(saved_run, tmp_path, monkeypatch, capsys):
    text, empty = tmp_path / "one.txt", tmp_path / "empty.txt"
    text.write_text("words")
    empty.write_text("")
    large = write(tmp_path / "large", [[5, 256, 300]])
    ranks, plain = tmp_path / "many.tiktoken", tmp_path / "bytes.tiktoken"
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnop"
    lines = "".join(f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
    plain.write_text(lines)
    ranks.write_text(
        lines
        + "".join(
            f"{base64.b64encode((a + b).encode()).decode()} {256 + n}\n"
            for n, (a, b) in enumerate((a, b) for a in letters for b in letters)
        )
    )
    for arguments, message in (
        (["--checkpoint", tmp_path, "--text", text], "there is no checkpoint"),
        (["--checkpoint", saved_run, "--text", empty], "has nothing to predict"),
        (["--checkpoint", saved_run, "--text", tmp_path / "none.txt"], "there is no such file"),
        (
            ["--checkpoint", saved_run, "--text", f"{large}.bin"],
            "token 2 is 300, but the model has",
        ),
        (
            ["--checkpoint", saved_run, "--text", text, "--tokenizer", f"tiktoken:{ranks}"],
            "has 2021",
        ),
        (
            ["--checkpoint", saved_run, "--text", text, "--tokenizer", f"tiktoken:{plain}"],
            "the run has the tokenizer bytes, and this command has tiktoken:",
        ),
        (["--checkpoint", saved_run, "--text", text, "--stride", "17"], "takes 1 to 16"),
        (["--checkpoint", saved_run, "--text", text, "--context", "17"], "learned 16 positions"),
        (["--checkpoint", saved_run, "--split", "test"], "no source has a share of the test split"),
        (["--checkpoint", saved_run], "nothing to evaluate on"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *arguments)
        assert ended.value.code == 2 and message in capsys.readouterr().err, arguments


def test_a_run_without_a_tokenizer_asks_for_one(build, tmp_path):
    with pytest.raises(UserError, match="name one with --tokenizer"):
        load_run_tokenizer(build().config.data, build().config.model)
    with pytest.raises(UserError, match="name one"):
        read_sequence(CorpusFile(str(tmp_path / "some.txt")), None)


def test_tasks_without_the_harness_say_what_to_install(saved_run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit):
        run(monkeypatch, "--checkpoint", saved_run, "--tasks", "mine")
    assert "pip install 'megaframe[evaluate]'" in capsys.readouterr().err
