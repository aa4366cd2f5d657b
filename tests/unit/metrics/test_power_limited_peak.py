"""Shares of the peak: one above 1 shows that a measured peak is wrong, and is not reported."""

from megaframe.metrics.peak_flops import Peak


def test_a_share_above_one_of_a_measured_peak_is_no_number():
    assert Peak(2.0, "", measured=True).share(1.0) == 0.5
    assert Peak(2.0, "", measured=True).share(2.5) is None
    assert Peak(2.0, "").share(2.5) == 1.25
    assert Peak(None, "").share(1.0) is None
