"""What each rank of `tools/doctor.py --ranks` does: links, rings, collectives, layouts, an abort.

Started by tools/doctor_ranks.py, with the environment that torchrun sets. Findings are written line
by line to a file, so that they survive the end of the process. A rank that fails ends; megaframe's
watchdog tells the others, and also ends and names what hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from doctor_ranks import choose_axis_size, list_layouts
from doctor_transfers import Doctor, check_collectives, check_links, check_rings

from megaframe import __version__
from megaframe.config import load
from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter
from megaframe.distributed.collectives import all_reduce, barrier
from megaframe.distributed.mesh import read_global_rank, read_local_world_size
from megaframe.distributed.nccl_settings import allow_abort, configure_nccl
from megaframe.errors import LostRanks, report_errors
from megaframe.io.closed_output import allow_closed_output
from megaframe.training.auto_layout import resolve_config
from megaframe.training.restart import run_attempts

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
    "metrics.peak_tflops": 1.0,
    "kernels.matmul": "torch",
    **{f"kernels.{key}": "reference" for key in ("elementwise", "attention", "loss", "update")},
}
_EXPERTS = {"model.moe": "{experts: 4, top_k: 2, ffn: 32}", "kernels.experts": "reference"}


def compare_settings(doctor: Doctor) -> None:
    """Compare versions, devices and settings, which should be the same on all ranks."""
    mesh = doctor.make_mesh(data=doctor.world)
    device = mesh.device
    own_settings: dict[str, object] = {
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
        properties = torch.cuda.get_device_properties(device)
        others = range(torch.cuda.device_count())
        own_settings |= {
            "device": torch.cuda.get_device_name(device),
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "cuda": torch.version.cuda or torch.version.hip,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "peers": [
                other
                for other in others
                if other != device.index and torch.cuda.can_device_access_peer(device.index, other)
            ],
        }
    settings_of_all: list[Any] = [None] * doctor.world
    if doctor.world > 1:
        dist.all_gather_object(
            settings_of_all, own_settings, group=mesh.make_control_group().handle
        )
    for name in ("torch", "megaframe", "device", "cuda", "nccl", "variables"):
        values = [settings.get(name) for settings in settings_of_all]
        if not any(values):
            continue
        odd = [rank for rank, value in enumerate(values) if value != values[0]]
        summary = values[0] if not isinstance(values[0], dict) else f"{len(values[0])} set"
        text = f"{summary} on all ranks" if not odd else f"differs on ranks {odd} from rank 0"
        doctor.report(name, not odd, text)
    for line in doctor.nccl.lines if doctor.nccl is not None and device.type == "cuda" else ():
        doctor.report(line.partition(" ")[2], True, "")
    doctor.report(
        "ranks", True, f"{doctor.world}, {read_local_world_size()} on a node", ranks=settings_of_all
    )
    mesh.close()


def check_layout(name: str, doctor: Doctor) -> None:
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

    def train_model(folder: str, device: str, *overrides: str) -> list[float] | None:
        """Return losses and norms, on the rank that records them."""
        keys = {
            **_MODEL,
            **more,
            "run.dir": doctor.folder / folder,
            "run.device": device,
            "model.layers": 2 * choose_axis_size(doctor.world),
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
            config, layout, _ = resolve_config(config, world)
            run_attempts(config, layout, nccl=doctor.nccl)
        if doctor.rank:
            return None
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [row[key] for row in rows for key in ("loss", "grad_norm")]

    expected = train_model(f"one-rank-{kind}", doctor.device, "train.microbatch=1")
    values = train_model(
        re.sub(r"\W+", "-", name), doctor.device, *list_layouts(doctor.world)[name]
    )
    if expected is None or values is None:
        doctor.report("losses", None, "")
        return
    largest_error = max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
    text = (
        f"differ from those of one rank by {largest_error:.1e} at most; {_TOLERANCE:g} is allowed"
    )
    doctor.report("losses", largest_error <= _TOLERANCE, text, difference=largest_error)


def check_abort(doctor: Doctor) -> None:
    """Check that a transfer that hangs is ended, and that new groups of the same processes work."""
    mesh = doctor.make_mesh(data=doctor.world)
    group = mesh.group("data")
    all_reduce(torch.ones(4, device=mesh.device), group).wait()
    hung: object = None
    if doctor.rank == 0:  # the others never start it
        hung = all_reduce(torch.ones(4, device=mesh.device), group)
        mesh.store.set("started", "")
    mesh.store.wait(["started"])
    began = time.monotonic()
    wrong = mesh.end_transfers()
    seconds = time.monotonic() - began
    del hung  # its memory was in use until the abort
    mesh.close()
    new_mesh = doctor.make_mesh(data=doctor.world)
    reduced = all_reduce(torch.ones(4, device=new_mesh.device), new_mesh.group("data")).wait()
    right = not wrong and bool((reduced == doctor.world).all())
    doctor.report(
        "restart", right, wrong or f"ended in {seconds:.2f} s, new groups work", seconds=seconds
    )
    barrier(new_mesh.world)
    new_mesh.close()


def list_parts(world: int) -> dict[str, Callable[[Doctor], None]]:
    """Return all parts by name."""
    return {
        "settings": compare_settings,
        "links": check_links,
        "rings": check_rings,
        "collectives": check_collectives,
        **{name: partial(check_layout, name) for name in list_layouts(world)},
        "abort": check_abort,
    }


def run(names: Sequence[str], first: int, doctor: Doctor) -> None:
    """Do these parts. Ends the process if one fails, as other ranks could wait for this one.

    Args:
        names: The parts, in order.
        first: Number of the part to begin with.
        doctor: What they report to.
    """
    doctor.part = "start"
    all_parts = list_parts(doctor.world)
    try:
        # Ranks of other nodes may have come further before a part failed.
        mesh = doctor.make_mesh(data=doctor.world)
        first = int(all_reduce(torch.tensor(first, device=mesh.device), mesh.world, "min").wait())
        mesh.close()
        for name in names[first:]:
            doctor.part = name
            doctor.write_line(begin=name)
            all_parts[name](doctor)
            doctor.write_line(end=name)
    except LostRanks as error:
        if doctor.latest is None:
            raise
        doctor.latest.leave(error)


def main() -> None:
    """Do the parts that the command line names on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", required=True, help="names, as JSON")
    parser.add_argument("--first", type=int, default=0, help="number of the first part to do")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--timeout", type=float, default=120.0)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    allow_abort()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with report_errors(read_global_rank()):
        nccl = configure_nccl(None) if arguments.device != "cpu" else None  # before CUDA starts
        doctor = Doctor(arguments.device, arguments.timeout, arguments.folder, nccl=nccl)
        run(json.loads(arguments.parts), arguments.first, doctor)


if __name__ == "__main__":
    with allow_closed_output():
        main()
