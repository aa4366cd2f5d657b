"""The waterfall: its shares sum to the peak, and each loss is charged to its cause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.metrics.waterfall import attribute_losses

PARTS = ("compute", "bubble", "optimizer", "data", "communication/data", "communication/tensor")
times = st.fixed_dictionaries({part: st.floats(0.001, 100) for part in PARTS})


@given(times, st.none() | st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 300))
def test_losses_and_mfu_are_the_whole(parts, mfu, recompute, stragglers):
    lost = attribute_losses(parts, mfu=mfu, recompute=recompute, stragglers=stragglers)
    assert sum(lost.values()) + (mfu or 0.0) == pytest.approx(1)
    waits = parts["communication/data"] + parts["communication/tensor"]
    seconds = sum(parts.values())
    waited = lost["stragglers"] + lost["communication/data"] + lost["communication/tensor"]
    assert waited * seconds == pytest.approx(waits)
    assert lost["stragglers"] * seconds == pytest.approx(min(stragglers, waits))
    assert lost["bubble"] * seconds == pytest.approx(parts["bubble"])


def test_waterfall_by_hand():
    parts = {"compute": 6.0, "bubble": 1.0, "communication/data": 3.0}
    lost = attribute_losses(parts, mfu=0.3, recompute=0.25, stragglers=1.0)
    expected = {"kernels": 0.15, "recompute": 0.15, "bubble": 0.1, "communication/data": 0.2}
    assert lost == pytest.approx({**expected, "stragglers": 0.1})
    assert attribute_losses(parts, mfu=None) == pytest.approx(
        {"compute": 0.6, "recompute": 0, "bubble": 0.1, "communication/data": 0.3, "stragglers": 0}
    )
    assert attribute_losses({"compute": 0.0}, mfu=None) == {}
