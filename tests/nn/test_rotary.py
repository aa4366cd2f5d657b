"""Rotary positions: what they preserve, and the landmarks of the published scalings."""

import math

import pytest
import torch

from megaframe.config import Model
from megaframe.nn.rotary import Rotary, frequencies


def model(**changes):
    return Model(**{"hidden": 256, "heads": 2, **changes})


def test_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 128, dtype=torch.float64, generator=generator)

    def score(at, other):
        turn = [Rotary(model(), torch.tensor([p]), torch.float64) for p in (at, other)]
        return float((turn[0](query) * turn[1](key)).sum())

    assert score(7, 3) == pytest.approx(score(1004, 1000), rel=1e-10)
    assert score(7, 3) != pytest.approx(score(8, 3), rel=1e-3)


def test_plain_frequencies():
    rate, factor = frequencies(model(rotary_base=500000.0))
    assert factor == 1.0 and rate[0] == 1.0
    assert float(rate[32]) == pytest.approx(500000.0**-0.5)


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    scaling = {"kind": "llama3", "factor": 8, "original_length": 8192}
    plain, _ = frequencies(model(rotary_base=500000.0))
    rate, factor = frequencies(model(rotary_base=500000.0, rotary_scaling=scaling))
    assert factor == 1.0
    wavelength = 2 * math.pi / plain
    assert torch.equal(rate[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    torch.testing.assert_close(rate[wavelength > 8192], plain[wavelength > 8192] / 8)
    middle = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert middle.any()
    smooth = (8192 / wavelength[middle] - 1) / (4 - 1)
    wanted = (1 - smooth) * plain[middle] / 8 + smooth * plain[middle]
    torch.testing.assert_close(rate[middle], wanted)


def test_yarn_ramps_between_its_two_rotation_counts():
    scaling = {
        "kind": "yarn",
        "factor": 4,
        "original_length": 32768,
        "low_frequency": 1,
        "high_frequency": 32,
    }
    plain, _ = frequencies(model(rotary_base=1e6))
    rate, factor = frequencies(model(rotary_base=1e6, rotary_scaling=scaling))
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    # The pair that turns n times in the original length is 64 ln(32768 / (2 pi n)) / ln 1e6.
    low, high = (64 * math.log(32768 / (2 * math.pi * n)) / math.log(1e6) for n in (32, 1))
    low, high = math.floor(low), math.ceil(high)
    assert (low, high) == (23, 40)
    assert torch.equal(rate[: low + 1], plain[: low + 1])
    torch.testing.assert_close(rate[high:], plain[high:] / 4)
    middle = (low + high) // 2
    share = (middle - low) / (high - low)
    wanted = plain[middle] * (1 - share) + plain[middle] / 4 * share
    assert float(rate[middle]) == pytest.approx(float(wanted))
