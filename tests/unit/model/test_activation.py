"""Activations and their gradients by hand, against autograd of their formulas in fp64."""

import pytest
import reference_model as reference
import torch
from megaframe_kernels.elementwise.activation import GATED as KERNEL_GATED
from megaframe_kernels.elementwise.activation import KINDS
from tolerances import assert_near

from megaframe.architecture.activation import GATED, describe_activation
from megaframe.config.parts import Activation
from megaframe.model import activation
from megaframe.model.activation import activate, recompute_activation

pytestmark = pytest.mark.numeric
ALL_KINDS = Activation.__args__
TERMS = 10
"""Roundings from an element to its result."""


def draw(width, kind):
    """Return rows whose gates and factors lie on both sides of the clamp, with some on it."""
    generator = torch.Generator().manual_seed(0)
    x = 6.0 * torch.randn(40, width * (2 if kind in GATED else 1), generator=generator).double()
    x[0] = 7.0
    x[1] = -7.0
    assert (x > 7).any() and (x < -7).any()
    return x


def test_the_kernels_know_the_same_activations():
    assert set(KERNEL_GATED) == set(GATED) and set(KINDS) == set(ALL_KINDS)


def activate_for_compiler(described, x):
    if not described.gated:
        return activation._activate(described.name, x)
    return activation._activate_gated_for_compiler(described.name, x)


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("compute", [activate, activate_for_compiler, recompute_activation])
def test_activation_and_gradient_are_those_of_the_formula(kind, compute):
    x = draw(9, kind).requires_grad_()
    dy = draw(9, "gelu")
    expected = reference._activated(kind, x, 9)
    (expected_dx,) = torch.autograd.grad(expected, x, dy)
    described = describe_activation(kind)
    actual = compute(described, x.detach() if compute is recompute_activation else x)
    if compute is recompute_activation:
        actual, run_backward = actual
        actual_dx = run_backward(dy)
    else:
        (actual_dx,) = torch.autograd.grad(actual, x, dy)
    smooth = torch.ones_like(x, dtype=torch.bool)
    if kind in ("swiglu_clamped", "relu", "relu2"):
        smooth[:2] = False  # on the clamp the gradient is either of two
    assert_near(actual, expected, TERMS, label="result")
    assert_near(actual_dx * smooth, expected_dx * smooth, TERMS, label="gradient")


@pytest.mark.parametrize("kind", GATED)
def test_a_gated_activation_keeps_only_its_input(kind):
    saved = []
    x = draw(9, kind).requires_grad_()

    def keep(tensor):
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        activate(describe_activation(kind), x)
    assert saved == [x.untyped_storage().data_ptr()]


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("part", ["gate", "up"])
def test_nan_stays_nan(kind, part):
    x = draw(9, kind)
    x[3, 4] = x[3, 13] = 1.0
    x[3, 4 if part == "gate" else 13] = torch.nan
    y, run_backward = recompute_activation(describe_activation(kind), x.clone())
    assert y[3, 4].isnan() and y.isnan().sum() == 1
    assert run_backward(torch.ones_like(y))[3].isnan().any()
