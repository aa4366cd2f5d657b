"""Cluster: the machine that a run is planned for, as data: chip, tiers of links, failures, price.

`load_cluster("h100-ib")` reads `configs/clusters/h100-ib.yaml`; a path reads any such file.
`find_cluster_for_device` is the likely one for a device, and says what it assumes. A tier is a set
of ranks that reach each other at the same speed. A rank's bandwidth is what it gets while all other
ranks use theirs, so no formula needs to know which ranks share an adapter.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from megaframe.config.section import Positive, Section
from megaframe.config.shipped import CONFIGS
from megaframe.errors import UserError, explain_failed_write, join_or
from megaframe.hardware.chips import CHIPS, UNKNOWN, Chip, suggest_chips
from megaframe.io.regular_file import write_file
from megaframe.io.untrusted import mask_secrets, parse_yaml, read_file

DEFAULT = "h100-ib"
"""Cluster of a plan that names none: nodes of 8 H100 SXM with 400 Gb/s InfiniBand per GPU."""
FOLDER = CONFIGS / "clusters"
_MAX_BYTES = 100_000
_FIGURES = ("memory", "bandwidth", "units", "watts", "host_link")
_NEEDED = ("memory", "bandwidth", "peaks")
"""Figures of a chip that its description can have, and those that it must have if the chip is not
in the table."""

TierKind = Literal["switch", "rail", "torus"]
"""switch: every rank of the tier reaches every other in the same way. rail: a rank reaches only the
rank with the same number in another node; others are reached through a neighbour in the node.
torus: a rank reaches its neighbours in a grid of `dims` dimensions, which have equal parts of the
bandwidth."""
_PositiveFloat = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Tier:
    """A tier: `size` consecutive ranks that reach each other at the same speed.

    Attributes:
        latency: Seconds per message (alpha).
        bandwidth: bytes/s of one rank in one direction (1/beta).
        dims: Dimensions of a torus.
        reduces: Whether the switches can sum (in-network reduction).
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
    """A cluster of equal chips.

    Attributes:
        tiers: From the innermost to the outermost, whose size is that of the whole cluster.
        failure_hours: Mean hours between failures of one chip, including its share of everything
            around it.
        price: Dollars per chip and hour.
        restart_seconds: Time from a failure until training continues.
        storage: bytes/s at which one rank writes a checkpoint.
        reduction: bytes/s at which a rank adds what it receives to what it has (1/gamma); None if
            it was not measured, and then the bandwidths of the tiers are those of collectives that
            sum.
        jitter: Share by which the slowest of 1,000 ranks lags behind the mean; it grows with the
            root of the logarithm of the number of ranks.
        constants: What was measured on the chip, by the names of `constants.Constants`.
        notes: What is assumed about the cluster; every plan says it.

    Raises:
        UserError: If the tiers do not fit together.
    """

    name: str
    chip: Chip
    tiers: tuple[Tier, ...]
    failure_hours: float
    price: float
    restart_seconds: float = 600.0
    storage: float = 1e9
    reduction: float | None = None
    jitter: float = 0.0
    constants: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        mistakes = list(_find_tier_mistakes(self.tiers))
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


def _find_tier_mistakes(tiers: tuple[Tier, ...]) -> list[str]:
    """Return a message for each figure of the tiers that is impossible."""
    mistakes = [] if tiers else ["tiers is empty; give at least one"]
    for number, tier in enumerate(tiers):
        for key, value in (("latency", tier.latency), ("bandwidth", tier.bandwidth)):
            if not (isfinite(value) and (value > 0 or (key == "latency" and value == 0))):
                mistakes.append(f"tiers[{number}].{key}={value:g} must be a number above 0")
        if number == 0:
            continue
        inner = tiers[number - 1]
        if tier.size % inner.size or tier.size <= inner.size:
            next_size = max(2, round(tier.size / inner.size)) * inner.size
            mistakes.append(
                f"tiers[{number}].size={tier.size} ({tier.name}) is not made of whole "
                f"tiers[{number - 1}].size={inner.size} ({inner.name}); use {next_size}"
            )
        if tier.bandwidth > inner.bandwidth:
            mistakes.append(
                f"tiers[{number}].bandwidth={tier.bandwidth:g} ({tier.name}) is more than that of "
                f"the tier inside it, tiers[{number - 1}].bandwidth={inner.bandwidth:g} "
                f"({inner.name}); use {inner.bandwidth:g} or less, or swap them"
            )
    return mistakes


