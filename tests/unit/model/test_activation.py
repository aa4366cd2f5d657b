"""Activations and their gradients by hand, against autograd of their formulas in fp64."""

import pytest
import reference_model as reference
import torch
import torch.nn.functional as F
from megaframe_kernels.elementwise.activation import GATED as KERNEL_GATED
from megaframe_kernels.elementwise.activation import KINDS
from tolerances import assert_near

from megaframe.architecture.activation import GATED, describe_activation
from megaframe.architecture.spec import Box
from megaframe.config.parts import Activation
from megaframe.model import activation
from megaframe.model.activation import activate, recompute_activation
from megaframe.model.xielu import XIELU
from megaframe.ops.kernel_dispatch import NO_KERNELS

pytestmark = pytest.mark.numeric
TRAINED = "xielu"
ALL_KINDS = [kind for kind in Activation.__args__ if kind != TRAINED]
TERMS = 10
"""Roundings from an element to its result."""


def compute_xielu(x, positive, negative):
    """Return the formula of Huang and Schlag, as transformers bounds its exponent."""
    positive, negative = F.softplus(positive), 0.5 + F.softplus(negative)
    below = negative * (torch.expm1(x.clamp(max=-1e-6)) - x)
    return torch.where(x > 0, positive * x * x, below) + 0.5 * x


def test_xielu_and_its_gradients_are_those_of_the_formula():
    layer = XIELU("mlp.activation", describe_activation(TRAINED).slopes)
    x = draw(9, TRAINED).requires_grad_()
    inputs = [x, *(torch.tensor([v], dtype=torch.float64).requires_grad_() for v in (0.3, -0.7))]
    for parameter, value in zip((layer.positive, layer.negative), inputs[1:], strict=True):
        parameter.bind(Box((0,), (1,)), lambda: None)
        parameter.value, parameter.grad = value.detach(), torch.zeros(1, dtype=torch.float64)
    actual, expected = layer(x, NO_KERNELS), compute_xielu(*inputs)
    dy = draw(9, "gelu")
    wanted = torch.autograd.grad(expected, inputs, dy)
    assert_near(actual, expected, TERMS)
    assert actual.grad_fn.saved_tensors[0] is x
    actual.backward(dy)
    for found, gradient in zip(
        (x.grad, layer.positive.grad, layer.negative.grad), wanted, strict=True
    ):
        assert_near(found, gradient, TERMS + x.numel())


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
    return activation._activate_gated_for_compiler(described.name, described.limit, x)


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
