"""Collectives: seconds by message size, group and algorithm, given each tier's alpha and bandwidth.

A message of n bytes takes alpha + n / bandwidth on one tier; beta is 1 / bandwidth. To add n bytes
that arrived to n others takes n gamma, which is 0 where it is not known apart: bandwidths that were
measured with all-reduces contain it. A group is a list of `GroupLevel`s from the innermost tier:
how many of its members (or of the groups inside) meet on each tier. Formulas take numbers or numpy
arrays. n is always the whole buffer: what each rank ends with (all-gather, all-reduce, broadcast),
begins with (reduce-scatter) or sends in total (all-to-all). Formulas: Thakur, Rabenseifner and
Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; the tree is the double
binary tree of Sanders, Speck and Traeff 2009, which keeps both directions of a link busy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaframe.hardware.cluster import Cluster
from megaframe.layout import exchange_steps

Number = Any
"""A float, or a numpy array of them."""


@dataclass(frozen=True)
class GroupLevel:
    """The part of a group that meets on one tier.

    Attributes:
        members: How many meet there.
        alpha: Seconds per message.
        bandwidth: bytes/s of each rank in one direction.
        rails: Whether only ranks with the same number in their nodes are connected.
        reduces: Whether the switches can sum.
        gamma: Seconds in which a rank adds a byte that arrived to one that it has.
    """

    members: Number
    alpha: float
    bandwidth: Number
    rails: bool = False
    reduces: bool = False
    gamma: float = 0.0


def get_share_on_tier(shares: Sequence[float], number: int) -> float:
    """Return the share of tier `number`; the last share applies to all further tiers."""
    return shares[min(number, len(shares) - 1)]


def list_group_levels(
    cluster: Cluster, stride: Number, size: Number, shares: Sequence[float] = (1.0,)
) -> list[GroupLevel]:
    """Return the levels of a group of `size` ranks that are `stride` apart: one for each tier of
    the cluster, with one member where the group does not use the tier.

    On a torus a group has the links of as many dimensions as it extends over.

    Args:
        cluster: Its tiers.
        stride: Distance in ranks between two members.
        size: Number of members.
        shares: Share of the bandwidth that collectives reach, by tier; the last one applies to all
            further tiers.
    """
    found_levels, inside = [], np.ones_like(np.asarray(size, dtype=float))
    gamma = 1.0 / cluster.reduction if cluster.reduction else 0.0
    for number, tier in enumerate(cluster.tiers):
        places = np.maximum(1.0, np.floor_divide(tier.size, stride))
        reached = np.minimum(size, places) * 1.0
        if tier is cluster.tiers[-1]:
            reached = np.asarray(size, dtype=float)
        members = np.maximum(1.0, np.ceil(reached / inside))
        bandwidth = np.full_like(members, tier.bandwidth * get_share_on_tier(shares, number))
        if tier.kind == "torus":
            side = tier.size ** (1.0 / tier.dims)
            dims_used = np.clip(
                np.ceil(np.log(np.maximum(members, 2)) / np.log(side)), 1, tier.dims
            )
            bandwidth = bandwidth * dims_used / tier.dims
        rails = tier.kind == "rail"
        found_levels.append(
            GroupLevel(members, tier.latency, bandwidth, rails, tier.reduces, gamma)
        )
        inside = inside * members
    return found_levels


def count_group_ranks(group: Sequence[GroupLevel]) -> Number:
    """Return the number of ranks of a group."""
    product: Number = 1.0
    for level in group:
        product = product * level.members
    return product


def _flatten_group(group: Sequence[GroupLevel]) -> tuple[Number, Number, Number]:
    """Return (ranks, alpha, bandwidth) of a group taken as one ring.

    The slowest hop determines the bandwidth; alpha is the mean latency of the hops. Every member
    inside a node has an adapter, and as many rings run as there are members, so traffic that leaves
    a node uses the bandwidth of all adapters.
    """
    count: Number = 1.0
    closing: Number = 0.0
    latency: Number = 0.0
    bandwidth: Number = np.inf
    for level in group:
        is_crossed = level.members > 1
        # A ring leaves each group of the tiers inside once; its last hop is on the outermost tier.
        latency = latency * level.members + (level.members - 1) * level.alpha
        closing = np.where(is_crossed, level.alpha, closing)
        bandwidth = np.where(is_crossed, np.minimum(bandwidth, level.bandwidth * count), bandwidth)
        count = count * level.members
    return count, (latency + closing) / count, bandwidth


def estimate_naive_all_reduce(size: Number, group: Sequence[GroupLevel]) -> Number:
    """All ranks send to one rank in turn, which sends the sum back:
    2 (p-1) (alpha + n beta) + (p-1) n gamma."""
    p, alpha, bandwidth = _find_slowest_tier(group)
    return (p - 1) * (2 * (alpha + size / bandwidth) + size * group[0].gamma)


def estimate_binomial_all_reduce(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Up and down one tree with the whole buffer at a time:
    2 ceil(log2 p) (alpha + n beta) + ceil(log2 p) n gamma."""
    p, alpha, bandwidth = _find_slowest_tier(group)
    return _log2(p) * (2 * (alpha + size / bandwidth) + size * group[0].gamma)


