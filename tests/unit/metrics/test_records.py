"""Values recorded in a step, on one rank. `test_metrics_logger_ranks.py` tests two ranks."""

from __future__ import annotations

import math

import pytest
import torch

from megaframe.distributed.collectives import Group
from megaframe.metrics.records import StepRecords
from megaframe.ops.operator_mode import OperatorMode

ALONE = Group(("data",), (0,), 0, None)
CPU = torch.device("cpu")


def reduce_records(*entries):
    records = StepRecords()
    for entry in entries:
        records.add(*entry)
    return records.reduce(ALONE, CPU).wait()


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("last", 2.0), ("sum", 4.0), ("mean", 4 / 3), ("max", 5.0), ("min", -3.0)],
)
@pytest.mark.parametrize(
    "kinds", [(float, float, float), (torch.tensor,) * 3, (float, torch.tensor, float)]
)
def test_values_of_one_name_are_combined_within_the_step(reduction, expected, kinds):
    values = [kind(value) for kind, value in zip(kinds, (5.0, -3.0, 2.0), strict=True)]
    assert reduce_records(*(("x", value, reduction) for value in values)) == {"x": expected}


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("last", [3.0, -5.0]),
        ("sum", [4.0, -1.0]),
        ("mean", [2.0, -0.5]),
        ("max", [3.0, 4.0]),
        ("min", [1.0, -5.0]),
    ],
)
def test_rows_are_combined_element_by_element(reduction, expected):
    rows = (torch.tensor([1.0, 4.0]), torch.tensor([3.0, -5.0]))
    reduced_values = reduce_records(
        ("a", 7.0, reduction), *(("x", row, reduction) for row in rows), ("y", 8.0, reduction)
    )
    assert reduced_values == {"a": 7.0, "x": expected, "y": 8.0}


def test_more_metrics_than_one_padded_vector():
    hows = ("last", "sum", "mean", "max", "min")
    entries = [(f"{reduction}{i}", float(i), reduction) for reduction in hows for i in range(100)]
    assert reduce_records(*entries) == {name: value for name, value, _ in entries}


@pytest.mark.parametrize("reduction", ["last", "sum", "mean", "max", "min"])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_nan_is_never_lost(reduction, kind):
    values = [kind(value) for value in (math.nan, 1.0)]
    if reduction == "last":
        values.reverse()
    assert not math.isfinite(reduce_records(*(("x", value, reduction) for value in values))["x"])


def test_fp64_keeps_every_bit_of_a_loss():
    loss = torch.tensor(10.824532508850098, dtype=torch.float32)
    assert reduce_records(("loss", loss, "sum"))["loss"] == loss.item()


def test_a_tensor_is_taken_as_it_is_now():
    records, total = StepRecords(), torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    records.add("x", total, "last")
    with torch.no_grad():
        total += 1
    assert records.reduce(ALONE, CPU).wait() == {"x": 1.0}


class Arrivals(OperatorMode):
    """Counts the operators that copy numbers between the host and another device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        tensors = [tensor for tensor in (*args, output) if isinstance(tensor, torch.Tensor)]
        self.count += len({tensor.device.type for tensor in tensors}) > 1
        return output


def test_numbers_of_the_host_go_to_a_device_together():
    # On a GPU, the host would wait for each copy from memory that is not pinned.
    records = StepRecords()
    for reduction in ("last", "sum", "max"):
        records.add(reduction, 1.0, reduction)
        records.add(f"{reduction} of the host", torch.tensor([2, 3]), reduction)
        records.add(f"{reduction} of the device", torch.ones(2, device="meta"), reduction)
    with Arrivals() as arrivals:
        records.reduce(ALONE, torch.device("meta"))
    assert arrivals.count == 3  # one vector each for last values, sums and maxima


def test_a_step_starts_empty():
    records = StepRecords()
    records.add("x", 1.0, "sum")
    records.reduce(ALONE, CPU)
    records.add("y", 1.0, "max")
    assert records.reduce(ALONE, CPU).wait() == {"y": 1.0}


def test_one_name_has_one_kind():
    with pytest.raises(ValueError, match="'x' was recorded as sum, now as max"):
        reduce_records(("x", 1.0, "sum"), ("x", 1.0, "max"))
