"""Times of kernels: fits of measured times, and the limits of products."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.architecture.window import Chunk, compute_mean_keys
from megaframe.hardware.cluster import load_cluster
from megaframe.planner.constants import get_family_constants
from megaframe.planner.kernel_times import (
    compute_kernel_rates,
    compute_start_factor,
    count_computed_keys,
    estimate_matmul_seconds,
    fit_line,
)

CLUSTER = load_cluster("h100-ib")
RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "h200"
TILE = 128


@given(
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-12, 1e-8),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=6, max_size=6),
)
def test_a_line_is_found_again(alpha, beta, noise):
    sizes = [4.0**k for k in range(5, 15)]
    exact = [alpha + beta * size for size in sizes]
    line = fit_line(sizes, exact)
    assert line[2] < 1e-6
    noisy = [t * (1 + e) for t, e in zip(exact, noise * 2, strict=False)]
    assert fit_line(sizes, noisy)[2] < 0.12


def test_products_approach_their_peak_and_are_bound_by_memory_when_thin():
    rate = compute_kernel_rates(CLUSTER.chip, get_family_constants("h100"), "bf16")
    wide = 2 * 65536.0**3 / float(estimate_matmul_seconds(rate, 65536.0, 65536.0, 65536.0))
    assert 0.97 * rate.flops < wide < rate.flops
    thin = float(estimate_matmul_seconds(rate, 1.0, 65536.0, 65536.0))
    assert thin >= 2 * 65536**2 / rate.read


def count_keys_of_tiles(seq, window):
    """Return the mean keys of a query over all tiles of the mask in which any score is seen."""
    place = np.arange(seq)
    seen = place[:, None] >= place
    if isinstance(window, Chunk):
        seen &= place[:, None] // window.size == place // window.size
    elif window is not None:
        seen &= place[:, None] - place < window
    tiles = seen.reshape(seq // TILE, TILE, seq // TILE, TILE).any((1, 3))
    return tiles.sum() * TILE**2 / seq


@pytest.mark.parametrize("window", [None, 1, 2, 100, 128, 129, 130, 256, 1024, 2048, Chunk(512)])
def test_keys_of_a_query_are_those_of_the_tiles_that_its_mask_touches(window):
    keys = count_computed_keys(2048, window)
    assert keys == pytest.approx(count_keys_of_tiles(2048, window), rel=1e-12)
    assert compute_mean_keys(2048, window) < keys


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_window_takes_the_share_of_a_causal_pass_that_was_measured(direction):
    """What tiles of queries take was taken from documents, so windows judge it; scores that are
    seen, or tiles alone, are too few."""
    measurements = json.loads((RESULTS / "attention.json").read_text())["measurements"]
    seconds = {
        row["case"].split(", head")[0]: row[direction]["seconds"]
        for row in measurements
        if row["implementation"] == "triton" and row["kernel"] == "attention"
    }
    measured = seconds["window"] / seconds["causal"]
    keys, all_keys = (count_computed_keys(8192, window) for window in (1024, None))
    assert compute_start_factor("triton", all_keys) == 1
    assert keys * compute_start_factor("triton", keys) / all_keys == pytest.approx(measured, 0.03)
    assert keys / all_keys < 0.85 * measured
    seen = compute_mean_keys(8192, 1024) / compute_mean_keys(8192, None)
    assert seen < 0.77 * measured
    packed = count_computed_keys(8192, Chunk(1024))
    measured = seconds["packed"] / seconds["causal, grouped heads"]
    planned = packed * compute_start_factor("triton", packed) / all_keys
    assert planned == pytest.approx(measured, 0.005)
