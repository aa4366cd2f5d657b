"""Goodput: the formula against simulation, Young and Daly against the search, published runs."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_process import run_tool

from megaframe.hardware.cluster import load_cluster
from megaframe.planner.failure_rates import (
    LLAMA3,
    MEGASCALE,
    PUBLISHED,
    FailureCause,
    FailureCosts,
    FailureMix,
)
from megaframe.planner.goodput import (
    compute_daly_interval,
    compute_effective_share,
    compute_gains_of_halving,
    find_best_interval,
    find_max_restart_seconds,
    format_table_lines,
    predict_goodput,
    simulate_failures,
)

CLUSTER = load_cluster("h100-ib")
FREE = FailureCosts(crash=0, hang=0, silent=0, restart=0, load=0, swap=0, stall=0, warmup=0)


def test_llama3_table_adds_up():
    counts = {cause.name: cause.count for cause in LLAMA3.causes}
    assert sum(counts.values()) == 466 and counts["planned"] == 47
    assert 1 / LLAMA3.compute_failure_rate(16384) / 3600 == pytest.approx(
        2.78, abs=0.01
    )  # about every three hours


@settings(max_examples=12)
@given(
    ranks=st.sampled_from([1024, 16384, 100000]),
    interval=st.floats(30, 1800),
    stall=st.floats(0, 20),
    mix=st.sampled_from([LLAMA3, MEGASCALE]),
)
def test_the_simulation_agrees_with_the_formula(ranks, interval, stall, mix):
    costs = FailureCosts(stall=stall)
    expected = compute_effective_share(mix, ranks, costs, interval)
    simulated = simulate_failures(mix, ranks, costs, interval, failures=20000)
    # The loss per failure varies by about its mean; also, the formula is only of first order.
    error = 0.001 + 4 * (1 - expected) / 20000**0.5
    assert simulated.effective == pytest.approx(expected, abs=error)
    assert sum(simulated.lost.values()) + simulated.effective == pytest.approx(1)


@settings(max_examples=20)
@given(stall=st.floats(0.1, 60), hours=st.floats(0.5, 100))
def test_the_best_interval_is_dalys(stall, hours):
    mix = FailureMix("one", 1, hours / 24, (FailureCause("any", 1),))
    costs = FailureCosts(stall=stall)
    interval = find_best_interval(mix, 1, costs)
    assert interval == pytest.approx(
        compute_daly_interval(stall, 1 / mix.compute_failure_rate(1)), rel=0.02
    )
    first_order = math.sqrt(2 * stall / mix.compute_failure_rate(1))  # Young 1974
    assert interval == pytest.approx(first_order, rel=0.25)


def test_without_costs_nothing_is_lost_but_what_was_not_saved():
    assert compute_effective_share(LLAMA3, 16384, FREE, 1e-3) == pytest.approx(1, abs=1e-6)
    assert all(gain >= -1e-9 for _, gain in compute_gains_of_halving(LLAMA3, 16384, FailureCosts()))


def test_runs_as_they_were_are_about_as_effective_as_published():
    """The published shares are a little above 90%."""
    for mix in (LLAMA3, MEGASCALE):
        share = compute_effective_share(
            mix, mix.ranks, PUBLISHED, find_best_interval(mix, mix.ranks, PUBLISHED)
        )
        assert 0.88 < share < 0.95


def test_more_ranks_fail_more_often_and_save_more_often():
    lines = list(format_table_lines(LLAMA3, FailureCosts(), (1024, 16384)))
    assert len(lines) == 3 and "16,384" in lines[2]
    shares = [
        compute_effective_share(
            LLAMA3, n, FailureCosts(), find_best_interval(LLAMA3, n, FailureCosts())
        )
        for n in (1, 10**5)
    ]
    assert shares[0] > shares[1]
    assert find_best_interval(LLAMA3, 1024, FailureCosts()) > find_best_interval(
        LLAMA3, 16384, FailureCosts()
    )


@pytest.mark.parametrize(("ranks", "share"), [(16384, 0.98), (100_000, 0.93)])
def test_the_room_for_a_restart_is_what_reaches_the_share(ranks, share):
    costs = FailureCosts(
        swap=0, restart=find_max_restart_seconds(LLAMA3, ranks, FailureCosts(swap=0), share)
    )
    reached = compute_effective_share(
        LLAMA3, ranks, costs, find_best_interval(LLAMA3, ranks, costs)
    )
    assert costs.restart > 5 and reached == pytest.approx(share, abs=1e-4)
    assert find_max_restart_seconds(LLAMA3, ranks, FailureCosts(), 0.9999) == pytest.approx(
        0, abs=1e-6
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--ranks", "0"), "is not a whole number from 1"),
        (("--ranks", "1_000"), "is not a whole number from 1"),
        (("--ranks", "100000000"), "use fewer ranks"),
        (("--target", "nan"), "is not a share between 0 and 1"),
        (("--measured", "/dev/zero"), "give what `tools/chaos/chaos_test.py"),
        (("--measured", "{file}"), "give what `tools/chaos/chaos_test.py"),
        (("--costs", "restart=inf"), "write NAME=SECONDS"),
    ],
)
def test_the_tool_refuses_what_it_cannot_compute(words, expected, tmp_path):
    costs = {"kill": {"restart": math.nan, "load": 1, "warmup": 1}, "whole": {"stall": 1}}
    (tmp_path / "chaos_test.json").write_text(json.dumps(costs))
    arguments = [word.format(file=tmp_path / "chaos_test.json") for word in words]
    process = run_tool("tools/goodput.py", *arguments)
    assert (
        process.returncode == 2 and expected in process.stderr and "Traceback" not in process.stderr
    )


@given(stall=st.floats(0.1, 300), between=st.floats(3600, 1e7))
def test_no_interval_loses_less_than_dalys(stall, between):
    def lost(interval):
        # Daly 2006: time per useful second, with exponential failures and immediate restarts.
        return between * math.expm1((interval + stall) / between) / interval

    best = compute_daly_interval(stall, between)
    assert lost(best) <= 1.001 * min(lost(best / 2), lost(best * 2), lost(0.9 * best))


def test_goodput_falls_with_ranks_and_failures():
    shares = [
        predict_goodput(CLUSTER, ranks, 1e6, 1e12, 1e10).share
        for ranks in (8, 1024, 16384, 100_000)
    ]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.99
    run = predict_goodput(CLUSTER, 1024, 1e6, 1e12, 1e10)
    assert run.days == pytest.approx(1e12 / 1e6 / run.share / 86400)
    assert run.dollars == pytest.approx(run.days * 24 * 1024 * CLUSTER.price)
    # The cluster's description cites 419 interruptions of 16,384 GPUs in 54 days.
    assert predict_goodput(CLUSTER, 16384, 1e6, 1e12, 1e10).failures_a_day == pytest.approx(
        419 / 54, rel=0.01
    )
    assert predict_goodput(replace(CLUSTER, failure_hours=1.0), 100_000, 1e6, 1e12, 1e10).share == 0
