"""Tokenizers: text survives a round trip, bytes are counted, and bad files are named."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import CORPUS, RANKS, rank_lines, train_tokenizer

from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.preprocessing.train_tokenizer import (
    ControlTokens,
    interleave,
    train_byte_bpe,
    train_sentencepiece,
)
from megaframe.data.tiktoken_ranks import PUBLISHED_RANKS
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError
from megaframe.inference.chat import find_chat_format


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with one small tokenizer file of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "corpus.txt").write_text(CORPUS, encoding="utf-8")
    for kind in ("bpe", "unigram"):
        train_sentencepiece(
            [CorpusFile(str(folder / "corpus.txt"))], str(folder / kind), 296, kind, 1
        )
    train_tokenizer(folder / "bytes.json", "ByteLevel")
    train_tokenizer(folder / "metaspace.json", "Metaspace")
    (folder / "r.tiktoken").write_bytes(rank_lines(RANKS))
    return folder


NAMES = {
    "bytes": "bytes",
    "sentencepiece bpe": "sentencepiece:{}/bpe.model",
    "sentencepiece unigram": "sentencepiece:{}/unigram.model",
    "hf bytes": "hf:{}/bytes.json",
    "hf metaspace": "hf:{}/metaspace.json",
    "tiktoken": "tiktoken:{}/r.tiktoken",
}
# SentencePiece and similar tokenizers write a blank as U+2581, and cannot distinguish the two.
TEXT = st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=30)


@pytest.mark.parametrize("kind", NAMES)
@given(texts=st.lists(TEXT | st.sampled_from([CORPUS[:300], "  a\n\n\tb ", "x\0y"]), max_size=4))
def test_every_text_comes_back_with_all_its_bytes(folder, kind, texts):
    tokenizer = load_tokenizer(NAMES[kind].format(folder))
    counts = tokenizer.count_token_bytes()
    batch = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids.tolist()) for ids in batch] == texts
    assert [int(counts[ids].sum()) for ids in batch] == [len(text.encode()) for text in texts]
    assert [tokenizer.encode(text) for text in texts] == [ids.tolist() for ids in batch]
    assert all(0 <= token < tokenizer.vocab_size for ids in batch for token in ids)


@pytest.mark.parametrize("kind", NAMES)
def test_text_cannot_end_a_document(folder, kind):
    tokenizer = load_tokenizer(NAMES[kind].format(folder))
    assert tokenizer.count_token_bytes()[tokenizer.eod] == 0
    assert tokenizer.count_token_bytes().shape == (tokenizer.vocab_size,)
    assert tokenizer.decode([tokenizer.eod]) == ""
    for name in ("<|endoftext|>", "</s>"):
        ids = tokenizer.encode(f"a{name}b")
        assert tokenizer.eod not in ids
        assert tokenizer.decode(ids) == f"a{name}b"


def test_ids_are_those_of_the_libraries(folder):
    text = CORPUS[:500]
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "bpe.model"))
    assert load_tokenizer(f"sentencepiece:{folder}/bpe.model").encode(text) == model.encode(text)
    reference = tokenizers.Tokenizer.from_file(str(folder / "bytes.json"))
    reference.no_truncation()
    assert load_tokenizer(f"hf:{folder}/bytes.json").encode(text) == reference.encode(text).ids
    tokenizer = load_tokenizer(f"tiktoken:{folder}/r.tiktoken")
    # The pattern joins a blank to its word.
    assert tokenizer.encode("the  th") == [257, 32, 32, 256]
    assert (tokenizer.eod, tokenizer.vocab_size) == (258, 301)


def test_fingerprints_tell_files_apart(folder):
    names = [name.format(folder) for name in NAMES.values()]
    prints = [load_tokenizer(name).fingerprint for name in names]
    assert len(set(prints)) == len(prints)
    assert prints == [load_tokenizer(name).fingerprint for name in names]


def test_published_patterns_are_those_of_tiktoken():
    from tiktoken_ext import openai_public

    source = Path(openai_public.__file__).read_text(encoding="utf-8")
    pattern, eod = PUBLISHED_RANKS[100256]
    assert pattern in source and f"ENDOFTEXT: {eod}" in source
    pattern, eod = PUBLISHED_RANKS[199998]
    assert f"ENDOFTEXT: {eod}" in source
    assert all(f'r"""{part}"""' in source for part in split_top_level(pattern))


def split_top_level(pattern):
    """Split a pattern at each `|` that is not inside parentheses."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