class _TierFile(Section):
    name: str
    size: Positive
    latency: Annotated[float, Field(ge=0)]
    bandwidth: _PositiveFloat
    kind: TierKind = "switch"
    dims: Annotated[int, Field(ge=1, le=6)] = 1
    reduces: bool = False


class _ConstantsFile(Section):
    product: _PositiveFloat | None = None
    start: Annotated[float, Field(ge=0)] | None = None
    attention: _PositiveFloat | None = None
    memory: _PositiveFloat | None = None
    launch: _PositiveFloat | None = None
    contention: Annotated[float, Field(ge=0)] | None = None
    links: Annotated[tuple[_PositiveFloat, ...], Field(min_length=1)] | None = None


class _ClusterFile(Section):
    chip: str
    tiers: Annotated[tuple[_TierFile, ...], Field(min_length=1)]
    failure_hours: _PositiveFloat
    price: Annotated[float, Field(ge=0)]
    restart_seconds: Annotated[float, Field(ge=0)] = 600.0
    storage: _PositiveFloat = 1e9
    reduction: _PositiveFloat | None = None
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    memory: _PositiveFloat | None = None
    bandwidth: _PositiveFloat | None = None
    units: Positive | None = None
    watts: _PositiveFloat | None = None
    host_link: _PositiveFloat | None = None
    peaks: dict[Literal["fp8", "fp16", "bf16", "tf32", "fp32", "fp64"], _PositiveFloat] | None = (
        None
    )
    constants: _ConstantsFile | None = None


_FILES = (_ClusterFile, _TierFile, _ConstantsFile)


def describe_unknown_chip(chip: Chip) -> str:
    """Return the sentence about a chip of which only the memory is known: what is not predicted,
    and how it can be."""
    return (
        f"unknown chip {chip.name} with {chip.memory / 2**30:.1f} GiB: its memory is planned, its "
        "speed is not predicted; measure it there with `python tools/measure_kernels.py --write "
        "mine.yaml` and give parallel.cluster=mine.yaml, or name a cluster whose chip is as fast"
    )


def load_cluster(name: str = DEFAULT) -> Cluster:
    """Read a cluster from `configs/clusters/NAME.yaml`, or from a path.

    The chip is one of the table, of which `memory`, `bandwidth`, `units`, `watts`, `host_link` and
    `peaks` (by type) in the file override figures; or another one, which needs them. `constants`
    are what was measured on it.

    Raises:
        UserError: Naming all mistakes.
    """
    path = _resolve_cluster_path(name)
    raw = _read_description(name, path)
    try:
        description = _ClusterFile.model_validate(raw)
    except ValidationError as errors:
        lines = [_format_error(error) for error in errors.errors()[:20]]
        raise UserError("\n  ".join([f"cluster {path.name}", *lines])) from None
    constants = description.constants.model_dump(exclude_none=True) if description.constants else {}
    return Cluster(
        name=path.stem,
        chip=_make_chip(path, description),
        tiers=tuple(Tier(**tier.model_dump()) for tier in description.tiers),
        failure_hours=description.failure_hours,
        price=description.price,
        restart_seconds=description.restart_seconds,
        storage=description.storage,
        reduction=description.reduction,
        jitter=description.jitter,
        constants=constants,
    )


