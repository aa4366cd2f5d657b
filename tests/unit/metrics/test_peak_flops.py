"""Peaks of chips: the right one, or none."""

from __future__ import annotations

import pytest
import torch

from megaframe.config import RunConfig
from megaframe.distributed.mesh import Mesh
from megaframe.layout import Layout
from megaframe.metrics.peak_flops import (
    DevicePeak,
    find_chip_peak,
    find_device_peak,
    measure_matmul_peak,
)


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10", 125),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_known_chips(name, bf16):
    assert find_chip_peak(name, "bf16") == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A10G",
        "NVIDIA H20-3e",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L400",
        "",
    ],
)
def test_variants_that_are_not_listed_have_no_peak(name):
    assert all(
        find_chip_peak(name, kind) is None for kind in ("fp16", "bf16", "tf32", "fp32", "fp64")
    )


def test_a_type_that_a_chip_lacks_has_no_peak():
    assert find_chip_peak("Tesla V100-SXM2-16GB", "fp16") == 125
    assert find_chip_peak("Tesla V100-SXM2-16GB", "bf16") is None


def test_a_cpu_is_measured_and_the_note_says_so():
    state = torch.get_rng_state()
    mesh = Mesh(Layout(), device="cpu")
    measured = find_device_peak(
        RunConfig.model_validate({"train": {"precision": "fp32"}}).metrics,
        RunConfig.model_validate({"train": {"precision": "fp32"}}).train,
        mesh,
    )
    # The bounds are far below a slow core and far above a fast machine: they check the unit.
    assert 1e-4 < measured.tflops < 1e3
    assert "measured matmul peak of" in measured.note and "fp32" in measured.note
    assert torch.equal(state, torch.get_rng_state())
    assert measure_matmul_peak(torch.float64) > 1e-4


def test_a_given_peak_is_taken():
    config = RunConfig.model_validate({"metrics": {"peak_tflops": 123.0}})
    peak = find_device_peak(config.metrics, config.train, Mesh(Layout(), device="cpu"))
    assert peak.tflops == 123.0 and "metrics.peak_tflops=123" in peak.note


def test_a_share_above_one_of_a_measured_peak_is_no_number():
    """It shows that the peak is wrong."""
    assert DevicePeak(2.0, "", measured=True).compute_utilization(1.0) == 0.5
    assert DevicePeak(2.0, "", measured=True).compute_utilization(2.5) is None
    assert DevicePeak(2.0, "").compute_utilization(2.5) == 1.25
    assert DevicePeak(None, "").compute_utilization(1.0) is None
