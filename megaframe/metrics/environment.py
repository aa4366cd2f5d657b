"""The environment of a run, written next to its config so that two runs can be compared."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megaframe import __version__
from megaframe.config import TrainConfig
from megaframe.distributed.mesh import Mesh, read_local_world_size
from megaframe.io.output_files import OutputFiles
from megaframe.io.run_files import ENVIRONMENT_FILE
from megaframe.ops import cpu_attention, matmul
from megaframe.parameters.parameter import PRECISIONS


def write_environment(
    files: OutputFiles, train: TrainConfig, mesh: Mesh, kernels: Mapping[str, Any]
) -> None:
    """Write the environment into the run folder, over that of an earlier process.

    Args:
        files: Those of the run.
        train: Has the precision of the run.
        mesh: The mesh of its ranks.
        kernels: Which are used, and why not faster ones.
    """
    environment = {**describe_environment(train, mesh), "kernels": kernels}
    files.write(ENVIRONMENT_FILE, json.dumps(environment, indent=1) + "\n")


def describe_environment(train: TrainConfig, mesh: Mesh) -> dict[str, Any]:
    """Return names and values. They include the command as it was typed, with its overrides."""
    device = mesh.device
    environment: dict[str, Any] = {
        "ranks": mesh.layout.world,
        "layout": str(mesh.layout),
        "ranks on the first node": read_local_world_size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "host": platform.node(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads of a rank": torch.get_num_threads(),
        "python": platform.python_version(),
        "megaframe": __version__,
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
        "commit": _find_commit(),
    }
    if device.type == "cpu":
        dtype = PRECISIONS[train.precision].compute
        environment["instructions"] = torch.backends.cpu.get_cpu_capability()
        environment["matrix products"] = matmul.get_libraries_in_use(dtype)
        environment["attention"] = cpu_attention.get_methods_in_use(dtype)
    if device.type == "cuda":
        environment["cuda"] = torch.version.cuda or torch.version.hip
        environment["memory of the device"] = torch.cuda.get_device_properties(device).total_memory
    return environment


def _find_commit() -> str | None:
    """Return the commit of the sources, marked if they were changed since; None without git."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None
