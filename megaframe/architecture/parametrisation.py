"""The maximal update parametrisation (muP): how initial values, learning rates and factors follow
from how much wider a model is than its base model, so that the best learning rate stays the same.

Everything follows from one condition (Yang, Simon and Bernstein 2023, "A Spectral Condition for
Feature Learning"): the spectral norms of a matrix and of its updates are to grow as sqrt(n_out /
n_in), where the matrix has n_in times as many inputs and n_out times as many outputs as in the
base model. The formulas below turn it into those of table 8 of "Tensor Programs V" (Yang et al.
2022), whose cases are n_in = 1 (tables and vectors), n_out = 1 (the head, routers), and both equal.
At the base widths every factor is 1.

A matrix whose results are multiplied by a factor, as those of the output head are, is the product
of both to the condition: with a factor a, initial values are 1 / a as large, and so are the updates
that make no use of the gradient's size; gradients are a times as large, so those of SGD have a
learning rate of 1 / a^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from megaframe.architecture.spec import Growth
from megaframe.config.model import ModelConfig


def compute_output_multiplier(model: ModelConfig) -> float:
    """Return the factor of what the output head, tied or not, makes of the stream."""
    return 1.0 / compute_width_growth(model)


def compute_score_multiplier(model: ModelConfig) -> float:
    """Return the factor of attention's scores beside 1 / sqrt(width of a head): with it they fall
    as 1 / width, because queries and keys of a trained model are no longer independent."""
    base = model.mup_base_head_dim
    return 1.0 if base is None else math.sqrt(base / get_head_width(model))


def get_head_width(model: ModelConfig) -> int:
    """Return the width of a query or key head."""
    latent = model.latent
    return model.head_dim if latent is None else latent.head_dim + latent.rotary_dim


def compute_width_growth(model: ModelConfig) -> float:
    """Return the width of the stream relative to the base model's."""
    return model.hidden / (model.mup_base_hidden or model.hidden)


def compute_initial_scale(growth: Growth) -> float:
    """Return the factor of initial values: a matrix drawn from a normal distribution has a norm of
    std (sqrt(n_in) + sqrt(n_out))."""
    return _bound_by_sides(growth) / growth.multiplier


def compute_learning_rate_scale(rule: str, growth: Growth) -> float:
    """Return the factor of the learning rate.

    Args:
        rule: A key of `LEARNING_RATE_SCALES`.
        growth: Of the parameter.
    """
    return LEARNING_RATE_SCALES[rule](growth)


def _bound_by_sides(growth: Growth) -> float:
    """Return sqrt(n_out / n_in) / sqrt(max(n_in, n_out))."""
    return growth.inputs**-0.5 * min(1.0, (growth.outputs / growth.inputs) ** 0.5)


def _scale_for_unit_elements(growth: Growth) -> float:
    # Elements of one size, of a matrix of low rank: its norm grows as sqrt(n_in n_out).
    return 1.0 / growth.inputs / growth.multiplier


def _scale_for_gradients(growth: Growth) -> float:
    # The norm of the gradient itself falls as sqrt(n_in / n_out).
    return growth.outputs / growth.inputs / growth.multiplier**2


def _scale_for_orthogonal_matrices(growth: Growth) -> float:
    # Our Muon's updates have a norm of 0.2 sqrt(max(inputs, outputs)).
    return _bound_by_sides(growth) / growth.multiplier


LEARNING_RATE_SCALES: dict[str, Callable[[Growth], float]] = {
    "adamw": _scale_for_unit_elements,
    "lion": _scale_for_unit_elements,
    "sgd": _scale_for_gradients,
    "muon": _scale_for_orthogonal_matrices,
}
"""The factor of the learning rate of a parameter, by what updates it."""
