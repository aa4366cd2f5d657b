"""Advice about splits works when it is followed: the shares that a message names give the split its
sample, and keep what is trained on wherever they can."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st
from token_files import make_counting_documents, write_token_file

from megaframe.config import load
from megaframe.config.data import DataConfig
from megaframe.data.gpt_dataset import GPTDataset
from megaframe.data.split_advice import SPLITS, SplitSetting, enlarge_split, split_range
from megaframe.data.training_shares import divide_for_evaluation, find_changed_shares
from megaframe.errors import UserError
from megaframe.validate.data import find_split_mistakes

SHARES = st.tuples(st.integers(1, 100), st.integers(0, 100), st.integers(0, 100))


def normalise(counts):
    train, validation = (round(count / sum(counts), 3) for count in counts[:2])
    return train, validation, max(0.0, round(1 - train - validation, 9))


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    shares=SHARES.map(normalise),
    split=st.sampled_from(SPLITS),
    seq=st.integers(1, 12),
    own=st.booleans(),
)
def test_advice_that_is_followed_literally_gives_a_sample(lengths, shares, split, seq, own):
    with TemporaryDirectory() as folder:
        path = write_token_file(Path(folder) / "f", make_counting_documents(lengths))
        setting = SplitSetting(path if own else None)
        try:
            GPTDataset(path, split, shares, seq, 1 << 16, None, setting)
            return
        except UserError as error:
            text = str(error)
        sizes = lengths if len(lengths) > 1 else [1] * lengths[0]  # what is divided
        least = sizes[0] if split != "train" else 0
        if sum(sizes) - least <= seq:  # the first one has to be trained on
            assert text.endswith("use more text")
            return
        (listed,) = re.findall(r"\[[^]]*\] for" if own else r'"data\.split=([^"]*)"', text)
        config = load(None, [f"data.split={listed.removesuffix(' for')}"])
        assert not list(find_split_mistakes(config.train, config.data))
        assert GPTDataset(path, split, config.data.split, seq, 1 << 16).windows
        assert text.endswith("also at a resume" if config.data.split[0] == shares[0] else "new run")


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    shares=SHARES.map(normalise),
    split=st.sampled_from(SPLITS[1:]),
    least=st.integers(1, 12),
)
def test_what_is_trained_on_stays_wherever_it_can(counts, shares, split, least):
    ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
    first, _ = split_range(len(counts), shares, "validation")
    enough = enlarge_split(shares, split, ends, least)
    held_out = ends[-1] - ends[first]
    assert (enough is None) == (ends[-1] - ends[1] < least)
    if enough is not None:
        assert (enough[0] == shares[0]) == (first > 0 and held_out >= least)


def test_a_large_file_gets_shares_as_exact_as_it_needs():
    tokens = 123_456_789
    shares = enlarge_split((0.98, 0.02, 0.0), "test", range(tokens + 1), 1025)
    assert shares[0] == 0.98
    first, last = split_range(tokens, shares, "test")
    assert last - first == 1025


def test_an_evaluation_is_told_its_option_or_to_take_other_text():
    evaluation = SplitSetting(is_evaluation=True)
    assert evaluation.advise((0.8, 0.1, 0.1), keeps_training=True) == "use --data-split 0.8 0.1 0.1"
    for setting, keeps in ((evaluation, False), (SplitSetting("a", is_evaluation=True), True)):
        assert (
            setting.advise((0.8, 0.1, 0.1), keeps_training=keeps) == "evaluate other text (--text)"
        )


def make_data(*sources, split=(0.8, 0.2, 0.0)):
    return DataConfig.model_validate({"sources": sources, "split": split})


def test_two_sources_with_one_file_name_have_shares_of_their_own():
    both = [{"path": "x/web", "split": [1, 0, 0]}, {"path": "y/web", "split": [0.5, 0.5, 0]}]
    saved = make_data(*both)
    assert not [*find_changed_shares(saved, {}, make_data(*reversed(both)))]
    swapped = make_data({**both[0], "path": "y/web"}, {**both[1], "path": "x/web"})
    lines = [*find_changed_shares(saved, {}, swapped)]
    assert [line.partition(":")[0] for line in lines] == [
        "data.sources, split of y/web",
        "data.sources, split of x/web",
    ]


@pytest.mark.parametrize("name", ["moved/web", "renamed"])
def test_a_source_is_known_by_its_tokens_wherever_it_lies(tmp_path, name):
    (tmp_path / "moved").mkdir()
    documents = make_counting_documents([9] * 10)
    new = write_token_file(tmp_path / name, documents)
    other = write_token_file(tmp_path / "other", make_counting_documents([8] * 10))
    digest = GPTDataset(new, "train", (1.0, 0.0, 0.0), 4, 99).compute_digest()
    state = {"digests": {"old/web": digest}, "sizes": {"old/web": 9}}
    saved = make_data({"path": "old/web"}, {"path": "gone"})
    assert not [*find_changed_shares(saved, state, make_data({"path": new}))]
    (line,) = find_changed_shares(saved, state, make_data({"path": new}, split=(0.5, 0.5, 0)))
    assert line == "data.split: [0.8, 0.2, 0.0] there, [0.5, 0.5, 0.0] here"
    (line,) = find_changed_shares(saved, state, make_data({"path": new, "split": [0, 1, 0]}))
    assert f"split of {new}" in line
    assert not [*find_changed_shares(saved, state, make_data({"path": other, "split": [0, 1, 0]}))]


def test_a_checkpoint_without_digests_goes_by_names_that_are_no_others():
    state = {"sizes": {"x/web": 9, "y/web": 9, "x/book": 9}}
    saved = make_data({"path": "x/web"}, {"path": "y/web"}, {"path": "x/book"})
    held_out = {"split": [0, 1, 0]}
    assert [*find_changed_shares(saved, state, make_data({"path": "z/book", **held_out}))]
    present = make_data({"path": "x/web"}, {"path": "z/web", **held_out})
    (line,) = find_changed_shares(saved, state, present)
    assert "split of z/web" in line


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (
            (0.7, 0.3, 0.0),
            r"--data-split 0.7 0.3 0 would count as held out .*; use 0.8 and divide 0.2",
        ),
        ((0.9, 0.3, 0.0), r"sum to 1.2; the run has 0.8 0.2 0.0"),
        ((1.2, -0.2, 0.0), r"takes three shares from 0 to 1"),
        ((float("nan"), 0.5, 0.5), r"takes three shares from 0 to 1"),
    ],
)
def test_no_evaluation_counts_as_held_out_what_was_trained_on(split, message):
    with pytest.raises(UserError, match=message):
        divide_for_evaluation(make_data({"path": "a"}), split)


def test_an_evaluation_may_divide_what_is_held_out_and_hold_out_less():
    data = make_data({"path": "a"}, {"path": "b", "split": [1, 0, 0]})
    for split in ((0.8, 0.1, 0.1), (0.9, 0.0, 0.1)):
        divided = divide_for_evaluation(data, split)
        assert (divided.split, divided.sources) == (split, data.sources)
    with pytest.raises(UserError, match="every source of the run has a split of its own"):
        divide_for_evaluation(make_data({"path": "a", "split": [1, 0, 0]}), (0.8, 0.1, 0.1))
