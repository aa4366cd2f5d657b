"""Activations: whether they are gated, and what they keep."""

from __future__ import annotations

from dataclasses import dataclass

from megaframe.config.part_calls import call_part
from megaframe.config.parts import ActivationPart

GATED = ("swiglu", "geglu", "swiglu_clamped")
"""Our activations of two inputs, gate and up."""


@dataclass(frozen=True)
class ActivationDescription:
    """An activation between the two products of an MLP or of experts.

    Attributes:
        name: By which a config asks for it.
        gated: Whether it has two inputs, gate and up. The first product is then twice as wide.
        saved: Elements kept for each element of the result, besides this and the input.
        part: Computes it, if it comes from outside.
    """

    name: str
    gated: bool
    saved: int = 0
    part: ActivationPart | None = None


def describe_activation(activation: str | ActivationPart) -> ActivationDescription:
    """Return what a value of `model.activation` is.

    Raises:
        UserError: An activation from outside does not say what it keeps.
    """
    if isinstance(activation, ActivationPart):
        saved = call_part(activation, "count_saved", int)
        return ActivationDescription(activation.name, activation.gated, saved, activation)
    return ActivationDescription(activation, activation in GATED)
