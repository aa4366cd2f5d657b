"""Tables of routers by hashes of tokens: what they begin with, and what is read as one."""

import numpy as np
import pytest
import torch

from megaframe.architecture.hash_table import DIGIT, HashTableDescription
from megaframe.checkpoint.convert.huggingface.tensors import HuggingFaceTensor, make_part
from megaframe.config import RunConfig
from megaframe.config.model import MOST_EXPERTS
from megaframe.errors import UserError

SIZES = [(60, 4, 12), (900, 6, 300), (40, 1, 8), (70, 3, 3)]


def draw(words, top_k, experts, seed=0):
    """Return the experts of all words."""
    (spec,) = HashTableDescription(words, top_k, experts).declare_parameters("table")
    digits = spec.init.draw(seed)
    assert digits.shape == spec.shape and digits.min() >= 0 and digits.max() < DIGIT
    return digits @ np.array([DIGIT, 1])


@pytest.mark.parametrize(("words", "top_k", "experts"), SIZES)
def test_words_have_different_experts_and_choices_the_same_load(words, top_k, experts):
    table = draw(words, top_k, experts)
    assert table.min() >= 0 and table.max() < experts
    assert all(len({*row}) == top_k for row in table)
    first = np.bincount(table[:, 0], minlength=experts)
    assert first.max() - first.min() <= 1
    assert (table != draw(words, top_k, experts, seed=1)).any()


def test_two_digits_are_enough():
    assert MOST_EXPERTS <= DIGIT**2


def test_a_foreign_table_is_the_same_both_ways():
    (spec,) = HashTableDescription(7, 2, 300).declare_parameters("table")
    tensor = HuggingFaceTensor("tid2eid", (make_part(spec),), experts=300)
    numbers = torch.arange(14).view(7, 2) * 23
    assert tensor.shape == numbers.shape
    ((_, box),) = tensor.split(numbers.float())
    assert box.shape == spec.shape and torch.equal(tensor.join([box.bfloat16()]), numbers)
    for wrong in (300, -1):
        with pytest.raises(UserError, match=f"to expert {wrong}, and there are 300"):
            [*tensor.split(torch.full((7, 2), float(wrong)))]


def test_tables_are_not_trained():
    block = {"feed_forward": {"kind": "moe", "router": "hash"}}
    model = {"layers": 1, "blocks": [block], "moe": {"experts": 4}, "vocab": 10}
    assert RunConfig(model=model).frozen_patterns == ("*.router.table",)
