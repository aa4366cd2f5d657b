"""Figures of scaling and of long runs, compared with closed forms."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.config import RunConfig
from megaframe.hardware.cluster import load_cluster
from megaframe.layout import Layout
from megaframe.planner.constants import constants_of
from megaframe.planner.goodput import daly_interval
from megaframe.planner.kernel_times import fit_line, product_seconds, rates, roofline
from megaframe.planner.scaling import (
    amdahl,
    balances,
    batch_advice,
    compute_bound_batch,
    gustafson,
    scaling_efficiency,
    serial_share,
)
from megaframe.planner.stragglers_and_failures import goodput

CLUSTER = load_cluster("h100-ib")
GPT = {"layers": 24, "hidden": 4096, "heads": 32, "vocab": 32000}


@settings(deadline=None, max_examples=50)
@given(stall=st.floats(0.1, 300), between=st.floats(3600, 1e7))
def test_no_interval_loses_less_than_dalys(stall, between):
    def lost(interval):
        # Daly 2006: time per useful second, with exponential failures and immediate restarts.
        from math import expm1

        return between * expm1((interval + stall) / between) / interval

    best = daly_interval(stall, between)
    assert lost(best) <= 1.001 * min(lost(best / 2), lost(best * 2), lost(0.9 * best))


def test_goodput_falls_with_ranks_and_failures():
    shares = [goodput(CLUSTER, ranks, 1e6, 1e12, 1e10).share for ranks in (8, 1024, 16384, 100_000)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.99
    run = goodput(CLUSTER, 1024, 1e6, 1e12, 1e10)
    assert run.days == pytest.approx(1e12 / 1e6 / run.share / 86400)
    assert run.dollars == pytest.approx(run.days * 24 * 1024 * CLUSTER.price)
    # The cluster's description cites 419 interruptions of 16,384 GPUs in 54 days.
    assert goodput(CLUSTER, 16384, 1e6, 1e12, 1e10).failures_a_day == pytest.approx(
        419 / 54, rel=0.01
    )
    assert goodput(replace(CLUSTER, failure_hours=1.0), 100_000, 1e6, 1e12, 1e10).share == 0


@settings(deadline=None, max_examples=50)
@given(serial=st.floats(0, 1), ranks=st.integers(2, 10**6))
def test_laws_of_scaling(serial, ranks):
    assert amdahl(serial, ranks) <= gustafson(serial, ranks) + 1e-9
    assert serial_share(1.0, 1 / amdahl(serial, ranks), ranks) == pytest.approx(serial, abs=1e-9)
    assert amdahl(0.0, ranks) == pytest.approx(gustafson(0.0, ranks)) == ranks
    assert scaling_efficiency(1, 2.0, ranks, 2.0 * ranks) == pytest.approx(1)


def test_advice_for_another_batch():
    far = batch_advice(10**6, 64 * 10**6, 4e6, 1e-3, 1000)
    assert far.lr_linear == pytest.approx(4e-3) and far.lr_root == pytest.approx(2e-3)
    assert not far.efficient and far.tokens == pytest.approx(17 / 1.25)
    near = batch_advice(10**6, 2 * 10**6, 4e6, 1e-3, 1000)
    assert near.lr_linear == pytest.approx(2e-3) and near.efficient
    assert near.steps == pytest.approx(1000 * 3 / 5)
    assert near.steps * 2 / 1000 == pytest.approx(near.tokens)


def test_communication_rooflines():
    config = RunConfig.model_validate(
        {"model": GPT, "train": {"seq": 2048, "global_batch": 256}, "parallel": {"tensor": 8}}
    )
    constants = constants_of("h100")
    layout = Layout.from_parallel(config.parallel, 64)
    found = {b.axis: b for b in balances(config, layout, CLUSTER, constants)}
    assert set(found) == {"tensor", "data"}
    assert found["tensor"].tier == "nvlink" and found["data"].tier == "infiniband"
    # Each row has 6 x 12 h^2 / 8 matrix operations and moves 10 x 2 h x 7/8 bytes; rows cancel.
    matrices = 6 * 12 * 4096**2 + 6 * 2 * 4096 * 1024
    bytes_ = 10 * 2 * 4096 * 7 / 8
    assert found["tensor"].intensity == pytest.approx(matrices / 8 / bytes_)
    batch = compute_bound_batch(config, layout, CLUSTER, constants)
    assert batch % 8 == 0
    for size, bound in ((batch, True), (batch - 8, False)):
        if size:
            train = config.train.model_copy(update={"global_batch": size})
            other = config.model_copy(update={"train": train})
            data = next(b for b in balances(other, layout, CLUSTER, constants) if b.axis == "data")
            assert data.compute_bound == bound
    alone = Layout(tensor=8)
    assert compute_bound_batch(config, alone, CLUSTER, constants) == 1


@settings(deadline=None, max_examples=50)
@given(
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-12, 1e-8),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=6, max_size=6),
)
def test_a_line_is_found_again(alpha, beta, noise):
    sizes = [4.0**k for k in range(5, 15)]
    exact = [alpha + beta * size for size in sizes]
    found = fit_line(sizes, exact)
    assert found[2] < 1e-6
    noisy = [t * (1 + e) for t, e in zip(exact, noise * 2, strict=False)]
    assert fit_line(sizes, noisy)[2] < 0.12


def test_products_approach_their_peak_and_are_bound_by_memory_when_thin():
    rate = rates(CLUSTER.chip, constants_of("h100"), "bf16")
    wide = 2 * 65536.0**3 / float(product_seconds(rate, 65536.0, 65536.0, 65536.0))
    assert 0.97 * rate.flops < wide < rate.flops
    thin = float(product_seconds(rate, 1.0, 65536.0, 65536.0))
    assert thin >= 2 * 65536**2 / rate.read
    assert roofline(10, 1e12, 1e10) == 1e11 and roofline(1000, 1e12, 1e10) == 1e12
