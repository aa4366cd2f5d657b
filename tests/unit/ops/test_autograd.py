"""Functions that keep only their arguments for the backward pass."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from megaframe.architecture.spec import Box, Constant, ParamSpec
from megaframe.ops.autograd import recompute
from megaframe.parameters.parameter import Parameter


def make_parameter():
    parameter = Parameter(ParamSpec("gain", (4,), Constant(1.0), role="gain"))
    parameter.bind(Box((0,), (4,)), lambda: None)
    parameter.value = torch.tensor([1.0, 2.0, 3.0, 4.0])
    parameter.grad = torch.zeros(4)
    return parameter


def test_gradients_are_the_same_and_only_arguments_are_kept():
    generator = torch.Generator().manual_seed(0)
    x, y, weight = (torch.randn(3, 4, generator=generator) for _ in range(3))
    gradients, kept = [], []

    def keep(tensor):
        kept[-1].append(tensor.data_ptr())
        return tensor

    for wrap in (lambda function, *tensors: function(*tensors), recompute):
        parameter = make_parameter()
        leaves = x.clone().requires_grad_(), y.clone().requires_grad_()

        def compute(a, b, parameter=parameter):
            return (a.exp() * b).sigmoid() * parameter.use()

        kept.append([])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = wrap(compute, *leaves)
        (result * weight).sum().backward()
        gradients.append([*(leaf.grad for leaf in leaves), parameter.grad])
        arguments = [leaf.data_ptr() for leaf in leaves]
    assert kept[1] == arguments and len(kept[0]) > 2
    for plain, computed_again in zip(*gradients, strict=True):
        assert torch.equal(plain, computed_again)


def test_without_gradients_it_is_only_called():
    calls = []
    with torch.no_grad():
        recompute(lambda a: calls.append(1) or a + 1, torch.ones(2))
    assert calls == [1]


def test_the_backward_pass_calls_it_once():
    x = torch.ones(2, 2, requires_grad=True)
    result = recompute(lambda a: a @ a, x)
    with FlopCounterMode(display=False) as counter:
        result.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2**3  # again, and two gradients
