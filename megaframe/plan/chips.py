"""Chips: the peak figures of devices, and what their power limit leaves of them.

Peaks are dense, with fp32 accumulation, as vendors state them. The share of a peak that a matrix
product reaches is not a property of the chip alone; it is in `constants`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megaframe.config.numbers import either

WIDTH = {"fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a value by type, under the names of `train.precision`."""
CLOCK_EXPONENT = 0.4
"""The clock grows as power to this exponent, because voltage must rise with the clock."""


@dataclass(frozen=True)
class Chip:
    """One device.

    family: key into `constants.CONSTANTS`. peaks: dense FLOP/s by type (those of `train.precision`,
    and `fp8` if the chip has it). memory: bytes. bandwidth: bytes/s of that memory. units:
    processors that share the tiles of a product. watts: power limit. product_watts: power that
    large products would draw at the peak's clock. idle_watts: power when idle. host_link: bytes/s
    to or from the host's memory, in both directions at the same time; None if unknown.
    """

    name: str
    family: str
    peaks: Mapping[str, float]
    memory: float
    bandwidth: float
    units: int
    watts: float
    product_watts: float
    idle_watts: float = 0.0
    host_link: float | None = None

    @property
    def is_host(self) -> bool:
        """Whether the device's memory is the host's memory, as on a CPU."""
        return self.family == "cpu"

    @property
    def power_share(self) -> float:
        """Share of the peak clock that large products sustain within the power limit, at most 1."""
        wanted = self.product_watts - self.idle_watts
        return min(1.0, ((self.watts - self.idle_watts) / wanted) ** CLOCK_EXPONENT)

    def sustained(self, kind: str) -> float | None:
        """Return the FLOP/s of the type `kind` within the power limit, or None if the chip lacks
        this type."""
        peak = self.peaks.get(kind)
        return None if peak is None else peak * self.power_share


def _peaks(bf16: float, fp32: float, fp64: float, fp8: float | None = None) -> dict[str, float]:
    peaks = {"bf16": bf16, "fp16": bf16, "fp32": fp32, "fp64": fp64}
    if fp8 is not None:
        peaks["fp8"] = fp8
    return {kind: 1e12 * value for kind, value in peaks.items()}


_PCIE4, _PCIE5 = 31.5e9, 63.0e9
"""Bytes/s of 16 lanes of PCI Express at 16 or 32 GT/s each, where 128 of 130 bits are data
(PCI-SIG, base specifications 4.0 and 5.0). NVIDIA's datasheets say which version a chip has."""
_C2C = 225e9
"""Bytes/s of NVLink-C2C: 900 GB/s for both directions together (datasheet of the GB200), which two
GPUs share."""
_A100, _H100 = _peaks(312, 156, 19.5), _peaks(989.4, 494.7, 67, 1978.9)
_B200, _GB200 = _peaks(2250, 1100, 37, 4500), _peaks(2500, 1250, 40, 5000)
_GB = 2.0**30
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        # The fp32 peak is that of the default for fp32 products: TF32 where there are tensor cores.
        Chip("a100-40gb", "a100", _A100, 40 * _GB, 1.555e12, 108, 400, 400, 60, _PCIE4),
        Chip("a100-80gb", "a100", _A100, 80 * _GB, 2.039e12, 108, 400, 400, 60, _PCIE4),
        Chip("h100", "h100", _H100, 80 * _GB, 3.35e12, 132, 700, 1000, 100, _PCIE5),
        # A variant with slower memory and a limit of 500 W, on which torchtitan's tables were made.
        Chip("h100-500w", "h100", _H100, 96 * _GB, 2.4e12, 132, 500, 1000, 100, _PCIE5),
        Chip("h200", "h200", _H100, 141 * _GB, 4.8e12, 132, 700, 1000, 100, _PCIE5),
        Chip("b200", "b200", _B200, 180 * _GB, 8e12, 148, 1000, 1300, 140, _PCIE5),
        Chip("gb200", "b200", _GB200, 186 * _GB, 8e12, 152, 1200, 1500, 140, _C2C),
        Chip("tpu-v5p", "tpu", _peaks(459, 57, 0.5), 95 * _GB, 2.765e12, 8, 500, 500, 50),
        Chip("cpu", "cpu", _peaks(0.9, 0.4, 0.1), 4 * _GB, 10e9, 1, 100, 100),
    )
}
"""All known chips, by name."""


def nearest_chips(name: str) -> str:
    """Return the names of known chips that resemble `name`, for a message; all names if none
    does."""
    from difflib import get_close_matches

    near = get_close_matches(name.lower(), CHIPS, n=3, cutoff=0.3)
    return either(near or CHIPS)
