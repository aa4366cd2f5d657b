"""The likely cluster of a chip or device for which none is named, and what is only assumed."""

from __future__ import annotations

from dataclasses import replace

from megaframe.errors import UserError
from megaframe.hardware.chips import CHIPS, Chip, find_chip, identify_chip, suggest_chips
from megaframe.hardware.cluster import Cluster, Tier, describe_unknown_chip, load_cluster

_CLUSTER_OF_CHIP = {
    "a100-40gb": "a100-40gb-roce",
    "a100-80gb": "a100-ib",
    "a100-pcie-80gb": "a100-pcie-ib",
    "h100": "h100-ib",
    "h100-pcie": "h100-pcie-ib",
    "h200": "h200-ib",
    "b200": "b200-ib",
    "gb200": "gb200-nvl72",
    "gh200-96gb": "gh200-ib",
    "gh200-144gb": "gh200-ib",
    "cpu": "cpu",
}
"""The shipped cluster whose links a chip is likely to have."""
_NODE_SIZE, _MAX_SIZE = 8, 4096
"""Chips of a node, and of the whole cluster, where nothing is known of its links."""
_NETWORK = 12.5e9
"""Bytes/s of the network for each chip there: an adapter of 100 Gb/s."""


def find_cluster_for_device(device: str, memory: float | None = None, units: int = 2) -> Cluster:
    """Return the likely cluster of a device. The device determines chip and memory; `notes` says
    what is only assumed. Of an unknown device nothing but its memory can be planned.

    Args:
        device: Name of the device, as torch reports it.
        memory: Its bytes; by default those of the chip's datasheet.
        units: Its multiprocessors.

    Raises:
        UserError: Nothing at all is known: neither the device's name nor its memory.
    """
    chip = find_chip(device) if memory is None else identify_chip(device, memory, units)
    if chip is None:
        raise UserError(f"{device or 'this device'} is not a known chip; name a cluster for it")
    cluster, links = _assume_links(chip)
    if not chip.has_rates:
        return replace(cluster, notes=(describe_unknown_chip(chip),))
    return replace(
        cluster,
        notes=(
            f"{device} is the chip {chip.name}, with {chip.memory / 2**30:.1f} GiB; "
            f"parallel.cluster is not given, so {links} are assumed",
        ),
    )


def find_cluster_for_chip(name: str) -> Cluster:
    """Return the likely cluster of a chip of the table. `notes` says what is only assumed.

    Raises:
        UserError: There is no such chip.
    """
    if name not in CHIPS:
        raise UserError(f"chip {name} is unknown; use {suggest_chips(name)}")
    cluster, links = _assume_links(CHIPS[name])
    return replace(cluster, notes=(f"{links} are assumed; name yours with --cluster",))


def _assume_links(chip: Chip) -> tuple[Cluster, str]:
    """Return a cluster of the chip with the links that it is likely to have, and these in words."""
    name = _CLUSTER_OF_CHIP.get(chip.name)
    if name is not None:
        cluster = replace(load_cluster(name), chip=chip)
        links = f"the links and the price of cluster {name}"
    else:
        inside = chip.link or chip.host_link or 2 * _NETWORK
        network = min(_NETWORK, inside)
        tiers = (Tier("node", _NODE_SIZE, 8e-6, inside), Tier("network", _MAX_SIZE, 10e-6, network))
        # Failures as of nodes of A100 or H100 (`configs/clusters`); there is no price.
        cluster = Cluster(chip.name, chip, tiers, failure_hours=50_000, price=0.0)
        links = (
            f"nodes of {_NODE_SIZE} joined by {'its links' if chip.link else 'PCI Express'} at "
            f"{inside / 1e9:g} GB/s, a network of {network / 1e9:g} GB/s for each chip and no price"
        )
    return cluster, links
