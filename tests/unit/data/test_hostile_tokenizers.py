"""Tokenizer files that would take a library's memory, its time or the process are refused before a
library sees them, and no message quotes a file that is no tokenizer."""

import base64
import json

import numpy as np
import pytest
import tokenizers

from megaframe.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from megaframe.data.tokenizer_description import read_description
from megaframe.errors import UserError

END = {
    **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
    **{"id": 3, "content": "</s>", "special": True},
}
MODEL = {
    **{"type": "BPE", "unk_token": None, "byte_fallback": False},
    **{"vocab": {"a": 0, "b": 1, "ab": 2, "</s>": 3}, "merges": [["a", "b"]]},
}
DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
UNTYPED = {"pattern": {"String": "a"}, "content": "aa"}
BETWEEN = {"type": "Replace", "pattern": {"Regex": "(?=a)"}, "content": "a"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
CHARSMAP = base64.b64encode(b"\0\0\0\0" + b"a" * 300 + b"\0").decode()


def load(path, **parts):
    """Load a tokenizer.json with these parts."""
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [END], "model": MODEL, **parts}))
    return load_tokenizer(f"hf:{path}")


def chain(part, times, kind="normalizers"):
    return {"type": "Sequence", kind: [part] * times}


def unigram(*pieces):
    return {"type": "Unigram", "unk_id": 0, "vocab": [[piece, 0.0] for piece in pieces]}


HOSTILE = {
    "doubled": (
        {"normalizer": chain(DOUBLED, 40)},
        "can make 1000000000 characters of one; .* 256",
    ),
    "few": ({"normalizer": chain(DOUBLED, 9)}, "can make 512 characters of one; the most is 256"),
    "untyped": ({"normalizer": chain(UNTYPED, 40)}, "normalizer and pre_tokenizer can make"),
    "between": ({"normalizer": chain(BETWEEN, 40)}, "can make 1000000000 characters"),
    "bytes": ({"normalizer": chain({"type": "ByteLevel"}, 40)}, "can make 1000000000 characters"),
    "byte pieces": ({"pre_tokenizer": chain(BYTES, 40, "pretokenizers")}, "can make 1000000000"),
    "decoded": ({"decoder": chain(DOUBLED, 40, "decoders")}, "its decoder can make 1000000000"),
    "charsmap": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
        "can make 300 characters of one",
    ),
    "prepended": (
        {"normalizer": chain({"type": "Prepend", "prepend": "a" * 10_000}, 30)},
        r"texts of its parts have \d+ characters; the most is 100000",
    ),
    "many": ({"normalizer": chain({"type": "Lowercase"}, 2000)}, "2002 normalizers and the like"),
    "prefix": (
        {"model": {**MODEL, "continuing_subword_prefix": "#" * 8}},
        "second part of merge 0 does not begin with the continuing_subword_prefix of 8 characters",
    ),
    "old merges": (
        {"model": {**MODEL, "continuing_subword_prefix": "é", "merges": ["a b"]}},
        "second part of merge 0",
    ),
    "long piece": ({"model": unigram("u", "a" * 10**6)}, "a piece has 1000000 characters; .* 1000"),
    "trie": (
        lambda: {"model": unigram(*(f"{n:x>1000}" for n in range(13_000)))},
        "pieces of its unigram model have 13000000 bytes; the most is 12582912",
    ),
    "long added": (
        {"added_tokens": [END, {**END, "id": 4, "content": "x" * 10**6}]},
        "an added token has 1000000 characters; the most is 1000",
    ),
    "added": (
        {"added_tokens": [{**END, "content": f"{n:x>1000}", "id": n} for n in range(5000)]},
        "added tokens have 5000000 characters; the most is 4194304",
    ),
    "long words": (
        {"model": {"type": "WordPiece", "vocab": {}, "max_input_chars_per_word": 10**9}},
        "max_input_chars_per_word=1000000000 is more than 10000",
    ),
    "no vocab": ({"model": {"type": "BPE"}}, "it has no model with a vocab"),
    "unknown": ({"pre_tokenizer": {"type": "Guess"}}, "tokenizers cannot use it: .*PreTokenizer"),
    "panic": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "tokenizers cannot use it: Precompiled",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_asks_for_more_than_a_tokenizer_needs_is_refused(tmp_path, name):
    parts, message = HOSTILE[name]
    parts = parts() if callable(parts) else parts  # what is large is not made to be collected
    with pytest.raises(UserError, match=message) as error:
        load(tmp_path / "t.json", **parts)
    assert len(str(error.value)) < 1000


def message(number, content):
    """Return a field of a protocol buffer that holds bytes."""
    size = len(content)
    digits = [size >> 7 * place & 127 for place in range(5)]
    return bytes([number << 3 | 2, *(digit | 128 for digit in digits[:-1]), digits[-1]]) + content


