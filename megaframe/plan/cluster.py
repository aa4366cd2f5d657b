"""Cluster: the machine that a run is planned for, as data: chip, tiers of links, failures, price.

`load_cluster("h100-ib")` reads `configs/clusters/h100-ib.yaml`; a path reads any such file. A tier
is a set of ranks that reach each other at the same speed. A rank's bandwidth is what it gets while
all other ranks use theirs, so no formula needs to know which ranks share an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from megaframe.config.numbers import either
from megaframe.config.section import Positive, Section
from megaframe.config.shipped import CONFIGS
from megaframe.errors import UserError
from megaframe.plan.chips import CHIPS, Chip, nearest_chips

DEFAULT = "h100-ib"
"""Cluster of a plan that names none: nodes of 8 H100 SXM with 400 Gb/s InfiniBand per GPU."""
_BY_NAME = {
    "A100": "a100-ib",
    "H100": "h100-ib",
    "H200": "h200-ib",
    "B200": "b200-ib",
    "CPU": "cpu",
}
"""Likely cluster of a device whose name contains the key."""
FOLDER = CONFIGS / "clusters"
_MAX_BYTES = 100_000
_OF_CHIP = ("memory", "bandwidth", "watts", "host_link")

TierKind = Literal["switch", "rail", "torus"]
"""switch: every rank of the tier reaches every other in the same way. rail: a rank reaches only the
rank with the same number in another node; others are reached through a neighbour in the node.
torus: a rank reaches its neighbours in a grid of `dims` dimensions, which have equal parts of the
bandwidth."""
_Above = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Tier:
    """A tier: `size` consecutive ranks that reach each other at the same speed.

    latency: seconds per message (alpha). bandwidth: bytes/s of one rank in one direction (1/beta).
    dims: dimensions of a torus. reduces: whether the switches can sum (in-network reduction).
    """

    name: str
    size: int
    latency: float
    bandwidth: float
    kind: TierKind = "switch"
    dims: int = 1
    reduces: bool = False


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal chips. Raises `UserError` if the tiers do not fit together.

    tiers: from the innermost to the outermost, whose size is that of the whole cluster.
    failure_hours: mean hours between failures of one chip, including its share of everything around
    it. price: dollars per chip and hour. restart_seconds: time from a failure until training
    continues. storage: bytes/s at which one rank writes a checkpoint. jitter: share by which the
    slowest of 1,000 ranks lags behind the mean; it grows with the root of the logarithm of the
    number of ranks.
    """

    name: str
    chip: Chip
    tiers: tuple[Tier, ...]
    failure_hours: float
    price: float
    restart_seconds: float = 600.0
    storage: float = 1e9
    jitter: float = 0.0

    def __post_init__(self) -> None:
        mistakes = list(_tier_mistakes(self.tiers))
        if mistakes:
            raise UserError("\n  ".join([f"cluster {self.name}", *mistakes]))

    @property
    def size(self) -> int:
        """Number of ranks of the whole cluster."""
        return self.tiers[-1].size

    @property
    def node(self) -> int:
        """Number of ranks of the innermost tier."""
        return self.tiers[0].size


def _tier_mistakes(tiers: tuple[Tier, ...]) -> list[str]:
    """Return a message for each figure of the tiers that is impossible."""
    found = [] if tiers else ["tiers is empty; give at least one"]
    for number, tier in enumerate(tiers):
        for key, value in (("latency", tier.latency), ("bandwidth", tier.bandwidth)):
            if not (isfinite(value) and (value > 0 or (key == "latency" and value == 0))):
                found.append(f"tiers[{number}].{key}={value:g} must be a number above 0")
        if number == 0:
            continue
        inner = tiers[number - 1]
        if tier.size % inner.size or tier.size <= inner.size:
            least = max(2, round(tier.size / inner.size)) * inner.size
            found.append(
                f"tiers[{number}].size={tier.size} ({tier.name}) is not made of whole "
                f"tiers[{number - 1}].size={inner.size} ({inner.name}); use {least}"
            )
        if tier.bandwidth > inner.bandwidth:
            found.append(
                f"tiers[{number}].bandwidth={tier.bandwidth:g} ({tier.name}) is more than that of "
                f"the tier inside it, tiers[{number - 1}].bandwidth={inner.bandwidth:g} "
                f"({inner.name}); use {inner.bandwidth:g} or less, or swap them"
            )
    return found


