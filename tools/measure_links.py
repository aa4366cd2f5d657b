"""Measure the links between ranks, and describe them as a cluster for the planner.

    torchrun --nproc-per-node 8 tools/measure_links.py --chip h100 --write cluster.yaml
    torchrun ... tools/measure_links.py --tensor 8 --pipeline 2      each axis of a layout

Without a layout, the ranks of a node are one tier, and ranks with the same number in all nodes are
the next. A collective of n bytes takes A + n B seconds. A and B are fitted by least squares of
relative errors, and converted to the latency (alpha) and bandwidth (1 / beta) that give them in the
formula for a ring. By how much a byte of a reduce-scatter takes longer than one of an all-gather is
gamma, the cost of adding it. From these follow the sizes at which other algorithms are faster. Bus
bandwidth is what a link carried, comparable between operations and numbers of ranks.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megaframe.distributed.collectives import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    reduce_scatter,
)
from megaframe.distributed.mesh import (
    Mesh,
    read_global_rank,
    read_local_world_size,
    read_world_size,
)
from megaframe.errors import UserError, report_errors
from megaframe.hardware.chips import CHIPS, identify_chip, suggest_chips
from megaframe.hardware.cluster import Cluster, describe_unknown_chip, load_cluster, write_cluster
from megaframe.io.closed_output import allow_closed_output
from megaframe.io.untrusted import make_integer_parser
from megaframe.layout import Layout
from megaframe.planner.collective_times import GroupLevel, compute_bus_bandwidth
from megaframe.planner.constants import NCCL, Constants, get_cluster_constants
from megaframe.planner.explanations.collectives import describe_crossovers
from megaframe.planner.kernel_times import fit_line

OPERATIONS: Mapping[str, Callable[[Tensor, Group], Tensor]] = {
    "all_reduce": lambda whole, group: all_reduce(whole, group).wait(),
    "all_gather": lambda whole, group: all_gather(whole[: len(whole) // group.size], group).wait(),
    "reduce_scatter": lambda whole, group: reduce_scatter(whole, group).wait(),
    "all_to_all": lambda whole, group: all_to_all(whole, group).wait(),
}
"""Operations to measure, by name. The buffer has n bytes, as `planner.collective_times` counts
them."""


@dataclass(frozen=True)
class LinkFit:
    """The fit of one operation on one group of ranks, by the formula for a ring.

    Attributes:
        alpha: Seconds per message.
        bandwidth: Bytes/s of a rank.
        name: Name of the group.
        error: Largest relative error of the fitted line.
        bus: Bus bandwidth of the largest size, in bytes/s.
    """

    name: str
    operation: str
    ranks: int
    alpha: float
    bandwidth: float
    error: float
    bus: float

    def __str__(self) -> str:
        return (
            f"{self.name:<12}{self.operation:<16}{self.ranks:>6}{self.alpha * 1e6:>12.1f}"
            f"{self.bandwidth / 1e9:>12.3f}{self.bus / 1e9:>12.3f}{self.error:>9.0%}"
        )


HEAD = (
    f"{'axis':<12}{'operation':<16}{'ranks':>6}{'alpha us':>12}{'GB/s':>12}{'bus GB/s':>12}"
    f"{'error':>9}"
)


def measure_seconds(
    operation: Callable[[Tensor, Group], Tensor], size: int, group: Group, mesh: Mesh, times: int
) -> float:
    """Return the seconds of an operation on `size` bytes: the slowest rank of the group, and of
    `times` repetitions the median.

    Args:
        operation: Starts and waits.
        size: Bytes that each rank has.
        group: The ranks.
        mesh: All ranks, which begin together.
        times: Number of repetitions.
    """
    buffer = torch.zeros(size // 4, device=mesh.device)
    samples = []
    for repetition in range(times + 1):
        barrier(mesh.world)
        start = time.perf_counter()
        operation(buffer, group)
        if mesh.device.type == "cuda":
            torch.cuda.synchronize()
        elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=mesh.device)
        slowest = all_reduce(elapsed, group, "max").wait()
        if repetition:  # the first operation makes the connections
            samples.append(float(slowest))
    return statistics.median(samples)


def fit_ring(
    name: str, operation: str, ranks: int, sizes: Sequence[float], seconds: Sequence[float]
) -> LinkFit:
    """Return the latency and the bandwidth with which a ring takes so many seconds.

    Args:
        name: Of the group.
        operation: A key of `OPERATIONS`.
        ranks: Of the group.
        sizes: Bytes of the messages.
        seconds: Of each of them.
    """
    latency, seconds_per_byte, error = fit_line(sizes, seconds)
    hops, passes = ranks - 1, 2 if operation == "all_reduce" else 1
    bandwidth = passes * hops / ranks / seconds_per_byte if seconds_per_byte > 0 else math.inf
    bus = compute_bus_bandwidth(operation, sizes[-1], ranks, seconds[-1])
    return LinkFit(name, operation, ranks, latency / (passes * hops), bandwidth, error, bus)


def measure_group(
    name: str, group: Group, mesh: Mesh, sizes: list[int], times: int
) -> list[LinkFit]:
    """Measure and fit all operations on one group. All ranks call it together, each with its own
    group of this kind.

    Args:
        name: Of the group, for the table.
        group: The ranks.
        mesh: All ranks.
        sizes: Bytes of the measured messages.
        times: Number of repetitions.
    """
    ranks, fits = group.size, []
    for operation_name, operation in OPERATIONS.items():
        rounded = [max(1, size // (4 * ranks)) * 4 * ranks for size in sizes]
        measured = [measure_seconds(operation, size, group, mesh, times) for size in rounded]
        fits.append(fit_ring(name, operation_name, ranks, rounded, measured))
    return fits


def fit_gamma(fits: Sequence[LinkFit]) -> float:
    """Return the seconds in which a rank adds a byte that arrived: by how much a byte of a
    reduce-scatter takes longer than one of an all-gather, which moves as many; 0 if it does not."""
    scatter, gather = (
        next(fit for fit in fits if fit.operation == name)
        for name in ("reduce_scatter", "all_gather")
    )
    return max(0.0, 1.0 / scatter.bandwidth - 1.0 / gather.bandwidth)


def describe_reduction(name: str, fits: Sequence[LinkFit]) -> Iterator[str]:
    """Yield gamma of a group, and which algorithm of an all-reduce is the fastest there by size.

    Args:
        name: Of the group.
        fits: Of all operations on it.
    """
    gamma, gather = fit_gamma(fits), next(fit for fit in fits if fit.operation == "all_gather")
    if gamma:
        yield f"{name}: gamma {gamma * 1e9:.3g} ns a byte, so {1e-9 / gamma:.3g} GB/s are added"
    else:
        yield f"{name}: gamma 0: reduce-scatters took no longer than all-gathers"
    if math.isfinite(gather.bandwidth):
        level = GroupLevel(float(gather.ranks), gather.alpha, gather.bandwidth, gamma=gamma)
        yield describe_crossovers(f"{name} ranks", "all_reduce", [level], NCCL)


def make_tiers(
    fits: Mapping[str, list[LinkFit]], sizes: Mapping[str, int], constants: Constants
) -> list[dict[str, object]]:
    """Return the tiers of a description, from the all-gathers of each tier, which are the most
    frequent operation of a run. An outer tier that measured faster than the one inside it gets the
    bandwidth of the latter.

    Args:
        fits: Measurements by tier.
        sizes: Ranks of each tier.
        constants: Those of the chip. Measured bandwidth is divided by the share that the planner
            lets collectives reach (`Constants.links`).

    Raises:
        UserError: No bandwidth can be derived.
    """
    tiers: list[dict[str, object]] = []
    fastest = float("inf")
    for number, (name, tier_fits) in enumerate(fits.items()):
        gather = next(fit for fit in tier_fits if fit.operation == "all_gather")
        if not math.isfinite(gather.bandwidth):
            raise UserError(
                f"{name}: larger gathers took no longer than small ones, so the link has no "
                "bandwidth; use a larger --largest, or more --times on a machine at rest"
            )
        fastest = min(fastest, gather.bandwidth)
        tiers.append(
            {
                "name": name,
                "size": sizes[name],
                "kind": "switch",
                "bandwidth": float(f"{fastest / constants.get_link_efficiency(number):.4g}"),
                "latency": float(f"{gather.alpha:.3g}"),
            }
        )
    return tiers


def write_description(
    path: Path,
    cluster: Cluster,
    tiers: list[dict[str, object]],
    arguments: argparse.Namespace,
    gamma: float = 0.0,
) -> None:
    """Write the description. Of a file that is there, as tools/measure_kernels.py writes, only the
    tiers and the reduction change, and what the command line names.

    Args:
        path: The file.
        cluster: That of the chip.
        tiers: The measured tiers.
        arguments: The command line.
        gamma: Seconds in which a rank adds a byte, 0 if that was too short to be seen.
    """
    changes: dict[str, object] = {"tiers": tiers}
    if gamma:
        changes["reduction"] = float(f"{1.0 / gamma:.4g}")
    named_figures = {
        "chip": arguments.chip,
        "failure_hours": arguments.failure_hours,
        "price": arguments.price,
    }
    changes |= {key: value for key, value in named_figures.items() if value is not None}
    write_cluster(path, cluster, changes, "Measured by tools/measure_links.py.")


def choose_cluster(arguments: argparse.Namespace, mesh: Mesh) -> Cluster:
    """Return the cluster of the file that is to be written if it is there, else one of the chip
    that the command line names, else the likely one for the device."""
    if arguments.write.exists():
        return load_cluster(str(arguments.write.resolve()))
    default = replace(load_cluster("cpu"), failure_hours=50_000.0, price=0.0)
    if arguments.chip is not None or mesh.device.type == "cpu":
        return replace(default, chip=CHIPS[arguments.chip or "cpu"])
    properties = torch.cuda.get_device_properties(mesh.device)
    chip = identify_chip(torch.cuda.get_device_name(mesh.device), properties.total_memory)
    if not chip.has_rates:
        raise UserError(
            f"{describe_unknown_chip(chip)}; then tools/measure_links.py --write mine.yaml adds "
            "the links"
        )
    return replace(default, chip=chip)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UserError: For an unknown chip or impossible sizes.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for axis in ("tensor", "context", "pipeline"):
        parser.add_argument(
            f"--{axis}", type=make_integer_parser(1), default=None, help=f"ranks of the {axis} axis"
        )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--smallest", type=make_integer_parser(1), default=2**14, help="bytes")
    parser.add_argument(
        "--largest", type=make_integer_parser(1, 2**40), default=2**26, help="bytes"
    )
    parser.add_argument(
        "--times", type=make_integer_parser(1), default=7, help="measurements of each size"
    )
    parser.add_argument("--write", type=Path, help="description to write (of tiers, no layout)")
    parser.add_argument(
        "--chip", help="chip of the description (default: that of the file, or of the device)"
    )
    parser.add_argument("--failure-hours", type=float, help="default: 50000")
    parser.add_argument("--price", type=float, help="dollars per chip and hour (default: 0)")
    arguments = parser.parse_args()
    if arguments.chip is not None and arguments.chip not in CHIPS:
        raise UserError(f"--chip {arguments.chip} is unknown; use {suggest_chips(arguments.chip)}")
    if not 4 <= arguments.smallest < arguments.largest:
        raise UserError(
            f"--smallest {arguments.smallest} must be at least 4 and less than --largest "
            f"{arguments.largest}"
        )
    return arguments


def run(arguments: argparse.Namespace) -> None:
    """Measure on every rank, and print and write the result on the first one."""
    world = read_world_size()
    if world < 2:
        raise UserError("links need 2 ranks or more; start with torchrun --nproc-per-node 2")
    axes = {name: getattr(arguments, name) for name in ("tensor", "context", "pipeline")}
    by_axis = any(axes.values())
    if by_axis and arguments.write:
        raise UserError("--write describes tiers; leave --tensor, --context and --pipeline out")
    if by_axis:
        sizes = {name: size or 1 for name, size in axes.items()}
        rest = sizes["tensor"] * sizes["context"] * sizes["pipeline"]
        layout = Layout(**sizes, data=max(1, world // rest))
        if layout.world != world:
            raise UserError(f"the axes take {layout.world} ranks of {world}; make them equal")
        names = {axis: axis for axis in (*sizes, "data") if layout.sizes[axis] > 1}
    else:
        node = read_local_world_size()
        layout = Layout(tensor=node, data=world // node)
        names = {"node": "tensor", "cluster": "data"}
        names = {name: axis for name, axis in names.items() if layout.sizes[axis] > 1}
    mesh = Mesh(layout, device=arguments.device)
    buffer_sizes = []
    size = arguments.smallest
    while size <= arguments.largest:
        buffer_sizes.append(size)
        size *= 4
    fits = {
        name: measure_group(name, mesh.group(axis), mesh, buffer_sizes, arguments.times)
        for name, axis in names.items()
    }
    if mesh.rank == 0:
        print(HEAD)
        for group_fits in fits.values():
            print(*group_fits, sep="\n")
        for name, group_fits in fits.items():
            print(*describe_reduction(name, group_fits), sep="\n")
        if arguments.write:
            tier_sizes = {"node": layout.tensor, "cluster": world}
            cluster = choose_cluster(arguments, mesh)
            write_description(
                arguments.write,
                cluster,
                make_tiers(fits, tier_sizes, get_cluster_constants(cluster)),
                arguments,
                fit_gamma(next(iter(fits.values()))),
            )
            print(f"wrote {arguments.write}")
    barrier(mesh.world)
    mesh.close()


if __name__ == "__main__":
    with allow_closed_output():
        with report_errors():
            rank = read_global_rank()
        with report_errors(rank):
            run(parse_arguments())
