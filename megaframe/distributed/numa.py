"""NUMA binding: puts a rank's process on the cores and the memory next to its GPU.

What is next to what is read from /sys (the Linux kernel's `sysfs-bus-pci` and
`sysfs-devices-node`): the PCI address of a GPU leads to its NUMA node, and the node to its cores.
Every rank works out the same for all ranks of its machine, so ranks divide cores without
communicating, and the first one can log it. Whatever is not known or not allowed leaves a process
as the launcher started it, with a line that says so.

`torchrun --numa-binding` needs `numactl`, ends the job where it cannot bind, and is not there under
Slurm, MPI and Ray, whose ranks are bound here too.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megaframe.distributed.device import read_launcher_number
from megaframe.distributed.mesh import read_local_world_size

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
"""Number of the system call by processor (the kernel's syscall tables)."""
_PREFERRED = 1
"""MPOL_PREFERRED (linux/mempolicy.h): memory of the node, of others only when it is full."""


@dataclass(frozen=True)
class NumaBinding:
    """Where the ranks of a machine are put.

    Attributes:
        nodes: NUMA node of each local rank, None if it is not known.
        cores: The cores of each local rank, empty if it is not bound.
    """

    nodes: tuple[int | None, ...]
    cores: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        """Return the ranks of each node and their cores, as in `local ranks 0-3 on node 0 (cores
        0-13, ...)`."""
        parts = []
        for node in sorted({node for node in self.nodes if node is not None}):
            ranks = [rank for rank, of in enumerate(self.nodes) if of == node and self.cores[rank]]
            if ranks:
                shares = [
                    format_ranges(cores) for cores in dict.fromkeys(self.cores[r] for r in ranks)
                ]
                more = ", ..." if len(shares) > 2 else ""
                text = " and ".join(shares[:2]) if not more else shares[0] + more
                plural = "s" if len(ranks) > 1 else ""
                parts.append(
                    f"local rank{plural} {format_ranges(ranks)} on node {node} (cores {text})"
                )
        return ", ".join(parts)


def bind_to_numa_node(
    mode: Literal["auto", "node", "off"],
    device: torch.device,
    *,
    shared: bool = False,
    root: Path = Path("/"),
) -> list[str]:
    """Bind this process as `run.numa_binding` says. Returns lines for the log.

    Args:
        mode: The key's value.
        device: The device of this rank.
        shared: Whether all ranks of the machine use this device.
        root: The root of the file system to read.
    """
    if mode == "off" or sys.platform != "linux":
        return []
    if device.type != "cuda" and mode == "auto":
        return []
    local_rank, count = read_launcher_number("LOCAL_RANK", 0), read_local_world_size()
    allowed = os.sched_getaffinity(0)
    if allowed != _read_cores_of_parent(allowed):
        return ["run.numa_binding: the launcher has bound this process, so it is left as it is"]
    cores_of_node = read_node_cores(root)
    if device.type == "cuda":
        gpus = [device.index] * count if shared else range(count)
        nodes = [_find_node_of_gpu(gpu, cores_of_node, root) for gpu in gpus]
    else:
        nodes = assign_nodes(count, cores_of_node, allowed)
    binding = divide_cores(nodes, cores_of_node, allowed, root)
    node = nodes[local_rank] if local_rank < count else None
    if node is None or not binding.cores[local_rank]:
        why = _explain_unbound(node, cores_of_node)
        return [f"run.numa_binding: local rank {local_rank} is not bound: {why}"]
    cores = binding.cores[local_rank]
    try:
        _set_cores(cores)
    except OSError as error:
        why = f"cores {format_ranges(cores)} of NUMA node {node}: {error.strerror}"
        return [f"run.numa_binding: local rank {local_rank} is not bound: {why}"]
    if torch.get_num_threads() > len(cores):
        torch.set_num_threads(len(cores))
    refusal = _prefer_memory(node)
    memory = "with their memory" if not refusal else f"memory by first touch, as {refusal}"
    return [f"bound to NUMA nodes, {memory}: {binding}"]


def read_node_cores(root: Path) -> dict[int, frozenset[int]]:
    """Return the cores of each NUMA node; empty where the system does not say. Nodes that have only
    memory are left out."""
    cores_of_node = {}
    for path in sorted(root.glob("sys/devices/system/node/node[0-9]*")):
        cores = _read_numbers(path / "cpulist")
        if cores:
            cores_of_node[int(path.name.removeprefix("node"))] = frozenset(cores)
    return cores_of_node


def find_node_at(address: str, nodes: Iterable[int], root: Path) -> int | None:
    """Return the NUMA node of the device at a PCI address.

    Args:
        address: Of the device, such as 0000:3b:00.0.
        nodes: The nodes of the machine.
        root: The root of the file system to read.

    Returns:
        The node; None if the system, or what emulates it, does not know (-1). On a machine with one
        node, it is that one.
    """
    only = [*nodes]
    if len(only) == 1:
        return only[0]
    try:
        path = root / "sys/bus/pci/devices" / address.lower() / "numa_node"
        node = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node in only else None


def assign_nodes(
    count: int, cores_of_node: dict[int, frozenset[int]], allowed: Iterable[int]
) -> list[int | None]:
    """Return a NUMA node for each local rank, in order and as evenly as possible.

    Args:
        count: Number of local ranks.
        cores_of_node: The cores of each node, as from `read_node_cores`.
        allowed: The cores that this process may use; nodes without any of them get no rank.

    Returns:
        The node of each local rank; None for all if no node has allowed cores.
    """
    nodes = [node for node, cores in sorted(cores_of_node.items()) if not cores.isdisjoint(allowed)]
    return [nodes[rank * len(nodes) // count] if nodes else None for rank in range(count)]


def divide_cores(
    nodes: Sequence[int | None],
    cores_of_node: dict[int, frozenset[int]],
    allowed: Iterable[int],
    root: Path,
) -> NumaBinding:
    """Return the cores of each local rank: an equal share of its node's allowed cores.

    Hardware threads of one core stay together. If a node has fewer cores than ranks, they share all
    of them.

    Args:
        nodes: NUMA node of each local rank; None if it is not known.
        cores_of_node: The cores of each node, as from `read_node_cores`.
        allowed: The cores that this process may use.
        root: The root of the file system to read.
    """
    cores_of_rank: list[tuple[int, ...]] = []
    for rank, node in enumerate(nodes):
        ranks = [other for other, of in enumerate(nodes) if of == node]
        cores = cores_of_node.get(node, frozenset()) if node is not None else frozenset()
        threads = _group_by_core(sorted(cores.intersection(allowed)), root)
        if len(threads) >= len(ranks):
            index, count = ranks.index(rank), len(ranks)
            threads = threads[index * len(threads) // count : (index + 1) * len(threads) // count]
        cores_of_rank.append(tuple(sorted(number for core in threads for number in core)))
    return NumaBinding(tuple(nodes), tuple(cores_of_rank))


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers in the kernel's form: `0-3,8`."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in ranges)


def _read_numbers(path: Path) -> list[int]:
    """Return the numbers in a file of the kernel's form; none if there is no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
        numbers: list[int] = []
        for part in filter(None, text.split(",")):
            low, _, high = part.partition("-")
            numbers += range(int(low), int(high or low) + 1)
    except (OSError, ValueError):
        return []
    return numbers


def _group_by_core(numbers: Sequence[int], root: Path) -> list[tuple[int, ...]]:
    """Group hardware threads by the core that they belong to, in order of their first."""
    cores: dict[tuple[int, ...], None] = {}
    for number in numbers:
        path = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        siblings = {number, *_read_numbers(path)}.intersection(numbers)
        cores[tuple(sorted(siblings))] = None
    return [*cores]


def _find_node_of_gpu(gpu: int, nodes: dict[int, frozenset[int]], root: Path) -> int | None:
    """Return the NUMA node of a GPU; None if torch or the system does not know."""
    try:
        properties = torch.cuda.get_device_properties(gpu)
        # Newer than torch's stubs, and missing in older versions of torch.
        address = [getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")]
    except (AttributeError, RuntimeError, AssertionError):
        return find_node_at("", nodes, root)
    return find_node_at("{:04x}:{:02x}:{:02x}.0".format(*address), nodes, root)


def _explain_unbound(node: int | None, cores_of_node: dict[int, frozenset[int]]) -> str:
    """Return why a local rank with this NUMA node is not bound."""
    if not cores_of_node:
        return "the system does not say which cores a NUMA node has"
    if node is None:
        return "the system does not say which NUMA node its GPU is on"
    cores = format_ranges(cores_of_node[node])
    return f"none of the cores {cores} of NUMA node {node} is allowed here"


def _read_cores_of_parent(default: set[int]) -> set[int]:
    """Return the cores that the process that has started this one may use."""
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return default


def _set_cores(cores: Iterable[int]) -> None:
    """Let all threads of this process run on these cores only; a new thread inherits them."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def _prefer_memory(node: int) -> str:
    """Take memory of this thread, and of threads that it starts, from a NUMA node as long as it has
    some. Returns why that is not possible, or nothing."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"the system call is not known on {platform.machine()}"
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[node // bits] = 1 << node % bits
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(number, _PREFERRED, mask, ctypes.c_ulong(len(mask) * bits)) == 0:
        return ""
    return f"set_mempolicy fails local_rank ({os.strerror(ctypes.get_errno()).lower()})"