RULES = b"\0\0\0\0" + b"a" * 300 + b"\0"
PIECES = b"".join(message(1, message(1, piece)) for piece in (b"<unk>", b"</s>", b"a"))
HOSTILE_MODELS = {
    "rules": (message(3, message(2, RULES)), "its rules can make 300 characters of one; .* 256"),
    "later rules": (
        message(3, message(1, b"nfkc")) + message(3, message(2, RULES)) + message(3, b""),
        "its rules can make 300",
    ),
    "rules after decoding": (message(5, message(2, RULES)), "its rules can make 300"),
    "hidden rules": (  # the library takes 32 bits of a field's number
        bytes([3 << 3 | 2 | 128, 128, 128, 128, 16]) + message(3, message(2, RULES))[1:],
        "is not a SentencePiece model",
    ),
    "long piece": (
        message(1, message(1, b"a" * 10**6)),
        r"a piece has \d+ bytes; the most is 4032",
    ),
    "cut": (b"\x0a", "is not a SentencePiece model"),
}


@pytest.mark.parametrize("name", HOSTILE_MODELS)
def test_a_model_that_asks_for_more_than_a_tokenizer_needs_is_refused(tmp_path, name):
    """A rule of a few kilobytes turns a text of a kilobyte into gigabytes."""
    part, problem = HOSTILE_MODELS[name]
    (tmp_path / "t.model").write_bytes(PIECES + part)
    with pytest.raises(UserError, match=problem):
        load_tokenizer(f"sentencepiece:{tmp_path}/t.model")


def test_parts_that_decide_on_no_id_are_not_given_to_the_library(tmp_path):
    """Some make it panic or pad each text to a terabyte."""
    harmful = {
        "truncation": {"max_length": 0, "stride": 10, "strategy": "x"},
        "padding": {"strategy": {"Fixed": 10**12}},
        "post_processor": {"type": "Guess"},
    }
    assert load(tmp_path / "t.json", **harmful).encode("abab") == [2, 2]


def test_what_is_given_twice_is_what_was_checked(tmp_path):
    """Parsers differ in which of two equal keys they take."""
    plain = json.dumps({"version": "1.0", "added_tokens": [END], "model": MODEL})
    bomb = json.dumps({"normalizer": chain(DOUBLED, 40)})
    (tmp_path / "t.json").write_text(f'{bomb[:-1]}, "normalizer": null, {plain[1:]}')
    assert load_tokenizer(f"hf:{tmp_path}/t.json").encode("ab") == [2]
    (tmp_path / "t.json").write_text(f'{{"normalizer": null, {bomb[1:-1]}, {plain[1:]}')
    with pytest.raises(UserError, match="can make 1000000000 characters"):
        load_tokenizer(f"hf:{tmp_path}/t.json")


def test_a_failure_on_a_text_is_a_message(tmp_path):
    words = {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0, "</s>": 3}}
    unknown = load(tmp_path / "t.json", model=words)
    with pytest.raises(UserError, match=r"t\.json: tokenizers cannot use it: .*Missing \[UNK\]"):
        unknown.encode("b")
    cut = load(
        tmp_path / "t.json", decoder={"type": "Strip", "content": "a", "start": 0, "stop": 2}
    )
    with pytest.raises(UserError, match="tokenizers cannot use it: index out of bounds"):
        cut.decode([0])


def test_published_descriptions_pass(tmp_path):
    """What the largest and the oldest families ask for."""
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    short = base64.b64encode(b"\0\0\0\0" + "صلى الله عليه وسلم".encode() + b"\0").decode()
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    t5 = {
        "model": unigram("<unk>", "</s>", "▁"),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Precompiled", "precompiled_charsmap": short}, spaces],
        },
        "pre_tokenizer": chain(metaspace, 1, "pretokenizers"),
        "decoder": metaspace,
    }
    bert = {**MODEL, "type": "WordPiece", "max_input_chars_per_word": 100}
    clip = {**MODEL, "continuing_subword_prefix": "", "end_of_word_suffix": "</w>"}
    splits = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}"}, "behavior": "Isolated"}
    deepseek = {"pre_tokenizer": chain(splits, 5, "pretokenizers"), "decoder": BYTES}
    for parts in (t5, {"model": bert}, {"model": clip}, {"model": MODEL, **deepseek}):
        read_description("t.json", json.dumps(parts).encode())


@pytest.mark.parametrize("kind", ["tiktoken", "hf", "sentencepiece"])
@pytest.mark.parametrize(
    "content",
    ["root:s3cret:1", "s3cretab 5", '{"key": "s3cret"}', '["s3cret"]', "s3cret= 99999999"],
)
def test_no_message_quotes_a_file_that_is_no_tokenizer(tmp_path, kind, content):
    (tmp_path / "file").write_text(content + "\n")
    with pytest.raises(UserError) as error:
        load_tokenizer(f"{kind}:{tmp_path}/file")
    assert "s3cret" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.parametrize("kind", ["tiktoken", "hf", "sentencepiece"])
def test_a_file_larger_than_any_tokenizer_is_not_read(tmp_path, kind):
    path = tmp_path / "file"
    path.touch()
    with open(path, "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="has 1099511627776 bytes; between 1 and 67108864 are read"):
        load_tokenizer(f"{kind}:{path}")


def test_ids_are_those_of_the_file_as_it_is(tmp_path):
    """Nothing that decides on ids is lost on the way to the library."""
    spaced = {"type": "Replace", "pattern": {"String": " "}, "content": "a"}
    tokenizer = load(tmp_path / "t.json", normalizer=spaced, decoder={"type": "Fuse"})
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    text = "ab b  ba"
    assert np.array_equal(tokenizer.encode(text), reference.encode(text).ids)
