"""Chats as tokens: which of them count is what transformers says, with and without marks in the
template, and rows that cannot be used are named.

Tests `megaframe.inference.chat_files` and `megaframe.inference.chat_tokens`.
"""

import gzip
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from chat_folders import name_tokenizer, write_byte_tokenizer
from entry_runs import read_losses, train
from programs import load_program

from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.token_file_record import read_record
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError
from megaframe.inference.chat import find_chat_format
from megaframe.inference.chat_tokens import encode_chats, encode_spans, parse_chat_row

ROOT = Path(__file__).resolve().parents[3]
PLAIN = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
    {%- else %}{{ message.content + '<|im_end|>' + '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
FORGETFUL = PLAIN.replace("message.content", "(message.content if loop.last else '...')")
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "né"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "two\nlines"},
    {"role": "user", "content": "unanswered"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders(template) -> folder of a tokenizer with it."""
    made = {}

    def get(template):
        if template not in made:
            made[template] = write_byte_tokenizer(tmp_path_factory.mktemp("chat"), template)
        return made[template]

    return get


@pytest.fixture
def find_form(folders):
    def find(template):
        name = name_tokenizer(folders(template))
        return find_chat_format(name, load_tokenizer(name))

    return find


def list_counted(form, document):
    """Return the texts of neighbouring tokens that count, with their weights."""
    names = {
        number: name
        for name in form.tokenizer.list_control_tokens()
        if (number := form.tokenizer.find_id(name)) is not None
    }
    found, before = [], 0.0
    for token, weight in zip(document.ids.tolist(), document.weights.tolist(), strict=True):
        if weight and weight != before:
            found.append((weight, b""))
        if weight:
            text = names.get(token)
            content = text.encode() if text else bytes_of(form, token)
            found[-1] = (weight, found[-1][1] + content)
        before = weight
    return [(weight, text.decode()) for weight, text in found]


def bytes_of(form, token):
    """Return the byte of a token by the alphabet of ByteLevel."""
    letter = form.tokenizer._model.id_to_token(token)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    letters |= {chr(256 + place): byte for place, byte in enumerate(others)}
    return bytes([letters[letter]])


def test_what_counts_is_what_transformers_says(folders, find_form):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders(MARKED))
    expected = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    (document,) = encode_chats(find_form(MARKED), [parse_chat_row({"messages": CHAT})])
    assert document.ids.tolist() == expected["input_ids"]
    assert document.weights.tolist() == expected["assistant_masks"]
    assert 0 < document.weights.sum() < len(document.ids)


def test_without_marks_an_answer_is_what_it_adds_to_the_text_that_asks_for_it(find_form):
    form = find_form(PLAIN)
    (document,) = encode_chats(form, [parse_chat_row({"messages": CHAT})])
    end = "<|im_end|>\n"
    assert list_counted(form, document) == [(1.0, "né" + end), (1.0, "two\nlines" + end)]
    (of_marked,) = encode_chats(find_form(MARKED), [parse_chat_row({"messages": CHAT})])
    assert document.ids.tolist() == of_marked.ids.tolist()


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_messages_have_weights(template, find_form):
    form = find_form(template)
    messages = [dict(message) for message in CHAT]
    messages[2]["weight"], messages[4]["weight"] = 0, 0.25
    rows = [parse_chat_row({"messages": m}) for m in (messages, CHAT)]
    document, plain = encode_chats(form, rows)
    ((weight, text),) = list_counted(form, document)
    assert weight == 0.25 and text.startswith("two\nlines<|im_end|>")
    assert len(list_counted(form, plain)) == 2


def test_a_template_that_rewrites_what_was_said_must_mark_it(find_form):
    with pytest.raises(UserError, match=r"before messages\[2\] in another way once it is answered"):
        encode_chats(find_form(FORGETFUL), [parse_chat_row({"messages": CHAT})])


def test_spans_are_characters_and_the_end_counts_like_what_is_before_it(find_form):
    form = find_form(PLAIN)
    tokenizer = form.tokenizer
    document = encode_spans(tokenizer, {"text": "né <|im_end|> ok", "spans": [[1, 2], [14, 16, 3]]})
    assert document.ids[-1] == tokenizer.eod and document.weights[-1] == 3.0
    assert list_counted(form, document)[0] == (1.0, "é")
    assert tokenizer.find_id("<|im_end|>") not in document.ids.tolist()
    assert document.weights.sum() == 2 + 3 * 3
    assert encode_spans(tokenizer, {"text": "ab", "spans": [[0, 1]]}).weights.tolist() == [1, 0, 0]


def run_tool(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["preprocess_chat.py", *map(str, arguments)])
    load_program("tools/preprocess_chat.py").main()


def write_rows(path, rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


GOOD = {"messages": CHAT[1:3]}
BROKEN = [
    (b"{", "not JSON"),
    (b'{"messages": "\xff"}', "byte 0xff is not UTF-8"),
    ([1], 'the row has no "messages"'),
    ({"messages": []}, 'the row has no "messages"'),
    ({"messages": [{"content": "x"}]}, r'messages\[0\] is no object with "role" and "content"'),
    ({"messages": CHAT[:2]}, "no message has the role assistant; the roles are system, user"),
    ({"messages": [{**CHAT[2], "weight": -1}]}, r"messages\[0\].weight is no finite number"),
    ({"messages": [{**CHAT[2], "weight": 0}]}, "no token of the row counts"),
    ({"messages": [{**CHAT[2], "weight": 0.5}]}, "the row has the weight 0.5; --weighted takes"),
    ({"messages": [{"role": "assistant"}]}, "the chat template of .* fails: UndefinedError"),
    ({"messages": [{**CHAT[2], "content": "a<|im_end|>"}]}, "the name of a control token"),
    ({"text": "abc", "spans": []}, "no token of the row counts"),
    ({"text": "abc", "spans": [[0, 4]]}, r"spans\[0\] is no \[first, end\] with .* end <= 3"),
    ({"text": "abc", "spans": [[2, 2]]}, r"spans\[0\] is no \[first, end\]"),
    ({"text": "abc", "spans": [[0, 2, "x"]]}, r"the weight of spans\[0\] is no finite number"),
    ({"spans": [[0, 2]]}, 'the row has no "text" and "spans"'),
]


@pytest.mark.parametrize(("row", "problem"), BROKEN, ids=range(len(BROKEN)))
def test_a_row_that_cannot_be_used_is_named_and_leaves_nothing(
    row, problem, folders, tmp_path, monkeypatch
):
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD, b"", row])
    common = ("--tokenizer", name_tokenizer(folders(PLAIN)), "--output", tmp_path / "out")
    with pytest.raises(UserError, match=rf"rows.jsonl:3: .*{problem}.*--skip-broken"):
        run_tool(monkeypatch, "--input", rows, *common)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_broken_rows_are_left_out_only_if_asked_and_counted(folders, tmp_path, monkeypatch, capsys):
    rows = [row for pair in BROKEN for row in (pair[0], GOOD)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    packed = tmp_path / "more.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps({"text": "abc", "spans": [[1, 2]]}).encode()))
    out, form = tmp_path / "out", find_chat_format_of(folders(PLAIN))
    common = ("--tokenizer", name_tokenizer(folders(PLAIN)), "--output", out, "--skip-broken")
    run_tool(monkeypatch, "--input", path, packed, *common)
    printed = capsys.readouterr().out
    tokens, weights = IndexedDataset(str(out)), IndexedDataset(f"{out}.weights")
    (good,) = encode_chats(form, [parse_chat_row(GOOD)])
    assert len(tokens) == len(BROKEN) + 1
    for number in range(len(BROKEN)):
        assert tokens.get_sequence(number).tolist() == good.ids.tolist()
        assert weights.get_sequence(number).tolist() == good.weights.tolist()
    assert weights.get_sequence(len(BROKEN)).tolist() == [0, 1, 0, 0]
    assert weights.dtype == np.uint8
    assert f"{len(BROKEN)} rows were left out" in printed
    assert "rows.jsonl:1: not JSON" in printed and printed.count("left out: ") == 5
    record = read_record(str(out), len(tokens), tokens.tokens.size)
    assert record.tokenizer.fingerprint == form.tokenizer.fingerprint
    with pytest.raises(UserError, match=r"out.bin is there; --overwrite replaces it"):
        run_tool(monkeypatch, "--input", path, *common)
    run_tool(monkeypatch, "--input", packed, *common, "--overwrite", "--weighted")
    assert IndexedDataset(f"{out}.weights").dtype == np.float32


def find_chat_format_of(folder):
    name = name_tokenizer(folder)
    return find_chat_format(name, load_tokenizer(name))


def test_a_template_may_lie_elsewhere(folders, tmp_path, monkeypatch, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "own.jinja").write_text(MARKED)
    common = ("--tokenizer", name_tokenizer(folders(PLAIN)), "--input", rows, "--overwrite")
    run_tool(monkeypatch, *common, "--output", tmp_path / "out")
    plain = IndexedDataset(f"{tmp_path}/out.weights").tokens.sum()
    run_tool(
        monkeypatch, *common, "--output", tmp_path / "own", "--template", tmp_path / "own.jinja"
    )
    assert IndexedDataset(f"{tmp_path}/own.weights").tokens.sum() == plain - 1  # no line end
    with pytest.raises(UserError, match=r"cannot read --template .*absent: No such file"):
        run_tool(
            monkeypatch, *common, "--output", tmp_path / "x", "--template", tmp_path / "absent"
        )


def test_a_tokenizer_without_places_is_refused(tmp_path, monkeypatch):
    rows = write_rows(tmp_path / "rows.jsonl", [GOOD])
    with pytest.raises(UserError, match="--tokenizer bytes does not tell the place of a token"):
        run_tool(monkeypatch, "--input", rows, "--tokenizer", "bytes", "--output", tmp_path / "out")


def test_a_run_learns_answers_alone(folders, tmp_path, monkeypatch, overrides):
    """Answers that are always the same are learnt; questions at random are not, and do not
    count."""
    random = np.random.default_rng(0)
    rows = [
        {
            "messages": [
                {"role": "user", "content": "".join(map(chr, random.integers(97, 123, 4)))},
                {"role": "assistant", "content": "yes"},
            ]
        }
        for _ in range(200)
    ]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    name = name_tokenizer(folders(PLAIN))
    run_tool(monkeypatch, "--input", path, "--tokenizer", name, "--output", tmp_path / "chats")
    keys = {
        **{"model__vocab": 259, "train__steps": 60, "train__seq": 32, "optim__lr": 0.01},
        **{"data__sources": f"[{{path: {tmp_path / 'chats'}}}]", "data__tokenizer": name},
        "run__dir": str(tmp_path / "run"),
    }
    train(overrides(**keys))
    # What nobody can predict: four of 26 letters in each chat.
    tokens = IndexedDataset(str(tmp_path / "chats"))
    floor = 4 * math.log(26) * len(tokens) / tokens.tokens.size
    assert read_losses(tmp_path / "run")[-1] < floor
    train(overrides(**{**keys, "run__dir": str(tmp_path / "all"), "data__label_weights": False}))
    assert read_losses(tmp_path / "all")[-1] > floor
