"""The colours of the page's series: by name, so that a name keeps its colour from page to page, and
each its own within a chart.

The twelve colours were searched so that any two are at least 20 apart (CIE 1976) for normal sight
and for the three kinds of colour blindness (Machado, Oliveira and Fernandes 2009, in full), and
have a contrast of 3:1 to the page, once for a light and once for a dark one; a test computes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

PALETTES = {
    "light": (
        "#5a87fb", "#f66800", "#346945", "#9000ff", "#d17795", "#9f3b02", "#ab9054", "#7e3c6b",
        "#2e14a2", "#8077b6", "#5e1900", "#49166c",
    ),
    "dark": (
        "#a4b7ff", "#f8a616", "#5cc865", "#b74cff", "#f5d2b9", "#a05538", "#ddfa77", "#c2336b",
        "#5468af", "#a094b0", "#987c00", "#64fcff",
    ),
}  # fmt: skip
_ORDER = (
    "compute", "optimizer", "communication/data", "bubble", "communication/tensor", "other",
    "communication/pipeline", "evaluation", "checkpoint", "data", "communication/expert",
    "communication/world",
)  # fmt: skip
_SAME = {"kernels": "compute", "work": "compute", "samples": "compute"}
"""Names that take the colour of another one, which no chart has as well."""
_SIZE = 12


def assign_colours(names: Iterable[str], order: Sequence[str] = ()) -> dict[str, int]:
    """Return the number of each name's colour; no two names have the same.

    A name's first choice follows from the name alone. It gets another colour only if a name before
    it in the alphabet, or one that has a fixed colour, has that one.

    Args:
        names: Names of series, with their panel's prefix, such as `time/compute`.
        order: Names that have the first colours.
    """
    colours: dict[str, int] = {}
    fixed = {name: number for number, name in enumerate(_ORDER)} | {
        name: number for number, name in enumerate(order)
    }
    wanted = {name: _strip_prefix(name) for name in names}
    for name in sorted(wanted, key=lambda name: (wanted[name] not in fixed, name)):
        first = fixed.get(wanted[name], crc32(wanted[name].encode()) % _SIZE)
        taken = set(colours.values())
        choices = [(first + place) % _SIZE for place in range(_SIZE)]
        while not (free := [choice for choice in choices if choice not in taken]):
            choices = [choice + _SIZE for choice in choices]
        colours[name] = free[0]
    return colours


def _strip_prefix(name: str) -> str:
    """Return what a series is about: parts of a step and axes have one colour in all charts."""
    first, _, rest = name.partition("/")
    if first in ("bytes", "bandwidth"):
        return f"communication/{rest}"
    name = rest if first in ("time", "lost") else name
    return _SAME.get(name, name)


def make_palette(count: int) -> dict[str, list[str]]:
    """Return `count` colours for a light and a dark page, all different: beyond the first twelve
    they are mixed with grey, in lines that the page also dashes."""
    return {
        theme: [_mix(colours[number % _SIZE], number // _SIZE) for number in range(count)]
        for theme, colours in PALETTES.items()
    }


def _mix(colour: str, times: int) -> str:
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    share = 1 - 0.75**times
    return "#" + "".join(f"{round(part + share * (128 - part)):02x}" for part in parts)
