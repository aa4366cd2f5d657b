"""Names of what islands have of their own in a checkpoint."""

import pytest

from megaframe.training.island_checkpoint import name_for_island, remove_island


@pytest.mark.parametrize(
    ("name", "of_island"),
    [
        ("blocks.0.mlp.up.weight", "optimizer.island3.weights/blocks.0.mlp.up.weight"),
        ("optimizer.mean/head.weight", "optimizer.island3.mean/head.weight"),
        ("optimizer.unsent/head.weight", "optimizer.island3.unsent/head.weight"),
    ],
)
def test_an_island_adds_its_number_and_a_reader_removes_it(name, of_island):
    assert name_for_island(name, 3) == of_island
    assert remove_island(of_island) == remove_island(name) == name


def test_what_all_islands_share_keeps_its_name():
    assert remove_island("optimizer.outer.momentum/w") == "optimizer.outer.momentum/w"
