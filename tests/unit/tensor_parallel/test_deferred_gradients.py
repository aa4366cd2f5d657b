"""Weight gradients that wait: computed in order, with the next transfer under way."""

import pytest

from megaframe.tensor_parallel.deferred_gradients import DeferredGradientQueue, DeferredGradients


class Transfer:
    """A transfer that notes when it is started and waited for."""

    def __init__(self, events, name):
        self.events, self.name = events, name
        events.append(f"start {name}")

    def wait(self):
        self.events.append(f"wait {self.name}")
        return self.name


@pytest.fixture
def events():
    return []


def add_all(gradients, events):
    """Add a gradient of rows that come from others, one of own rows, and one more of others'."""
    compute = lambda *operand: events.append(f"compute {''.join(operand) or 'own'}")  # noqa: E731
    gradients.add(compute, lambda: Transfer(events, "a"))
    gradients.add(compute)
    gradients.add(compute, lambda: Transfer(events, "b"))


def test_without_deferring_each_is_computed_at_once(events):
    gradients = DeferredGradients()
    add_all(gradients, events)
    assert events == [
        "start a",
        "wait a",
        "compute a",
        "compute own",
        "start b",
        "wait b",
        "compute b",
    ]
    assert gradients.take() == []


def test_a_queue_starts_the_next_transfer_before_it_computes(events):
    gradients = DeferredGradients()
    gradients.deferring = True
    add_all(gradients, events)
    assert events == []  # nothing is sent or computed before the queue is made
    queue = DeferredGradientQueue(gradients.take())
    assert events == ["start a"] and gradients.take() == []
    events.clear()
    queue.compute_next()
    assert events == ["wait a", "compute a"]
    queue.compute_next()
    assert events[2:] == ["start b", "compute own"]
    queue.compute_next()
    assert events[4:] == ["wait b", "compute b"]
    with pytest.raises(AssertionError):
        queue.compute_next()
