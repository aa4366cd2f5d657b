"""Tensors that are handed to later layers (`megaframe.model.cross_layer_tensors`): the gradients
that they bring to the part that made them, also if it is computed again."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megaframe.model.cross_layer_tensors import HandedTensors
from megaframe.ops.autograd import backward

X = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_part_that_made_it_gets_the_sum_of_all_gradients(recompute):
    """With y = x^2, handed on as 3 x: dx of 5 y + 7 (3 x) + 11 (3 x)^2 = 10 x + 21 + 198 x."""
    handed, leaf = HandedTensors(), X.clone().requires_grad_()

    def make():
        handed.hand_on("triple", 3 * leaf)
        return leaf * leaf

    with torch.set_grad_enabled(not recompute):
        output = make()
    first = handed.take("triple")
    backward(7 * first, torch.ones_like(X))
    backward(11 * first * first, torch.ones_like(X))
    output = make() if recompute else output
    assert handed.take("triple") is first  # what later layers keep is not made again
    edges, gradients = handed.take_edges(["triple"])
    backward(get_gradient_edge(output), torch.full_like(X, 5), edges, gradients)
    torch.testing.assert_close(leaf.grad, 208 * X + 21, rtol=1e-15, atol=0)


def test_gradients_of_later_stages_come_first_and_unused_ones_are_zero():
    handed = HandedTensors()
    for name in ("used", "unused"):
        handed.hand_on(name, X)
    handed.set_gradient("used", torch.full_like(X, 2))
    backward(handed.take("used") * 4, torch.ones_like(X))
    assert handed.get_gradient("used").tolist() == [6, 6, 6]
    assert handed.get_gradient("unused").tolist() == [0, 0, 0]
    handed.hand_on("numbers", torch.arange(3))
    assert not handed.take("numbers").requires_grad
    handed.clear()
    with pytest.raises(KeyError):
        handed.take("used")
