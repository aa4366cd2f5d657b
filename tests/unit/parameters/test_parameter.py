"""Sums of gradients: the first or a later addition, in one piece or many, in either precision."""

import pytest
import torch
from tolerances import assert_near, assert_within, compute_allowance

from megaframe.architecture.spec import Box, Constant, ParamSpec
from megaframe.ops import matmul as product_module
from megaframe.parameters.parameter import Module, Parameter

pytestmark = pytest.mark.numeric


def make(shape, dtype, master):
    spec = ParamSpec("a.weight", shape, Constant(0), role="matrix")
    parameter = Parameter(spec)
    box = Box((0,) * len(shape), shape)
    parameter.bind(box, lambda: None)
    parameter.value = torch.zeros(shape, dtype=dtype)
    parameter.grad = torch.full(shape, torch.nan, dtype=master)  # as an earlier step may leave it
    return parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_products_add_up(dtype, piece, monkeypatch):
    monkeypatch.setattr(product_module, "PIECE_BYTES", piece)
    parameter = make((2, 3, 5), dtype, torch.float32)
    left, right = torch.randn(4, 6).to(dtype), torch.randn(4, 5).to(dtype)
    parameter.add_product(left, right)
    parameter.add_product(left, right)
    expected = 2.0 * (left.double().T @ right.double()).view(2, 3, 5)
    size = 2.0 * (left.double().T.abs() @ right.double().abs()).view(2, 3, 5)
    allowed = compute_allowance(8, size, dtype, result=expected.abs())
    assert_within(parameter.grad, expected, allowed, f"products of 4 terms, rounded to {dtype}")


@pytest.mark.parametrize("operation", ["finish", "add", "add_product"])
def test_matrices_one_by_one(operation):
    """Matrices without an addition are zero, whatever is added next."""
    parameter = make((3, 4, 5), torch.float64, torch.float64)
    left, right = torch.randn(6, 4).double(), torch.randn(6, 5).double()
    for step in range(2):  # each step leaves out other matrices
        parameter.fresh = True
        parameter.add_product(left, right, matrix=2 * step)
        parameter.add(torch.ones(4, 5), matrix=2 * step)
        expected = torch.zeros(3, 4, 5).double()
        expected[2 * step] = left.T @ right + 1
        if operation == "add":
            parameter.add(torch.ones(3, 4, 5))
            expected += 1
        elif operation == "add_product":
            parameter.add_product(torch.ones(1, 12).double(), torch.ones(1, 5).double())
            expected += 1
        parameter.finish()
        assert_near(parameter.grad, expected, 8)


def test_sums_look_ups_and_unused():
    parameter = make((4, 2), torch.float64, torch.float64)
    parameter.add_rows(torch.tensor([1, 1, 3]), torch.ones(3, 2, dtype=torch.float64))
    assert parameter.grad.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
    parameter.add(torch.ones(4, 2))
    assert parameter.grad[0, 0] == 1
    unused = make((3,), torch.float32, torch.float32)
    unused.finish()
    assert not unused.grad.any()


def test_use_adds_what_flows_back():
    parameter = make((3,), torch.float64, torch.float64)
    (parameter.use() * torch.arange(3.0)).sum().backward()
    (parameter.use() * torch.arange(3.0)).sum().backward()
    assert parameter.grad.tolist() == [0, 2, 4]
    with torch.no_grad():
        assert parameter.use() is parameter.value


def test_modules_list_shared_parameters_once_and_in_order():
    class Leaf(Module):
        def __init__(self, weight):
            self.weight = weight

    first, second = (
        make((1,), torch.float32, torch.float32),
        make((2,), torch.float32, torch.float32),
    )
    tree = Leaf(first)
    tree.children = [Leaf(second), (Leaf(first),)]
    tree.name = "no parameter"
    assert list(tree.parameters()) == [first, second]