class _TierFile(Section):
    name: str
    size: Positive
    latency: Annotated[float, Field(ge=0)]
    bandwidth: _Above
    kind: TierKind = "switch"
    dims: Annotated[int, Field(ge=1, le=6)] = 1
    reduces: bool = False


class _ClusterFile(Section):
    chip: str
    tiers: Annotated[tuple[_TierFile, ...], Field(min_length=1)]
    failure_hours: _Above
    price: Annotated[float, Field(ge=0)]
    restart_seconds: Annotated[float, Field(ge=0)] = 600.0
    storage: _Above = 1e9
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    memory: _Above | None = None
    bandwidth: _Above | None = None
    watts: _Above | None = None
    host_link: _Above | None = None
    peaks: dict[str, _Above] | None = None


def likely_cluster(device: str) -> str | None:
    """Return the name of the cluster that a device with this name is likely to belong to, or None
    if the device is unknown."""
    return next((cluster for part, cluster in _BY_NAME.items() if part in device), None)


def load_cluster(name: str = DEFAULT) -> Cluster:
    """Read a cluster from `configs/clusters/NAME.yaml`, or from a path.

    `memory`, `bandwidth`, `watts`, `host_link` and `peaks` (by type) in the file override those of
    the chip that it names. Raises `UserError` with all mistakes.
    """
    path = (
        Path(name) if "/" in name or name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    )
    raw = _read(name, path)
    try:
        given = _ClusterFile.model_validate(raw)
    except ValidationError as errors:
        lines = [_told(error) for error in errors.errors()[:20]]
        raise UserError("\n  ".join([f"cluster {path.name}", *lines])) from None
    if given.chip not in CHIPS:
        raise UserError(
            f"cluster {path.name}: chip={given.chip} is unknown; use {nearest_chips(given.chip)}, "
            "or one of these with memory, bandwidth, watts and peaks of its own"
        )
    chip = CHIPS[given.chip]
    own = {key: getattr(given, key) for key in _OF_CHIP}
    chip = replace(chip, **{key: value for key, value in own.items() if value is not None})
    if given.peaks is not None:
        chip = replace(chip, peaks={**chip.peaks, **given.peaks})
    return Cluster(
        name=path.stem,
        chip=chip,
        tiers=tuple(Tier(**tier.model_dump()) for tier in given.tiers),
        failure_hours=given.failure_hours,
        price=given.price,
        restart_seconds=given.restart_seconds,
        storage=given.storage,
        jitter=given.jitter,
    )


def cluster_names() -> tuple[str, ...]:
    """Return the names that `load_cluster` knows."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def _read(name: str, path: Path) -> Any:
    try:
        raw = path.read_bytes() if path.stat().st_size <= _MAX_BYTES else None
    except OSError:
        known = cluster_names()
        near = get_close_matches(name, known, n=2, cutoff=0.4) or known
        raise UserError(
            f"cluster {name}: there is no file {path.name}; use {either(near)}, or the path of a "
            "description"
        ) from None
    if raw is None:
        raise UserError(f"cluster {path.name}: is larger than {_MAX_BYTES} bytes; use a short one")
    try:
        # Scalars stay text: `4e11` is a number to pydantic, and text to YAML.
        return yaml.load(raw, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"cluster {path.name}: not valid YAML: {str(error)[:200]}") from None


def _told(error: Any) -> str:
    """Return a pydantic error as a message in this project's style."""
    where = ".".join(map(str, error["loc"])) or "the file"
    if error["type"] == "missing":
        return f"{where}: missing; give the figure"
    if error["type"] == "extra_forbidden":
        known = [*_ClusterFile.model_fields, *_TierFile.model_fields]
        near = get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0) or known
        return f"{where}: unknown key; did you mean {near[0]}?"
    return f"{where}={str(error['input'])[:60]}: {error['msg'][0].lower()}{error['msg'][1:]}"
