from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_files import make_counting_documents, write_token_file

from megaframe.data.gpt_dataset import GPTDataset, locate_documents, number_documents
from megaframe.data.split_advice import SPLITS, split_range
from megaframe.errors import UserError

ALL = (1.0, 0.0, 0.0)
VOCAB = 2**16

texts = st.lists(
    st.lists(st.lists(st.integers(0, 90), max_size=9), max_size=3), min_size=1, max_size=25
)


def split_by_hand(texts, shares, split):
    """Return the tokens of a split, and for each whether it begins a document."""
    place = SPLITS.index(split)
    flat = [[token for sequence in text for token in sequence] for text in texts]
    marked = [[(token, not i) for i, token in enumerate(text)] for text in flat]
    if len(texts) == 1:
        marked = [[mark] for mark in marked[0]]  # a single document is split by tokens
    low = round(sum(shares[:place]) * len(marked))
    high = round(sum(shares[: place + 1]) * len(marked))
    pairs = [pair for text in marked[low:high] for pair in text]
    return [token for token, _ in pairs], [begins for _, begins in pairs]


@given(
    texts,
    st.sampled_from(["u1", "u2", "i4"]),
    st.sampled_from([ALL, (0.5, 0.3, 0.2), (0.2, 0.2, 0.6)]),
    st.sampled_from(SPLITS),
    st.integers(1, 7),
    st.randoms(use_true_random=False),
)
def test_windows_equal_a_slow_walk_over_the_documents(texts, dtype, shares, split, seq, random):
    tokens, begins = split_by_hand(texts, shares, split)
    with TemporaryDirectory() as folder:
        path = write_token_file(Path(folder) / "f", texts, dtype)
        if len(tokens) <= seq:
            with pytest.raises(UserError):
                GPTDataset(path, split, shares, seq, VOCAB)
            return
        source = GPTDataset(path, split, shares, seq, VOCAB)
        assert source.windows == (len(tokens) - 1) // seq
        windows = random.sample(range(source.windows), source.windows)
        read = source.read(np.array(windows))
        marks = source.is_document_start(np.array(windows))
    for row, window in enumerate(windows):
        where = range(window * seq, window * seq + seq + 1)
        assert read[row].tolist() == [tokens[i] for i in where]
        assert marks[row].tolist() == [begins[i] for i in where]
        position, document = -1, 0
        for column, i in enumerate(where[:-1]):
            position = 0 if begins[i] else position + 1
            document += begins[i]
            assert locate_documents(marks[:, :-1])[row, column] == position
            assert number_documents(marks[:, :-1])[row, column] == document


def test_every_token_but_the_first_is_predicted_once(tmp_path):
    path = write_token_file(tmp_path / "f", make_counting_documents([5, 1, 17, 30, 8]))
    source = GPTDataset(path, "train", ALL, 6, VOCAB)
    labels = source.read(np.arange(source.windows))[:, 1:]
    assert labels.reshape(-1).tolist() == list(range(1, 61))


@given(st.integers(1, 400), st.integers(0, 10), st.integers(0, 10))
def test_splits_share_out_everything(count, train, validation):
    train, validation = sorted((train, validation))[::-1]
    test = max(0, 20 - train - validation)
    total = train + validation + test
    shares = (train / total, validation / total, test / total)
    covered = []
    for split, share in zip(SPLITS, shares, strict=True):
        first, last = split_range(count, shares, split)
        assert abs((last - first) - share * count) <= 1 + 1e-9
        covered += range(first, last)
    assert covered == list(range(count))


def test_a_split_without_documents_is_refused_with_numbers(tmp_path):
    path = write_token_file(tmp_path / "f", make_counting_documents([40] * 10))
    message = r'validation split of .*: 0\.02 of 10 documents; use "data.split=\[0.9, 0.1, 0.0\]"'
    with pytest.raises(UserError, match=message + " in a new run"):
        GPTDataset(path, "validation", (0.98, 0.02, 0.0), 8, VOCAB)
    with pytest.raises(UserError, match=r'"data.split=\[0.8, 0.1, 0.1\]", also at a resume'):
        GPTDataset(path, "test", (0.8, 0.2, 0.0), 8, VOCAB)


