"""Sampling: which tokens may come, how often each does, samples in batches, how text is streamed,
and bad arguments.

Tests `megaframe.inference.generation`, `megaframe.inference.prompts` and
`megaframe.inference.sample_reader`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import load_program

from megaframe.config.registry import Registry, use_registry
from megaframe.data.microbatch import Microbatch
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError
from megaframe.extensions import load_extensions
from megaframe.inference.generation import (
    SampledIds,
    SampleRequest,
    SamplingOptions,
    sample,
    sample_batch,
    stream_texts,
)

ROOT = Path(__file__).resolve().parents[3]
BYTES, GREEDY = load_tokenizer("bytes"), SamplingOptions()


def generate(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
    load_program("tools/generate.py").main()


def compute_probabilities(logits, temperature, top_k, top_p):
    """Return the probability of each token, found one by one from the likeliest to the least."""
    chances = np.exp((logits - logits.max()) / temperature)
    likeliest = np.argsort(-logits, kind="stable")[: top_k or None]
    chances /= chances[likeliest].sum()
    probabilities, total = np.zeros(len(logits)), 0.0
    for token in likeliest:
        if total >= top_p and top_p < 1:
            break
        probabilities[token] = chances[token]
        total += chances[token]
    return probabilities / probabilities.sum()


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True),
    st.floats(0.05, 20),
    st.integers(0, 15),
    st.floats(0.01, 1),
    st.integers(0, 2**63 - 1),
)
def test_only_tokens_that_may_come_come(logits, temperature, top_k, top_p, seed):
    logits = np.array(logits, np.float64) / 10
    chances = compute_probabilities(logits, temperature, top_k, top_p)
    options, generator = (
        SamplingOptions(temperature, top_k, top_p),
        torch.Generator().manual_seed(seed),
    )
    for _ in range(5):
        assert chances[options.choose(torch.from_numpy(logits), generator)] > 0


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 4, 1.0), (1.5, 0, 0.8), (1.0, 5, 0.9)]
)
def test_tokens_come_as_often_as_their_probabilities_say(temperature, top_k, top_p):
    logits, draws = np.array([0.3, 2.0, -1.0, 1.5, 0.0, 1.9, -3.0]), 4000
    options, generator = (
        SamplingOptions(temperature, top_k, top_p),
        torch.Generator().manual_seed(0),
    )
    chosen = [options.choose(torch.from_numpy(logits), generator) for _ in range(draws)]
    chances = compute_probabilities(logits, temperature, top_k, top_p)
    counts = np.bincount(chosen, minlength=len(logits))
    assert (np.abs(counts - draws * chances) <= 5 * np.sqrt(draws * chances * (1 - chances))).all()


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-40, 1e300])
def test_no_temperature_overflows(temperature):
    logits, generator = torch.tensor([1e4, 3e4, -2e4]), torch.Generator().manual_seed(0)
    chosen = SamplingOptions(temperature).choose(logits, generator)
    assert chosen == 1 or temperature == 1e300


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_said(bad):
    with pytest.raises(UserError, match="use an earlier checkpoint"):
        SamplingOptions(1.0).choose(torch.tensor([0.0, bad, 1.0]), torch.Generator())


@given(st.one_of(st.text(max_size=12).map(str.encode), st.binary(max_size=12)))
def test_streamed_text_is_whole_characters_and_all_of_the_text(content):
    ids = [*content]
    steps = (SampledIds(0, ids[:n], n == len(ids)) for n in range(1, len(ids) + 1))
    pieces = [piece.text for piece in stream_texts(steps, BYTES)]
    text = BYTES.decode(ids)
    assert "".join(pieces) == text
    if text.encode() == content and "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_text_is_shown_as_soon_as_it_is_known():
    numbers_asked, texts = [], [[*"aé".encode()], [*"€".encode()]]

    def samples():
        for size in (1, 2, 3):
            for number, ids in enumerate(texts):
                numbers_asked.append(number)
                yield SampledIds(number, ids[:size], size == len(ids))

    pieces = stream_texts(samples(), BYTES)
    first = [(*next(pieces), len(numbers_asked)) for _ in range(3)]
    assert first == [(0, "a", False, 1), (0, "é", True, 5), (1, "€", True, 6)]


def record_lengths(stage):
    """Have a stage record how many tokens each pass has. Returns that list, and what computed
    passes before."""
    lengths, passes = [], stage.compute_hidden

    def compute_hidden(batch, **keys):
        lengths.append(batch.tokens_BS.shape[1])
        return passes(batch, **keys)

    stage.compute_hidden = compute_hidden
    return lengths, passes


def ask(start, tokens, sampling=GREEDY, seed=0, end=-1):
    """Return a request for a sample, which ends with the id `end`."""
    return SampleRequest(start, tokens, sampling, seed, lambda ids: ids[-1] == end)


def sample_again(stage, start, tokens, context):
    """Return a greedy sample, computed again from all that the model sees for each token."""
    ids = list(start)
    for _ in range(tokens):
        seen = torch.tensor([ids[-context:]])
        hidden = stage.compute_hidden(Microbatch(seen, seen, seen.new_zeros(1)))[-1]
        ids.append(int(stage.head.compute_logits(hidden).argmax()))
    return ids


FACTORS = {"short_factors": [1.0, 2.0], "long_factors": [3.0, 5.0]}


@pytest.mark.parametrize(
    ("scaling", "expected_lengths"),
    [
        ({"kind": "longrope", **FACTORS}, [3, 1, 1, 1, 7, 1, 1, 1]),
        ({"kind": "dynamic"}, [3, 1, 1, 1, 7, 8, 9, 10]),
    ],
)
def test_keys_of_the_past_are_rotated_anew_where_a_sample_becomes_long(
    scaling, expected_lengths, build
):
    scaling = {"factor": 4.0, "original_length": 6, **scaling}
    stage = build({"heads": 4, "hidden": 16, "rotary_scaling": scaling}).stage
    lengths, passes = record_lengths(stage)
    *_, ids = sample(stage, ask([3, 1, 4], 8), context=12)
    assert lengths == expected_lengths
    stage.compute_hidden = passes
    assert ids == sample_again(stage, [3, 1, 4], 8, 12)


@pytest.mark.parametrize("mixer", ["attention", "gated_linear"])
def test_a_sample_is_what_the_model_says_of_all_that_it_sees(mixer, build):
    """Also where the sample outgrows the context, and of layers that keep more than keys."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{ROOT / 'examples/gated_linear_attention.py'}]"])
        stage = build({"blocks": [{"mixer": {"window": 4}}, {"mixer": mixer}]}).stage
        lengths, passes = record_lengths(stage)
        *_, ids = sample(stage, ask([3, 1, 4], 12), context=9)
    once, growing = [3, 1, 1, 1, 1, 1, 1], [3, 4, 5, 6, 7, 8, 9]
    assert lengths == (once if mixer == "attention" else growing) + [9] * 5
    stage.compute_hidden = passes
    assert ids == sample_again(stage, [3, 1, 4], 12, 9) and len({*ids[3:]}) > 1


