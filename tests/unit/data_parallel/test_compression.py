"""Codecs keep what they promise: everything, each number to half a step, or the largest numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megaframe.data_parallel.compression import Bf16Codec, Int8Codec, TopKCodec

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
    codec = TopKCodec(0.1)
    restored, used = round_trip(codec, x)
    count = math.ceil(0.1 * length)
    assert used == count * (4 + dtype.itemsize)
    sent = restored != 0
    assert sent.sum() == count and torch.equal(restored[sent], x[sent])
    assert count == length or x[sent].abs().min() >= x[~sent].abs().max()
    assert torch.equal(round_trip(TopKCodec(1.0), x)[0], x)


@pytest.mark.parametrize("codec", [Bf16Codec(), Int8Codec(), TopKCodec(0.001)])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(codec, bad):
    x = make_numbers(3000, 0, torch.float32)
    x[1500] = bad
    restored, _ = round_trip(codec, x)
    assert not torch.isfinite(restored[1500])
    assert torch.isfinite(restored[2048:]).all()


def test_zeros_and_tiny_numbers_do_no_harm():
    for x in (torch.zeros(1500), torch.full((1500,), 1e-44)):
        restored, _ = round_trip(Int8Codec(), x)
        assert ((restored - x).abs() <= x.abs()).all()