@pytest.mark.parametrize("ranks", PUBLISHED_RANKS)
def test_published_patterns_lose_no_text(ranks):
    pattern, _ = PUBLISHED_RANKS[ranks]
    merges = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=merges, special_tokens={})
    assert encoding.decode(encoding.encode_ordinary(CORPUS)) == CORPUS


BAD_NAMES = {
    "sentencepice:m.model": "unknown kind 'sentencepice'.*nearest: sentencepiece:m.model",
    "m.model": "has no kind.*nearest: sentencepiece:m.model",
    "t.json": "has no kind.*nearest: hf:t.json",
    "hf:": "hf:' has no path",
    "bytes:x": "takes no path",
    "hf:/does/not/exist": "/does/not/exist: No such file",
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_wrong_name_gets_the_nearest_right_one(name):
    with pytest.raises(UserError, match=BAD_NAMES[name]):
        load_tokenizer(name)


BAD_RANKS = {
    "not base64": (b"!!! 1\n", r":1: not a token in base64 and its rank$"),
    "no rank": (b"AA==\n", r":1: not a token in base64 and its rank$"),
    "negative": (b"AA== -1\n", r":1: a rank outside 0 to 16777215$"),
    "huge": (b"AA== 99999999999\n", r":1: a rank outside 0 to 16777215$"),
    "twice": (b"AA== 1\nAA== 2\n", r":2: a token that is empty or repeated$"),
    "bytes left out": (b"AA== 0\n", r"255 of the 256 single bytes"),
    "shared": (rank_lines(RANKS | {b"zz": 5}), r"260 tokens share 259 ranks"),
    "empty": (b"", r"has 0 bytes"),
}


@pytest.mark.parametrize("name", BAD_RANKS)
def test_a_bad_rank_file_is_refused(tmp_path, name):
    content, message = BAD_RANKS[name]
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(f"tiktoken:{tmp_path}/r")


@pytest.mark.parametrize("kind", ["sentencepiece", "hf", "tiktoken"])
@settings(max_examples=25)
@given(content=st.binary(min_size=1, max_size=200))
def test_a_foreign_file_is_refused(tmp_path_factory, kind, content):
    path = tmp_path_factory.mktemp("foreign") / "file"
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        load_tokenizer(f"{kind}:{path}")


def test_a_vocabulary_without_an_end_of_document_is_refused(folder, tmp_path):
    described = (folder / "bytes.json").read_text(encoding="utf-8")
    (tmp_path / "t.json").write_text(described.replace("<|endoftext|>", "<|start|>"), "utf-8")
    with pytest.raises(UserError, match=r"no end of document; .*are: <\|pad\|>, <\|start\|>|<\|st"):
        load_tokenizer(f"hf:{tmp_path}/t.json")


def test_a_missing_library_names_its_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'megaframe\[hf\]'"):
        load_tokenizer(f"hf:{folder}/bytes.json")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError, match=r"pip install 'megaframe\[data\]'"):
        load_tokenizer(f"tiktoken:{folder}/r.tiktoken")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_training_is_deterministic_and_bounded(folder, tmp_path, kind):
    corpus = str(folder / "corpus.txt")
    used = train_sentencepiece([CorpusFile(corpus)], str(tmp_path / "t"), 296, kind, 1)
    assert used == len(CORPUS)
    assert (tmp_path / "t.model").read_bytes() == (folder / f"{kind}.model").read_bytes()
    with pytest.raises(UserError, match=r"--vocab 99999 .*too high.*<= \d+"):
        train_sentencepiece([CorpusFile(corpus)], str(tmp_path / "u"), 99999, kind, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["t.model"]


MARKS = ControlTokens(
    others=("<|start|>", "<|stop|>"), answer_end="<|stop|>", template="{{ messages[0].content }}"
)


def test_a_byte_level_bpe_is_deterministic_and_can_chat(folder, tmp_path):
    """It restores any text, no text becomes a control token, and its end of an answer is known."""
    corpus = [CorpusFile(str(folder / "corpus.txt"))]
    for name in ("one", "other"):
        assert train_byte_bpe(corpus, str(tmp_path / name), 300, 1, MARKS) == len(CORPUS)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == [
        *("chat_template.jinja", "generation_config.json", "tokenizer.json"),
        "tokenizer_config.json",
    ]
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    name = f"hf:{tmp_path}/one/tokenizer.json"
    tokenizer = load_tokenizer(name)
    assert tokenizer.vocab_size == 300 and tokenizer.eod_name == "<|endoftext|>"
    text = "aé\u2028 \t\r\n" + CORPUS[:99] + "<|stop|>\x00"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())
    control = {tokenizer.find_id(mark) for mark in ("<|endoftext|>", *MARKS.others)}
    assert len(control) == 3 and not control & {*ids}
    chat = find_chat_format(name, tokenizer)
    assert chat.ends == {tokenizer.eod, tokenizer.find_id("<|stop|>")}
    assert chat.template == MARKS.template


