"""Samples of evaluation: the same for any ranks, and none that is trained on."""

import json

import numpy as np
import pytest
import torch
from loader_runs import SEQ, is_same, list_samples, make_config, take
from token_files import make_counting_documents, write_token_file

from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE
from megaframe.errors import UserError


def list_evaluation_samples(config, ranks, samples):
    """Return the samples of all ranks that have labels, and the batch shapes of each rank."""
    samples_seen, shapes = [], []
    for rank in range(ranks):
        batches = [batch for _, batch, _ in Loader(config, rank, ranks).iterate_validation(samples)]
        shapes.append([tuple(batch.tokens_BS.shape) for batch in batches])
        for batch in batches:
            for number, tokens, labels in zip(
                batch.samples_B, batch.tokens_BS, batch.labels_BS, strict=True
            ):
                if (labels != IGNORE).any():
                    assert torch.equal(labels, tokens + 1)
                    samples_seen.append((int(number), int(tokens[0])))
    return sorted(samples_seen), shapes


@pytest.mark.parametrize("samples", [1, 7, 10, 16, 1000])
def test_evaluation_is_the_same_for_any_ranks_and_microbatch(paths, samples):
    expected, _ = list_evaluation_samples(make_config(paths), 1, samples)
    sizes = np.array([6, 19, 3])
    assert len(expected) == min(samples, len(expected)) <= sizes.sum()
    assert len(set(expected)) == len(expected)
    if samples == 1000:
        assert len(expected) == sizes.sum()
    for ranks, microbatch in [(1, 3), (2, 1), (2, 4), (4, 2)]:
        config = make_config(paths, train={"microbatch": microbatch})
        actual, shapes = list_evaluation_samples(config, ranks, samples)
        assert actual == expected
        assert all(shape == shapes[0] for shape in shapes)
        rows = sum(rows for rows, _ in shapes[0]) * ranks
        assert len(expected) <= rows < len(expected) + ranks * len(paths)


def test_evaluation_is_disjoint_from_training_and_repeats_itself(paths):
    config = make_config(paths, train={"eval_every": 1})
    loader = Loader(config, 0, 1)
    trained = {token for _, token in list_samples(take(loader, 100))}
    first, second = (
        [batch.tokens_BS.tolist() for _, batch, _ in loader.iterate_validation(20)]
        for _ in range(2)
    )
    assert first == second
    assert not trained & {row[0] for batch in first for row in batch}
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 5})})
    repeated = Loader(other, 0, 1).iterate_validation(20)
    assert first == [batch.tokens_BS.tolist() for _, batch, _ in repeated]


def test_a_text_of_one_document_is_trained_on_and_evaluated_by_its_tokens(tmp_path):
    """The same samples for any ranks, from where a resumed run left off too."""
    path = write_token_file(tmp_path / "book", make_counting_documents([500]))
    config = make_config([path], train={"eval_every": 1})
    steps = take(Loader(config, 0, 1), 14)
    trained = {token for _, token in list_samples(steps)}
    assert trained == {*range(0, 399 // SEQ * SEQ, SEQ)}
    evaluated, _ = list_evaluation_samples(config, 1, 1000)
    assert {token for _, token in evaluated} == {*range(400, 400 + 99 // SEQ * SEQ, SEQ)}
    assert list_evaluation_samples(config, 2, 1000)[0] == evaluated
    ranks = [Loader(config, rank, 2) for rank in range(2)]
    for loader in ranks:
        loader.load(json.loads(json.dumps(steps[5].state)))
    for step in steps[6:]:
        assert list_samples([loader.next() for loader in ranks]) == list_samples([step])


def with_splits(paths, *splits, **sections):
    """Return a config with a split for each source; None leaves it to `data.split`."""
    sources = [{"path": path, "split": split} for path, split in zip(paths, splits, strict=True)]
    return make_config(paths, sources=sources, **sections)


def test_a_source_can_be_for_training_or_validation_alone(paths):
    only_trained, only_evaluated = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
    config = with_splits(paths, only_trained, only_evaluated, None, train={"eval_every": 1})
    loader = Loader(config, 0, 1)
    trained = {token for _, token in list_samples(take(loader, 40))}
    # 13 x 20 and 7 x 16 tokens are 32 and 13 windows of 8, all of which were read.
    assert {token // 10_000 for token in trained} == {0, 2}
    assert len(trained) == 32 + 13
    assert loader.consumed == (160, 160)
    evaluated = [(name, batch) for name, batch, _ in loader.iterate_validation(1000)]
    first = {(name, int(token)) for name, batch in evaluated for token in batch.tokens_BS[:, 0]}
    assert {(name, token // 10_000) for name, token in first} == {("source1", 1), ("source2", 2)}
    assert len(first) == 99 + 3
    assert not trained & {token for _, token in first}
    # The batches of a source are adjacent, in the order of the config.
    assert [name for name, _ in evaluated] == sorted(name for name, _ in evaluated)


def test_a_source_of_validation_changes_nothing_of_training(paths, tmp_path):
    (tmp_path / "apart").mkdir()
    held_out = write_token_file(
        tmp_path / "apart" / "source0", make_counting_documents([30] * 20, 50)
    )
    training_only = with_splits(paths, (1.0, 0.0, 0.0), None, None)
    with_held_out = with_splits([held_out, *paths], (0.0, 1.0, 0.0), (1.0, 0.0, 0.0), None, None)
    before = take(Loader(training_only, 0, 1), 30)
    after = take(Loader(with_held_out, 0, 1), 30)
    assert list_samples(before) == list_samples(after)
    resumed = Loader(with_held_out, 0, 1)
    assert resumed.load(before[9].state) == []
    assert all(map(is_same, take(resumed, 20), before[10:]))
    names = [name for name, _, _ in Loader(with_held_out, 0, 1).iterate_validation(1000)]
    assert {*names} == {"source0", "source1", "source2"}
    twice = with_splits([held_out, *paths], *[None] * 4)
    names = {name for name, _, _ in Loader(twice, 0, 1).iterate_validation(1000)}
    assert names == {held_out, paths[0], "source1", "source2"}


def test_a_missing_validation_split_is_refused_at_once_when_it_is_needed(paths):
    none = (1.0, 0.0, 0.0)
    Loader(make_config(paths, split=none), 0, 1)
    with pytest.raises(UserError, match="validation split"):
        Loader(make_config(paths, train={"eval_every": 10}, split=none), 0, 1)
