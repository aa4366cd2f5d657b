"""How a rank of `tools/doctor.py --ranks` checks transfers: links, rings and collectives.

Contents are compared with what they must be, and latency and bandwidth are measured. A transfer
that hangs is ended by megaframe's watchdog, which also names it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaframe.distributed.collectives import (
    Group,
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    all_to_all_v,
    barrier,
    receive,
    reduce_scatter,
    reduce_scatter_v,
    send,
    shift_ring,
)
from megaframe.distributed.fault_records import write_flight_record
from megaframe.distributed.mesh import Mesh, read_global_rank, read_world_size
from megaframe.distributed.nccl_settings import NcclSettings
from megaframe.io.regular_file import open_append
from megaframe.layout import Layout
from megaframe.planner.collective_times import compute_bus_bandwidth

_ALL_PAIRS = 8
"""Ranks up to which every pair of them is measured; with more, only neighbours."""
_ROUNDS = 20


@dataclass
class Doctor:
    """The state of one rank's checks, and its file of findings.

    Attributes:
        device: As `run.device`.
        timeout: Seconds that a check may take.
        folder: Where the rank writes.
        part: Name of the part that runs.
        large: Bytes of a large message.
        nccl: Settings of NCCL that are in force.
        latest: The mesh that was made last.
    """

    device: str
    timeout: float
    folder: Path
    part: str = ""
    large: int = 1 << 24
    nccl: NcclSettings | None = None
    latest: Mesh | None = None

    def __post_init__(self) -> None:
        self.rank, self.world = read_global_rank(), read_world_size()

    def write_line(self, **fields: object) -> None:
        """Write a line to this rank's file."""
        with open_append(self.folder / f"rank-{self.rank}.jsonl", inside=self.folder) as file:
            file.write((json.dumps(fields) + "\n").encode())

    def report(self, check: str, passed: bool | None, text: str, **numbers: object) -> None:
        """Write a finding.

        Args:
            check: What was checked, within the part.
            passed: Whether it is as it must be; None if this rank cannot judge it.
            text: The finding, as the report shows it.
            numbers: Measurements, for the report's JSON.
        """
        self.write_line(part=self.part, check=check, passed=passed, message=text, numbers=numbers)

    def make_mesh(self, **sizes: int) -> Mesh:
        """Return a mesh of all ranks, whose watchdog ends and names what hangs."""
        # Twice the time, so that the watchdog, which reports more than a transfer, ends what hangs.
        layout, limit = Layout(**sizes), 2 * self.timeout
        mesh = Mesh(layout, device=self.device, timeout=limit, nccl=self.nccl)
        mesh.watch_steps(self.timeout, self.folder)
        mesh.progress.begin_activity(self.part)
        self.latest = mesh
        return mesh

    def announce(self, mesh: Mesh, check: str) -> None:
        """Wait for all ranks and name the next check, which must end within the timeout."""
        barrier(mesh.world)
        mesh.progress.begin_activity(f"{self.part}, {check}")


def measure_seconds(mesh: Mesh, work: Callable[[], object], times: int) -> float:
    """Return the seconds that each of `times` calls takes, the device's work included.

    Args:
        mesh: All ranks, which begin together.
        work: What is measured.
        times: Number of calls.
    """

    def finish() -> None:
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)

    work()  # makes connections
    finish()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    finish()
    return (time.perf_counter() - begun) / times