def test_a_byte_level_bpe_that_cannot_be_is_refused(folder, tmp_path):
    corpus = [CorpusFile(str(folder / "corpus.txt"))]
    for vocab, control, words in (
        (258, MARKS, r"--vocab 258 is too few: .* alone are 259; use 259 or more"),
        (99999, MARKS, r"--vocab 99999 with \d+ characters: there are only \d+ different tokens"),
        (300, ControlTokens(others=("a", "a")), r"\['a'\] is empty or named twice"),
        (300, ControlTokens(answer_end="x"), "--answer-end x is no control token; use one of"),
    ):
        with pytest.raises(UserError, match=words):
            train_byte_bpe(corpus, str(tmp_path / "t"), vocab, 1, control)
    for content, message in (('{"text": ""}\n', "corpus is empty"), ("{\n", r"c\.jsonl:1: not")):
        (tmp_path / "c.jsonl").write_text(content)
        with pytest.raises(UserError, match=message):
            train_byte_bpe([CorpusFile(str(tmp_path / "c.jsonl"))], str(tmp_path / "t"), 300, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]


def test_training_explains_an_empty_and_a_bad_corpus(tmp_path):
    for content, message in (('{"text": ""}\n', "corpus is empty"), ("{\n", r"c\.jsonl:1: not")):
        (tmp_path / "c.jsonl").write_text(content)
        with pytest.raises(UserError, match=message):
            train_sentencepiece([CorpusFile(str(tmp_path / "c.jsonl"))], "unused", 300, "bpe", 1)


def test_files_take_turns():
    assert list(interleave([iter("abc"), iter(""), iter("xy")])) == list("axbyc")


def test_byte_ids_are_bytes():
    tokenizer = load_tokenizer("bytes")
    assert np.array_equal(tokenizer.encode("é"), [0xC3, 0xA9])
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)


def test_an_id_beyond_any_vocabulary_is_refused(folder, tmp_path):
    description = json.loads((folder / "bytes.json").read_text())
    description["model"]["vocab"]["a"] = 2**31
    (tmp_path / "x.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match="has a token with id 2147483648; ids are below"):
        load_tokenizer(f"hf:{tmp_path}/x.json")
