"""Random values of a config section, derived from its pydantic class: what a class gains is drawn
without a change here, and so are the parts of extensions that are registered."""

from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from megaframe.config.registry import Extensible, is_part
from megaframe.config.section import Section

FLOATS = (1.0, 0.5, 2.0, 0.25, 4.0, 0.1, 0.0)
"""Values of a number without a list of its own, the simplest first, to which failures shrink."""
INTEGERS = range(5)
KEYS_OF_ONE = 8
"""Keys of a section in a union for each time that it is among what is drawn from."""
RARITY = 3
"""One key in this many is given; the others keep their defaults."""


def draw_keys(draw, section, values, skipped=(), given=()):
    """Return a dictionary of some keys of a section, as a config file has them.

    Args:
        draw: As hypothesis gives it to a composite strategy.
        section: The pydantic class.
        values: A strategy for each key whose type does not tell which values make sense, by
            `Class.key`; None for a key that is never drawn here.
        skipped: More keys that are never drawn.
        given: Keys that are always drawn.
    """
    keys = {}
    for name, field in section.model_fields.items():
        path = f"{section.__name__}.{name}"
        if name in skipped or values.get(path, st) is None:
            continue
        always = field.is_required() or name in given
        if always or draw(st.integers(0, RARITY - 1)) == RARITY - 1:
            strategy = values.get(path)
            if strategy is None:
                strategy = make_strategy(field.annotation, values, tuple(field.metadata))
            keys[name] = draw(strategy)
    return keys


# Made once: hypothesis reads the source of a function that it makes a strategy of.
draw_sections = st.composite(draw_keys)


def make_strategy(annotation, values, metadata=(), nullable=False):
    """Return a strategy for the values of a type that is written in a config class.

    Args:
        annotation: The type.
        values: As in `draw_keys`, for sections inside the type.
        metadata: Limits of a number, as pydantic keeps them.
        nullable: Whether to draw null, where it is one of the values.
    """
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        limits = [
            limit
            for extra in members[1:]
            for limit in (extra.metadata if isinstance(extra, FieldInfo) else (extra,))
        ]
        return make_strategy(members[0], values, (*metadata, *limits), nullable)
    if origin is Literal:
        return st.sampled_from(members)
    if origin in (Union, UnionType):
        kinds = [m for m in members if m is not NoneType and not is_part(m)]
        # Those with many keys more often, so that each of these is drawn.
        strategies = [
            make_strategy(kind, values, metadata)
            for kind in kinds
            for _ in range(1 + len(getattr(kind, "model_fields", ())) // KEYS_OF_ONE)
        ]
        strategies += [
            draw_sections(section, values, given=("kind",))
            for limit in metadata
            if isinstance(limit, Extensible)
            for section in limit.kinds.values()
        ]
        return st.one_of(*([st.none()] if nullable and NoneType in members else []), *strategies)
    if origin is tuple:
        item = make_strategy(members[0], values, nullable=True)
        return st.lists(item, min_size=1, max_size=3)
    if annotation is bool:
        return st.booleans()
    if annotation in (int, float):
        numbers = INTEGERS if annotation is int else FLOATS
        return st.sampled_from([n for n in numbers if all(is_within(n, m) for m in metadata)])
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return draw_sections(annotation, values)
    raise TypeError(f"no values are known for {annotation}; give a strategy for the key")


def is_within(number, limit):
    """Return whether a number keeps a limit; True for metadata that are none."""
    match limit:
        case Gt():
            return number > limit.gt
        case Ge():
            return number >= limit.ge
        case Lt():
            return number < limit.lt
        case Le():
            return number <= limit.le
    return True