def check_links(doctor: Doctor) -> None:
    """Check messages between two ranks: contents, latency, bandwidth."""
    mesh = doctor.make_mesh(pipeline=doctor.world)
    world, own_rank = doctor.world, doctor.rank
    pairs = [(low, high) for low in range(world) for high in range(low + 1, world)]
    if world > _ALL_PAIRS:
        pairs = [(low, (low + 1) % world) for low in range(world)]
    mesh.connect([link for low, high in pairs for link in ((low, high), (high, low))])
    for low, high in pairs:
        doctor.announce(mesh, f"{low} and {high}")
        if own_rank not in (low, high):
            continue
        first = own_rank == low
        out, back = mesh.link(low, high), mesh.link(high, low)

        def send_round_trip(x: Tensor, first: bool, out: Group, back: Group) -> Tensor:
            received = torch.empty_like(x)
            if first:
                sent = send(x, out)
                receive(received, back).wait()
                sent.wait()
                return received
            receive(received, out).wait()
            send(received, back).wait()
            return received

        small = torch.ones(2, device=mesh.device)
        large = torch.arange(doctor.large // 4, device=mesh.device, dtype=torch.int32)
        trip = partial(send_round_trip, first=first, out=out, back=back)
        right = torch.equal(trip(large), large)
        latency = measure_seconds(mesh, lambda: trip(small), _ROUNDS) / 2  # noqa: B023 (called at once)
        seconds = measure_seconds(mesh, lambda: trip(large), 3) / 2  # noqa: B023
        rate = large.nbytes / seconds
        text = f"{latency * 1e6:.1f} us, {rate / 1e9:.2f} GB/s"
        name = f"{low} and {high}"
        doctor.report(name, right, text if right else "wrong contents", latency=latency, rate=rate)
    barrier(mesh.world)
    mesh.close()


def check_rings(doctor: Doctor) -> None:
    """Check that a ring of all ranks delivers the right rank's tensors, in both directions."""
    mesh = doctor.make_mesh(context=doctor.world)
    _, ring = mesh.divide_context(1)
    for reverse in (False, True):
        name = "backwards" if reverse else "forwards"
        doctor.announce(mesh, name)
        x = torch.full((doctor.large // 16,), float(doctor.rank), device=mesh.device)
        wrong = []
        for step in range(1, doctor.world + 1):
            x = shift_ring(x, torch.empty_like(x), ring, reverse=reverse).wait()
            source = (doctor.rank + (step if reverse else -step)) % doctor.world
            if not bool((x == source).all()):
                wrong.append(step)
        shift = partial(shift_ring, x, torch.empty_like(x), ring, reverse=reverse)
        seconds = measure_seconds(mesh, lambda: shift().wait(), 3)  # noqa: B023
        text = f"{x.nbytes / seconds / 1e9:.2f} GB/s" if not wrong else f"wrong after steps {wrong}"
        doctor.report(name, not wrong, text, rate=x.nbytes / seconds)
    barrier(mesh.world)
    mesh.close()


def make_test_values(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return small whole numbers that differ between ranks: their sums are exact in every type, for
    up to 85 ranks in bf16.

    Args:
        rank: The rank.
        count: How many.
        dtype: Their type.
        device: Where they are.
    """
    return ((torch.arange(count, device=device) + 3 * rank) % 4).to(dtype)


CollectiveCase = tuple[Callable[[], Tensor], Tensor]
"""A call, and what it must return."""


def make_collective_cases(
    group: Group, dtype: torch.dtype, device: torch.device
) -> dict[str, CollectiveCase]:
    """Return a call of every collective that training uses, and its result, by name.

    Args:
        group: The ranks.
        dtype: Type of the tensors.
        device: Where they are.
    """
    own_index, world = group.index, group.size
    sizes = [rank % 3 + 1 for rank in range(world)]
    starts = np.cumsum([0, *sizes])
    uneven, even = (
        slice(starts[own_index], starts[own_index + 1]),
        slice(35 * own_index, 35 * (own_index + 1)),
    )
    of_all_ranks = torch.stack(
        [make_test_values(rank, 35 * world, dtype, device) for rank in range(world)]
    )
    own_values, parts = of_all_ranks[own_index], of_all_ranks.view(world, world, 35)
    total, own_prefix = (
        of_all_ranks.double().sum(0).to(dtype),
        of_all_ranks[own_index, : starts[-1]],
    )
    beginnings = torch.cat([row[:size] for row, size in zip(of_all_ranks, sizes, strict=True)])
    received_sizes = [sizes[own_index]] * world
    return {
        "all_reduce sum": (lambda: all_reduce(own_values.clone(), group).wait(), total),
        "all_reduce max": (
            lambda: all_reduce(own_values.clone(), group, "max").wait(),
            of_all_ranks.amax(0),
        ),
        "all_reduce min": (
            lambda: all_reduce(own_values.clone(), group, "min").wait(),
            of_all_ranks.amin(0),
        ),
        "all_gather": (lambda: all_gather(own_values, group).wait(), of_all_ranks.view(-1)),
        "reduce_scatter": (lambda: reduce_scatter(own_values, group).wait(), total[even]),
        "all_to_all": (lambda: all_to_all(parts[own_index], group).wait(), parts[:, own_index]),
        "all_gather_v": (
            lambda: all_gather_v(own_values[: sizes[own_index]], sizes, group).wait(),
            beginnings,
        ),
        "reduce_scatter_v": (
            lambda: reduce_scatter_v(own_prefix, sizes, group).wait(),
            total[uneven],
        ),
        "all_to_all_v": (
            lambda: all_to_all_v(own_prefix, sizes, received_sizes, group).wait(),
            torch.cat([row[uneven] for row in of_all_ranks]),
        ),
    }


def check_collectives(doctor: Doctor) -> None:
    """Check every collective that training uses against known results, in several types."""
    mesh = doctor.make_mesh(data=doctor.world)
    group, device, own_rank, world = mesh.group("data"), mesh.device, doctor.rank, doctor.world
    types = [torch.float32, torch.float64, torch.int64]
    types += [torch.bfloat16] if 3 * world <= 256 else []
    for dtype in types:
        for name, (call, expected) in make_collective_cases(group, dtype, device).items():
            check = f"{name} {str(dtype).removeprefix('torch.')}"
            doctor.announce(mesh, check)
            right = torch.equal(call(), expected)
            doctor.report(check, right, "right" if right else f"wrong on rank {own_rank}")
    large = torch.ones(doctor.large // 4 // world * world, device=device)
    timed: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(large, group, "max").wait(),
        "all_gather": lambda: all_gather(large[: len(large) // world], group).wait(),
        "reduce_scatter": lambda: reduce_scatter(large, group).wait(),
        "all_to_all": lambda: all_to_all(large.view(world, -1), group).wait(),
    }
    for name, work in timed.items():
        doctor.announce(mesh, f"speed of {name}")
        seconds = measure_seconds(mesh, work, 3)
        rate = compute_bus_bandwidth(name, large.nbytes, world, seconds)
        text = f"{rate / 1e9:.2f} GB/s of bus bandwidth, {large.nbytes / 2**20:.0f} MiB"
        doctor.report(f"speed of {name}", True, text, rate=rate, seconds=seconds)
    if mesh.device.type == "cuda":
        text = write_flight_record(doctor.folder, own_rank)
        written = text.startswith("flight record in")
        doctor.report("flight record", written, "written" if written else text)
    barrier(mesh.world)
    mesh.close()
