"""The samples of many steps, with a batch that grows."""

from hypothesis import given
from hypothesis import strategies as st

from megaframe.config import BatchRampConfig, TrainConfig
from megaframe.config.batch_ramp import compute_batch_size, count_samples, count_steps


def test_the_batch_ramp_rises_in_equal_parts():
    train = TrainConfig(
        global_batch=32, batch_ramp=BatchRampConfig(start=8, increment=8, samples=300)
    )
    assert [
        compute_batch_size(train, consumed) for consumed in (0, 99, 100, 199, 200, 299, 300, 10**15)
    ] == [*(8, 8, 16, 16, 24, 24, 32, 32)]
    flat = TrainConfig(
        global_batch=8, batch_ramp=BatchRampConfig(start=8, increment=8, samples=300)
    )
    assert compute_batch_size(flat, 5) == 8
    assert compute_batch_size(TrainConfig(global_batch=6), 0) == 6


@st.composite
def draw_sections(draw):
    """Draw a batch, in half of the cases with a ramp."""
    increment = draw(st.integers(1, 5))
    start, top = sorted(increment * draw(st.integers(1, 12)) for _ in range(2))
    ramp = BatchRampConfig(start=start, increment=increment, samples=draw(st.integers(1, 300)))
    return TrainConfig(global_batch=top, batch_ramp=draw(st.sampled_from([ramp, None])))


@given(draw_sections(), st.integers(0, 60), st.integers(0, 350))
def test_sums_over_steps_are_those_of_the_steps_one_by_one(train, steps, seen):
    samples = 0
    for _ in range(steps):
        samples += compute_batch_size(train, seen + samples)
    assert count_samples(train, steps, seen) == samples
    assert count_steps(train, samples, seen) == steps
    assert count_steps(train, samples + 1, seen) == steps + 1
    assert count_steps(train, -1, seen) == count_steps(train, 0, seen) == 0


def test_a_long_run_is_counted_at_once():
    ramp = BatchRampConfig(start=1, increment=1, samples=10**12)
    train = TrainConfig(global_batch=65536, batch_ramp=ramp)
    samples = count_samples(train, 10**12)
    assert count_steps(train, samples) == 10**12