@given(st.integers(200, 900), st.integers(1, 6), st.integers(1, 8), st.integers(1, 8))
def test_a_single_document_is_split_by_tokens(tokens, sequences, held_out, seq):
    """Training gets its first tokens, in one piece; no token is in two splits."""
    cuts = [tokens * i // sequences for i in range(sequences + 1)]
    shares = (1 - held_out / 20, held_out / 20, 0.0)
    with TemporaryDirectory() as folder:
        text = [list(range(a, b)) for a, b in pairwise(cuts)]
        path = write_token_file(Path(folder) / "f", [text])
        datasets = [
            GPTDataset(path, split, shares, seq, VOCAB) for split in ("train", "validation")
        ]
        for source in datasets:
            windows = source.read(np.arange(source.windows))
            assert windows[:, 0].tolist() == source.tokens[:-1:seq][: source.windows].tolist()
        train, validation = (source.tokens.tolist() for source in datasets)
        starts = [source.find_document_starts().tolist() for source in datasets]
    assert train + validation == list(range(tokens))
    assert abs(len(validation) - tokens * held_out / 20) <= 1
    assert starts == [[0], []]


def test_a_source_shorter_than_a_window_is_refused_with_both_numbers(tmp_path):
    path = write_token_file(tmp_path / "f", make_counting_documents([5, 3]))
    assert GPTDataset(path, "train", ALL, 7, VOCAB).windows == 1
    with pytest.raises(
        UserError, match=r"train\.seq=8 needs 9 tokens.* has 8; train\.seq=7 in a new run"
    ):
        GPTDataset(path, "train", ALL, 8, VOCAB)


@pytest.mark.parametrize(("dtype", "bad"), [("u2", 100), ("u2", 65535), ("i4", 100), ("i4", -3)])
def test_a_token_beyond_the_vocabulary_is_named(tmp_path, dtype, bad):
    tokens = [7] * 60
    tokens[41] = bad
    path = write_token_file(tmp_path / "f", [[tokens[:30]], [tokens[30:]]], dtype)
    source = GPTDataset(path, "validation", (0.5, 0.5, 0.0), 4, 100)
    source.read(np.array([0, 1]))
    with pytest.raises(UserError, match=rf"f\.bin: token 41 is {bad}, but model\.vocab=100"):
        source.read(np.array([1, 2]))


def test_the_largest_token_of_a_type_is_read_when_the_vocabulary_has_it(tmp_path):
    path = write_token_file(tmp_path / "f", [[[65535, 0, 65535]]], "u2")
    assert GPTDataset(path, "train", ALL, 2, 65536).read(np.array([0])).tolist() == [
        [65535, 0, 65535]
    ]


def test_scattered_sequences_are_refused(tmp_path):
    documents = make_counting_documents([4, 4, 4])
    path = write_token_file(tmp_path / "f", documents, pointers=[0, 16, 8])
    with pytest.raises(UserError, match=r"f\.idx: sequences 0 and after do not follow"):
        GPTDataset(path, "train", ALL, 4, VOCAB)


def test_tokens_that_are_no_whole_numbers_are_refused(tmp_path):
    path = write_token_file(tmp_path / "f", [[[1, 2, 3]]], "f4")
    with pytest.raises(UserError, match="float32"):
        GPTDataset(path, "train", ALL, 2, VOCAB)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", r"cannot open .*none\.idx: No such file.* --input TEXT --output .*/none$"),
        ("text.txt", r"cannot open .*text\.txt\.idx.* --input .*/text\.txt --output .*/text$"),
        ("f.bin", r"leave the suffix out: .*/f; .*preprocess_data\.py"),
        ("cut", r"cut\.idx is truncated"),
    ],
)
def test_a_source_that_cannot_be_read_names_its_key_and_the_tool(name, expected, tmp_path):
    write_token_file(tmp_path / "f", make_counting_documents([40]))
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "cut.idx").write_bytes((tmp_path / "f.idx").read_bytes()[:40])
    (tmp_path / "cut.bin").write_bytes((tmp_path / "f.bin").read_bytes())
    with pytest.raises(UserError, match=rf"^data\.sources: .*{expected}"):
        GPTDataset(str(tmp_path / name), "train", ALL, 4, VOCAB)
