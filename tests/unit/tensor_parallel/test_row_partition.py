"""Rows of the residual stream over tensor ranks: equal parts, each token once, padding last."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megaframe.tensor_parallel.axis import RowPartition

PADDING = -1.0


@given(tokens=st.integers(1, 40), ranks=st.integers(1, 9), width=st.integers(1, 3))
def test_the_parts_of_all_ranks_are_the_tokens_and_then_padding(tokens, ranks, width):
    x = torch.arange(tokens * width, dtype=torch.float64).view(tokens, width)
    partitions = [RowPartition(tokens, ranks, index) for index in range(ranks)]
    parts = [partition.select(x, PADDING) for partition in partitions]
    assert {len(part) for part in parts} == {partitions[0].padded // ranks}
    assert partitions[0].padded - tokens < ranks
    together = torch.cat(parts)
    assert torch.equal(partitions[0].remove_padding(together), x)
    assert (together[tokens:] == PADDING).all()
    assert torch.equal(partitions[0].pad(x, PADDING), together)


def test_rows_without_padding_are_not_copied():
    x = torch.randn(8, 2)
    partition = RowPartition(8, 4, 1)
    assert partition.pad(x) is x and partition.remove_padding(x) is x
    assert partition.select(x).data_ptr() == x[2:].data_ptr()
