"""Comparisons of two runs bit by bit, each with what makes them equal.

A processor rounds the body of a vector otherwise than its scalar tail, and a sum by the order of
its terms. So two runs have the same bits only if their buffers are laid out alike and all their
sums have one order. Each comparison says why that is so (`because`), and what can be checked of it
is checked: what the two runs have decided, or the buffers of their ranks.
`tests/unit/repository/test_bitwise.py` sees to it that there are no others.
"""

import torch

SUMS = ("model", "train", "parallel", "optim", "data", "kernels")
"""Sections of a config on which the order of sums may depend."""


class RunLosses(list):
    """The loss of each step of a run, and its config as it ran.

    Those of two runs are not compared by `==`, which would not say why they are equal: use
    `assert_same_losses`, or `promised` if only layouts have the same answer.
    """

    def __init__(self, losses, config):
        super().__init__(losses)
        self.config = config

    def __getitem__(self, place):
        found = super().__getitem__(place)
        return RunLosses(found, self.config) if isinstance(place, slice) else found

    def __eq__(self, other):
        if isinstance(other, RunLosses):
            raise TypeError("compare runs by assert_same_losses(..., because=...) or promised(...)")
        return super().__eq__(other)

    def __ne__(self, other):
        return not self == other

    __hash__ = None


def assert_same_losses(losses, expected, *, because, but=()):
    """Assert that two runs have the same losses, to the last bit.

    losses, expected: As `read_losses` returns them. because: What makes them equal. but: Keys in
    which their configs differ, such as `train.steps`, that have no part in any sum.
    """
    assert because
    for section in SUMS:
        ours, theirs = losses.config[section], expected.config[section]
        differ = {f"{section}.{key}" for key in ours if ours[key] != theirs[key]}
        assert differ <= {*but}, f"buffers and sums may differ, as these keys do: {differ}"
    assert list(losses) == list(expected), f"not the same, although {because}"


def assert_same_bits(results, others, *, because):
    """Assert that each rank got the same bits in two worlds of one layout.

    results, others: Of `parity_runs.run` on each rank. because: What makes them equal.
    """
    for result, other in zip(results, others, strict=True):
        assert result.spans == other.spans, "buffers are laid out differently"
        numbers, expected = (
            (one.losses, one.norms, one.evaluation, [*one.weights]) for one in (result, other)
        )
        assert numbers == expected, f"not the same, although {because}"
        for name, pieces in result.weights.items():
            boxes, expected_boxes = (
                [box for box, _ in one] for one in (pieces, other.weights[name])
            )
            assert boxes == expected_boxes, name
            assert_bitwise_equal(
                [piece for _, piece in pieces],
                [piece for _, piece in other.weights[name]],
                because=because,
                label=name,
            )


def assert_bitwise_equal(tensors, expected, *, because, label=""):
    """Assert that tensors are equal; NaN, where both have it. because: What makes them equal."""
    assert because
    for number, (one, other) in enumerate(zip(tensors, expected, strict=True)):
        both_nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.tensor(False)
        same = one.shape == other.shape and bool(((one == other) | both_nan).all())
        assert same, f"{label} {number} is not the same, although {because}"


def assert_same_files(paths, expected, *, because):
    """Assert that files hold the same bytes. because: What makes them equal."""
    assert because
    for path, other in zip(paths, expected, strict=True):
        assert path.read_bytes() == other.read_bytes(), f"{path} and {other}, although {because}"
