"""Descriptions from extensions: what a part returns is checked before it is used."""

from __future__ import annotations

from typing import Any

from megaframe.config.part_calls import call_part, describe_method
from megaframe.config.parts import Part
from megaframe.errors import UserError

MAKES_LAYER = "make_layer(name, run)"
"""What descriptions of layers from outside must have."""


def describe_part(
    part: Part,
    base: type,
    needed: str,
    *arguments: object,
    known: tuple[type, ...] = (),
) -> Any:
    """Return what a part says that its layer or norm is made of.

    Args:
        part: Its section, with a method `describe`.
        base: What the description is derived from.
        needed: What the description must have of its own for torch code: `METHOD(ARGUMENTS)`.
        arguments: Those of `describe`.
        known: Descriptions of ours that need no such method.

    Raises:
        UserError: The part fails, or nothing can be built from the description.
    """
    description: Any = call_part(part, "describe", base, *arguments)
    kind, method = type(description), needed.partition("(")[0]
    place = describe_method(part, "describe")
    if getattr(kind, method) is getattr(base, method) and not isinstance(description, known):
        raise UserError(f"{place} returns {kind.__name__}, which lacks {needed}")
    try:
        hash(description)
    except TypeError as error:
        raise UserError(
            f"{place} returns {kind.__name__}, which cannot be compared by value ({error}); make "
            "it a frozen dataclass of numbers, texts and tuples"
        ) from None
    return description
