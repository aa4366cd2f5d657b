"""Published mixes of failures, and what failures and saves cost.

Each kind of failure takes its time to be noticed; then come restart, reload and slower first steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FailureKind = Literal["crash", "hang", "silent", "planned"]
"""crash: a process or node dies, which its neighbours and the launcher notice. hang: nothing moves
until a timeout. silent: numbers are wrong until somebody compares. planned: there is time to save.
"""
DAY = 86400.0


@dataclass(frozen=True)
class FailureCause:
    """A cause of failures.

    Attributes:
        count: How often it occurred.
        spare: Whether the node must be replaced.
    """

    name: str
    count: int
    kind: FailureKind = "crash"
    spare: bool = True


@dataclass(frozen=True)
class FailureMix:
    """The failures of a run with `ranks` ranks that took `days` days. All ranks are assumed to fail
    equally often."""

    name: str
    ranks: int
    days: float
    causes: tuple[FailureCause, ...]

    def compute_failure_rate(self, ranks: int) -> float:
        """Return the failures per second of a run with `ranks` ranks."""
        return sum(cause.count for cause in self.causes) / (self.days * DAY) * ranks / self.ranks


LLAMA3 = FailureMix(
    "llama3",
    16384,
    54,
    (
        FailureCause("faulty GPU", 148),
        FailureCause("GPU HBM3 memory", 72),
        FailureCause("software bug", 54, spare=False),
        FailureCause("network switch or cable", 35),
        FailureCause("host maintenance, not planned", 32),
        FailureCause("GPU SRAM memory", 19),
        FailureCause("GPU system processor", 17),
        FailureCause("network card", 7),
        FailureCause("NCCL watchdog timeout", 7, "hang", spare=False),
        FailureCause("silent data corruption", 6, "silent"),
        FailureCause("GPU thermal interface and sensor", 6),
        FailureCause("SSD", 3),
        FailureCause("power supply", 3),
        FailureCause("server chassis", 2),
        FailureCause("IO expansion board", 2),
        FailureCause("dependency", 2, spare=False),
        FailureCause("CPU", 2),
        FailureCause("system memory", 2),
        FailureCause("planned", 47, "planned", spare=False),
    ),
)
"""The Llama 3 Herd of Models (2024), table 5 and section 3.3.4: 466 interruptions, of which 47 were
planned; above 90% effective. The paper names causes only; their kinds are assigned here."""


MEGASCALE = FailureMix("megascale", 12288, 28, (FailureCause("any", 100, "crash"),))
"""MegaScale (Jiang et al. 2024), section 6.3: over 100 recoveries in several weeks on more than
10,000 GPUs, above 90% effective. Taken as four weeks on the 12,288 GPUs of its tables."""
MIXES = {mix.name: mix for mix in (LLAMA3, MEGASCALE)}


@dataclass(frozen=True)
class FailureCosts:
    """Costs of failures and saves, in seconds.

    Attributes:
        crash, hang, silent: Time until such a failure is noticed.
        restart: From then until loading.
        load: Time to load the last save of any kind.
        swap: Further time if a node is replaced; 0 with warm spares.
        stall: How long steps wait for a save.
        warmup: Total time lost because the first steps are slower.
    """

    crash: float = 5.0
    hang: float = 60.0
    silent: float = 600.0
    restart: float = 30.0
    load: float = 30.0
    swap: float = 60.0
    stall: float = 1.0
    warmup: float = 10.0

    def compute_downtime(self, cause: FailureCause) -> float:
        """Return the seconds from a failure to the next step."""
        detection = 0.0 if cause.kind == "planned" else getattr(self, cause.kind)
        replacement = self.swap if cause.spare else 0.0
        return detection + replacement + self.restart + self.load + self.warmup


PUBLISHED = FailureCosts(
    crash=60, hang=1800, silent=3600, restart=300, load=120, swap=120, stall=10, warmup=60
)
"""Rough costs of published large runs: a collective timeout of half an hour, minutes to start."""
