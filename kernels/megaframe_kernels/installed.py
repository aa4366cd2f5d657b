"""Which other libraries are installed that can run a kernel.

Nothing is imported to find out, so a broken library cannot break a run that does not use it. The
PyPI package `apex` is not NVIDIA's library of that name, which is built from source; the contents
of the package's folder tell them apart.
"""

from __future__ import annotations

import functools
import importlib.util
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch
import triton

Chosen = TypeVar("Chosen")


def require_nothing() -> None:
    """Return None: torch and Triton are always available."""


def check_triton(least: tuple[int, int]) -> str | None:
    """Return why a kernel that needs at least this version of Triton cannot be used, or None."""
    numbers = tuple(int(n) for n in triton.__version__.split(".")[:2])
    if numbers < least:
        return f"Triton {triton.__version__} does not compile it; {least[0]}.{least[1]} does"
    return None


def choose_for_triton(newer: Chosen, before_3_7: Chosen) -> Chosen:
    """Return what a kernel is compiled with: registers that suffice with one version of Triton may
    not with another, as `python -m megaframe_kernels.ahead` shows.

    Args:
        newer: With Triton 3.7 and later.
        before_3_7: With 3.5 and 3.6.
    """
    return newer if check_triton((3, 7)) is None else before_3_7


@functools.lru_cache
def _find_folder(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@functools.lru_cache
def check_liger() -> str | None:
    """Return why Liger-Kernel cannot be used, or None."""
    return None if _find_folder("liger_kernel") else "Liger-Kernel is not installed: liger-kernel"


@functools.lru_cache
def check_flash_attention() -> str | None:
    """Return why the package flash-attn cannot be used, or None."""
    return None if _find_folder("flash_attn") else "flash-attn is not installed"


@functools.lru_cache
def check_apex() -> str | None:
    """Return why NVIDIA's apex cannot be used, or None."""
    folder = _find_folder("apex")
    if folder is None:
        return "NVIDIA apex is not installed"
    if not (folder / "multi_tensor_apply").is_dir():
        return "the installed package `apex` is not NVIDIA's, which is built from its repository"
    if importlib.util.find_spec("amp_C") is None:
        return "NVIDIA apex was installed without its CUDA extensions"
    return None


@functools.lru_cache
def check_bitsandbytes() -> str | None:
    """Return why bitsandbytes cannot be used, or None."""
    if _find_folder("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    version = metadata.version("bitsandbytes")
    if tuple(int(n) for n in version.split(".")[:2]) < (0, 50):
        return f"bitsandbytes {version} was not tried; 0.50 is what it needs"
    return None


def check_cuda() -> str | None:
    """Return why nothing can run on a GPU, or None."""
    return None if torch.cuda.is_available() else "torch sees no GPU"


def read_versions() -> dict[str, str]:
    """Return the versions of torch, Triton and the installed libraries."""
    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    libraries = "liger-kernel", "flash-attn", "apex", "transformer-engine", "bitsandbytes"
    for package in ("triton", *libraries):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
