"""What a budget buys, read from words: `64 h100 for 7 days`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megaframe.errors import UserError
from megaframe.hardware.chips import CHIPS
from megaframe.hardware.cluster import Cluster, list_cluster_names, load_cluster
from megaframe.hardware.likely_cluster import find_cluster_for_chip

_UNITS = {"minute": 60.0, "hour": 3600.0, "day": 86400.0, "week": 7 * 86400.0}
_MOST_GPUS = 10**7
_FORM = '"64 h100 for 7 days" (or hours, weeks, dollars; a chip or a cluster)'
_WORDS = re.compile(
    r"\s*([0-9][0-9,]*)\s+(\S+)\s+for\s+(\$?)\s*([0-9][0-9,]*(?:\.[0-9]+)?)\s*([a-z]*)\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Budget:
    """Chips for a time."""

    gpus: int
    cluster: Cluster
    seconds: float

    @property
    def gpu_hours(self) -> float:
        """Hours of all chips together."""
        return self.gpus * self.seconds / 3600.0

    @property
    def dollars(self) -> float:
        """What they cost."""
        return self.gpu_hours * self.cluster.price

    @property
    def kilowatt_hours(self) -> float | None:
        """Energy of the chips at their power limit; None if that is not known."""
        watts = self.cluster.chip.watts
        return None if watts is None else self.gpu_hours * watts / 1000.0


def parse_budget(text: str, cluster_name: str | None = None) -> Budget:
    """Return the budget of a text.

    Args:
        text: Such as `64 h100 for 7 days` or `8 b200-ib for $10,000`.
        cluster_name: The cluster that was named beside it, with the text's chip; None if there is
            none.

    Raises:
        UserError: It is of another form, names an unknown chip, or buys nothing.
    """
    match = _WORDS.fullmatch(text)
    if match is None:
        raise UserError(f"--budget {text} is not understood; write it as {_FORM}")
    gpus = int(match[1].replace(",", ""))
    amount, unit = float(match[4].replace(",", "")), match[5].lower().removesuffix("s")
    if match[3] and unit not in ("", "dollar"):
        raise UserError(f"--budget {text} is not understood; write it as {_FORM}")
    if not 1 <= gpus <= _MOST_GPUS:
        raise UserError(f"--budget {text}: {gpus} chips buy nothing; use 1 to {_MOST_GPUS:,}")
    if not amount > 0:
        raise UserError(f"--budget {text}: {match[4]} buys nothing; use more than 0")
    cluster = _find_cluster(text, match[2], cluster_name)
    if gpus > cluster.size:
        raise UserError(
            f"--budget {text}: {gpus} chips are more than the {cluster.size} of cluster "
            f"{cluster.name}; use {cluster.size} or fewer"
        )
    if match[3] or unit == "dollar":
        return Budget(gpus, cluster, _convert_dollars(text, amount, gpus, cluster))
    if unit not in _UNITS:
        raise UserError(f"--budget {text}: {match[5] or 'no unit'} is no time; write it as {_FORM}")
    return Budget(gpus, cluster, amount * _UNITS[unit])


def _convert_dollars(text: str, dollars: float, gpus: int, cluster: Cluster) -> float:
    """Return the seconds for which so many chips cost this."""
    if not cluster.price:
        raise UserError(
            f"--budget {text}: cluster {cluster.name} has no price, so dollars buy no time; give "
            f'price in its description, or a time: "{gpus} {cluster.chip.name} for 7 days"'
        )
    return dollars / (gpus * cluster.price) * 3600.0


def _find_cluster(text: str, name: str, cluster_name: str | None) -> Cluster:
    """Return the cluster of the budget's chip or cluster `name`."""
    is_cluster = name in list_cluster_names() or "/" in name or name.endswith((".yaml", ".yml"))
    if cluster_name is not None:
        cluster = load_cluster(cluster_name)
        if name not in (cluster_name, cluster.name, cluster.chip.name):
            raise UserError(
                f"--budget {text}: cluster {cluster.name} has the chip {cluster.chip.name}, not "
                f"{name}; name one of both"
            )
        return cluster
    if is_cluster:
        return load_cluster(name)
    chip = name.lower()
    try:
        return find_cluster_for_chip(chip)
    except UserError as error:
        if chip in CHIPS:
            raise
        raise UserError(f"--budget {text}: {error}, or a cluster of --cluster") from None
