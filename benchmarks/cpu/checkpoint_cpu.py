"""Saving and loading a sharded state, compared with torch.distributed.checkpoint and a plain write.

Two ranks hold 1.07 GB in fp32, some rows of each of 32 tensors, and take turns in the same
processes. Measured are: a write of the same bytes with fsync; our `save`, until it is on disk and
`latest` names it, so that a resumed run finds it; `save, read back`, until it has also been read
back from disk, which completes it; dcp's save, which flushes too; loads of both by the same rows,
and of ours by columns too, from disk and from the page cache; and steps (matrix products, then an
update of the state) that start with a background save. The `blocked` time is what the save takes
from a step: in the call, and before the update. The duration of a step alone and of one with a save
is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import ROOT, Spread, describe_measurement

RANKS = 2
TENSORS, ROWS, COLUMNS = 32, 4096, 2048
BYTES = TENSORS * ROWS * COLUMNS * 4
CHUNK = 8 << 20
RATIOS = {
    "save / write": ("write", "save"),
    "save, read back / write": ("write", "save, read back"),
    "save / dcp save": ("dcp save", "save"),
    "save, read back / dcp save": ("dcp save", "save, read back"),
    "load / dcp load": ("dcp load", "load"),
    "load / dcp load, cached": ("dcp load, cached", "load, cached"),
    "columns / rows": ("load", "load by columns"),
    "columns / rows, cached": ("load, cached", "load by columns, cached"),
    "blocked / dcp blocked": ("dcp blocked", "blocked"),
}
"""Speed of the second divided by that of the first."""

Measured = dict[str, list[float]]
"""Seconds of the slower rank by what was done, one number per round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(json.dumps(measure(arguments.folder, arguments.rounds)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        first, second = start(folder, arguments.rounds)
    seconds = {name: [*map(max, first[name], second[name])] for name in first}
    show(seconds)
    if arguments.write:
        document = {
            **describe_measurement(),
            "config": {"ranks": RANKS, "bytes": BYTES, "rounds": arguments.rounds},
            "summary": {name: asdict(Spread.of(values)) for name, values in seconds.items()},
            "ratios": {
                name: asdict(compute_ratio(seconds, *pair)) for name, pair in RATIOS.items()
            },
            "seconds": seconds,
        }
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def start(folder: str, rounds: int) -> list[Measured]:
    """Start the ranks and return what each measured."""
    from megaframe.io.local_rendezvous import find_free_port

    port = find_free_port()
    ranks = []
    for rank in range(RANKS):
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        rank_variables = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
        shared_variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "PYTHONPATH": paths,
        }
        options = [f"--rank={rank}", f"--rounds={rounds}", f"--folder={folder}"]
        command = [sys.executable, __file__, *options]
        environment = {**os.environ, **rank_variables, **shared_variables}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed")
    return [json.loads(answer.strip().splitlines()[-1]) for answer in answers]


def measure(folder: Path, rounds: int) -> Measured:
    """Measure everything on one rank, once per round. Of the first round only the stalls are
    recorded, under names of their own."""
    import torch

    from megaframe.distributed.collectives import barrier
    from megaframe.distributed.mesh import Mesh
    from megaframe.layout import Layout

    torch.set_num_threads(1)
    mesh = Mesh(Layout(data=RANKS), device="cpu", timeout=300)
    contenders = (
        PlainWrite(folder, mesh),
        MegaframeCheckpoint(folder, mesh),
        TorchCheckpoint(folder, mesh),
    )
    seconds: Measured = {}
    for number in range(1 + rounds):
        for contender in contenders:
            for name, act in contender.iterate_operations():
                os.sync()
                barrier(mesh.world)
                began = time.perf_counter()
                reported = act()
                barrier(mesh.world)
                durations = reported or {name: time.perf_counter() - began}
                for operation, value in durations.items():
                    if number:
                        seconds.setdefault(operation, []).append(value)
                    elif "blocked" in operation:
                        seconds.setdefault(f"{operation}, first", []).append(value)
    mesh.close()
    return seconds


class CheckpointedState:
    """The state of one rank, and a step that updates it."""

    def __init__(self, folder: Path, mesh: Any) -> None:
        import torch

        self.mesh, self.rank = mesh, mesh.rank
        self.folder = folder / type(self).__name__
        rows = ROWS // RANKS
        self.state = {f"w{i}": torch.rand(rows, COLUMNS) for i in range(TENSORS)}
        self.matrix = torch.rand(1024, 1024)

    def compute(self) -> None:
        """Compute the forward and backward passes of a step."""
        for _ in range(60):
            self.matrix = (self.matrix @ self.matrix).div_(self.matrix.abs().max())

    def update(self) -> None:
        for tensor in self.state.values():
            tensor.mul_(0.999)

    def step(
        self, begin: Callable[[], None], until_copied: Callable[[], None]
    ) -> tuple[float, float]:
        """Return the seconds of a step and of what blocks it."""
        start = time.perf_counter()
        begin()
        begun = time.perf_counter()
        self.compute()
        worked = time.perf_counter()
        until_copied()
        copied = time.perf_counter()
        self.update()
        return time.perf_counter() - start, begun - start + copied - worked

    def clear(self) -> None:
        """Delete everything that the last save left."""
        from megaframe.distributed.collectives import barrier

        barrier(self.mesh.world)
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir()
        barrier(self.mesh.world)

    def evict_from_cache(self) -> None:
        """Drop the files from the page cache."""
        os.sync()
        for path in self.folder.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_into_cache(self) -> None:
        """Read the files into the page cache; each rank reads its half."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        for path in paths[self.rank :: RANKS]:
            with open(path, "rb", buffering=0) as file:
                while file.read(CHUNK):
                    pass


class PlainWrite(CheckpointedState):
    """Plain bytes."""

    def iterate_operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        self.clear()
        yield "write", self.write
        self.step(lambda: None, lambda: None)
        yield "", lambda: {"step": self.step(lambda: None, lambda: None)[0]}

    def write(self) -> None:
        with open(self.folder / str(self.rank), "xb", buffering=0) as file:
            for tensor in self.state.values():
                data = tensor.reshape(-1).numpy().data.cast("B")
                for start in range(0, len(data), CHUNK):
                    file.write(data[start : start + CHUNK])
            os.fsync(file.fileno())


class MegaframeCheckpoint(CheckpointedState):
    """megaframe."""

    def __init__(self, folder: Path, mesh: Any) -> None:
        from megaframe.checkpoint import CheckpointWriter

        super().__init__(folder, mesh)
        arguments = {"rank": self.rank, "world": RANKS, "store": mesh.store}
        self.writer, self.number = CheckpointWriter(self.folder, **arguments, keep=1), 0

    def iterate_operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        self.clear()
        yield "", self.save
        self.evict_from_cache()
        yield "load", self.load
        yield "load by columns", self.load_columns
        self.read_into_cache()
        yield "load, cached", self.load
        yield "load by columns, cached", self.load_columns
        self.clear()
        yield "", self.save_during_step
        self.writer.wait()

    def list_slices(self) -> list[Any]:
        from megaframe.checkpoint import Slice

        offset = (self.rank * ROWS // RANKS, 0)
        return [Slice(n, (ROWS, COLUMNS), offset, t) for n, t in self.state.items()]

    def begin(self) -> None:
        self.number += 1
        self.writer.save(self.number, self.list_slices(), {})

    def save(self) -> dict[str, float]:
        from megaframe.checkpoint.folder import read_pointer
        from megaframe.checkpoint.stores.store import format_checkpoint_name

        began = time.perf_counter()
        self.begin()
        while read_pointer(self.folder) != format_checkpoint_name(self.number):
            time.sleep(0.002)
        named = time.perf_counter()
        self.writer.wait()
        return {"save": named - began, "save, read back": time.perf_counter() - began}

    def load(self) -> None:
        self._load(self.list_slices())

    def load_columns(self) -> None:
        from megaframe.checkpoint import Slice

        width = COLUMNS // RANKS
        views = {name: tensor.view(ROWS, width) for name, tensor in self.state.items()}
        offset = (0, self.rank * width)
        self._load([Slice(name, (ROWS, COLUMNS), offset, view) for name, view in views.items()])

    def _load(self, slices: list[Any]) -> None:
        from megaframe.checkpoint import find_checkpoint, open_checkpoint

        path = find_checkpoint(self.folder, "latest")
        assert path is not None
        with open_checkpoint(path) as checkpoint:
            # A run passes the slices that only this rank keeps in the same way.
            checkpoint.load(slices, {(part.name, part.box) for part in slices})

    def save_during_step(self) -> dict[str, float]:
        step, blocked = self.step(self.begin, self.writer.wait_for_copy)
        return {"step with save": step, "blocked": blocked}


class TorchCheckpoint(CheckpointedState):
    """torch.distributed.checkpoint, with DTensors."""

    def __init__(self, folder: Path, mesh: Any) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        super().__init__(folder, mesh)
        self.dcp = dcp
        self.future: Future[Any]
        grid = init_device_mesh("cpu", (RANKS,))
        self.sharded = {
            name: DTensor.from_local(tensor, grid, [Shard(0)])
            for name, tensor in self.state.items()
        }

    def iterate_operations(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        self.clear()
        yield "dcp save", self.save
        self.evict_from_cache()
        yield "dcp load", self.load
        self.read_into_cache()
        yield "dcp load, cached", self.load
        self.clear()
        yield "", self.save_during_step
        self.future.result()

    def save(self) -> None:
        self.dcp.save(self.sharded, checkpoint_id=self.folder)

    def load(self) -> None:
        self.dcp.load(self.sharded, checkpoint_id=self.folder)

    def begin(self) -> None:
        future = self.dcp.async_save(self.sharded, checkpoint_id=self.folder)
        assert isinstance(future, Future)
        self.future = future

    def save_during_step(self) -> dict[str, float]:
        step, blocked = self.step(self.begin, lambda: None)
        return {"dcp step with save": step, "dcp blocked": blocked}


def compute_ratio(seconds: Measured, baseline: str, other: str) -> Spread:
    """Return how many times as fast `other` is, over the rounds."""
    return Spread.of([a / b for a, b in zip(seconds[baseline], seconds[other], strict=True)])


def show(seconds: Measured) -> None:
    for name, values in seconds.items():
        spread = Spread.of(values)
        rate = f"{BYTES / spread.median / 1e9:8.2f} GB/s"
        rate = rate if any(word in name for word in ("save", "load", "write")) else ""
        rate = "" if "step" in name or "blocked" in name else rate
        print(f"{name:<30}{spread.median:8.3f} s ({spread.low:.3f}-{spread.high:.3f}){rate}")
    print()
    for name, pair in RATIOS.items():
        spread = compute_ratio(seconds, *pair)
        medians = [statistics.median(seconds[operation]) for operation in pair]
        print(
            f"{name:<30}{medians[0] / medians[1]:8.2f}   "
            f"({spread.low:.2f}-{spread.high:.2f} in rounds)"
        )


if __name__ == "__main__":
    main()
