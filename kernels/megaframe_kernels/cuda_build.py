"""Builds the CUDA C++ kernels with nvcc.

Imports only the standard library, because `MEGAFRAME_BUILD_CUDA=1 pip install .` runs it where
torch may be missing. That build ahead is for every chip; a build at first use is for the chip that
is present.
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
"""Compute capabilities for which a build ahead compiles."""
_HERE = Path(__file__).parent


class BuildError(RuntimeError):
    """The library could not be built or loaded; the text gives the reason in one line."""


def list_sources() -> list[Path]:
    """Return the .cu files, which are beside the package in a checkout and inside it when
    installed.

    Raises:
        BuildError: If they are not installed.
    """
    for folder in (_HERE / "cuda", _HERE.parent / "cuda"):
        if folder.is_dir():
            return sorted(folder.glob("*.cu"))
    raise BuildError("the CUDA sources are not installed")


def hash_sources(compiler: str = "") -> str:
    """Return a digest of the sources, of `compiler`, and of the type of this machine's
    processor."""
    files = list_sources()
    whole = hashlib.sha256(f"{platform.machine()}\0{compiler}\0".encode())
    for file in (*files, *sorted(files[0].parent.glob("*.cuh"))):
        whole.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def find_nvcc() -> str:
    """Return the path of nvcc: from CUDA_HOME or CUDA_PATH, from PATH, or where CUDA is usually
    installed.

    Raises:
        BuildError: If there is none.
    """
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and Path(home, "bin", "nvcc").is_file():
            return str(Path(home, "bin", "nvcc"))
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise BuildError("there is no nvcc to build the CUDA kernels (set CUDA_HOME)")
    return nvcc


def read_nvcc_version() -> str:
    """Return what `nvcc --version` prints."""
    command = [find_nvcc(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def build(library: Path, chips: Sequence[int]) -> None:
    """Compile the library for these chips.

    Args:
        library: Where to put the library.
        chips: Compute capabilities, such as 90.

    Raises:
        BuildError: If the compiler fails, with its first error.
    """
    targets = [f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in chips]
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        temporary = Path(folder, library.name)
        options = ("-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC,-fvisibility=hidden")
        command = [find_nvcc(), *options, *targets, *map(str, list_sources()), "-o", str(temporary)]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        if completed.returncode:
            lines = (completed.stderr + completed.stdout).splitlines()
            complaints = (line for line in lines if re.search("error|fatal", line, re.IGNORECASE))
            first = next(complaints, "no message")
            raise BuildError(f"nvcc failed: {first.strip()}")
        # Ranks that build at the same time each move a complete file here; the last one stays.
        temporary.replace(library)


def find_prebuilt_library() -> Path:
    """Return the path of a library built in advance. Its name contains the digest of its sources,
    so a stale one is not found."""
    return _HERE / f"_cuda-{hash_sources()}.so"


def find_cached_library(chip: int) -> Path:
    """Return the path of a library built at first use. There is one for each compiler and machine
    type, because a driver may be too old for a newer compiler's code, and different machines may
    share a home."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "megaframe_kernels" / f"cuda-{hash_sources(read_nvcc_version())}-sm{chip}.so"
