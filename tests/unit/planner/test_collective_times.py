"""Times of collectives, compared with closed forms and with each other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.hardware.cluster import Cluster, Tier, load_cluster
from megaframe.layout import exchange_steps
from megaframe.planner.collective_times import (
    ALGORITHMS,
    GroupLevel,
    compute_bus_bandwidth,
    count_group_ranks,
    estimate_collective_seconds,
    estimate_pairwise_all_to_all,
    estimate_stepped_exchange,
    list_group_levels,
)

ALPHA, BANDWIDTH = 5e-6, 2e10
sizes = st.floats(1, 1e12)
ranks = st.integers(1, 4096)


def make_tier(count, reduces=False):
    return [GroupLevel(float(count), ALPHA, BANDWIDTH, reduces=reduces)]


@pytest.mark.parametrize(
    ("operation", "algorithm", "form"),
    [
        ("all_reduce", "naive", lambda p, n: 2 * (p - 1) * (ALPHA + n / BANDWIDTH)),
        ("all_reduce", "binomial", lambda p, n: 2 * math.log2(p) * (ALPHA + n / BANDWIDTH)),
        ("all_reduce", "ring", lambda p, n: 2 * (p - 1) * (ALPHA + n / p / BANDWIDTH)),
        ("all_reduce", "tree", lambda p, n: 2 * math.log2(p) * ALPHA + 2 * n / BANDWIDTH),
        (
            "all_reduce",
            "halving_doubling",
            lambda p, n: 2 * math.log2(p) * ALPHA + 2 * n * (p - 1) / p / BANDWIDTH,
        ),
        ("all_gather", "ring", lambda p, n: (p - 1) * (ALPHA + n / p / BANDWIDTH)),
        ("reduce_scatter", "ring", lambda p, n: (p - 1) * (ALPHA + n / p / BANDWIDTH)),
        ("all_gather", "doubling", lambda p, n: math.log2(p) * ALPHA + n * (p - 1) / p / BANDWIDTH),
        ("all_to_all", "pairwise", lambda p, n: (p - 1) * (ALPHA + n / p / BANDWIDTH)),
        ("broadcast", "tree", lambda p, n: math.log2(p) * (ALPHA + n / BANDWIDTH)),
        (
            "broadcast",
            "scatter",
            lambda p, n: (math.log2(p) + p - 1) * ALPHA + 2 * n * (p - 1) / p / BANDWIDTH,
        ),
    ],
)
@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_closed_forms_on_one_tier(operation, algorithm, form, count, size):
    seconds = ALGORITHMS[operation][algorithm](size, make_tier(count))
    assert float(seconds) == pytest.approx(form(count, size), rel=1e-12)


def test_switches_that_add_send_each_number_once():
    seconds = ALGORITHMS["all_reduce"]["in_network"](1e9, make_tier(64, reduces=True))
    assert float(seconds) == pytest.approx(2 * ALPHA + 1e9 / BANDWIDTH)
    assert np.isinf(ALGORITHMS["all_reduce"]["in_network"](1e9, make_tier(64)))


def test_a_number_of_ranks_that_is_no_power_of_two_pays_for_the_rest():
    five, four = (ALGORITHMS["all_reduce"]["halving_doubling"](1e9, make_tier(n)) for n in (5, 4))
    assert float(five - four) == pytest.approx(2 * (ALPHA + 1e9 / BANDWIDTH))


@given(count=ranks, size=sizes, other=sizes, operation=st.sampled_from(sorted(ALGORITHMS)))
def test_the_choice_is_the_best_of_all_and_grows_with_the_size(count, size, other, operation):
    group = make_tier(count)
    best = float(estimate_collective_seconds(operation, size, group))
    each = {name: float(f(size, group)) for name, f in ALGORITHMS[operation].items()}
    assert (
        best
        == min(each.values())
        == float(estimate_collective_seconds(operation, size, group, [min(each, key=each.get)]))
    )
    if count == 1:
        assert best == 0
    if other >= size:
        assert float(estimate_collective_seconds(operation, other, group)) >= best


@given(inner=st.sampled_from([2, 4, 8]), outer=st.integers(2, 64), size=st.floats(1e6, 1e11))
def test_hierarchies_carry_on_the_slow_tier_what_is_left(inner, outer, size):
    group = [GroupLevel(float(inner), 0.0, 1e11), GroupLevel(float(outer), 0.0, 1e10)]
    seconds = float(ALGORITHMS["all_reduce"]["hierarchical"](size, group))
    left = size / inner
    form = 2 * size * (inner - 1) / inner / 1e11 + 2 * left * (outer - 1) / outer / 1e10
    assert seconds == pytest.approx(form)
    # A ring over all ranks uses the adapters of all ranks of a node.
    p = inner * outer
    ring = float(ALGORITHMS["all_reduce"]["ring"](size, group))
    assert ring == pytest.approx(2 * size * (p - 1) / p / min(1e11, inner * 1e10))


@pytest.mark.parametrize("counts", [(8, 4), (8, 1), (1, 6), (2, 3, 4), (8, 1, 4)])
def test_each_hop_has_the_latency_of_its_tier(counts):
    alphas = (1e-6, 1e-4, 1e-2)[: len(counts)]
    group = [GroupLevel(float(m), a, 1e11) for m, a in zip(counts, alphas, strict=True)]
    p, tiers = math.prod(counts), range(len(counts))

    def tier(first, other):
        """Return the outermost tier on which two ranks are at different places."""
        inside = [math.prod(counts[:number]) for number in tiers]
        return max(
            n for n in tiers if first // inside[n] % counts[n] != other // inside[n] % counts[n]
        )

    round_once = sum(alphas[tier(rank, (rank + 1) % p)] for rank in range(p))
    seconds = float(ALGORITHMS["all_gather"]["ring"](0.0, group))
    assert seconds == pytest.approx(round_once * (p - 1) / p)
    deep = sum(math.ceil(math.log2(m)) * a for m, a in zip(counts, alphas, strict=True))
    assert float(ALGORITHMS["all_reduce"]["tree"](0.0, group)) == pytest.approx(2 * deep)


def test_shares_of_links_are_of_each_tier():
    cluster = load_cluster("gb200-nvl72")
    full_levels, part = (
        list_group_levels(cluster, 1, 144, shares) for shares in ((1.0,), (0.5, 0.75))
    )
    shares_found = [
        float(shared.bandwidth / full.bandwidth)
        for full, shared in zip(full_levels, part, strict=True)
    ]
    assert shares_found == [0.5] + [0.75] * (len(cluster.tiers) - 1)


@given(stride=st.sampled_from([1, 2, 4, 8, 16, 64]), size=st.integers(1, 2000))
def test_levels_hold_the_whole_group(stride, size):
    cluster = load_cluster("h100-ib")
    group = list_group_levels(cluster, stride, size)
    inner = max(1, min(size, 8 // stride))
    assert float(group[0].members) == inner
    assert float(count_group_ranks(group)) >= size
    assert float(count_group_ranks(group)) < size + inner


def test_levels_of_many_groups_are_those_of_each():
    cluster = load_cluster("gb200-nvl72")
    strides, counts = np.array([1, 8, 72, 576]), np.array([144, 9, 4, 16])
    many = list_group_levels(cluster, strides, counts)
    for place, (stride, count) in enumerate(zip(strides, counts, strict=True)):
        single_group = list_group_levels(cluster, int(stride), int(count))
        assert [float(level.members[place]) for level in many] == [
            float(level.members) for level in single_group
        ]


def test_where_a_ring_begins_to_beat_a_tree():
    """Above p (p - 1 - log2 p) alpha / beta bytes a ring is faster."""
    point = 64 * (64 - 1 - math.log2(64)) * ALPHA * BANDWIDTH
    assert choose_of_two(0.9 * point) == "tree" and choose_of_two(1.1 * point) == "ring"


def choose_of_two(size):
    times = {n: float(ALGORITHMS["all_reduce"][n](size, make_tier(64))) for n in ("ring", "tree")}
    return min(times, key=times.get)


def test_rails_pass_what_crosses_them_through_a_neighbour():
    plain = [GroupLevel(8.0, 0.0, 1e11), GroupLevel(4.0, 0.0, 1e10)]
    rails = [plain[0], GroupLevel(4.0, 0.0, 1e10, rails=True)]
    operation = ALGORITHMS["all_to_all"]["pairwise"]
    over = 1e9 * 24 / 32
    assert float(operation(1e9, rails) - operation(1e9, plain)) == pytest.approx(
        over * 7 / 8 / 1e11
    )


def test_one_dimension_of_a_torus_has_its_own_links_only():
    cluster = Cluster(
        "torus", load_cluster("tpu-v5p").chip, (Tier("t", 512, 1e-6, 3e11, "torus", 3),), 1e4, 1.0
    )
    line, cube = (float(list_group_levels(cluster, 1, n)[0].bandwidth) for n in (8, 512))
    assert (line, cube) == (pytest.approx(1e11), pytest.approx(3e11))


def test_bus_bandwidth_is_that_of_the_link():
    for operation in ("all_reduce", "all_gather", "all_to_all"):
        algorithm = "pairwise" if operation == "all_to_all" else "ring"
        group = [GroupLevel(8.0, 0.0, BANDWIDTH)]
        seconds = float(ALGORITHMS[operation][algorithm](1e9, group))
        assert compute_bus_bandwidth(operation, 1e9, 8, seconds) == pytest.approx(BANDWIDTH)


def count_messages(ranks, inside):
    """Return the messages that a rank sends in an exchange in steps."""
    return sum(size - 1 for size in exchange_steps(ranks, inside))


def test_an_exchange_in_steps_takes_its_messages_and_the_same_bytes():
    alpha, bandwidth, size = 2e-5, 4e10, 1e9
    for ranks in (64, 2048):
        group = [GroupLevel(1.0, 3e-6, 4e11), GroupLevel(float(ranks), alpha, bandwidth)]
        transfer = size * (ranks - 1) / ranks / bandwidth
        assert float(estimate_stepped_exchange(size, group)) == pytest.approx(
            count_messages(ranks, 1) * alpha + transfer
        )
        assert float(estimate_pairwise_all_to_all(size, group)) == pytest.approx(
            (ranks - 1) * alpha + transfer
        )
    # Within a node first: the slow links carry an eighth.
    group = [GroupLevel(8.0, 3e-6, 4e11), GroupLevel(np.float64(16.0), alpha, bandwidth)]
    outer = size / 8 * 15 / 16 / bandwidth + count_messages(16, 1) * alpha
    inner = size * 7 / 8 / 4e11 + 7 * 3e-6
    assert float(estimate_stepped_exchange(size, group)) == pytest.approx(inner + outer)