LONGROPE = {
    **{"kind": "longrope", "factor": 4.0, "original_length": 8},
    **{"short_factors": [1.0, 2.0], "long_factors": [3.0, 5.0]},
}
LATENT = {"kv_rank": 10, "head_dim": 6, "rotary_dim": 4, "value_dim": 5}
BATCHES = {
    "windows, learned": {"position": "learned", "blocks": [{"mixer": {"window": 4}}, {}]},
    "long rotations": {"rotary_scaling": LONGROPE},
    "latent": {"latent": LATENT},
    "delta net": {"norm": "rmsnorm", "blocks": [{"mixer": "gated_delta_net"}, {}]},
    "experts": {"moe": {"experts": 4, "ffn": 10}},
    "keeps nothing": {"blocks": [{}, {"mixer": "gated_linear"}]},
}
STARTS = [[3, 1, 4, 1, 5], [9], [3, 1, 4, 1, 5], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2], [8, 4]]
"""Prompts, of which one comes twice, and one soon fills the context."""


@pytest.mark.parametrize("name", BATCHES)
def test_a_sample_in_a_batch_is_the_same_as_alone(name, build):
    """Samples begin and end at different times, and some outgrow the context."""
    with use_registry(Registry()):
        load_extensions(None, [f"run.extensions=[{ROOT / 'examples/gated_linear_attention.py'}]"])
        stage = build(BATCHES[name], train={"seq": 10}).stage
        lengths, _ = record_lengths(stage)
        for temperature in (0.0, 1.0):
            how = SamplingOptions(temperature, top_p=0.9)
            requests = [ask(start, 4 + n, how, n, end=7) for n, start in enumerate(STARTS)]
            alone = [[*sample(stage, request, context=10)] for request in requests]
            lengths.clear()
            together = {number: [] for number in range(len(STARTS))}
            for number, ids, is_last in sample_batch(stage, requests, context=10, batch=4):
                together[number].append(([*ids], is_last))
            for number, steps in enumerate(alone):
                size = len(STARTS[number])
                cut = [steps[-1][: size + n + 1] for n in range(len(steps))]
                lasts = [n == len(steps) - 1 for n in range(len(steps))]
                assert together[number] == [*zip(cut, lasts, strict=True)]
            assert len({len(steps) for steps in alone}) > 2


def test_a_pass_has_the_next_token_of_all_samples(build):
    stage = build().stage
    lengths, _ = record_lengths(stage)
    steps = [*sample_batch(stage, [ask(s, 6) for s in STARTS], context=12, batch=6)]
    # Each start once; then the next tokens together, until the longest outgrows the context.
    assert lengths == [5, 1, 3, 8, 2, *[1] * 5, 12]
    assert len(steps) == 6 * len(STARTS)


