"""Chips: the figures of devices, and what their power limit leaves of them.

`chips.csv` is the only table of chips: the planner predicts with it, and a run measures its MFU
against it. Peaks are dense, with fp32 accumulation, as vendors state them. The share of a peak that
a matrix product reaches is not a property of the chip alone; it is in `constants`.

A device is recognised by its whole name, because an unlisted variant (another board, a slice of a
chip, a laptop part) has other figures, and no figure is better than a wrong one.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megaframe.errors import join_or
from megaframe.io.untrusted import read_file

DTYPE_BYTES = {"fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a value by type, under the names of `train.precision`."""
TYPES = ("fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
"""Types of which chips have peaks."""
CLOCK_EXPONENT = 0.4
"""The clock grows as power to this exponent, because voltage must rise with the clock."""
_MAX_BYTES = 1 << 20
UNKNOWN = "unknown"
"""Family of chips that are not in the table."""
_MEMORY_TOLERANCE = 0.15
"""Share by which the memory that a device reports may differ from the table: error correction, the
driver and units of 1000 or 1024 take up to 9%; a device that differs by more is another one."""


@dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
        family: Key into `constants.CONSTANTS`.
        peaks: Dense FLOP/s by type (`TYPES`), of tensor cores where they have the type; types that
            the chip lacks, or of which nothing is stated, are left out. Products in fp32 count as
            fp32, because torch uses TF32 only if told to.
        memory: Bytes.
        bandwidth: bytes/s of that memory.
        units: Processors that share the tiles of a product.
        watts: Power limit.
        product_watts: Power that large products would draw at the peak's clock; None if unknown,
            and then they are assumed to be within the limit.
        idle_watts: Power when idle.
        host_link: bytes/s to or from the host's memory, in both directions at the same time; None
            if unknown.
        link: bytes/s of all links to the other chips of a node together, in one direction (NVLink,
            Infinity Fabric); None if such links join no more than two chips, or none.
        names: A pattern of the whole name under which torch reports the device.
        source: Where the figures are from.
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
        needed = self.product_watts - self.idle_watts
        return min(1.0, ((self.watts - self.idle_watts) / needed) ** CLOCK_EXPONENT)

    def get_sustained_flops(self, kind: str) -> float | None:
        """Return the FLOP/s of the type `kind` within the power limit, or None if the chip lacks
        this type."""
        peak = self.peaks.get(kind)
        return None if peak is None else peak * self.power_share


def _read_chips() -> dict[str, Chip]:
    """Return the chips of `chips.csv`, by name."""
    text = read_file(Path(__file__).with_name("chips.csv"), _MAX_BYTES).decode()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {row["name"]: _parse_chip(row) for row in rows}


def _parse_chip(row: Mapping[str, str]) -> Chip:
    """Return the chip of a row, whose figures are in the units that the head of the table states;
    those of an empty cell are unknown."""
    return Chip(
        name=row["name"],
        family=row["family"],
        peaks={dtype: 1e12 * float(row[dtype]) for dtype in TYPES if row[dtype]},
        memory=2.0**30 * float(row["memory"]),
        bandwidth=1e9 * float(row["bandwidth"]),
        units=int(row["units"]),
        watts=_parse_number(row["watts"]),
        product_watts=_parse_number(row["product_watts"]),
        idle_watts=_parse_number(row["idle_watts"]) or 0.0,
        host_link=_parse_number(row["host_link"], 1e9),
        link=_parse_number(row["link"], 1e9),
        names=row["names"],
        source=row["source"],
    )


def _parse_number(text: str, unit: float = 1.0) -> float | None:
    return unit * float(text) if text else None


CHIPS: Mapping[str, Chip] = _read_chips()
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
        device: Name of the device, as torch reports it.
        memory: Its bytes, as torch reports them.
        units: Its multiprocessors.
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
