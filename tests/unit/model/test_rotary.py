"""Rotary positions: what they preserve, and the landmarks of the published scalings."""

import math

import pytest
import torch
from tolerances import assert_near, near

from megaframe.architecture.model_blocks import describe_block
from megaframe.config import ModelConfig
from megaframe.model.rotary import Rotary, compute_frequencies

pytestmark = pytest.mark.numeric

POWER = 32
"""Roundings of a power: its exponent's is multiplied by the base's logarithm, which is below 16."""


def frequencies_of(model):
    return compute_frequencies(describe_block(model, 0).mixer.rotary)


def make_model(**changes):
    return ModelConfig(**{"hidden": 256, "heads": 2, **changes})


def test_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 128, dtype=torch.float64, generator=generator)

    def score(at, other):
        turn = [
            Rotary(describe_block(make_model(), 0).mixer.rotary, torch.tensor([p]), torch.float64)
            for p in (at, other)
        ]
        return float((turn[0](query) * turn[1](key)).sum())

    # An angle is a position times a rate, so its rounding is up to 1004 times that of a number.
    size = float((query.norm() * key.norm()).sum())
    assert_near(score(7, 3), score(1004, 1000), 128 + 2 * 1004, size=size)
    assert abs(score(7, 3) - score(8, 3)) > 1e-3 * abs(score(8, 3))


def test_plain_frequencies():
    rate, factor = frequencies_of(make_model(rotary_base=500000.0))
    assert factor == 1.0 and rate[0] == 1.0
    assert float(rate[32]) == near(500000.0**-0.5, POWER)


def test_linear_scaling_divides_all_frequencies():
    plain, _ = frequencies_of(make_model(rotary_base=500000.0))
    scaling = {"kind": "linear", "factor": 8}
    rate, factor = frequencies_of(make_model(rotary_base=500000.0, rotary_scaling=scaling))
    assert factor == 1.0 and torch.equal(rate, plain / 8)


def test_proportional_scaling_rotates_the_fastest_pairs_alone():
    plain, _ = frequencies_of(make_model(rotary_base=500000.0))
    scaling = {"kind": "proportional", "factor": 8, "proportion": 0.25}
    rate, factor = frequencies_of(make_model(rotary_base=500000.0, rotary_scaling=scaling))
    turning = len(plain) // 4
    assert factor == 1.0 and torch.equal(rate[:turning], plain[:turning] / 8)
    assert not rate[turning:].any()


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    scaling = {"kind": "llama3", "factor": 8, "original_length": 8192}
    plain, _ = frequencies_of(make_model(rotary_base=500000.0))
    rate, factor = compute_frequencies(
        describe_block(make_model(rotary_base=500000.0, rotary_scaling=scaling), 0).mixer.rotary
    )
    assert factor == 1.0
    wavelength = 2 * math.pi / plain
    assert torch.equal(rate[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    longest = wavelength > 8192
    assert_near(rate[longest], plain[longest] / 8, 4, size=plain[longest] / 8)
    middle = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert middle.any()
    smooth = (8192 / wavelength[middle] - 1) / (4 - 1)
    expected = (1 - smooth) * plain[middle] / 8 + smooth * plain[middle]
    # The share is a difference of numbers up to 4.
    assert_near(rate[middle], expected, 16, size=4 * plain[middle])


def test_yarn_may_blend_over_one_pair():
    scaling = {"kind": "yarn", "factor": 4, "original_length": 32768}
    plain, _ = frequencies_of(make_model(rotary_base=1e6))
    scaling |= {"low_frequency": 1, "high_frequency": 1}
    rate, _ = frequencies_of(make_model(rotary_base=1e6, rotary_scaling=scaling))
    assert torch.equal(rate[:40], plain[:40])  # 39.67 is rounded outwards
    assert_near(rate[40:], plain[40:] / 4, 4, size=plain[40:] / 4)


def test_yarn_ramps_between_its_two_rotation_counts():
    scaling = {
        "kind": "yarn",
        "factor": 4,
        "original_length": 32768,
        "low_frequency": 1,
        "high_frequency": 32,
    }
    plain, _ = frequencies_of(make_model(rotary_base=1e6))
    rate, factor = compute_frequencies(
        describe_block(make_model(rotary_base=1e6, rotary_scaling=scaling), 0).mixer.rotary
    )
    assert factor == near(0.1 * math.log(4) + 1, 4)
    # The pair that turns n times in the original length is 64 ln(32768 / (2 pi n)) / ln 1e6.
    low, high = (64 * math.log(32768 / (2 * math.pi * n)) / math.log(1e6) for n in (32, 1))
    low, high = math.floor(low), math.ceil(high)
    assert (low, high) == (23, 40)
    assert torch.equal(rate[: low + 1], plain[: low + 1])
    assert_near(rate[high:], plain[high:] / 4, 4, size=plain[high:] / 4)
    middle = (low + high) // 2
    share = (middle - low) / (high - low)
    expected = plain[middle] * (1 - share) + plain[middle] / 4 * share
    assert_near(rate[middle], expected, 8)
