"""Shares of the peak: one above 1 shows that a measured peak is wrong, and is not reported."""

from megaframe.metrics.peak_flops import DevicePeak


def test_a_share_above_one_of_a_measured_peak_is_no_number():
    assert DevicePeak(2.0, "", measured=True).compute_utilization(1.0) == 0.5
    assert DevicePeak(2.0, "", measured=True).compute_utilization(2.5) is None
    assert DevicePeak(2.0, "").compute_utilization(2.5) == 1.25
    assert DevicePeak(None, "").compute_utilization(1.0) is None
