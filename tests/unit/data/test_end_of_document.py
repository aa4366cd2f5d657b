"""The end of a document of a tokenizer.json: from the files beside it, or from the user."""

import pytest
from token_files import write_tokenizer

from megaframe.data.preprocessing.preprocess import encode_documents
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError

GEMMA = {"special": ("<pad>", "<eos>", "<bos>", "<unk>"), "added": ("<s>", "</s>")}
"""In this vocabulary </s> is an HTML tag."""


FOLDERS = {
    "config": ({"tokenizer_config": {"eos_token": "<eos>"}}, "<eos>"),
    "an added token in full": ({"tokenizer_config": {"eos_token": {"content": "<eos>"}}}, "<eos>"),
    "the html tag, because the config says so": (
        {"tokenizer_config": {"eos_token": "</s>"}},
        "</s>",
    ),
    "special tokens map": ({"special_tokens_map": {"eos_token": "<bos>"}}, "<bos>"),
    "config before map": (
        {"special_tokens_map": {"eos_token": "<bos>"}, "tokenizer_config": {"eos_token": "<pad>"}},
        "<pad>",
    ),
    "null says nothing": (
        {"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": 2}},
        "<bos>",
    ),
    "one id in a list": ({"config": {"eos_token_id": [3]}}, "<unk>"),
    "several ids are no answer": ({"generation_config": {"eos_token_id": [0, 2]}}, "<eos>"),
    "nothing beside": ({}, "<eos>"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_the_files_of_the_model_say_what_ends_a_document(case, tmp_path):
    files, expected = FOLDERS[case]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, **GEMMA, **files))
    assert tokenizer.eod_name == expected


def test_an_html_tag_does_not_end_a_document(tmp_path):
    name = write_tokenizer(tmp_path, **GEMMA, tokenizer_config={"eos_token": "<eos>"})
    tokenizer = load_tokenizer(name)
    documents = encode_documents(tokenizer, ["ab", "a<s>b</s>a"], append_eod=True)
    ids = {"<eos>": 1, "<s>": 4, "</s>": 5, "a": 6, "b": 7}
    expected = ["a", "b", "<eos>", "a", "<s>", "b", "</s>", "a", "<eos>"]
    assert documents.tokens.tolist() == [ids[token] for token in expected]


def test_files_beside_another_name_are_of_another_tokenizer(tmp_path):
    beside = {"tokenizer_config": {"eos_token": "<bos>"}}
    assert load_tokenizer(write_tokenizer(tmp_path, **GEMMA, file="gemma.json", **beside)).eod == 1


ASKED = {
    "a word of the vocabulary": (
        {"added": ("</s>",)},
        "no known special token.*special tokens are: none",
    ),
    "two candidates": (
        {"special": ("</s>", "<eos>")},
        "2 special tokens with a known name.*</s>, <eos>",
    ),
    "none": ({"special": ("[SEP]",)}, r"no known special token.*hf:.*\?eod=\[SEP\]"),
    "not in the vocabulary": (
        {"special": ("</s>",), "tokenizer_config": {"eos_token": "<end>"}},
        r"tokenizer_config\.json names as the end of a text is no token of.*\?eod=</s>",
    ),
    "no such id": (
        {"special": ("</s>",), "config": {"eos_token_id": 99}},
        r"config\.json names as the end of a text is no token of",
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_where_nothing_says_it_the_user_is_asked(case, tmp_path):
    tokens, message = ASKED[case]
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(write_tokenizer(tmp_path, **tokens))
    assert "<end>" not in str(error.value)  # the file may be a link to one with secrets


def test_the_user_names_it_after_the_path(tmp_path):
    name = write_tokenizer(tmp_path, **GEMMA, tokenizer_config={"eos_token": "<eos>"})
    named = load_tokenizer(f"{name}?eod=</s>")
    assert (named.eod_name, named.eod) == ("</s>", 5)
    assert named.decode([6, 5]) == "a" and named.count_token_bytes()[5] == 0
    assert named.fingerprint != load_tokenizer(name).fingerprint
    assert load_tokenizer(f"{name}?eod=<eos>").fingerprint == load_tokenizer(name).fingerprint
    with pytest.raises(UserError, match="no token '<end>'; its special tokens are: <bos>, <eos>"):
        load_tokenizer(f"{name}?eod=<end>")


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 99, b"null", b'{"eos_token": 3}'])
def test_a_damaged_file_beside_it_is_named_or_says_nothing(content, tmp_path):
    name = write_tokenizer(tmp_path, **GEMMA)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    try:
        assert load_tokenizer(name).eod_name == "<eos>"
    except UserError as error:
        assert f"{tmp_path}/tokenizer_config.json is not JSON" in str(error)
