"""Weights as codes: levels by their definition, errors within half a gap, and nothing new when what
was decoded is coded again.

Tests `megaframe.ops.block_codec` and `megaframe.architecture.quantised`.
"""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_exactness import DEVICE
from tolerances import assert_near

from megaframe.architecture.quantised import compute_bits_per_element, count_decoded_bytes
from megaframe.config import RunConfig
from megaframe.config.adapters import QuantisationConfig
from megaframe.ops.block_codec import BlockCodec, compute_levels, round_to_codes
from megaframe.ops.kernel_dispatch import make_kernels

BLOCK, ROWS = 16, 3


def test_nf4_has_quantiles_of_the_normal_distribution():
    """At equally spaced probabilities on both sides of the zero that both have in common."""
    levels = compute_levels("nf4")
    assert len(levels) == 16 and (levels[0], levels[7], levels[-1]) == (-1.0, 0.0, 1.0)
    outermost = ((1 - 1 / 32) + (1 - 1 / 30)) / 2
    low, high = 0.0, 10.0
    for _ in range(200):  # the quantile of the outermost probability, by bisection
        middle = (low + high) / 2
        below = (1 + math.erf(middle / 2**0.5)) / 2 < outermost
        low, high = (middle, high) if below else (low, middle)
    probabilities = [(1 + math.erf(level * low / 2**0.5)) / 2 for level in levels]
    steps = [after - before for before, after in pairwise(probabilities)]
    assert steps[:7] == pytest.approx([(outermost - 0.5) / 7] * 7, rel=1e-12)
    assert steps[7:] == pytest.approx([(outermost - 0.5) / 8] * 8, rel=1e-12)


def make_rows(seed, dtype, spread):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, 4 * BLOCK, generator=generator, dtype=dtype)
    rows *= torch.rand(rows.shape, generator=generator, dtype=dtype) ** spread
    rows[0, :BLOCK] = 0
    return rows


def code_by_definition(rows, config):
    """Return what is left of rows, by looking for the nearest level of all."""
    levels = torch.tensor(compute_levels(config.type), dtype=rows.dtype)
    blocks = rows.view(ROWS, -1, config.block)
    absmax = blocks.abs().amax(2).float()
    distances = blocks[..., None] / absmax[..., None, None] - levels
    nearest = levels[distances.abs().argmin(3).nan_to_num()]
    if config.absmax_block is not None:
        groups = absmax.view(ROWS, -1, config.absmax_block)
        largest = groups.amax(2, keepdim=True)
        shares = torch.where(groups > 0, (255 * groups / largest).round().clamp(1, 255), 0)
        absmax = (shares / 255 * largest).view(ROWS, -1)
    return (nearest * absmax[..., None]).view(rows.shape), absmax


@given(
    kind=st.sampled_from(("nf4", "int8")),
    absmax_block=st.sampled_from((None, 1, 2, 4)),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    spread=st.integers(0, 30),
    seed=st.integers(0, 1000),
)
def test_codes_are_near_and_stay(kind, absmax_block, dtype, spread, seed):
    config = QuantisationConfig(type=kind, block=BLOCK, absmax_block=absmax_block)
    rows = make_rows(seed, dtype, spread)
    coded = rows.clone()
    round_to_codes(coded, config)
    expected, absmax = code_by_definition(rows, config)
    # On either side a level, a share, what it is divided by, a scale and their product are rounded,
    # each by half an eps of fp32.
    assert torch.allclose(coded, expected, rtol=5 * torch.finfo(torch.float32).eps, atol=0)

    gap = max(after - before for before, after in pairwise(compute_levels(kind)))
    true = rows.view(ROWS, -1, BLOCK).abs().amax(2)
    bound = true * (gap / 2 + 1e-6) + (absmax - true).abs()
    errors = (coded - rows).view(ROWS, -1, BLOCK).abs().amax(2)
    assert (errors <= bound).all()
    groups = true.view(ROWS, -1, absmax_block or 1)
    largest = groups.amax(2, keepdim=True).expand(groups.shape).reshape(absmax.shape)
    assert ((absmax - true).abs() <= largest / (255 if absmax_block else 1e6)).all()

    again = coded.clone()
    round_to_codes(again, config)
    assert again.equal(coded)
    # Any part of a row that ends where blocks do has the codes of the row.
    piece = rows[:, 4 * BLOCK // 4 * (absmax_block or 1) % (4 * BLOCK) :].contiguous()
    round_to_codes(piece, config)
    assert piece.equal(coded[:, -piece.shape[1] :])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("absmax_block", [None, 4])
def test_bytes_are_those_of_the_plan(kind, absmax_block):
    config = QuantisationConfig(type=kind, block=64, absmax_block=absmax_block)
    codec, length = BlockCodec(config), 64 * 4 * 8
    assert 8 * codec.count_bytes(length) == compute_bits_per_element(config) * length
    values = torch.randn(length, generator=torch.Generator().manual_seed(0))
    stored = torch.zeros(codec.count_bytes(length), dtype=torch.uint8)
    codec.encode(values, stored)
    narrow, wide = torch.empty(length, dtype=torch.bfloat16), torch.empty(length)
    codec.decode(stored, narrow)
    codec.decode(stored, wide)
    assert narrow.equal(wide.bfloat16())  # rounded once
    moved = count_decoded_bytes(config, 2, by_kernel=True)
    assert length * moved == codec.count_bytes(length) + 2 * length


def test_what_is_not_finite_stays_so():
    config = QuantisationConfig(block=4)
    for value in (math.nan, math.inf):
        values = torch.ones(8)
        values[1] = value
        round_to_codes(values, config)
        assert not values[1].isfinite() and values[4:].equal(torch.ones(4))


@pytest.mark.parametrize(("start", "end"), [(0, 96), (96, 352), (352, 480)])
def test_a_kernel_makes_the_values_of_a_part_that_begins_inside_a_row(start, end):
    """As ranks of ZeRO 3 have them, in a buffer of several."""
    model = {"adapters": {"quantize_base": {"block": 16, "absmax_block": 2}}}
    config = RunConfig(model=model, kernels={"codes": "triton"})
    kernels = make_kernels(config, torch.device(DEVICE))
    codec = BlockCodec(config.model.adapters.quantize_base)
    values = torch.randn(3 * 160, generator=torch.Generator().manual_seed(0))
    stored = torch.zeros(codec.count_bytes(len(values)), dtype=torch.uint8)
    codec.encode(values, stored)
    codec.decode(stored, values)
    size = codec.count_bytes(end - start)
    parts = torch.zeros(2, size, dtype=torch.uint8)
    codec.encode(values[start:end], parts[1])
    made = torch.full((end - start,), torch.nan, device=DEVICE)
    codec.decode(parts.to(DEVICE)[1], made, kernels)
    expected = values[start:end].to(DEVICE)
    assert_near(made, expected, 3, size=expected.abs().double())
