"""Activations: whether they are gated, what they keep, and the parameters that one of them has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megaframe.architecture.spec import Constant, ParamSpec
from megaframe.config.part_calls import call_part
from megaframe.config.parts import ActivationPart

GATED = ("swiglu", "geglu", "swiglu_clamped")
"""Our activations of two inputs, gate and up."""
XIELU_BETA = 0.5
"""The slope of xIELU at 0, and the least one of negative inputs."""
_FIRST_SLOPE = 0.8
"""Of both sides, before training."""


@dataclass(frozen=True)
class ActivationDescription:
    """An activation between the two products of an MLP or of experts.

    Attributes:
        name: By which a config asks for it.
        gated: Whether it has two inputs, gate and up. The first product is then twice as wide.
        saved: Elements kept for each element of the result, besides this and the input.
        part: Computes it, if it comes from outside.
        limit: Of gate and up of SwiGLU; None for no limit.
    """

    name: str
    gated: bool
    saved: int = 0
    part: ActivationPart | None = None
    limit: float | None = None

    @property
    def slopes(self) -> SlopesDescription | None:
        """What is trained of the activation itself; None if nothing is."""
        return SlopesDescription() if self.name == "xielu" else None


@dataclass(frozen=True)
class SlopesDescription:
    """The two slopes of xIELU, of positive and of negative inputs. A parameter is the inverse
    softplus of what its slope has more than its least value."""

    def declare_parameters(self, name: str) -> Iterator[ParamSpec]:
        """Yield the specs of both."""
        for side, least in (("positive", 0.0), ("negative", XIELU_BETA)):
            init = Constant(math.log(math.expm1(_FIRST_SLOPE - least)))
            yield ParamSpec(f"{name}.{side}", (1,), init, role="gain")


def describe_activation(
    activation: str | ActivationPart, limit: float | None = None
) -> ActivationDescription:
    """Return what a value of `model.activation` is.

    Args:
        activation: The value.
        limit: `model.activation_limit`, which concerns SwiGLU alone.

    Raises:
        UserError: An activation from outside does not say what it keeps.
    """
    if isinstance(activation, ActivationPart):
        saved = call_part(activation, "count_saved", int)
        return ActivationDescription(activation.name, activation.gated, saved, activation)
    limit = limit if activation == "swiglu" else None
    return ActivationDescription(activation, activation in GATED, limit=limit)
