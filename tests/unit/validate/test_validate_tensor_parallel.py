"""Warnings about tensor ranks on several nodes, with the bytes that they move."""

import pytest

from megaframe.config import RunConfig
from megaframe.layout import Layout
from megaframe.validate.tensor_parallel import (
    count_tensor_parallel_bytes,
    find_node_crossing_warning,
)


def make_config(tensor):
    return RunConfig(
        model={"layers": 8, "hidden": 64, "heads": 8, "vocab": 100},
        train={"seq": 32, "global_batch": 8, "microbatch": 2},
        parallel={"tensor": tensor, "pipeline": 2, "schedule": "1f1b"},
    )


def test_bytes_are_the_closed_form():
    """(t-1)/t b s h elements in bf16 move 10 times for each layer and 4 times for the model's ends;
    each of two stages has half of that."""
    layout = Layout(tensor=4, pipeline=2, data=2)
    stream, microbatches = 2 * 32 * 64 * 2, 2
    assert (
        count_tensor_parallel_bytes(make_config(4), layout)
        == (84 / 2) * stream * microbatches * 3 / 4
    )


@pytest.mark.parametrize(
    ("tensor", "node", "fits"), [(4, 4, None), (4, 8, None), (2, 16, None), (8, 4, 4), (4, 6, 2)]
)
def test_only_groups_that_cross_are_warned_of(tensor, node, fits):
    layout = Layout(tensor=tensor, pipeline=2)
    text = find_node_crossing_warning(make_config(tensor), layout, node)
    assert (text is None) == (fits is None or node >= layout.world)
    if text:
        assert f"parallel.tensor={tensor} crosses" in text
        assert f"parallel.node_size={node}" in text and f"parallel.tensor={fits} would" in text
