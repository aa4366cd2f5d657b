"""Builds the CUDA C++ kernels with nvcc.

Imports nothing but Python, because `MEGAFRAME_BUILD_CUDA=1 pip install .` runs it where torch is
not: a build ahead is for every chip, one at first use for the chip that is there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

CHIPS = (80, 90, 100)
"""Compute capabilities that a build ahead is for."""
_HERE = Path(__file__).parent


class BuildError(RuntimeError):
    """The library could not be built or loaded; the text says why in one line."""


def sources() -> list[Path]:
    """The .cu files, beside the package in a checkout and inside it when installed."""
    for folder in (_HERE / "cuda", _HERE.parent / "cuda"):
        if folder.is_dir():
            return sorted(folder.glob("*.cu"))
    raise BuildError("the CUDA sources are not installed")


def digest(compiler: str = "") -> str:
    """Of all that a build is made from, and of the processor that it is for."""
    files = sources()
    whole = hashlib.sha256(f"{platform.machine()}\0{compiler}\0".encode())
    for file in (*files, *sorted(files[0].parent.glob("*.cuh"))):
        whole.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def find_nvcc() -> str:
    """The compiler: of CUDA_HOME, of the PATH, or where CUDA is usually installed."""
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and Path(home, "bin", "nvcc").is_file():
            return str(Path(home, "bin", "nvcc"))
    found = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if found is None:
        raise BuildError("there is no nvcc to build the CUDA kernels (set CUDA_HOME)")
    return found


def nvcc_version() -> str:
    """What the compiler says of itself."""
    command = [find_nvcc(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def build(library: Path, chips: Sequence[int]) -> None:
    """Compile the library for some chips. Raises BuildError with the compiler's first complaint."""
    targets = [f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in chips]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        options = ("-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden")
        command = [find_nvcc(), *options, *targets, *map(str, sources()), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stderr + done.stdout).splitlines()
            complaints = (line for line in lines if re.search("error|fatal", line, re.IGNORECASE))
            first = next(complaints, "no message")
            raise BuildError(f"nvcc failed: {first.strip()}")
        # Ranks that build at once each put a whole file in place; the last one stays.
        made.replace(library)


def prebuilt() -> Path:
    """Where a build ahead lies; its name holds what it was made from: a stale one is not found."""
    return _HERE / f"_cuda-{digest()}.so"


def cached(chip: int) -> Path:
    """Where a build at first use lies: one for each compiler, as a driver may be too old for what a
    newer one makes, and a home may be shared by machines that differ."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "megaframe_kernels" / f"cuda-{digest(nvcc_version())}-sm{chip}.so"
