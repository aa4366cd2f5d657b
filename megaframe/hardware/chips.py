"""Chips: the figures of devices, and what their power limit leaves of them.

This is the only table of chips: the planner predicts with it, and a run measures its MFU against
it. Peaks are dense, with fp32 accumulation, as vendors state them. The share of a peak that a
matrix product reaches is not a property of the chip alone; it is in `constants`.

A device is recognised by its whole name, because an unlisted variant (another board, a slice of a
chip, a laptop part) has other figures, and no figure is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megaframe.errors import join_or

DTYPE_BYTES = {"fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a value by type, under the names of `train.precision`."""
TYPES = ("fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
"""Types of which chips have peaks."""
CLOCK_EXPONENT = 0.4
"""The clock grows as power to this exponent, because voltage must rise with the clock."""
UNKNOWN = "unknown"
"""Family of chips that are not in the table."""
_MEMORY_TOLERANCE = 0.15
"""Share by which the memory that a device reports may differ from the table: error correction, the
driver and units of 1000 or 1024 take up to 9%; a device that differs by more is another one."""


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        family: key into `constants.CONSTANTS`.
        peaks: dense FLOP/s by type (`TYPES`), of tensor cores where they have the type; types that
            the chip lacks, or of which nothing is stated, are left out. Products in fp32 count as
            fp32, because torch uses TF32 only if told to.
        memory: bytes.
        bandwidth: bytes/s of that memory.
        units: processors that share the tiles of a product.
        watts: power limit.
        product_watts: power that large products would draw at the peak's clock; None if unknown,
            and then they are assumed to be within the limit.
        idle_watts: power when idle.
        host_link: bytes/s to or from the host's memory, in both directions at the same time; None
            if unknown.
        link: bytes/s of all links to the other chips of a node together, in one direction (NVLink,
            Infinity Fabric); None if such links join no more than two chips, or none.
        names: a pattern of the whole name under which torch reports the device.
        source: where the figures are from.
    """

    name: str
    family: str
    peaks: Mapping[str, float]
    memory: float
    bandwidth: float
    units: int
    watts: float | None = None
    product_watts: float | None = None
    idle_watts: float = 0.0
    host_link: float | None = None
    link: float | None = None
    names: str = ""
    source: str = ""

    @property
    def is_host(self) -> bool:
        """Whether the device's memory is the host's memory, as on a CPU."""
        return self.family == "cpu"

    @property
    def has_rates(self) -> bool:
        """Whether anything is known of the chip's speed; otherwise only memory can be planned."""
        return bool(self.peaks) and self.bandwidth > 0

    @property
    def power_share(self) -> float:
        """Share of the peak clock that large products sustain within the power limit, at most 1."""
        if self.watts is None or self.product_watts is None:
            return 1.0
        wanted = self.product_watts - self.idle_watts
        return min(1.0, ((self.watts - self.idle_watts) / wanted) ** CLOCK_EXPONENT)

    def sustained_flops(self, kind: str) -> float | None:
        """Return the FLOP/s of the type `kind` within the power limit, or None if the chip lacks
        this type."""
        peak = self.peaks.get(kind)
        return None if peak is None else peak * self.power_share


def _peaks(
    fp8: float | None,
    fp16: float | None,
    bf16: float | None,
    tf32: float | None,
    fp32: float | None,
    fp64: float | None,
) -> dict[str, float]:
    """Return FLOP/s by type from TFLOP/s, without those that are None."""
    stated = zip(TYPES, (fp8, fp16, bf16, tf32, fp32, fp64), strict=True)
    return {kind: 1e12 * value for kind, value in stated if value is not None}


_PCIE3, _PCIE4, _PCIE5 = 15.75e9, 31.5e9, 63.0e9
"""Bytes/s of 16 lanes of PCI Express at 8, 16 or 32 GT/s each, where 128 of 130 bits are data
(PCI-SIG, base specifications 3.0, 4.0 and 5.0). Datasheets say which version a chip has."""
_C2C = 450e9
"""Bytes/s of NVLink-C2C in one direction: 900 GB/s for both together (datasheet of the GH200). Two
GPUs of a GB200 or GB300 share it."""
_V100 = _peaks(None, 125, None, None, 15.7, 7.8)
_A100 = _peaks(None, 312, 312, 156, 19.5, 19.5)
_H100 = _peaks(1978.9, 989.4, 989.4, 494.7, 67, 67)
_H100_NVL = _peaks(1670.5, 835.5, 835.5, 417.5, 60, 60)
_B200 = _peaks(4500, 2250, 2250, 1100, 75, 37)
_GB200 = _peaks(5000, 2500, 2500, 1250, 80, 40)
_MI300 = _peaks(2614.9, 1307.4, 1307.4, 653.7, 163.4, 163.4)
_GB = 2.0**30
_VOLTA = "NVIDIA V100 datasheet, January 2020; NVIDIA Tesla V100 architecture whitepaper, 2017"
_AMPERE = "NVIDIA A100 datasheet, June 2021; NVIDIA A100 architecture whitepaper, 2020"
_GA102 = "NVIDIA Ampere GA102 architecture whitepaper, 2021"
_HOPPER = "NVIDIA H100 datasheet, 2023; NVIDIA H100 architecture whitepaper, 2022"
_ADA = "NVIDIA Ada GPU architecture whitepaper 2.1, 2023"
_BLACKWELL = "NVIDIA Blackwell datasheet (HGX and GB200 NVL72), 2024"
_ULTRA = "NVIDIA HGX and GB300 NVL72 specifications, 2025"
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v100-sxm-16gb",
            names=r"Tesla V100-SXM[23]-16GB",
            family="v100",
            peaks=_V100,
            memory=16 * _GB,
            bandwidth=0.9e12,
            units=80,
            watts=300,
            host_link=_PCIE3,
            link=150e9,
            source=_VOLTA,
        ),
        Chip(
            name="v100-sxm-32gb",
            names=r"Tesla V100-SXM[23]-32GB",
            family="v100",
            peaks=_V100,
            memory=32 * _GB,
            bandwidth=0.9e12,
            units=80,
            watts=300,
            host_link=_PCIE3,
            link=150e9,
            source=_VOLTA,
        ),
        Chip(
            name="v100-pcie-16gb",
            names=r"Tesla V100-PCIE-16GB",
            family="v100",
            peaks=_peaks(None, 112, None, None, 14, 7),
            memory=16 * _GB,
            bandwidth=0.9e12,
            units=80,
            watts=250,
            host_link=_PCIE3,
            source=_VOLTA,
        ),
        Chip(
            name="v100-pcie-32gb",
            names=r"Tesla V100-PCIE-32GB",
            family="v100",
            peaks=_peaks(None, 112, None, None, 14, 7),
            memory=32 * _GB,
            bandwidth=0.9e12,
            units=80,
            watts=250,
            host_link=_PCIE3,
            source=_VOLTA,
        ),
        Chip(
            name="v100s",
            names=r"Tesla V100S-PCIE-32GB",
            family="v100",
            peaks=_peaks(None, 130, None, None, 16.4, 8.2),
            memory=32 * _GB,
            bandwidth=1.134e12,
            units=80,
            watts=250,
            host_link=_PCIE3,
            source=_VOLTA,
        ),
        Chip(
            name="t4",
            names=r"(Tesla|NVIDIA) T4",
            family="t4",
            peaks=_peaks(None, 65, None, None, 8.1, None),
            memory=16 * _GB,
            bandwidth=0.32e12,
            units=40,
            watts=70,
            host_link=_PCIE3,
            source="NVIDIA T4 datasheet, March 2019; NVIDIA Turing architecture whitepaper, 2018",
        ),
        Chip(
            name="a100-40gb",
            names=r"(NVIDIA )?A100-SXM4-40GB",
            family="a100",
            peaks=_A100,
            memory=40 * _GB,
            bandwidth=1.555e12,
            units=108,
            watts=400,
            product_watts=400,
            idle_watts=60,
            host_link=_PCIE4,
            link=300e9,
            source=_AMPERE,
        ),
        Chip(
            name="a100-80gb",
            names=r"(NVIDIA )?A100-SXM4-80GB",
            family="a100",
            peaks=_A100,
            memory=80 * _GB,
            bandwidth=2.039e12,
            units=108,
            watts=400,
            product_watts=400,
            idle_watts=60,
            host_link=_PCIE4,
            link=300e9,
            source=_AMPERE,
        ),
        Chip(
            name="a100-pcie-40gb",
            names=r"(NVIDIA )?A100-PCIE-40GB",
            family="a100",
            peaks=_A100,
            memory=40 * _GB,
            bandwidth=1.555e12,
            units=108,
            watts=250,
            product_watts=400,
            idle_watts=60,
            host_link=_PCIE4,
            source=_AMPERE,
        ),
        Chip(
            name="a100-pcie-80gb",
            names=r"(NVIDIA )?A100-PCIE-80GB|NVIDIA A100 80GB PCIe",
            family="a100",
            peaks=_A100,
            memory=80 * _GB,
            bandwidth=1.935e12,
            units=108,
            watts=300,
            product_watts=400,
            idle_watts=60,
            host_link=_PCIE4,
            source=_AMPERE,
        ),
        Chip(
            name="a10",
            names=r"NVIDIA A10",
            family="ga102",
            peaks=_peaks(None, 125, 125, 62.5, 31.2, None),
            memory=24 * _GB,
            bandwidth=0.6e12,
            units=72,
            watts=150,
            host_link=_PCIE4,
            source=f"NVIDIA A10 datasheet, April 2021; {_GA102}",
        ),
        Chip(
            name="a30",
            names=r"NVIDIA A30",
            family="a100",
            peaks=_peaks(None, 165, 165, 82, 10.3, 10.3),
            memory=24 * _GB,
            bandwidth=0.933e12,
            units=56,
            watts=165,
            host_link=_PCIE4,
            source="NVIDIA A30 datasheet, April 2021",
        ),
        Chip(
            name="a40",
            names=r"NVIDIA A40",
            family="ga102",
            peaks=_peaks(None, 149.7, 149.7, 74.8, 37.4, None),
            memory=48 * _GB,
            bandwidth=0.696e12,
            units=84,
            watts=300,
            host_link=_PCIE4,
            source=f"NVIDIA A40 datasheet, 2021; {_GA102}",
        ),
        Chip(
            name="rtx-a6000",
            names=r"NVIDIA RTX A6000",
            family="ga102",
            peaks=_peaks(None, 154.8, 154.8, 77.4, 38.7, None),
            memory=48 * _GB,
            bandwidth=0.768e12,
            units=84,
            watts=300,
            host_link=_PCIE4,
            source=f"NVIDIA RTX A6000 datasheet, 2021; {_GA102}",
        ),
        Chip(
            name="rtx-3090",
            names=r"NVIDIA GeForce RTX 3090",
            family="ga102",
            peaks=_peaks(None, 71, 71, 35.6, 35.6, None),
            memory=24 * _GB,
            bandwidth=0.936e12,
            units=82,
            watts=350,
            host_link=_PCIE4,
            source=_GA102,
        ),
        Chip(
            name="h100",
            names=r"NVIDIA H100 80GB HBM3",
            family="h100",
            peaks=_H100,
            memory=80 * _GB,
            bandwidth=3.35e12,
            units=132,
            watts=700,
            product_watts=1000,
            idle_watts=100,
            host_link=_PCIE5,
            link=450e9,
            source=_HOPPER,
        ),
        Chip(
            name="h100-500w",
            family="h100",
            peaks=_H100,
            memory=96 * _GB,
            bandwidth=2.4e12,
            units=132,
            watts=500,
            product_watts=1000,
            idle_watts=100,
            host_link=_PCIE5,
            link=450e9,
            source="the H100 of torchtitan's published tables: 96 GB of HBM2e and a limit of 500 W",
        ),
        Chip(
            name="h100-pcie",
            names=r"NVIDIA H100 PCIe",
            family="h100",
            peaks=_peaks(1513, 756, 756, 378, 51, 51),
            memory=80 * _GB,
            bandwidth=2.0e12,
            units=114,
            watts=350,
            host_link=_PCIE5,
            source="NVIDIA H100 datasheet, 2022; NVIDIA H100 architecture whitepaper, 2022",
        ),
        Chip(
            name="h100-nvl",
            names=r"NVIDIA H100 NVL",
            family="h100",
            peaks=_H100_NVL,
            memory=94 * _GB,
            bandwidth=3.9e12,
            units=132,
            watts=400,
            host_link=_PCIE5,
            source=_HOPPER,
        ),
        Chip(
            name="h20",
            names=r"NVIDIA H20",
            family="h100",
            peaks=_peaks(296, 148, 148, 74, 44, 1),
            memory=96 * _GB,
            bandwidth=4.0e12,
            units=78,
            watts=400,
            host_link=_PCIE5,
            link=450e9,
            source="NVIDIA H20 specification for partners, November 2023 (there is no datasheet)",
        ),
        Chip(
            name="h200",
            names=r"NVIDIA H200",
            family="h100",
            peaks=_H100,
            memory=141 * _GB,
            bandwidth=4.8e12,
            units=132,
            watts=700,
            product_watts=1000,
            idle_watts=100,
            host_link=_PCIE5,
            link=450e9,
            source="NVIDIA H200 datasheet, 2024",
        ),
        Chip(
            name="h200-nvl",
            names=r"NVIDIA H200 NVL",
            family="h100",
            peaks=_H100_NVL,
            memory=141 * _GB,
            bandwidth=4.8e12,
            units=132,
            watts=600,
            host_link=_PCIE5,
            source="NVIDIA H200 datasheet, 2024",
        ),
        Chip(
            # The names tell how much memory the host has.
            name="gh200-96gb",
            names=r"NVIDIA GH200 (120|480)GB",
            family="h100",
            peaks=_H100,
            memory=96 * _GB,
            bandwidth=4.0e12,
            units=132,
            host_link=_C2C,
            source="NVIDIA GH200 datasheet, 2024 (its 1000 W are those of GPU, CPU and memory)",
        ),
        Chip(
            name="gh200-144gb",
            names=r"NVIDIA GH200 144G HBM3e",
            family="h100",
            peaks=_H100,
            memory=144 * _GB,
            bandwidth=4.9e12,
            units=132,
            host_link=_C2C,
            source="NVIDIA GH200 datasheet, 2024 (its 1000 W are those of GPU, CPU and memory)",
        ),
        Chip(
            name="l4",
            names=r"NVIDIA L4",
            family="ada",
            peaks=_peaks(242.5, 121, 121, 60, 30.3, None),
            memory=24 * _GB,
            bandwidth=0.3e12,
            units=58,
            watts=72,
            host_link=_PCIE4,
            source=f"NVIDIA L4 datasheet, 2023; {_ADA}",
        ),
        Chip(
            name="l40",
            names=r"NVIDIA L40",
            family="ada",
            peaks=_peaks(362, 181, 181, 90.5, 90.5, None),
            memory=48 * _GB,
            bandwidth=0.864e12,
            units=142,
            watts=300,
            host_link=_PCIE4,
            source=f"NVIDIA L40 datasheet, 2023; {_ADA}",
        ),
        Chip(
            name="l40s",
            names=r"NVIDIA L40S",
            family="ada",
            peaks=_peaks(733, 362, 362, 183, 91.6, None),
            memory=48 * _GB,
            bandwidth=0.864e12,
            units=142,
            watts=350,
            host_link=_PCIE4,
            source=f"NVIDIA L40S datasheet, 2023; {_ADA}",
        ),
        Chip(
            # Products with fp16 accumulation are twice as fast on GeForce; these are not those.
            name="rtx-4090",
            names=r"NVIDIA GeForce RTX 4090",
            family="ada",
            peaks=_peaks(330.3, 165.2, 165.2, 82.6, 82.6, None),
            memory=24 * _GB,
            bandwidth=1.008e12,
            units=128,
            watts=450,
            host_link=_PCIE4,
            source=_ADA,
        ),
        Chip(
            name="rtx-6000-ada",
            names=r"NVIDIA RTX 6000 Ada Generation",
            family="ada",
            peaks=_peaks(728.5, 364.2, 364.2, 182.1, 91.1, None),
            memory=48 * _GB,
            bandwidth=0.96e12,
            units=142,
            watts=300,
            host_link=_PCIE4,
            source=_ADA,
        ),
        Chip(
            name="rtx-5090",
            names=r"NVIDIA GeForce RTX 5090",
            family="gb202",
            peaks=_peaks(419, 209.5, 209.5, 104.8, 104.8, None),
            memory=32 * _GB,
            bandwidth=1.792e12,
            units=170,
            watts=575,
            host_link=_PCIE5,
            source="NVIDIA RTX Blackwell GPU architecture whitepaper 1.1, 2025",
        ),
        Chip(
            name="rtx-pro-6000",
            names=r"NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            family="gb202",
            peaks=_peaks(1007.6, 503.8, 503.8, 251.9, 126, None),
            memory=96 * _GB,
            bandwidth=1.792e12,
            units=188,
            watts=600,
            host_link=_PCIE5,
            source="NVIDIA RTX PRO Blackwell GPU architecture whitepaper 1.0, 2025",
        ),
        Chip(
            name="rtx-pro-6000-max-q",
            names=r"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
            family="gb202",
            peaks=_peaks(877.8, 438.9, 438.9, 219.5, 109.7, None),
            memory=96 * _GB,
            bandwidth=1.792e12,
            units=188,
            watts=300,
            host_link=_PCIE5,
            source="NVIDIA RTX PRO Blackwell GPU architecture whitepaper 1.0, 2025",
        ),
        Chip(
            name="b200",
            names=r"NVIDIA B200",
            family="b200",
            peaks=_B200,
            memory=180 * _GB,
            bandwidth=8e12,
            units=148,
            watts=1000,
            product_watts=1300,
            idle_watts=140,
            host_link=_PCIE5,
            link=900e9,
            source=_BLACKWELL,
        ),
        Chip(
            name="gb200",
            names=r"NVIDIA GB200",
            family="b200",
            peaks=_GB200,
            memory=186 * _GB,
            bandwidth=8e12,
            units=152,
            watts=1200,
            product_watts=1500,
            idle_watts=140,
            host_link=_C2C / 2,
            link=900e9,
            source=_BLACKWELL,
        ),
        Chip(
            name="b300",
            names=r"NVIDIA B300( SXM6 AC)?",
            family="b200",
            peaks=_peaks(4500, 2250, 2250, 1125, 75, 1.25),
            memory=268 * _GB,
            bandwidth=8e12,
            units=148,
            watts=1100,
            host_link=_PCIE5,
            link=900e9,
            source=_ULTRA,
        ),
        Chip(
            name="gb300",
            names=r"NVIDIA GB300",
            family="b200",
            peaks=_peaks(5000, 2500, 2500, 1250, 80, 1.4),
            memory=279 * _GB,
            bandwidth=8e12,
            units=152,
            watts=1400,
            host_link=_C2C / 2,
            link=900e9,
            source=_ULTRA,
        ),
        Chip(
            # Half of the card: torch sees each of its two dies as a device.
            name="mi250x",
            names=r"AMD Instinct MI250X",
            family="cdna",
            peaks=_peaks(None, 191.5, 191.5, None, 47.85, 47.85),
            memory=64 * _GB,
            bandwidth=1.6384e12,
            units=110,
            watts=280,
            host_link=_PCIE4,
            link=200e9,
            source="AMD Instinct MI250X datasheet, 2021; AMD CDNA 2 whitepaper, 2021",
        ),
        Chip(
            name="mi300x",
            names=r"AMD Instinct MI300X( OAM)?",
            family="cdna",
            peaks=_MI300,
            memory=192 * _GB,
            bandwidth=5.3e12,
            units=304,
            watts=750,
            host_link=_PCIE5,
            link=448e9,
            source="AMD Instinct MI300X datasheet, 2023; AMD CDNA 3 whitepaper, 2023",
        ),
        Chip(
            name="mi325x",
            names=r"AMD Instinct MI325X( OAM)?",
            family="cdna",
            peaks=_MI300,
            memory=256 * _GB,
            bandwidth=6.0e12,
            units=304,
            watts=1000,
            host_link=_PCIE5,
            link=448e9,
            source="AMD Instinct MI325X datasheet, 2024; AMD CDNA 3 whitepaper, 2023",
        ),
        Chip(
            name="tpu-v5p",
            family="tpu",
            peaks=_peaks(None, 459, 459, None, 57, 0.5),
            memory=95 * _GB,
            bandwidth=2.765e12,
            units=8,
            watts=500,
            product_watts=500,
            idle_watts=50,
            source="Google Cloud TPU v5p documentation, 2023; fp32 and fp64 are guesses",
        ),
        Chip(
            # Two cores. A run takes the memory of the machine that it is on.
            name="cpu",
            names="CPU",
            family="cpu",
            peaks=_peaks(None, 0.9, 0.9, None, 0.4, 0.1),
            memory=4 * _GB,
            bandwidth=10e9,
            units=1,
            watts=100,
            product_watts=100,
            source="two cores on which the tests run",
        ),
    )
}
"""All known chips, by name."""


def find_chip(device: str) -> Chip | None:
    """Return the chip whose device torch reports under this name, or None if it is not in the
    table."""
    return next(
        (chip for chip in CHIPS.values() if re.fullmatch(chip.names or r"(?!)", device)), None
    )


def identify_chip(device: str, memory: float, units: int = 2) -> Chip:
    """Return the chip of a device, with the memory that the device has.

    A device is unknown if its name is not in the table, or if it has another amount of memory than
    the chip of this name; then only its memory is known (`Chip.has_rates`).

    Args:
        device: name of the device, as torch reports it.
        memory: its bytes, as torch reports them.
        units: its multiprocessors.
    """
    named = find_chip(device)
    if named is None or abs(memory / named.memory - 1) > _MEMORY_TOLERANCE:
        return Chip(device, UNKNOWN, {}, memory, 0.0, units)
    return replace(named, memory=float(memory))


def suggest_chips(name: str) -> str:
    """Return the names of known chips that resemble `name`, for a message; all names if none
    does."""
    from difflib import get_close_matches

    near = get_close_matches(name.lower(), CHIPS, n=3, cutoff=0.3)
    return join_or(near or CHIPS)
