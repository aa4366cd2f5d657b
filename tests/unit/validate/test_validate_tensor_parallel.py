"""Tensor ranks: those that cannot share heads or rows are refused, and those on several nodes are
warned of with the bytes that they move."""

import pytest
from config_refusals import LATENT, list_refusals_of_ranks

from megaframe.config import RunConfig
from megaframe.errors import TIMES
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
    config = make_config(4)
    assert (
        count_tensor_parallel_bytes(config.model, config.train, layout)
        == (84 / 2) * stream * microbatches * 3 / 4
    )


@pytest.mark.parametrize(
    ("tensor", "node", "fits"), [(4, 4, None), (4, 8, None), (2, 16, None), (8, 4, 4), (4, 6, 2)]
)
def test_only_groups_that_cross_are_warned_of(tensor, node, fits):
    layout = Layout(tensor=tensor, pipeline=2)
    config = make_config(tensor)
    text = find_node_crossing_warning(config.model, config.train, layout, node)
    assert (text is None) == (fits is None or node >= layout.world)
    if text:
        assert f"parallel.tensor={tensor} crosses" in text
        assert f"parallel.node_size={node}" in text and f"parallel.tensor={fits} would" in text


# (tensor ranks that are refused, the message, changes that it suggests, each of which must pass)
RANKS = [
    (
        {"parallel.tensor": 8},
        "parallel.tensor=8 can neither divide model.kv_heads=12 nor share them evenly among "
        "model.heads=12; use 6 or 12",
        [{"parallel.tensor": 6}, {"parallel.tensor": 12}],
    ),
    (
        {LATENT.partition("=")[0]: LATENT.partition("=")[2], "parallel.tensor": 8},
        "parallel.tensor=8 does not divide model.heads=12; use 6 or 12",
        [{"parallel.tensor": 6}, {"parallel.tensor": 12}],
    ),
    (
        {"parallel.tensor": 4, "parallel.tensor_chunks": 257},
        "parallel.tensor_chunks=257 is more than the 256 rows of a microbatch (train.microbatch=1"
        f"{TIMES}train.seq=1024) that each rank has; use 256 or fewer",
        [{"parallel.tensor_chunks": 256}],
    ),
    (
        {"parallel.tensor_chunks": 2},
        "parallel.tensor_chunks=2 has no effect with parallel.tensor=1, where no rows travel; "
        "leave it out",
        [{"parallel.tensor_chunks": 1}, {"parallel.tensor": 2}],
    ),
]


@pytest.mark.parametrize(("keys", "message", "mends"), RANKS)
def test_ranks_that_cannot_be_are_refused_and_the_advice_works(keys, message, mends):
    lines = list_refusals_of_ranks(keys)
    assert len(lines) == 1 and message in lines[0]
    for mend in mends:
        assert list_refusals_of_ranks({**keys, **mend}) == []
