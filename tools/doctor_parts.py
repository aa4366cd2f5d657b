"""What each rank of `tools/doctor.py --ranks` does: links, rings, collectives, layouts, an abort.

Started by tools/doctor_ranks.py, with the environment that torchrun sets. What is found goes line
by line to a file, so that it survives the end of the process. A rank that fails ends; the others
learn of it from megaframe's watch, which also ends and names what hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from doctor_ranks import largest_axis, layouts
from torch import Tensor

from megaframe import __version__
from megaframe.config import load
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.distributed.collectives import (
    Group,
    all_gather,
    all_gather_uneven,
    all_reduce,
    all_to_all,
    all_to_all_uneven,
    barrier,
    receive,
    reduce_scatter,
    reduce_scatter_uneven,
    send,
    shift_ring,
)
from megaframe.distributed.flight_recorder import write_flight_record
from megaframe.distributed.mesh import (
    Mesh,
    read_global_rank,
    read_local_world_size,
    read_world_size,
)
from megaframe.distributed.nccl_settings import NcclSettings, allow_abort, configure_nccl
from megaframe.errors import LostRanks, report_errors
from megaframe.layout import Layout
from megaframe.planner.collective_times import bus_bandwidth
from megaframe.training.restart import train
from megaframe.validate.run import validate_config

_ALL_PAIRS = 8
"""Ranks up to which every pair of them is measured; with more, only neighbours."""
_ROUNDS = 20
_TOLERANCE = 1e-10
"""Relative, of losses and norms in fp64; as in tests/parity."""
_SETTINGS = re.compile(r"(NCCL|TORCH_NCCL|TORCH_FR|CUDA|PYTORCH|OMP|FI|UCX)_\w+")
"""Environment variables to report. Values with a path are left out."""
_MODEL = {
    "model.hidden": 32,
    "model.heads": 4,
    "model.vocab": 61,
    "train.seq": 16,
    "train.steps": 2,
    "train.microbatch": 1,
    "train.precision": "fp64",
    "train.eval_every": 0,
    "data.split": "[0.8, 0.2, 0.0]",
    "optim.lr": 0.01,
    "checkpoint.every": 0,
    "meter.peak_tflops": 1.0,
    "kernels.matmul": "torch",
    **{f"kernels.{key}": "reference" for key in ("elementwise", "attention", "loss", "update")},
}
_EXPERTS = {"model.moe": "{experts: 4, top_k: 2, ffn: 32}", "kernels.experts": "reference"}


@dataclass
class Doctor:
    """One rank at work. folder: where it writes. large: bytes of a large message. nccl: what is set
    for NCCL. latest: the mesh that it has made last."""

    device: str
    timeout: float
    folder: Path
    part: str = ""
    large: int = 1 << 24
    nccl: NcclSettings | None = None
    latest: Mesh | None = None

    def __post_init__(self) -> None:
        self.rank, self.world = read_global_rank(), read_world_size()

    def tell(self, **what: object) -> None:
        """Write a line to this rank's file."""
        with open(self.folder / f"rank-{self.rank}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def find(self, what: str, right: bool | None, said: str, **numbers: object) -> None:
        """Write a finding. right: None if this rank cannot judge it."""
        self.tell(part=self.part, what=what, right=right, said=said, numbers=numbers)

    def mesh(self, **sizes: int) -> Mesh:
        """Return a mesh of all ranks, whose watch ends and names what hangs."""
        # Twice the time, so that the watchdog, which says more than a transfer, ends what hangs.
        layout, limit = Layout(**sizes), 2 * self.timeout
        mesh = Mesh(layout, device=self.device, timeout=limit, nccl=self.nccl)
        mesh.watch_steps(self.timeout, self.folder)
        mesh.progress.begin_activity(self.part)
        self.latest = mesh
        return mesh

    def begin(self, mesh: Mesh, what: str) -> None:
        """Announce what comes next, which must end within the timeout."""
        barrier(mesh.world)
        mesh.progress.begin_activity(f"{self.part}, {what}")


def seconds(mesh: Mesh, work: Callable[[], object], times: int) -> float:
    """Return the seconds that each of `times` calls takes, the device's work included."""

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


def settings(doctor: Doctor) -> None:
    """Versions, devices and settings, which should be the same on all ranks."""
    mesh = doctor.mesh(data=doctor.world)
    device = mesh.device
    mine: dict[str, object] = {
        "node": doctor.rank // read_local_world_size(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megaframe": __version__,
        "system": platform.system() + " " + platform.release(),
        "device": "CPU",
        "variables": {
            name: "(a path)" if "/" in value else value
            for name, value in sorted(os.environ.items())
            if _SETTINGS.fullmatch(name)
        },
    }
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        others = range(torch.cuda.device_count())
        mine |= {
            "device": torch.cuda.get_device_name(device),
            "capability": f"{found.major}.{found.minor}",
            "memory": found.total_memory,
            "cuda": torch.version.cuda or torch.version.hip,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "peers": [
                other
                for other in others
                if other != device.index and torch.cuda.can_device_access_peer(device.index, other)
            ],
        }
    every: list[Any] = [None] * doctor.world
    if doctor.world > 1:
        dist.all_gather_object(every, mine, group=mesh.make_control_group().handle)
    for name in ("torch", "megaframe", "device", "cuda", "nccl", "variables"):
        values = [one.get(name) for one in every]
        if not any(values):
            continue
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        shown = values[0] if not isinstance(values[0], dict) else f"{len(values[0])} set"
        said = f"{shown} on all ranks" if not odd else f"differs on ranks {odd} from rank 0"
        doctor.find(name, not odd, said)
    for line in doctor.nccl.lines if doctor.nccl is not None and device.type == "cuda" else ():
        doctor.find(line.partition(" ")[2], True, "")
    doctor.find("ranks", True, f"{doctor.world}, {read_local_world_size()} on a node", ranks=every)
    mesh.close()


def links(doctor: Doctor) -> None:
    """Messages between two ranks: contents, latency, bandwidth."""
    mesh = doctor.mesh(pipeline=doctor.world)
    world, me = doctor.world, doctor.rank
    pairs = [(low, high) for low in range(world) for high in range(low + 1, world)]
    if world > _ALL_PAIRS:
        pairs = [(low, (low + 1) % world) for low in range(world)]
    mesh.connect([link for low, high in pairs for link in ((low, high), (high, low))])
    for low, high in pairs:
        doctor.begin(mesh, f"{low} and {high}")
        if me not in (low, high):
            continue
        first = me == low
        out, back = mesh.link(low, high), mesh.link(high, low)

        def there_and_back(x: Tensor, first: bool, out: Group, back: Group) -> Tensor:
            came = torch.empty_like(x)
            if first:
                sent = send(x, out)
                receive(came, back).wait()
                sent.wait()
                return came
            receive(came, out).wait()
            send(came, back).wait()
            return came

        small = torch.ones(2, device=mesh.device)
        large = torch.arange(doctor.large // 4, device=mesh.device, dtype=torch.int32)
        trip = partial(there_and_back, first=first, out=out, back=back)
        right = torch.equal(trip(large), large)
        latency = seconds(mesh, lambda: trip(small), _ROUNDS) / 2  # noqa: B023 (called at once)
        taken = seconds(mesh, lambda: trip(large), 3) / 2  # noqa: B023
        rate = large.nbytes / taken
        said = f"{latency * 1e6:.1f} us, {rate / 1e9:.2f} GB/s"
        name = f"{low} and {high}"
        doctor.find(name, right, said if right else "wrong contents", latency=latency, rate=rate)
    barrier(mesh.world)
    mesh.close()


def rings(doctor: Doctor) -> None:
    """What goes around a ring of all ranks, in both directions, is that of the right rank."""
    mesh = doctor.mesh(context=doctor.world)
    _, ring = mesh.divide_context(1)
    for reverse in (False, True):
        name = "backwards" if reverse else "forwards"
        doctor.begin(mesh, name)
        x = torch.full((doctor.large // 16,), float(doctor.rank), device=mesh.device)
        wrong = []
        for step in range(1, doctor.world + 1):
            x = shift_ring(x, torch.empty_like(x), ring, reverse=reverse).wait()
            source = (doctor.rank + (step if reverse else -step)) % doctor.world
            if not bool((x == source).all()):
                wrong.append(step)
        turn = partial(shift_ring, x, torch.empty_like(x), ring, reverse=reverse)
        taken = seconds(mesh, lambda: turn().wait(), 3)  # noqa: B023
        said = f"{x.nbytes / taken / 1e9:.2f} GB/s" if not wrong else f"wrong after steps {wrong}"
        doctor.find(name, not wrong, said, rate=x.nbytes / taken)
    barrier(mesh.world)
    mesh.close()


def numbers(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return small whole numbers that differ between ranks: their sums are exact in every type, for
    up to 85 ranks in bf16."""
    return ((torch.arange(count, device=device) + 3 * rank) % 4).to(dtype)


Case = tuple[Callable[[], Tensor], Tensor]
"""A call, and what it must return."""


def cases(group: Group, dtype: torch.dtype, device: torch.device) -> dict[str, Case]:
    """Return every collective that training uses, by name."""
    me, world = group.index, group.size
    sizes = [rank % 3 + 1 for rank in range(world)]
    starts = np.cumsum([0, *sizes])
    uneven, even = slice(starts[me], starts[me + 1]), slice(35 * me, 35 * (me + 1))
    every = torch.stack([numbers(rank, 35 * world, dtype, device) for rank in range(world)])
    mine, parts = every[me], every.view(world, world, 35)
    total, whole = every.double().sum(0).to(dtype), every[me, : starts[-1]]
    beginnings = torch.cat([row[:size] for row, size in zip(every, sizes, strict=True)])
    coming = [sizes[me]] * world
    return {
        "all_reduce sum": (lambda: all_reduce(mine.clone(), group).wait(), total),
        "all_reduce max": (lambda: all_reduce(mine.clone(), group, "max").wait(), every.amax(0)),
        "all_reduce min": (lambda: all_reduce(mine.clone(), group, "min").wait(), every.amin(0)),
        "all_gather": (lambda: all_gather(mine, group).wait(), every.view(-1)),
        "reduce_scatter": (lambda: reduce_scatter(mine, group).wait(), total[even]),
        "all_to_all": (lambda: all_to_all(parts[me], group).wait(), parts[:, me]),
        "all_gather uneven": (
            lambda: all_gather_uneven(mine[: sizes[me]], sizes, group).wait(),
            beginnings,
        ),
        "reduce_scatter uneven": (
            lambda: reduce_scatter_uneven(whole, sizes, group).wait(),
            total[uneven],
        ),
        "all_to_all uneven": (
            lambda: all_to_all_uneven(whole, sizes, coming, group).wait(),
            torch.cat([row[uneven] for row in every]),
        ),
    }


def collectives(doctor: Doctor) -> None:
    """Every collective that training uses, with results that are known, in several types."""
    mesh = doctor.mesh(data=doctor.world)
    group, device, me, world = mesh.group("data"), mesh.device, doctor.rank, doctor.world
    types = [torch.float32, torch.float64, torch.int64]
    types += [torch.bfloat16] if 3 * world <= 256 else []
    for dtype in types:
        for name, (call, wanted) in cases(group, dtype, device).items():
            what = f"{name} {str(dtype).removeprefix('torch.')}"
            doctor.begin(mesh, what)
            right = torch.equal(call(), wanted)
            doctor.find(what, right, "right" if right else f"wrong on rank {me}")
    large = torch.ones(doctor.large // 4 // world * world, device=device)
    timed: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: all_reduce(large, group, "max").wait(),
        "all_gather": lambda: all_gather(large[: len(large) // world], group).wait(),
        "reduce_scatter": lambda: reduce_scatter(large, group).wait(),
        "all_to_all": lambda: all_to_all(large.view(world, -1), group).wait(),
    }
    for name, work in timed.items():
        doctor.begin(mesh, f"speed of {name}")
        taken = seconds(mesh, work, 3)
        rate = bus_bandwidth(name, large.nbytes, world, taken)
        said = f"{rate / 1e9:.2f} GB/s of bus bandwidth, {large.nbytes / 2**20:.0f} MiB"
        doctor.find(f"speed of {name}", True, said, rate=rate, seconds=taken)
    if mesh.device.type == "cuda":
        said = write_flight_record(doctor.folder, me)
        written = said.startswith("flight record in")
        doctor.find("flight record", written, "written" if written else said)
    barrier(mesh.world)
    mesh.close()


def layout(name: str, doctor: Doctor) -> None:
    """Train a small model for two steps in fp64, and compare losses and norms of gradients with one
    rank."""
    # Ranks of a node write at the same time. The name of the file, but not of its folder, decides
    # the order of the data.
    home = doctor.folder / f"data-{doctor.rank}"
    corpus = str(home / "tokens")
    if not home.exists():
        home.mkdir()
        with IndexedDatasetWriter(corpus, np.dtype(np.uint16)) as writer:
            for start in range(40):
                writer.append(((start + 7 * np.arange(100)) % 61).astype(np.uint16))
    more = _EXPERTS if name.endswith("experts") else {}
    kind = "experts" if more else "dense"

    def trained(folder: str, device: str, *overrides: str) -> list[float] | None:
        """Return losses and norms, on the rank that records them."""
        keys = {
            **_MODEL,
            **more,
            "run.dir": doctor.folder / folder,
            "run.device": device,
            "model.layers": 2 * largest_axis(doctor.world),
            "train.global_batch": 2 * doctor.world,
            "data.sources": f"[{{path: {corpus}}}]",
            "parallel.timeout": 2 * doctor.timeout,
            "faults.step_timeout": doctor.timeout,
        }
        config = load(None, [*(f"{key}={value}" for key, value in keys.items()), *overrides])
        alone = folder.startswith("one")
        world = 1 if alone else doctor.world
        path = doctor.folder / folder / "metrics.jsonl"
        if not (alone and (doctor.rank or path.exists())):
            validate_config(config, world)
            train(config, Layout.from_parallel(config.parallel, world), nccl=doctor.nccl)
        if doctor.rank:
            return None
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [row[key] for row in rows for key in ("loss", "grad_norm")]

    wanted = trained(f"one-rank-{kind}", doctor.device, "train.microbatch=1")
    found = trained(re.sub(r"\W+", "-", name), doctor.device, *layouts(doctor.world)[name])
    if wanted is None or found is None:
        doctor.find("losses", None, "")
        return
    worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    said = f"differ from those of one rank by {worst:.1e} at most; {_TOLERANCE:g} is allowed"
    doctor.find("losses", worst <= _TOLERANCE, said, difference=worst)


def abort(doctor: Doctor) -> None:
    """A transfer that hangs is ended, and new groups of the same processes work."""
    mesh = doctor.mesh(data=doctor.world)
    group = mesh.group("data")
    all_reduce(torch.ones(4, device=mesh.device), group).wait()
    hung: object = None
    if doctor.rank == 0:  # the others never start it
        hung = all_reduce(torch.ones(4, device=mesh.device), group)
        mesh.store.set("started", "")
    mesh.store.wait(["started"])
    began = time.monotonic()
    wrong = mesh.end_transfers()
    taken = time.monotonic() - began
    del hung  # its memory was in use until the abort
    mesh.close()
    again = doctor.mesh(data=doctor.world)
    found = all_reduce(torch.ones(4, device=again.device), again.group("data")).wait()
    right = not wrong and bool((found == doctor.world).all())
    doctor.find(
        "restart", right, wrong or f"ended in {taken:.2f} s, new groups work", seconds=taken
    )
    barrier(again.world)
    again.close()


def parts(world: int) -> dict[str, Callable[[Doctor], None]]:
    """Return all parts by name."""
    return {
        "settings": settings,
        "links": links,
        "rings": rings,
        "collectives": collectives,
        **{name: partial(layout, name) for name in layouts(world)},
        "abort": abort,
    }


def run(names: Sequence[str], first: int, doctor: Doctor) -> None:
    """Do these parts, from number `first` on. Ends the process if one fails, as other ranks could
    wait for this one."""
    doctor.part = "start"
    all_parts = parts(doctor.world)
    try:
        # Ranks of other nodes may have come further before a part failed.
        mesh = doctor.mesh(data=doctor.world)
        first = int(all_reduce(torch.tensor(first, device=mesh.device), mesh.world, "min").wait())
        mesh.close()
        for name in names[first:]:
            doctor.part = name
            doctor.tell(begin=name)
            all_parts[name](doctor)
            doctor.tell(end=name)
    except LostRanks as lost:
        if doctor.latest is None:
            raise
        doctor.latest.leave(lost)


def main() -> None:
    """Do the parts that the command line names on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", required=True, help="names, as JSON")
    parser.add_argument("--first", type=int, default=0, help="number of the first part to do")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    allow_abort()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with report_errors(read_global_rank()):
        nccl = configure_nccl(None) if given.device != "cpu" else None  # before CUDA starts
        doctor = Doctor(given.device, given.timeout, given.folder, nccl=nccl)
        run(json.loads(given.parts), given.first, doctor)


if __name__ == "__main__":
    main()
