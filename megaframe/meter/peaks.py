"""The peak that MFU is measured against: dense TFLOP/s of one device in the type of the run.

Names of chips are matched in full, because an unlisted variant (another board, a slice of a chip, a
laptop part) has another peak, and no MFU is better than a wrong one. A CPU is measured instead,
because its peak depends on instructions, clocks and cores that its name does not tell.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import torch

from megaframe.comm import all_reduce, barrier
from megaframe.config import RunConfig
from megaframe.matmul import product
from megaframe.mesh import Mesh
from megaframe.parameter import PRECISIONS

_TYPES = ("fp16", "bf16", "tf32", "fp32", "fp64")
_CHIPS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    # Name as torch reports it; TFLOP/s in fp16, bf16, tf32, fp32 and fp64, without sparsity, with
    # fp32 accumulation, on tensor cores if the type has them. None: not supported or not stated.
    (r"(NVIDIA )?A100-(SXM4|PCIE)-(40|80)GB|NVIDIA A100 80GB PCIe", (312, 312, 156, 19.5, 19.5)),
    (r"NVIDIA H100 80GB HBM3|NVIDIA H200", (989.4, 989.4, 494.7, 67, 67)),
    (r"NVIDIA H100 PCIe", (756, 756, 378, 51, 51)),
    (r"NVIDIA H100 NVL|NVIDIA H200 NVL", (835.5, 835.5, 417.5, 60, 60)),
    (r"NVIDIA GH200 (120|480)GB", (989.4, 989.4, 494.7, 67, 67)),
    (r"NVIDIA B200", (2250, 2250, 1100, 75, 37)),
    (r"NVIDIA GB200", (2500, 2500, 1250, 80, 40)),
    (r"NVIDIA L40S", (362, 362, 183, 91.6, None)),
    (r"NVIDIA L40", (181, 181, 90.5, 90.5, None)),
    (r"NVIDIA L4", (121, 121, 60, 30.3, None)),
    (r"NVIDIA A10", (125, 125, 62.5, 31.2, None)),
    (r"NVIDIA A30", (165, 165, 82, 10.3, 10.3)),
    (r"NVIDIA A40", (149.7, 149.7, 74.8, 37.4, None)),
    (r"NVIDIA RTX A6000", (154.8, 154.8, 77.4, 38.7, None)),
    (r"NVIDIA GeForce RTX 4090", (165.2, 165.2, 82.6, 82.6, None)),
    (r"NVIDIA GeForce RTX 3090", (71, 71, 35.6, 35.6, None)),
    (r"Tesla V100-SXM[23]-(16|32)GB", (125, None, None, 15.7, 7.8)),
    (r"Tesla V100-PCIE-(16|32)GB", (112, None, None, 14, 7)),
    (r"Tesla V100S-PCIE-32GB", (130, None, None, 16.4, 8.2)),
    (r"(Tesla|NVIDIA) T4", (65, None, None, 8.1, None)),
    (r"AMD Instinct MI3(00|25)X( OAM)?", (1307.4, 1307.4, 653.7, 163.4, 163.4)),
    # Half of the card: torch sees each of its two dies as a device.
    (r"AMD Instinct MI250X", (191.5, 191.5, None, 47.85, 47.85)),
)
_SIZES = (512, 1024, 2048)
_SECONDS_PER_SIZE = 0.1


@dataclass(frozen=True)
class Peak:
    """The peak of a device. tflops: None if unknown. note: describes it in the run log. measured:
    on this machine, at the start of the run."""

    tflops: float | None
    note: str
    measured: bool = False

    def share(self, tflops: float) -> float | None:
        """Return `tflops` as a share of the peak; None if the peak is unknown. A share above 1 of a
        measured peak also gives None: the machine was busy during the measurement."""
        if self.tflops is None or (self.measured and tflops > self.tflops):
            return None
        return tflops / self.tflops


def device_peak(config: RunConfig, mesh: Mesh) -> Peak:
    """Return the peak of this run's devices. On a CPU all ranks must call it, because they share
    its cores and therefore measure at the same time."""
    given, precision = config.meter.peak_tflops, config.train.precision
    if given is not None:
        return Peak(given, f"mfu against meter.peak_tflops={given:g} TFLOP/s")
    if mesh.device.type == "cpu":
        barrier(mesh.world)
        measured = torch.tensor(matmul_peak(PRECISIONS[precision].compute), dtype=torch.float64)
        mean = float(all_reduce(measured, mesh.world).wait()) / mesh.world.size
        text = f"mfu against a measured matmul peak of {mean:.3f} TFLOP/s ({precision}, per rank)"
        return Peak(mean, text, measured=True)
    name = torch.cuda.get_device_name(mesh.device)
    tensor_cores = torch.backends.cuda.matmul.fp32_precision == "tf32"
    kind = "tf32" if precision == "fp32" and tensor_cores else precision
    known = chip_peak(name, kind)
    if known is None:
        return Peak(None, f"no dense {kind} peak known of {name!r}: mfu n/a; set meter.peak_tflops")
    return Peak(known, f"mfu against the dense {kind} peak of {name}, {known:g} TFLOP/s")


def chip_peak(name: str, kind: str) -> float | None:
    """Return the dense peak in TFLOP/s of the chip that torch calls `name`; None if it is not
    listed or does not have the type. kind: fp16, bf16, tf32, fp32 or fp64."""
    for pattern, peaks in _CHIPS:
        if re.fullmatch(pattern, name):
            return peaks[_TYPES.index(kind)]
    return None


def matmul_peak(dtype: torch.dtype) -> float:
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
            product(left, right)
            now = time.perf_counter()
            best = max(best, 2 * size**3 / (now - start))
            if now > end:
                break
    return best / 1e12