def test_several_samples_are_those_of_their_seeds(saved_run, monkeypatch, capsys):
    common = ("--checkpoint", saved_run, "--prompt", "ab", "--tokens", 20, "--top-p", 0.9)
    generate(monkeypatch, *common, "--samples", 3, "--seed", 5)
    together = capsys.readouterr().out
    apart = []
    for number, seed in enumerate((5, 6, 7), 1):
        generate(monkeypatch, *common, "--seed", seed)
        apart.append(capsys.readouterr().out)
        assert apart[-1].startswith("ab")
        assert f"--- sample {number} of 3, seed {seed}\n{apart[-1]}" in together
    assert len({*apart}) == 3


def test_several_prompts_are_answered_in_their_order(saved_run, monkeypatch, capsys, tmp_path):
    (tmp_path / "lines.txt").write_text("cd\n\nef\r\n")
    (tmp_path / "more.jsonl").write_text(json.dumps({"prompt": "g\nh", "id": 1}) + "\n")
    files = ("--prompts", tmp_path / "lines.txt", "--prompts", tmp_path / "more.jsonl")
    common = ("--checkpoint", saved_run, "--tokens", 9, "--seed", 3)
    generate(monkeypatch, *common, "--prompt", "ab", *files, "--samples", 2, "--batch", 3)
    printed = capsys.readouterr()
    expected = ""
    for number, prompt in enumerate(("ab", "cd", "ef", "g\nh"), 1):
        for sample_number, seed in enumerate((3, 4), 1):
            generate(monkeypatch, *common[:4], "--seed", seed, "--prompt", prompt)
            expected += f"--- prompt {number} of 4, sample {sample_number} of 2, seed {seed}\n"
            expected += capsys.readouterr().out
    assert printed.out == expected
    (speed,) = printed.err.splitlines()
    assert speed.startswith("8 texts: ") and speed.endswith(" a second") and " tokens in " in speed


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b" \n\n", "a.txt has no prompt; write one on each line"),
        ("a.txt", b"ab\xff", "a.txt is not UTF-8 at byte 2"),
        ("a.txt", None, "a.txt: No such file or directory"),
        (
            "a.jsonl",
            b'{"prompt": "x"}\n{"text": 1}',
            "a.jsonl:2: {'text': 1} is no {\"prompt\": TEXT}",
        ),
        ("a.jsonl", b"x", "a.jsonl:1: Expecting value"),
        ("a.txt", b"ab\n" + b"x" * 17, "prompt 2 has 17 tokens, and the model sees 16"),
    ],
)
def test_a_file_without_prompts_is_said(
    name, content, expected, saved_run, monkeypatch, capsys, tmp_path
):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit):
        generate(monkeypatch, "--checkpoint", saved_run, "--prompts", tmp_path / name)
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_a_prompt_may_fill_the_context_or_be_left_out(saved_run, monkeypatch, capsys):
    generate(monkeypatch, "--checkpoint", saved_run, "--prompt", "x" * 16, "--tokens", 2)
    assert capsys.readouterr().out.startswith("x" * 16)
    generate(monkeypatch, "--checkpoint", saved_run, "--tokens", 2)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--temperature", "-1"], "temperature -1 is not a number of 0 or more"),
        (["--temperature", "nan"], "temperature nan is not"),
        (["--temperature", "inf"], "temperature inf is not"),
        (["--top-k", "-3"], "top_k -3 is below 0"),
        (["--top-p", "0"], "top_p 0 is not above 0 and at most 1"),
        (["--top-p", "1.5"], "top_p 1.5 is not"),
        (["--top-p", "nan"], "top_p nan is not"),
        (["--seed", "-1"], "--seed -1 is not in range; use 0 to 9223372036854775807"),
        (["--seed", "9223372036854775807", "--samples", "2"], "use 0 to 9223372036854775806"),
        (["--tokens", "0"], "--tokens 0 is too few"),
        (["--samples", "0"], "--samples 0 is too few"),
        (["--batch", "0"], "--batch 0 is too few"),
        (["--samples", "2", "--temperature", "0"], "would be the same text each time"),
        (["--prompt", ""], "prompt '' has no token"),
        (["--prompt", "x" * 17], "has 17 tokens, and the model sees 16 (train.seq); leave out 1"),
        (["--prompt", "ab\udcff"], "prompt is not valid text at character 2"),
    ],
)
def test_what_cannot_be_sampled_is_said_in_one_line(
    words, expected, saved_run, monkeypatch, capsys
):
    with pytest.raises(SystemExit) as ended:
        generate(monkeypatch, "--checkpoint", saved_run, *words)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line
