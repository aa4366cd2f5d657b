"""The colours of series can be told apart, also by the colour-blind, and stay with their names."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.dashboard.colours import PALETTES, assign_colours, make_palette

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHTS = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
CARDS = {"light": "#ffffff", "dark": "#181c23"}


def to_linear(colour):
    parts = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def to_lab(linear):
    """Return CIE L*a*b* (CIE 1976) under the white of sRGB."""
    relative = TO_XYZ @ np.clip(linear, 0, 1) / TO_XYZ.sum(axis=1)
    f = np.where(
        relative > (6 / 29) ** 3, np.cbrt(relative), relative / (3 * (6 / 29) ** 2) + 4 / 29
    )
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("theme", PALETTES)
def test_colours_can_be_told_apart_by_everybody(theme, sight):
    seen = [to_lab(np.asarray(SIGHTS[sight]) @ to_linear(colour)) for colour in PALETTES[theme]]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) >= 20


@pytest.mark.parametrize("theme", PALETTES)
def test_colours_stand_out_from_the_page(theme):
    for colour in PALETTES[theme]:
        one, other = (TO_XYZ[1] @ to_linear(c) + 0.05 for c in (colour, CARDS[theme]))
        assert max(one, other) / min(one, other) >= 3


def test_no_two_of_many_colours_are_equal():
    for colours in make_palette(120).values():
        assert len(set(colours)) == 120


@given(st.sets(st.text(max_size=3), max_size=40), st.text(max_size=3))
def test_each_name_has_a_colour_and_another_name_changes_few(names, more):
    colours = assign_colours(names)
    assert colours.keys() == names and len(set(colours.values())) == len(names)
    assert assign_colours(sorted(names)) == assign_colours(sorted(names, reverse=True)) == colours
    wider = assign_colours({*names, more})
    unlucky = [name for name in names if wider[name] != colours[name]]
    assert all(name > more for name in unlucky), "only names after the new one make room"


def test_parts_of_a_step_have_colours_of_their_own():
    parts = ("compute", "bubble", "optimizer", "data", "checkpoint", "evaluation", "other")
    axes = ("world", "data", "tensor", "pipeline", "context", "expert", "context+data")
    names = [*(f"time/{p}" for p in parts), *(f"time/communication/{axis}" for axis in axes)]
    colours = assign_colours(names)
    assert len(set(colours.values())) == len(names)
    for name in ("time/compute", "time/communication/data", "time/communication/expert"):
        assert assign_colours([name])[name] == colours[name]
    assert assign_colours(["bytes/data"])["bytes/data"] == colours["time/communication/data"]
