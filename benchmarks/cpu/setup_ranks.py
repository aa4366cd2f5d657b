"""How long the set-up of a rank takes with up to 4,096 ranks, on torch's fake process group on a
CPU.

Nothing is transferred, so this measures the work of one rank without waiting for others: its
process groups (every rank creates those of all ranks in torch, in the same order); its part of the
model with optimizer and schedule (on tensors without content); its reader of the data; and what
only rank 0 does when a checkpoint is saved: joining what all ranks have written, writing the
manifest and reading it back. Each world runs in its own process, in turns. The layout has 8 tensor
and 4 pipeline ranks; the rest are data ranks at ZeRO stage 1, with a batch that grows with them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import ROOT, Spread, describe_measurement

WORLDS = (64, 512, 1024, 2048, 4096)
CONFIG = "llama3-8b.yaml"
TENSOR, PIPELINE = 8, 4
WORK = ("groups", "model", "data", "manifest")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=WORLDS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, help="write all measurements as JSON to this file")
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.world is not None:
        print(json.dumps(measure(arguments.world)))
        return
    results: dict[int, list[dict[str, float]]] = {world: [] for world in arguments.worlds}
    for _ in range(arguments.rounds):
        for world in arguments.worlds:
            results[world].append(run_in_process(world))
    lines = {
        world: {name: Spread.of([run[name] for run in runs]) for name in runs[0]}
        for world, runs in results.items()
    }
    show(lines)
    if arguments.write:
        document = {
            **describe_measurement(),
            "config": {"model": CONFIG, "tensor": TENSOR, "pipeline": PIPELINE, "zero": 1},
            "worlds": {
                world: {name: asdict(spread) for name, spread in line.items()}
                for world, line in lines.items()
            },
        }
        arguments.write.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {arguments.write}")


def run_in_process(world: int) -> dict[str, float]:
    """Return what a fresh process measures."""
    command = [sys.executable, __file__, f"--world={world}"]
    variables = {"OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": str(world)}
    completed = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if completed.returncode:
        sys.exit(f"{world} ranks failed:\n{completed.stderr[-3000:]}")
    measured: dict[str, float] = json.loads(completed.stdout.strip().splitlines()[-1])
    return measured


def measure(world: int) -> dict[str, float]:
    """Return the seconds of each kind of work on rank 0, and the bytes that it added to the
    process's peak memory."""
    import warnings

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megaframe.config import load
    from megaframe.data.loader import Loader
    from megaframe.distributed.mesh import Mesh
    from megaframe.layout import Layout
    from megaframe.training.meta_step import MetaTensorMode
    from megaframe.training.train_step import TrainStep

    class Fake(Mesh):
        """The process groups of all ranks in torch, without any other rank."""

        def _join_rendezvous(self) -> dist.Store:
            dist.init_process_group(
                "fake", store=FakeStore(), rank=self.rank, world_size=self.layout.world
            )
            return dist.HashStore()

        def _make_handle(
            self, ranks: tuple[int, ...], backend: str | None
        ) -> dist.ProcessGroup | None:
            return dist.new_group(ranks, backend="fake")

    data = world // (TENSOR * PIPELINE)
    seconds: dict[str, float] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        before, start = _read_peak(), time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start
        seconds[f"{name} bytes"] = _read_peak() - before
        return result

    with tempfile.TemporaryDirectory() as folder:
        config = load(
            str(ROOT / "configs" / CONFIG),
            [
                f"parallel.tensor={TENSOR}",
                f"parallel.pipeline={PIPELINE}",
                "parallel.zero=1",
                f"train.global_batch={8 * data}",
                "train.microbatch=1",
                f"data.sources=[{{path: {_write_corpus(Path(folder))}}}]",
                "train.seq=64",
                "data.split=[1, 0, 0]",
                f"run.dir={folder}/run",
            ],
        )
        layout = Layout.from_parallel(config.parallel, world)

        def make_groups() -> Mesh:
            result = Fake(layout, device="cpu")
            result.connect(link for a in range(PIPELINE - 1) for link in ((a, a + 1), (a + 1, a)))
            return result

        mesh = measure("groups", make_groups)

        def make_model() -> TrainStep:
            # The mesh has this rank alone, so tensors need no content.
            with MetaTensorMode(), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return TrainStep(config, Mesh(layout, alone=0), lambda part: nullcontext())

        train_step = measure("model", make_model)
        group = mesh.group("data")
        measure("data", lambda: Loader(config, group.index, group.size).close())
        slices = sum(1 for _ in train_step.optimizer.list_tensors(owned=True))
        seconds["slices"] = slices
        seconds["manifest size"] = measure("manifest", lambda: _measure_manifest(world, slices))
    torch.distributed.destroy_process_group()
    return seconds


def _read_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _write_corpus(folder: Path) -> Path:
    """Write a few documents, from which samples are drawn without end."""
    import numpy as np

    from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter

    with IndexedDatasetWriter(str(folder / "tokens"), np.dtype(np.uint16)) as writer:
        for _ in range(8):
            writer.append(np.arange(4096, dtype=np.uint16))
    return folder / "tokens"


def _measure_manifest(world: int, slices: int) -> int:
    """Join, write and read the manifest of this many slices of every rank. Return its size in
    bytes."""
    from megaframe.checkpoint.manifest import (
        Manifest,
        SavedFile,
        SavedSlice,
        SavedTensor,
        decode_manifest,
        encode_manifest,
        merge_tensors,
    )

    width = 4096
    parts = []
    for rank in range(world):
        file = f"rank-{rank:05d}.safetensors"
        row = SavedSlice(file=file, offset=(rank, 0), shape=(1, width), checksum="0" * 16)
        tensor = SavedTensor(shape=(world, width), dtype="F32", slices=(row,))
        parts.append({f"blocks.{index}.weight": tensor for index in range(slices)})
    files = {
        f"rank-{rank:05d}.safetensors": SavedFile(bytes=slices * width * 4, header="0" * 16)
        for rank in range(world)
    }
    data = encode_manifest(Manifest(step=1, state={}, files=files, tensors=merge_tensors(parts)))
    decode_manifest(data, Path("manifest"))
    return len(data)


def show(lines: dict[int, dict[str, Spread]]) -> None:
    """Print the medians as a table of seconds and megabytes."""
    print(f"{'ranks':>7}" + "".join(f"{name:>22}" for name in (*WORK, "together")))
    for world, line in lines.items():
        cells = [
            f"{line[name].median:.3f} s {line[f'{name} bytes'].median / 1e6:6.0f} MB"
            for name in WORK
        ]
        total = sum(line[name].median for name in WORK)
        print(f"{world:>7}" + "".join(f"{cell:>22}" for cell in (*cells, f"{total:.2f} s")))


if __name__ == "__main__":
    main()
