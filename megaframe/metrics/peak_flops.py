"""The peak that MFU is measured against: dense TFLOP/s of one device in the type of the run.

It is that of the table of chips (`hardware/chips.csv`). A chip that is not there has no peak, and
no MFU is better than a wrong one. A CPU is measured instead, because its peak depends on
instructions, clocks and cores that its name does not tell.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from megaframe.config import MetricsConfig, TrainConfig
from megaframe.distributed.collectives import all_reduce, barrier
from megaframe.distributed.mesh import Mesh
from megaframe.hardware.chips import find_chip
from megaframe.ops.matmul import multiply
from megaframe.parameters.parameter import PRECISIONS

_SIZES = (512, 1024, 2048)
_SECONDS_PER_SIZE = 0.1


@dataclass(frozen=True)
class DevicePeak:
    """The peak of a device.

    Attributes:
        tflops: In TFLOP/s; None if unknown.
        note: Describes it in the run log.
        measured: On this machine, at the start of the run.
    """

    tflops: float | None
    note: str
    measured: bool = False

    def compute_utilization(self, tflops: float) -> float | None:
        """Return `tflops` as a share of the peak; None if the peak is unknown. A share above 1 of a
        measured peak also gives None: the machine was busy during the measurement."""
        if self.tflops is None or (self.measured and tflops > self.tflops):
            return None
        return tflops / self.tflops


def find_device_peak(metrics: MetricsConfig, train: TrainConfig, mesh: Mesh) -> DevicePeak:
    """Return the peak of this run's devices. On a CPU all ranks must call it, because they share
    its cores and therefore measure at the same time."""
    configured_peak, precision = metrics.peak_tflops, train.precision
    if configured_peak is not None:
        return DevicePeak(
            configured_peak, f"mfu against metrics.peak_tflops={configured_peak:g} TFLOP/s"
        )
    if mesh.device.type == "cpu":
        barrier(mesh.world)
        measured = torch.tensor(
            measure_matmul_peak(PRECISIONS[precision].compute), dtype=torch.float64
        )
        mean = float(all_reduce(measured, mesh.world).wait()) / mesh.world.size
        text = f"mfu against a measured matmul peak of {mean:.3f} TFLOP/s ({precision}, per rank)"
        return DevicePeak(mean, text, measured=True)
    name = torch.cuda.get_device_name(mesh.device)
    tensor_cores = torch.backends.cuda.matmul.fp32_precision == "tf32"
    kind = "tf32" if precision == "fp32" and tensor_cores else precision
    chip_peak = find_chip_peak(name, kind)
    if chip_peak is None:
        problem = f"no dense {kind} peak of" if find_chip(name) else "unknown chip:"
        return DevicePeak(None, f"mfu n/a: {problem} {name!r}; set metrics.peak_tflops")
    return DevicePeak(
        chip_peak, f"mfu against the dense {kind} peak of {name}, {chip_peak:g} TFLOP/s"
    )


def find_chip_peak(name: str, kind: str) -> float | None:
    """Return the dense peak of a chip in TFLOP/s; None if it is not known or lacks the type.

    Args:
        name: What torch calls the chip.
        kind: fp8, fp16, bf16, tf32, fp32 or fp64.
    """
    chip = find_chip(name)
    peak = None if chip is None else chip.peaks.get(kind)
    return None if peak is None else peak / 1e12


def measure_matmul_peak(dtype: torch.dtype) -> float:
    """Return the TFLOP/s of the best of several square products on this process's threads; takes
    about 0.3 s."""
    # Has its own generator: the run's random numbers must not depend on whether this ran.
    generator = torch.Generator().manual_seed(0)
    best = 0.0
    for size in _SIZES:
        if best and 2 * size**3 / best > 1.5 * _SECONDS_PER_SIZE:
            break
        left = torch.rand(size, size, generator=generator).to(dtype)
        right = left.t().contiguous()
        end = time.perf_counter() + _SECONDS_PER_SIZE
        while True:
            start = time.perf_counter()
            multiply(left, right)
            now = time.perf_counter()
            best = max(best, 2 * size**3 / (now - start))
            if now > end:
                break
    return best / 1e12
