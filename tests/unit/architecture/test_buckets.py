"""Buckets by rule: closed forms, and what a run and the planner make of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.buckets import (
    LATENCY_SHARE,
    BucketBlocks,
    compute_bucket_count,
    group_blocks_into_buckets,
)
from megaframe.config import RunConfig
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import get_cluster_constants
from megaframe.planner.data_parallel_times import (
    count_buckets,
    estimate_exchange_times,
    resolve_bucket_size,
)
from megaframe.planner.layout_sizes import make_layout_sizes
from megaframe.planner.machine import Machine
from megaframe.training.auto_layout import choose_bucket_size

CLUSTER = load_cluster("h100-ib")
GPT = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 32000}
MATRICES = 32 * 12 * 4096**2


def make_config(model=None, **parallel):
    return RunConfig.model_validate(
        {
            "model": model or GPT,
            "train": {"seq": 2048, "global_batch": 1 << 15},
            "parallel": {"cluster": "h100-ib", **parallel},
        }
    )


@given(transfer=st.floats(1e-3, 10), latency=st.floats(1e-5, 1))
def test_latencies_and_the_last_bucket_are_balanced(transfer, latency):
    count = float(compute_bucket_count(transfer, latency))

    def cost(n):
        return n * latency + transfer / n

    if transfer < latency / LATENCY_SHARE**2:  # the sum of both is least
        assert cost(count) <= min(cost(1.1 * count), cost(count / 1.1))
    else:
        assert count * latency == pytest.approx(LATENCY_SHARE * transfer)
        assert transfer / count <= LATENCY_SHARE * transfer * (1 + 1e-9)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50)), max_size=12),
    least=st.integers(1, 300),
)
def test_blocks_are_together_until_they_have_enough(sizes, least):
    groups = group_blocks_into_buckets(sizes, least)
    assert [n for of in groups for n in range(of.start, of.stop)] == [*range(len(sizes))]
    for of in groups:
        bucket_sizes = sizes[of.start : of.stop]
        assert of.start == 0 or sum(map(sum, bucket_sizes)) >= least
        assert sum(map(sum, bucket_sizes[1:])) < least, "the first block is needed to have enough"
        has_both = min(bucket_sizes[0]) > 0
        assert of.halves == (has_both and len(bucket_sizes) == 1 and max(bucket_sizes[0]) >= least)


def test_half_a_block_is_the_least():
    assert group_blocks_into_buckets([(2, 1)] * 3, 1) == [
        BucketBlocks(n, n + 1, True) for n in range(3)
    ]
    assert group_blocks_into_buckets([(2, 1)] * 3, 3) == [
        BucketBlocks(n, n + 1, False) for n in range(3)
    ]
    assert group_blocks_into_buckets([(2, 1)] * 5, 6) == [
        BucketBlocks(0, 1, False),
        BucketBlocks(1, 3, False),
        BucketBlocks(3, 5, False),
    ]


def count_of(zero=1, latency=None, world=1024, **parallel):
    config = make_config(zero=zero, **parallel)
    layout = Layout.from_parallel(config.parallel, world)
    machine = Machine(
        config,
        CLUSTER,
        get_cluster_constants(CLUSTER),
        make_layout_sizes(config.parallel, config.train, layout),
    )
    return float(count_buckets(machine, MATRICES, 1, 32)), machine


def test_the_number_of_buckets_follows_from_latency_and_bandwidth():
    """A ring over 256 data ranks, 4 to a node: 255 messages of the mean latency of its hops."""
    size, machine = count_of(tensor=2, world=512)
    alpha = (3 * 3e-6 + 8e-6) / 4
    bandwidth = 0.9 * 50e9 * 4
    assert machine.constants.links == (0.82, 0.9)
    latency = 2 * 255 * alpha
    transfer = (4 + 2) * MATRICES * 255 / 256 / bandwidth
    assert size == pytest.approx(
        min(64.0, float(compute_bucket_count(transfer, latency))), rel=1e-6
    )
    half = estimate_exchange_times(machine, MATRICES, 2.0).sum_for_zero(1)
    full_bucket = estimate_exchange_times(machine, MATRICES, 1.0).sum_for_zero(1)
    assert half - full_bucket == pytest.approx(latency, rel=1e-6)


def test_more_ranks_have_fewer_buckets_between_their_bounds():
    counts = [count_of(world=world)[0] for world in (8, 64, 512, 4096, 32768)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 64 and counts[-1] < 3
    assert count_of(zero=3, world=32768)[0] == 32, "one block of gathered values at a time"
    assert count_of(world=32768, bucket_size=MATRICES // 20)[0] == pytest.approx(20, rel=0.01)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_key_is_decided_once_for_runtime_and_planner(zero):
    config = make_config(zero=zero)
    decided, (line,) = choose_bucket_size(config, 8192)
    size = decided.parallel.bucket_size
    layout = Layout.from_parallel(config.parallel, 8192)
    assert resolve_bucket_size(config, layout, CLUSTER) == decided
    assert choose_bucket_size(decided, 8192) == (decided, [])
    assert f"parallel.bucket_size=auto: {size:,} elements, so that 32 blocks are in " in line
    assert "between 8192 data ranks" in line
    if zero >= 2:
        assert size == 12 * 4096**2 and "32 blocks are in 32 buckets" in line
    else:
        assert size > 4 * 12 * 4096**2


def test_alone_or_on_few_ranks_half_a_block_stays_a_bucket():
    config = make_config()
    alone, lines = choose_bucket_size(config, 1)
    assert lines == [] and alone.parallel.bucket_size == 1
    decided, lines = choose_bucket_size(config, 8)
    assert lines == [] and decided.parallel.bucket_size < 8 * 4096**2
    # Without ZeRO NCCL has a tree, whose latency grows with the logarithm of the ranks.
    assert choose_bucket_size(make_config(zero=0), 8192)[1] == []
    given = make_config(bucket_size=12345)
    assert choose_bucket_size(given, 8192) == (given, [])
