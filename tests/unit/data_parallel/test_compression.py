"""Codecs keep what they promise: everything, each number to half a step, the largest numbers, or
numbers at random. What a message leaves out is no more than error feedback needs, and its bytes are
those that plans and documents count."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.traffic import count_message_bytes
from megaframe.data_parallel.compression import (
    Bf16Codec,
    Fp16Codec,
    Int4Codec,
    Int8Codec,
    RandomKCodec,
    ThresholdCodec,
    TopKCodec,
    choose_places,
    make_codec,
)

DTYPES = (torch.float32, torch.float64)


def make_numbers(length, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, generator=generator, dtype=dtype)


def round_trip(codec, x):
    message = codec.encode(x)
    assert message.dtype == torch.uint8 and message.ndim == 1
    return codec.decode(message, len(x), x.dtype), len(message)


@given(st.integers(1, 5000), st.integers(0, 99), st.sampled_from(DTYPES), st.floats(1e-30, 1e20))
def test_messages_say_what_they_promise(length, seed, dtype, size):
    x = make_numbers(length, seed, dtype) * size
    restored, used = round_trip(Bf16Codec(), x)
    assert torch.equal(restored, x.to(torch.bfloat16).to(dtype)) and used == 2 * length
    restored, used = round_trip(Int8Codec(), x)
    blocks = x.abs().split(1024)
    step = torch.cat([block.amax().expand(len(block)) / 127 for block in blocks])
    assert ((restored - x).abs() <= 0.5001 * step).all() and used == length + 4 * len(blocks)
    restored, used = round_trip(Fp16Codec(), x)
    # 11 bits of each number, and of the largest in its block what the smallest subnormal is.
    allowed = x.abs() * 2**-10 + 127 * step * 2**-24
    assert ((restored - x).abs() <= allowed).all() and used == 2 * length + 4 * len(blocks)
    restored, used = round_trip(Int4Codec(), x)
    blocks = x.abs().split(128)
    step = torch.cat([block.amax().expand(len(block)) / 7 for block in blocks])
    assert ((restored - x).abs() <= 0.5001 * step).all()
    assert used == math.ceil(length / 2) + 4 * len(blocks)
    codec = TopKCodec(0.1)
    restored, used = round_trip(codec, x)
    count = math.ceil(0.1 * length)
    assert used == count * (4 + dtype.itemsize)
    sent = restored != 0
    assert sent.sum() == count and torch.equal(restored[sent], x[sent])
    assert count == length or x[sent].abs().min() >= x[~sent].abs().max()
    for sends_all in (TopKCodec(1.0), ThresholdCodec(1.0), RandomKCodec(1.0)):
        assert torch.equal(round_trip(sends_all, x)[0], x)
    restored, used = round_trip(ThresholdCodec(0.1), x)
    sent = restored != 0
    assert used == count * (4 + dtype.itemsize)
    assert 1 <= sent.sum() <= count and torch.equal(restored[sent], x[sent])
    # As many normal numbers exceed this bound as may be sent.
    exceeded = torch.erfinv(torch.tensor(1 - count / length, dtype=torch.float64))
    bound = min(float(2**0.5 * exceeded * x.double().square().mean().sqrt()), float(x.abs().max()))
    assert (x[sent].abs() >= 0.999 * bound).all()
    assert sent.sum() == count or (x[~sent].abs() <= 1.001 * bound).all()
    restored, used = round_trip(RandomKCodec(0.1), x)
    sent = restored != 0
    assert used == 8 + count * dtype.itemsize
    assert sent.sum() == count and torch.equal(restored[sent], x[sent])


CODECS = ("bf16", "fp16", "int8", "int4", "topk", "randomk", "threshold")


@pytest.mark.parametrize("name", CODECS)
@given(st.integers(1, 3000), st.integers(0, 99), st.sampled_from((0.01, 0.3)))
def test_every_message_leaves_out_less_than_there_was(name, length, seed, share):
    """The condition under which error feedback converges (Karimireddy et al. 2019): a compression
    is a contraction. The worst case for most is that all numbers are equal."""
    codec = make_codec(name, share)
    for x in (make_numbers(length, seed, torch.float64), torch.full((length,), 3.0).double()):
        restored, used = round_trip(codec, x)
        left_out = float((restored - x).square().sum() / x.square().sum())
        if name == "randomk" and len(set(x.tolist())) > 1:
            assert left_out < 1  # less only in the mean
        else:
            assert left_out < 1 - 0.9 / length
        if name == "topk":
            assert left_out <= 1 - codec.count(length) / length + 1e-12
        assert used == count_message_bytes(name, length, 8, share)


@given(st.integers(1, 400), st.floats(0.01, 1.0), st.integers(0, 2**40))
def test_places_at_random_are_one_in_each_piece(length, share, seed):
    count = RandomKCodec(share).count(length)
    places = choose_places(torch.tensor([seed]), length, count)
    edges = [piece * length // count for piece in range(count + 1)]
    for place, (start, stop) in zip(places.tolist(), pairwise(edges), strict=True):
        assert start <= place < stop


def test_numbers_at_random_are_unbiased_once_scaled():
    """Every element is drawn as often as its piece has elements, so the mean message, scaled by the
    number of elements to a piece, is what was to be sent."""
    length, count, draws = 103, 11, 4000
    total = torch.zeros(length)
    for seed in range(draws):
        total[choose_places(torch.tensor([seed * 7919 - 10**9]), length, count)] += 1
    edges = [piece * length // count for piece in range(count + 1)]
    size = torch.cat([torch.full((b - a,), float(b - a)) for a, b in pairwise(edges)])
    # Five standard deviations of a share of 1 in 9 or 10.
    assert ((total / draws * size) - 1).abs().max() < 5 * (9 / draws) ** 0.5


@pytest.mark.parametrize("codec", [Bf16Codec(), Fp16Codec(), Int8Codec(), TopKCodec(0.001)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(codec, bad):
    x = make_numbers(3000, 0, torch.float32)
    x[1500] = bad
    restored, _ = round_trip(codec, x)
    assert not torch.isfinite(restored[1500])
    assert torch.isfinite(restored[2048:]).all()


@pytest.mark.parametrize("codec", [Int4Codec(), ThresholdCodec(0.001), RandomKCodec(0.001)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_lost(codec, bad):
    """A norm sees it, wherever it arrives."""
    x = make_numbers(3000, 0, torch.float32)
    x[1500] = bad
    assert not torch.isfinite(round_trip(codec, x)[0]).all()


def test_zeros_and_tiny_numbers_do_no_harm():
    for x in (torch.zeros(1500), torch.full((1500,), 1e-44)):
        for name in CODECS:
            restored, _ = round_trip(make_codec(name, 0.1), x)
            assert ((restored - x).abs() <= x.abs()).all()
