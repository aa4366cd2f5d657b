"""Documents that end where the index says, or after the token that ends them, as for Megatron."""

from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_runs import SEQ, is_same, make_config, take
from token_files import write_token_file

from megaframe.config import DataConfig, RunConfig
from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE
from megaframe.data.preprocessing.corpus_files import CorpusFile
from megaframe.errors import UserError
from megaframe.inference.evaluation import read_sequence, read_split
from megaframe.validate.data import find_source_mistakes

END = 0
FLAGS = {"reset_positions": True, "reset_attention": True, "mask_eod": True}
WHOLE = {"split": (1.0, 0.0, 0.0)}
DOCUMENTS = st.lists(
    st.lists(st.integers(1, 50), max_size=20).map(lambda tokens: [*tokens, END]),
    min_size=1,
    max_size=30,
).filter(lambda documents: sum(map(len, documents)) > SEQ)


def write_both(folder, documents):
    """Write documents with an index of them, and as a single document."""
    (folder / "one").mkdir()
    many = write_token_file(folder / "tokens", [[document] for document in documents])
    return many, write_token_file(folder / "one/tokens", [[[*chain(*documents)]]])


@settings(max_examples=40)
@given(DOCUMENTS, st.sampled_from([FLAGS, {"mask_eod": True}, {"reset_attention": True}]))
def test_ends_of_documents_are_those_of_an_index_that_has_them(documents, flags):
    with TemporaryDirectory() as folder:
        many, one = write_both(Path(folder), documents)
        steps = [
            take(Loader(make_config([path], **WHOLE, **flags, document_ends=ends), 0, 1), 2)
            for path, ends in ((many, "index"), (many, END), (one, END))
        ]
        for others in steps[1:]:
            for first, other in zip(steps[0], others, strict=True):
                assert first.valid == other.valid
                for a, b in zip(first.microbatches, other.microbatches, strict=True):
                    assert all(
                        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
                        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
                    )
        sequences = [
            read_sequence(CorpusFile(f"{path}.bin"), None, DataConfig(document_ends=ends))
            for path, ends in ((many, "index"), (many, END), (one, END))
        ]
        for sequence in sequences[1:]:
            assert np.array_equal(sequence.beginnings, sequences[0].beginnings)


def build_megatron_masks(tokens):
    """Return loss mask, positions and what each token may attend to, as Megatron-LM's
    `_get_ltor_masks_and_position_ids` builds them for one sample."""
    length = len(tokens)
    loss_mask, positions = [1] * length, list(range(length))
    allowed = torch.tril(torch.ones(length, length, dtype=torch.bool))
    previous = 0
    for place in (place for place, token in enumerate(tokens) if token == END):
        loss_mask[place] = 0
        allowed[place + 1 :, : place + 1] = False
        positions[place + 1 :] = [
            position - (place + 1 - previous) for position in positions[place + 1 :]
        ]
        previous = place + 1
    return loss_mask, positions, allowed


def test_masks_are_those_of_megatron(tmp_path):
    documents = [[*range(1, 3 + n % 9), END] for n in range(60)]
    _, one = write_both(tmp_path, documents)
    config = make_config([one], **WHOLE, **FLAGS, document_ends=END)
    for step in take(Loader(config, 0, 1), 5):
        for batch in step.microbatches:
            for row, tokens in enumerate(batch.tokens_BS.tolist()):
                loss_mask, positions, allowed = build_megatron_masks(tokens)
                assert (batch.labels_BS[row] != IGNORE).int().tolist() == loss_mask
                assert batch.positions_BS[row].tolist() == positions
                documents_S = batch.documents_BS[row]
                same = torch.tril(documents_S[:, None] == documents_S)
                assert torch.equal(same, allowed)


def test_the_end_is_the_tokenizers(tmp_path):
    path = write_token_file(tmp_path / "t", [[[1, 2, 256] * 30]])
    named, numbered = (
        make_config([path], **WHOLE, **FLAGS, tokenizer="bytes", document_ends=ends)
        for ends in ("tokens", 256)
    )
    assert is_same(Loader(named, 0, 1).next(), Loader(numbered, 0, 1).next())


def describe(config):
    return [*Loader(config, 0, 1).describe_sources(1)][1:]


def test_an_index_without_the_documents_is_said(tmp_path):
    documents = [[1, 2, 3, END]] * 50
    many, one = write_both(tmp_path, documents)
    few = write_token_file(tmp_path / "few", [[[*chain(*documents)]]] * 2)
    assert describe(make_config([many], **FLAGS)) == describe(make_config([one])) == []
    assert describe(make_config([one], **FLAGS, document_ends=END)) == []
    (line,) = describe(make_config([one], **WHOLE, mask_eod=True))
    assert f"the index of {one} has 1 document: data.mask_eod act" in line
    assert "data.document_ends=tokens" in line
    bytes_end = write_token_file(tmp_path / "b", [[[1, 256] * 50], [[2, 256] * 50]])
    (line,) = describe(make_config([bytes_end], **WHOLE, mask_eod=True, tokenizer="bytes"))
    assert "has 2 documents, and 98 ends of documents (token 256) inside" in line
    assert describe(make_config([few], **WHOLE, mask_eod=True)) == []  # nothing says what ends one


def test_evaluation_of_a_split_has_the_same_documents(tmp_path):
    many, one = write_both(tmp_path, [[1, 2, 3, END]] * 50)
    marks = []
    for path, ends in ((many, "index"), (many, END), (one, END)):
        config = make_config([path], document_ends=ends, split=(0.5, 0.5, 0.0))
        ((_, sequence),) = read_split(config.model, config.train, config.data, "validation")
        marks.append(sequence.beginnings.tolist())
        assert len(IndexedDataset(path).tokens) == 200
    assert marks[0] == marks[1] == marks[2] and sum(marks[0]) == 25


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"document_ends": "tokens"}, "needs a data.tokenizer"),
        ({"document_ends": 70}, "document_ends=70 is no token of model.vocab=70; use an id of 0"),
    ],
)
def test_an_end_that_cannot_be_is_refused(data, message, tmp_path):
    path = write_token_file(tmp_path / "t", [[[1] * 99]])
    sources = [{"path": path}]
    config = RunConfig.model_validate(
        {"model": {"vocab": 70}, "data": {**data, "sources": sources}}
    )
    (mistake,) = find_source_mistakes(config.model, config.data)
    assert message in mistake
    if data["document_ends"] == "tokens":
        with pytest.raises(UserError, match=r"needs a data\.tokenizer"):
            Loader(config, 0, 1)
