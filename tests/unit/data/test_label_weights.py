"""Weights of labels beside a token file: which labels count, and files that do not fit.

Tests `megaframe.data.label_weights`.
"""

from dataclasses import replace
from pathlib import Path
from shutil import copy
from typing import Literal

import numpy as np
import pytest
import torch
from loader_runs import SEQ, make_config, take
from token_files import write_token_file

from megaframe.config.parts import DataTransformPart
from megaframe.data.loader import Loader
from megaframe.data.microbatch import IGNORE
from megaframe.errors import UserError

LENGTHS = {0: 13, 1: 40, 2: 7}


def write_weights(path, source, dtype, change=lambda number: number % 3 / 2):
    """Write the weights of one of the sources, each a function of the token."""
    first = 10_000 * source
    numbers = iter(range(first, first + 20 * LENGTHS[source]))
    documents = [[[change(next(numbers)) for _ in range(LENGTHS[source])]] for _ in range(20)]
    write_token_file(f"{path}.weights", documents, dtype)


def test_a_mask_takes_labels_away_and_needs_no_weights(paths):
    write_weights(paths[0], 0, "u1", lambda number: number % 3 > 0)
    for step in take(Loader(make_config(paths), 0, 1), 9):
        valid = 0
        for batch in step.microbatches:
            following = batch.tokens_BS + 1
            masked = (following < 10_000) & (following % 3 == 0)
            assert torch.equal(batch.labels_BS, following.masked_fill(masked, IGNORE))
            assert batch.weights_BS is None
            valid += int((~masked).sum())
        assert step.valid == valid


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_those_of_the_labels_and_1_in_sources_without(paths, ranks):
    write_weights(paths[1], 1, "f4")
    config = make_config(paths, train={"microbatch": 2})
    loaders = [Loader(config, rank, ranks) for rank in range(ranks)]
    assert loaders[0].masks_labels
    kinds = set()
    for _ in range(9):
        for step in (loader.next() for loader in loaders):
            total = 0.0
            for batch in step.microbatches:
                following = batch.tokens_BS + 1
                from_second = following // 10_000 == 1
                expected = torch.where(from_second, following % 3 / 2, 1.0)
                assert torch.equal(batch.weights_BS, expected)
                ignored = expected == 0
                assert torch.equal(batch.labels_BS, following.masked_fill(ignored, IGNORE))
                total += float(expected.double().sum())
                kinds |= set(expected.unique().tolist())
            assert step.valid == total
    assert kinds == {0.0, 0.5, 1.0}


def test_all_labels_count_alike_if_asked_for(paths):
    write_weights(paths[1], 1, "f4")
    loader = Loader(make_config(paths, label_weights=False), 0, 1)
    assert not loader.masks_labels
    for batch in loader.next().microbatches:
        assert torch.equal(batch.labels_BS, batch.tokens_BS + 1) and batch.weights_BS is None


def test_a_mask_that_leaves_nothing_leaves_no_valid_token(paths):
    write_weights(paths[0], 0, "u1", lambda number: 0)
    assert {step.valid for step in take(Loader(make_config(paths[:1]), 0, 1), 3)} == {0.0}


def test_validation_counts_weights_of_tokens_and_of_their_bytes(paths):
    write_weights(paths[0], 0, "f4")
    config = make_config(paths[:1], train={"eval_every": 1}, split=(0.5, 0.5, 0.0))
    for _, batch, _ in Loader(config, 0, 1).iterate_validation(4):
        weights = (batch.tokens_BS + 1) % 3 / 2
        assert float(batch.sum_label_weights()) == float(weights.double().sum()) > 0


def test_a_resumed_run_says_that_weights_have_changed(paths):
    write_weights(paths[0], 0, "f4")
    state = Loader(make_config(paths[:1]), 0, 1).next().state
    assert not Loader(make_config(paths[:1]), 0, 1).load(state)
    write_weights(paths[0], 0, "f4", lambda number: 1.0)
    (note,) = Loader(make_config(paths[:1]), 0, 1).load(state)
    assert paths[0] in note and "weights of labels" in note


class Reverse(DataTransformPart):
    """Turns a sample around."""

    kind: Literal["reverse"] = "reverse"
    wrong: bool = False

    def transform(self, sample, random):
        weights = -sample.weights if self.wrong else sample.weights[::-1].copy()
        labels = np.where(sample.labels == IGNORE, 7, sample.labels)
        return replace(sample, labels=labels[::-1].copy(), weights=weights)


def test_transforms_move_weights_and_a_weight_of_0_is_no_label(paths):
    write_weights(paths[0], 0, "f4")
    plain = Loader(make_config(paths[:1]), 0, 1).next()
    turned = Loader(make_config(paths[:1], transforms=[Reverse()]), 0, 1).next()
    for before, after in zip(plain.microbatches, turned.microbatches, strict=True):
        assert torch.equal(after.weights_BS, before.weights_BS.flip(1))
        assert torch.equal(after.labels_BS == IGNORE, after.weights_BS == 0)
    with pytest.raises(UserError, match="its weights are not 8 finite numbers of 0 or more"):
        Loader(make_config(paths[:1], transforms=[Reverse(wrong=True)]), 0, 1).next()


def test_weights_of_other_text_are_refused(paths):
    write_weights(paths[0], 0, "f4")
    for suffix in ("bin", "idx"):
        copy(f"{paths[0]}.weights.{suffix}", f"{paths[2]}.weights.{suffix}")
    with pytest.raises(UserError, match=r"260 numbers, and .*source2.idx 20 of 140 tokens"):
        Loader(make_config(paths), 0, 1)


def test_half_of_a_weight_file_is_refused(paths):
    write_weights(paths[0], 0, "f4")
    Path(f"{paths[0]}.weights.idx").unlink()
    with pytest.raises(UserError, match=r"cannot open .*weights.idx"):
        Loader(make_config(paths), 0, 1)


def test_weights_of_another_type_are_refused(paths):
    write_weights(paths[0], 0, "i4", lambda number: 1)
    with pytest.raises(UserError, match="int32; weights of labels are float32, or uint8"):
        Loader(make_config(paths), 0, 1)


@pytest.mark.parametrize(
    ("dtype", "bad", "allowed"),
    [
        ("f4", float("nan"), "finite numbers of 0 or more"),
        ("f4", -0.5, "finite numbers of 0 or more"),
        ("f4", float("inf"), "finite numbers of 0 or more"),
        ("u1", 2, "0 and 1, in uint8"),
    ],
)
def test_a_number_that_is_no_weight_is_named(paths, dtype, bad, allowed):
    write_weights(paths[0], 0, dtype, lambda number: bad if number == 5 * SEQ + 3 else 1)
    loader = Loader(make_config(paths[:1], train={"global_batch": 25}), 0, 1)
    with pytest.raises(UserError, match=f"token 43 has the weight {bad}; weights are {allowed}"):
        loader.next()