def _make_chip(path: Path, description: _ClusterFile) -> Chip:
    """Return the chip of a description. Raises `UserError` if it is unknown and not described."""
    figures = {key: getattr(description, key) for key in _FIGURES}
    figures = {key: value for key, value in figures.items() if value is not None}
    peaks: dict[str, float] = {kind: peak for kind, peak in (description.peaks or {}).items()}
    if description.chip in CHIPS:
        listed = CHIPS[description.chip]
        return replace(listed, **figures, peaks={**listed.peaks, **peaks})
    missing = [key for key in _NEEDED if not getattr(description, key)]
    if missing:
        raise UserError(
            f"cluster {path.name}: chip={description.chip} is unknown; use "
            f"{suggest_chips(description.chip)}, or give its {', '.join(missing)} "
            "(tools/measure_kernels.py --write measures them)"
        )
    return Chip(description.chip, UNKNOWN, peaks, **{"units": 2, **figures})


def write_cluster(path: Path, cluster: Cluster, changes: Mapping[str, Any], comment: str) -> None:
    """Write the description of a cluster, and read it back as a check.

    What the file already says stays, except for `changes`.

    Args:
        path: The file. Its name is the cluster's.
        cluster: The cluster to describe where there is no such file yet.
        changes: Keys of the description, and their values.
        comment: The first line of the file.
    """
    if path.exists():
        content = dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    else:
        content = {
            "chip": cluster.chip.name,
            "tiers": [
                {
                    "name": tier.name,
                    "size": tier.size,
                    "kind": tier.kind,
                    "bandwidth": tier.bandwidth,
                    "latency": tier.latency,
                }
                for tier in cluster.tiers
            ],
            "failure_hours": cluster.failure_hours,
            "price": cluster.price,
        }
    text = f"# {comment}\n" + yaml.safe_dump({**content, **changes}, sort_keys=False)
    with explain_failed_write(path):
        write_file(path, text)
    load_cluster(str(path if "/" in str(path) else Path(".") / path.name))


def list_cluster_names() -> tuple[str, ...]:
    """Return the names that `load_cluster` knows."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def _resolve_cluster_path(name: str) -> Path:
    """Return the file of a cluster: a path, or the name of a shipped one."""
    is_path = "/" in name or name.endswith((".yaml", ".yml"))
    return Path(name) if is_path else FOLDER / f"{name}.yaml"


def _get_display_name(path: Path) -> str:
    """Return the name of a shipped file, and the whole path of another one."""
    return path.name if path.parent == FOLDER else str(path)


def _read_description(name: str, path: Path) -> Any:
    try:
        raw = read_file(path, _MAX_BYTES)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UserError(
                f"cluster {path.name}: is larger than {_MAX_BYTES} bytes; use a short one"
            ) from None
        if error.errno != errno.ENOENT:
            raise UserError(
                f"cluster {_get_display_name(path)} cannot be read: {error.strerror}"
            ) from None
        names = list_cluster_names()
        similar = get_close_matches(name, names, n=2, cutoff=0.4) or names
        raise UserError(
            f"cluster {name}: there is no file {_get_display_name(path)}; use {join_or(similar)}, "
            "or the path of a description"
        ) from None
    try:
        # Scalars stay text: `4e11` is a number to pydantic, and text to YAML.
        return parse_yaml(raw)
    except ValueError as error:
        raise UserError(f"cluster {path.name}: not valid YAML: {str(error)[:200]}") from None


def _format_error(error: Any) -> str:
    """Return a pydantic error as a message in this project's style."""
    where = ".".join(map(str, error["loc"])) or "the file"
    if error["type"] == "missing":
        return f"{where}: missing; give the figure"
    if error["type"] == "extra_forbidden":
        keys = [key for section in _FILES for key in section.model_fields]
        near = get_close_matches(str(error["loc"][-1]), keys, n=1, cutoff=0) or keys
        return f"{where}: unknown key; did you mean {near[0]}?"
    value = mask_secrets(str(error["input"]))[:60]
    return f"{where}={value}: {error['msg'][0].lower()}{error['msg'][1:]}"