def estimate_ring_all_reduce(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Reduce-scatter and all-gather on a ring: 2 (p-1) alpha + n (2 beta + gamma) (p-1)/p."""
    return 2 * estimate_ring_all_gather(size, group) + _estimate_summing(size, group)


def estimate_tree_all_reduce(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Up and down a double binary tree: 2 log2(p) alpha + n (2 beta + gamma), as each rank has two
    children in the tree of one half of the message. On several tiers it is a tree of trees, with
    the latency of each tier."""
    p, _, bandwidth = _flatten_group(group)
    latency = sum(_log2(level.members) * level.alpha for level in group)
    seconds = 2 * latency + 2 * size / bandwidth + size * group[0].gamma
    return np.where(p > 1, seconds, 0.0)


def estimate_halving_doubling_all_reduce(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Recursive halving and doubling: 2 log2(p) alpha + n (2 beta + gamma) (p-1)/p. If p is not a
    power of two, each surplus rank sends its whole buffer to another rank and gets the result back:
    2 (alpha + n beta) + n gamma more. Everything is charged to the slowest tier, because in half of
    the rounds partners are far apart."""
    p, alpha, bandwidth = _find_slowest_tier(group)
    below = 2.0 ** np.floor(np.log2(p))
    round_trip = 2 * size / bandwidth + size * group[0].gamma
    core = 2 * np.log2(below) * alpha + round_trip * (below - 1) / below
    return core + np.where(below < p, 2 * alpha + round_trip, 0.0)


def estimate_hierarchical_all_reduce(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Reduce-scatter on each tier from the innermost, then all-gather back: each tier carries only
    what the tiers inside it have left of the message."""
    return 2 * estimate_hierarchical_all_gather(size, group) + _estimate_summing(size, group)


def estimate_in_network_all_reduce(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Reduction in the switches: every rank sends and receives its message once, 2 alpha + n beta.
    Infinite if the switches of a tier cannot sum."""
    total: Number = 0.0
    message = size
    for level in group:
        is_crossed = level.members > 1
        cost = 2 * level.alpha + message / level.bandwidth if level.reduces else np.inf
        total = total + np.where(is_crossed, cost, 0.0)
        message = message / level.members
    return total


def estimate_ring_all_gather(size: Number, group: Sequence[GroupLevel]) -> Number:
    """All-gather on a ring: (p-1) alpha + n beta (p-1)/p."""
    p, alpha, bandwidth = _flatten_group(group)
    return (p - 1) * alpha + size / bandwidth * (p - 1) / p


def estimate_doubling_all_gather(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Recursive doubling: ceil(log2 p) alpha + n beta (p-1)/p on the slowest tier."""
    p, alpha, bandwidth = _find_slowest_tier(group)
    return _log2(p) * alpha + size / bandwidth * (p - 1) / p


def estimate_hierarchical_all_gather(size: Number, group: Sequence[GroupLevel]) -> Number:
    """All-gather tier by tier from the outermost, among ranks of the same number; the innermost
    tier comes last and carries the whole buffer."""
    total: Number = 0.0
    message = size
    for level in group:
        m = level.members
        total = total + (m - 1) * level.alpha + message / level.bandwidth * (m - 1) / m
        message = message / m
    return total


def estimate_ring_reduce_scatter(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Reduce-scatter on a ring: (p-1) alpha + n (beta + gamma) (p-1)/p."""
    return estimate_ring_all_gather(size, group) + _estimate_summing(size, group)


def estimate_halving_reduce_scatter(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Recursive halving: ceil(log2 p) alpha + n (beta + gamma) (p-1)/p on the slowest tier."""
    return estimate_doubling_all_gather(size, group) + _estimate_summing(size, group)


def estimate_hierarchical_reduce_scatter(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Reduce-scatter tier by tier from the innermost, which carries the whole buffer."""
    return estimate_hierarchical_all_gather(size, group) + _estimate_summing(size, group)


def estimate_pairwise_all_to_all(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Every rank sends 1/p of its n bytes to each other rank: (p-1) alpha, and on each tier the
    time of the bytes for ranks that are reached over it. On rails, bytes for ranks of another
    number first go to the neighbour of that number, on the tier inside."""
    p = count_group_ranks(group)
    total: Number = 0.0
    inside: Number = 1.0
    before: GroupLevel | None = None
    for level in group:
        over = (level.members - 1) * inside
        total = total + over * level.alpha + size * over / p / level.bandwidth
        if level.rails and before is not None:
            crossing = size * over / p * (inside - 1) / inside
            total = total + crossing / before.bandwidth
        inside = inside * level.members
        before = level
    return total


def estimate_hierarchical_all_to_all(size: Number, group: Sequence[GroupLevel]) -> Number:
    """All-to-all tier by tier: each tier exchanges everything that goes elsewhere on it, in one
    message per member: (m-1) alpha + n beta (m-1)/m on a tier of m members."""
    total: Number = 0.0
    for level in group:
        m = level.members
        total = total + (m - 1) * level.alpha + size / level.bandwidth * (m - 1) / m
    return total


def estimate_stepped_exchange(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Every rank sends each other one its part, n / p, of a sum in steps (`exchange_steps`):
    neighbours of a node add up what the ranks outside get from them, before two steps among nodes,
    each over the slowest tier. (a-1) alpha + n beta (a-1)/a for a step of a ranks, where n is what
    the steps before have left: n / a."""
    p, alpha, bandwidth = _find_slowest_tier(group)
    node, near, far = _count_exchange_steps(p, group[0].members)
    steps = [GroupLevel(near, alpha, bandwidth), GroupLevel(far, alpha, bandwidth)]
    return estimate_hierarchical_all_gather(size, [replace(group[0], members=node), *steps])


def estimate_tree_broadcast(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Broadcast down a binomial tree: ceil(log2 p) (alpha + n beta)."""
    p, alpha, bandwidth = _find_slowest_tier(group)
    return _log2(p) * (alpha + size / bandwidth)


def estimate_scatter_broadcast(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Broadcast as a scatter down a tree and an all-gather on a ring (van de Geijn):
    (log2 p + p - 1) alpha + 2 n beta (p-1)/p."""
    p, alpha, bandwidth = _flatten_group(group)
    return (_log2(p) + p - 1) * alpha + 2 * size / bandwidth * (p - 1) / p


Formula = Callable[[Number, Sequence[GroupLevel]], Number]


ALGORITHMS: Mapping[str, Mapping[str, Formula]] = {
    "all_reduce": {
        "naive": estimate_naive_all_reduce,
        "binomial": estimate_binomial_all_reduce,
        "ring": estimate_ring_all_reduce,
        "tree": estimate_tree_all_reduce,
        "halving_doubling": estimate_halving_doubling_all_reduce,
        "hierarchical": estimate_hierarchical_all_reduce,
        "in_network": estimate_in_network_all_reduce,
    },
    "all_gather": {
        "ring": estimate_ring_all_gather,
        "doubling": estimate_doubling_all_gather,
        "hierarchical": estimate_hierarchical_all_gather,
    },
    "reduce_scatter": {
        "ring": estimate_ring_reduce_scatter,
        "halving": estimate_halving_reduce_scatter,
        "hierarchical": estimate_hierarchical_reduce_scatter,
    },
    "all_to_all": {
        "pairwise": estimate_pairwise_all_to_all,
        "hierarchical": estimate_hierarchical_all_to_all,
    },
    "broadcast": {"tree": estimate_tree_broadcast, "scatter": estimate_scatter_broadcast},
}
"""Formula of each algorithm, by operation."""


def estimate_hop_seconds(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Return the seconds of a message from one member to the next over the slowest tier of the
    group: alpha + n beta; 0 for a group of one rank.

    Args:
        size: Bytes of the message.
        group: Levels of the group.
    """
    p, alpha, bandwidth = _find_slowest_tier(group)
    return np.where(p > 1, alpha + size / bandwidth, 0.0)


def estimate_collective_seconds(
    operation: str, size: Number, group: Sequence[GroupLevel], algorithms: Sequence[str] = ()
) -> Number:
    """Return the seconds of a collective by the fastest algorithm for this size and group; 0 for a
    group of one rank.

    Args:
        operation: A key of `ALGORITHMS`.
        size: Bytes of the whole buffer.
        group: Levels of the group.
        algorithms: Names of the algorithms to choose from; empty for all.
    """
    best: Number = np.inf
    for name, formula in ALGORITHMS[operation].items():
        if not algorithms or name in algorithms:
            best = np.minimum(best, formula(size, group))
    return best


def compute_bus_bandwidth(operation: str, size: float, members: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes/s: what a link carried, which can be compared with the
    link's nominal bandwidth for any number of ranks.

    Args:
        operation: A key of `ALGORITHMS`.
        size: Bytes of the whole buffer.
        members: Ranks of the group.
        seconds: Duration of one collective.
    """
    factor = {"all_reduce": 2.0, "broadcast": members / max(1, members - 1)}.get(operation, 1.0)
    return factor * size * (members - 1) / members / seconds


def _estimate_summing(size: Number, group: Sequence[GroupLevel]) -> Number:
    """Return the seconds in which a rank adds what a reduce-scatter brings: n gamma (p-1)/p. No
    algorithm adds less, as p-1 of the p terms of each of n/p bytes are added to the first."""
    ranks = count_group_ranks(group)
    return size * group[0].gamma * (ranks - 1) / ranks


def _find_slowest_tier(group: Sequence[GroupLevel]) -> tuple[Number, Number, Number]:
    """Return (ranks, alpha, bandwidth) as if the slowest tier in use carried every message."""
    count: Number = 1.0
    alpha: Number = 0.0
    bandwidth: Number = np.inf
    for level in group:
        is_crossed = level.members > 1
        alpha = np.where(is_crossed, np.maximum(alpha, level.alpha), alpha)
        bandwidth = np.where(is_crossed, np.minimum(bandwidth, level.bandwidth), bandwidth)
        count = count * level.members
    return count, alpha, bandwidth


def _log2(count: Number) -> Number:
    return np.ceil(np.log2(count))


def _count_exchange_steps(ranks: Number, inside: Number) -> tuple[Number, Number, Number]:
    """Return `exchange_steps` of numbers or arrays."""
    pairs = np.stack(np.broadcast_arrays(ranks, inside), -1).astype(int)
    distinct, row = np.unique(pairs.reshape(-1, 2), axis=0, return_inverse=True)
    steps = np.array([exchange_steps(*pair) for pair in distinct.tolist()], dtype=float)
    node, near, far = np.moveaxis(steps[row.reshape(pairs.shape[:-1])], -1, 0)
    return node, near, far
