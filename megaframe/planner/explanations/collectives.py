"""The time of collectives over the ranks of each axis, by algorithm and size of the message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megaframe.hardware.cluster import Cluster
from megaframe.planner.collective_times import (
    ALGORITHMS,
    GroupLevel,
    count_group_ranks,
    estimate_collective_seconds,
)
from megaframe.planner.constants import Constants
from megaframe.planner.explanations.explanation import Cell, Explanation, format_bytes
from megaframe.planner.layout_search import LayoutChoice
from megaframe.planner.layout_sizes import make_layout_sizes
from megaframe.planner.machine import Machine
from megaframe.planner.theory.crossover import list_fastest_algorithms

_GROUPS = {
    "tensor": "all_gather",
    "context": "all_gather",
    "shard": "all_reduce",
    "replicas": "all_reduce",
    "expert": "all_to_all",
}
"""Groups of ranks (keys of `Machine.groups`), with a collective that runs there."""
_SIZES = (2**12, 2**16, 2**20, 2**24, 2**28, 2**32)
_FORMULAS = {
    "all_reduce": (
        "All-reduce of n bytes on p ranks: naive 2 (p-1) (a + n b) + (p-1) n g; binomial "
        "log2(p) (2 a + n (2 b + g)); ring 2 (p-1) a + n (2 b + g) (p-1)/p; tree 2 log2(p) a "
        "+ n (2 b + g); recursive halving and doubling 2 log2(p) a + n (2 b + g) (p-1)/p on the "
        "slowest tier; hierarchical: a ring on each tier, for what the tiers inside have left; in "
        "the network 2 a + n b"
    ),
    "all_gather": (
        "All-gather of n bytes on p ranks: ring (p-1) a + n b (p-1)/p; recursive doubling log2(p) "
        "a + n b (p-1)/p on the slowest tier; hierarchical: a ring on each tier. A reduce-scatter "
        "adds n g (p-1)/p"
    ),
    "all_to_all": (
        "All-to-all of n bytes on p ranks: pairwise (p-1) a + n b (p-1)/p, each pair on its tier; "
        "hierarchical: an exchange of everything on each tier"
    ),
}


def explain_collectives(
    choice: LayoutChoice, cluster: Cluster, constants: Constants
) -> Explanation:
    """Return the times of collectives on the links of each axis.

    Args:
        choice: The layout.
        cluster: Chips and links.
        constants: What collectives reach of the links.
    """
    config = choice.config
    sizes = make_layout_sizes(config.parallel, config.train, choice.layout)
    groups = {
        name: group
        for name, group in Machine(config, cluster, constants, sizes).groups.items()
        if name in _GROUPS and float(count_group_ranks(group)) > 1
    }
    operations = dict.fromkeys(_GROUPS[name] for name in groups)
    lines = [_describe_links(cluster, constants), _describe_gamma(cluster)]
    lines += [f"{_FORMULAS[operation]}." for operation in operations]
    if not groups:
        lines.append(f"{choice.layout} has no axis with two ranks, so nothing is sent; use --gpus.")
    library = constants.software.collectives
    for name, group in groups.items():
        lines.append(describe_crossovers(f"{name} ranks", _GROUPS[name], group, library))
    head = ("ranks of", "collective", "algorithm", *(f"{format_bytes(n)}, us" for n in _SIZES))
    rows = tuple(
        row for name, group in groups.items() for row in _list_rows(name, _GROUPS[name], group)
    )
    return Explanation(f"Collectives of {choice.layout}", tuple(lines), head, rows)


def _describe_links(cluster: Cluster, constants: Constants) -> str:
    tiers = "; ".join(
        f"{tier.name} (up to {tier.size} ranks) a = {tier.latency * 1e6:.3g} us, 1 / b = "
        f"{tier.bandwidth * constants.get_link_efficiency(number) / 1e9:.4g} GB/s"
        for number, tier in enumerate(cluster.tiers)
    )
    return f"A message of n bytes takes a + n b, what collectives reach of {cluster.name}: {tiers}."


def _describe_gamma(cluster: Cluster) -> str:
    if cluster.reduction is not None:
        return f"To add n bytes takes n g: 1 / g = {cluster.reduction / 1e9:.4g} GB/s."
    return (
        "To add n bytes takes n g; g was not measured apart, so it is in b here, and counts as 0 "
        "(tools/measure_links.py --write measures it)."
    )


def describe_crossovers(
    name: str, operation: str, group: Sequence[GroupLevel], library: Sequence[str]
) -> str:
    """Return which algorithm is the fastest from which size of the message on.

    Args:
        name: Of the ranks.
        operation: A key of `ALGORITHMS`.
        group: Levels of the group.
        library: Names of the algorithms that the communication library has.
    """
    formulas = ALGORITHMS[operation]
    best = _name_fastest(operation, group, tuple(formulas))
    had = _name_fastest(operation, group, [each for each in formulas if each in library])
    text = f"Fastest {operation} of {int(count_group_ranks(group))} {name} by size: {best}"
    return f"{text}." if had in ("", best) else f"{text}; of those that NCCL has, {had}."


def _name_fastest(operation: str, group: Sequence[GroupLevel], algorithms: Sequence[str]) -> str:
    return ", ".join(
        f"{algorithm} from {format_bytes(size)}" if size else algorithm
        for size, algorithm in list_fastest_algorithms(operation, group, algorithms)
    )


def _list_rows(
    name: str, operation: str, group: Sequence[GroupLevel]
) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each algorithm that the links allow. A star marks the fastest."""
    best = [float(estimate_collective_seconds(operation, size, group)) for size in _SIZES]
    for algorithm, formula in ALGORITHMS[operation].items():
        seconds = [float(formula(float(size), group)) for size in _SIZES]
        if seconds[0] == float("inf"):
            continue
        cells = (
            f"{time * 1e6:,.4g}{'*' if time == least else ''}"
            for time, least in zip(seconds, best, strict=True)
        )
        yield (name, operation, algorithm, *cells)
