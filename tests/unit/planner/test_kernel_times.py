"""Times of kernels: fits of measured times, and the limits of products."""

from hypothesis import given
from hypothesis import strategies as st

from megaframe.hardware.cluster import load_cluster
from megaframe.planner.constants import get_family_constants
from megaframe.planner.kernel_times import compute_kernel_rates, estimate_matmul_seconds, fit_line

CLUSTER = load_cluster("h100-ib")


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
