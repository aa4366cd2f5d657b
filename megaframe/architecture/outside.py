"""Descriptions of layers from outside: what an extension returns is checked before it is used."""

from __future__ import annotations

from typing import Any

from megaframe.architecture.layer import LayerDescription
from megaframe.config.model import ModelConfig
from megaframe.config.part_calls import describe_failure
from megaframe.config.parts import FeedForwardPart, MixerPart
from megaframe.errors import UserError


def describe_part(
    part: MixerPart | FeedForwardPart, base: type, model: ModelConfig, output_std: float
) -> Any:
    """Return what a mixer or a feed-forward layer of an extension says of itself.

    Args:
        part: Its section.
        base: What its description is derived from.
        model: The section `model`.
        output_std: As in `MixerPart.describe`.

    Raises:
        UserError: It fails, or no layer can be built from the description.
    """
    name = f"{part.name}: {type(part).__name__}.describe"
    try:
        description = part.describe(model, output_std)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name} fails at {describe_failure(part, error)}") from error
    kind = type(description)
    if not isinstance(description, base):
        raise UserError(f"{name} returns {kind.__name__}, which is no {base.__name__}")
    if kind.make_layer is LayerDescription.make_layer:
        raise UserError(f"{name} returns {kind.__name__}, which lacks make_layer(name, run)")
    try:
        hash(description)
    except TypeError as error:
        raise UserError(
            f"{name} returns {kind.__name__}, which cannot be compared by value ({error}); make it "
            "a frozen dataclass of numbers, texts and tuples"
        ) from None
    return description
