"""A token file remembers which tokenizer made it, and no other one reads it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from loader_runs import make_config
from token_files import write_token_file, write_tokenizer

from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.data.loader import Loader
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.data.preprocessing.preprocess import PreprocessJob, preprocess
from megaframe.data.token_file_record import TokenizerRecord, read_record
from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError
from megaframe.inference.evaluation import read_sequence, read_split

TEXT = "abba" * 60


@pytest.fixture
def made(tmp_path):
    """Return a function that makes a token file of a tokenizer with these special tokens, and gives
    the names of both."""

    def make(name, special=("<eos>",)):
        folder = tmp_path / name
        folder.mkdir()
        tokenizer = write_tokenizer(folder, special)
        (folder / "text.jsonl").write_text(f"{json.dumps({'text': TEXT})}\n" * 9)
        job = (CorpusFile(str(folder / "text.jsonl")),), tokenizer, str(folder / "tokens")
        preprocess(PreprocessJob(*job))
        return str(folder / "tokens"), tokenizer

    return make


def load(paths, tokenizer, state=None, **data):
    loader = Loader(make_config(paths, (1.0, 1.0), tokenizer=tokenizer, **data), 0, 1)
    if state is not None:
        loader.load(state)
    return loader


def test_a_record_is_of_the_tokenizer_wherever_its_file_lies(made, tmp_path):
    path, tokenizer = made("one")
    record = read_record(path, 9, 9 * (len(TEXT) + 1))
    assert record.tokenizer.fingerprint == load_tokenizer(tokenizer).fingerprint
    assert (record.tokenizer.name, record.eod) == (tokenizer, 0)
    moved = shutil.copytree(tmp_path / "one", tmp_path / "moved")
    load([path], f"hf:{moved}/tokenizer.json").close()


def test_a_file_that_was_saved_anew_is_the_same_tokenizer(tmp_path):
    """transformers writes lengths of truncation and a post-processor of special tokens."""
    name = write_tokenizer(tmp_path, ("<eos>",))
    before, path = load_tokenizer(name).fingerprint, tmp_path / "tokenizer.json"
    description = json.loads(path.read_text())
    description["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}  # fmt: skip # noqa: E501
    path.write_text(json.dumps(dict(reversed(description.items())), indent=2))
    assert load_tokenizer(name).fingerprint == before
    description["model"]["vocab"] = {"<eos>": 0, "b": 1, "a": 2}
    path.write_text(json.dumps(description))
    assert load_tokenizer(name).fingerprint != before


def test_another_tokenizer_is_refused_with_both_names(made):
    path, tokenizer = made("one")
    other_path, other = made("two", ("<eos>", "<pad>"))
    for call in (
        lambda: load([path], other),
        lambda: load([path, other_path], None),
        lambda: load([path, other_path], tokenizer),
        lambda: load([path], f"{tokenizer}?eod=a"),
    ):
        with pytest.raises(
            UserError, match=r"the token file .*use the tokenizer that made"
        ) as error:
            call()
        assert tokenizer in str(error.value)
    assert Loader(make_config([path]), 0, 1).state["tokenizer"]["name"] == tokenizer


def test_a_tokenizer_that_changes_during_a_run_is_refused(made, tmp_path):
    _, tokenizer = made("one")
    foreign = write_token_file(tmp_path / "foreign", [[[1, 2] * 99]])
    loader = load([foreign], tokenizer)
    state = json.loads(json.dumps(loader.next().state))
    assert load([foreign], None, state).state["tokenizer"] == state["tokenizer"]
    write_tokenizer(tmp_path / "one", ("<eos>", "<pad>"))
    with pytest.raises(UserError, match=r"that file has changed .*checkpoint\.weights"):
        load([foreign], tokenizer, state)
    with pytest.raises(UserError, match=r"its checkpoint has .*they differ"):
        load([foreign], "bytes", state)
    del state["tokenizer"]  # of an earlier version
    load([foreign], tokenizer, state)
    state["tokenizer"] = {"name": 3}
    with pytest.raises(UserError, match="the data state of the checkpoint is damaged"):
        load([foreign], tokenizer, state)


def test_files_of_other_programs_are_taken_as_they_are(made):
    path, _ = made("one")
    lengths = [9, 40]
    with IndexedDatasetWriter(path, np.dtype("u2")) as writer:
        for length in lengths:
            writer.append(np.arange(length))
    assert not Path(f"{path}.tokens.json").exists()
    load([path], "bytes").close()


def test_a_record_of_an_earlier_file_counts_for_nothing(made):
    path, _ = made("one")
    write_token_file(path, [[list(range(99))]])
    load([path], "bytes", split=(1.0, 0.0, 0.0)).close()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"3", b'{"tokenizer": {}}', b"\xff", b" " * 70_000,
     b'{"tokenizer": {"name": "a", "fingerprint": 3}, "eod": 0, "documents": 9, "tokens": 9}'],
)  # fmt: skip
def test_a_damaged_record_is_refused(made, content):
    path, tokenizer = made("one")
    Path(f"{path}.tokens.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokens\.json"):
        load([path], tokenizer)


def test_a_record_that_cannot_be_written_is_written_by_the_next_try(made, tmp_path):
    path, tokenizer = made("one")
    output = tmp_path / "again"
    job = PreprocessJob((CorpusFile(f"{tmp_path}/one/text.jsonl"),), tokenizer, str(output))
    blocking = tmp_path / "again.tokens.json" / "folder"
    blocking.mkdir(parents=True)
    with pytest.raises(UserError, match="cannot write"):
        preprocess(job)
    shutil.rmtree(blocking.parent)
    preprocess(job)
    contents = [Path(f"{prefix}.tokens.json").read_text() for prefix in (output, path)]
    assert contents[0] == contents[1]
    assert sorted(file.name for file in tmp_path.glob("again*")) == [
        "again.bin", "again.idx", "again.tokens.json"
    ]  # fmt: skip


def test_an_input_is_never_replaced(tmp_path):
    path = tmp_path / "corpus.tokens.json"
    path.write_text('{"text": "a"}\n')
    job = PreprocessJob((CorpusFile(str(path)),), "bytes", str(tmp_path / "corpus"))
    with pytest.raises(UserError, match=r"would replace the input .*corpus\.tokens\.json"):
        preprocess(job)
    assert path.read_text() == '{"text": "a"}\n'


def test_evaluation_refuses_token_files_of_another_tokenizer(made):
    path, tokenizer = made("one")
    other_path, _ = made("two", ("<eos>", "<pad>"))
    own = Loader(make_config([path], tokenizer=tokenizer), 0, 1)._tokenizer
    read = load_tokenizer(tokenizer)
    assert len(read_sequence(CorpusFile(f"{path}.bin"), read, None, own).tokens) == 9 * 241
    with pytest.raises(UserError, match="evaluate on token files that the tokenizer of the run"):
        read_sequence(CorpusFile(f"{other_path}.bin"), read, None, own)
    with pytest.raises(UserError, match="evaluate on token files that the tokenizer of the run"):
        config = make_config([other_path])
        next(read_split(config.model, config.train, config.data, "validation", read, own))


def test_files_of_one_model_are_one_tokenizer_if_their_ids_mean_the_same():
    def make(kind, digest, vocabulary=""):
        return TokenizerRecord("name", f"{kind}:{digest}", vocabulary)

    assert make("hf", "a", "v").is_same(make("sentencepiece", "b", "v"))
    assert not make("hf", "a", "v").is_same(make("sentencepiece", "b", "w"))
    assert not make("hf", "a").is_same(make("sentencepiece", "b"))  # of earlier versions
    assert not make("hf", "a", "v").is_same(make("hf", "b", "v"))  # that file has changed
    assert make("hf", "a").is_same(make("hf", "a", "v"))
