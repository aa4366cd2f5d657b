"""Device: where this process computes, whether a GPU is left unused, and settings of the host: how
memory is taken and kept, and that a rank that wakes does not preempt another one.

A run never lands on a CPU by accident: if the machine has a GPU that torch cannot use, `auto` is an
error with the reason, which `torch.cuda.is_available` keeps to itself.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from megaframe.errors import UserError

_DRIVERS = {11: 450, 12: 525, 13: 580}
"""First driver branch that runs programs built with a major version of CUDA (NVIDIA, "CUDA
Compatibility", table of minor version compatibility)."""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables with which a user hides GPUs from a program."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of glibc's mallopt (malloc.h)."""
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Variable by which torch's allocator of host memory asks for huge pages
(c10/core/impl/alloc_cpu.cpp). A user who sets it to 0 keeps small ones."""


def read_launcher_number(name: str, default: int, least: int = 0) -> int:
    """Return a number from the environment that a launcher has set.

    Args:
        name: Name of the variable.
        default: The number if the variable is not set.
        least: The least number that is allowed.

    Raises:
        UserError: If the variable is not a whole number from `least` on.
    """
    text = os.environ.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < least:
        raise UserError(
            f"{name}={text[:40]!r} in the environment is not a number from {least} on, as "
            f"launchers set it; without a launcher, leave {name} unset"
        )
    return int(text)


def select_device(requested: str) -> torch.device:
    """Return the torch device of this process and make it current.

    Args:
        requested: `cpu`, `cuda` or `auto` (a GPU for each local rank), or `shared` (the first GPU
            for all of them). `auto` and `shared` use the CPU of a machine without a GPU.

    Raises:
        UserError: `cuda` is requested and there is no GPU, `auto` or `shared` is requested and
            there is one that torch cannot use, or this local rank has none.
    """
    if requested == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = explain_unusable_gpu()
        if requested == "cuda":
            why = f": {reason}" if reason else ""
            raise UserError(
                f"run.device=cuda, but torch sees no GPU here{why}; use run.device=cpu or auto"
            )
        if reason:
            raise UserError(
                f"run.device={requested} finds no GPU that it can use, although this machine has "
                f"one: {reason}; or use run.device=cpu to train on the CPU"
            )
        return torch.device("cpu")
    local, count = read_launcher_number("LOCAL_RANK", 0), torch.cuda.device_count()
    if requested == "shared":
        local = 0
    if local >= count:
        raise UserError(
            f"local rank {local} has no GPU: this machine has {count}; "
            f"start torchrun with --nproc-per-node {count} or fewer, or let ranks share one "
            "(run.device=shared: slow, for trying layouts)"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device


def explain_unusable_gpu(root: Path = Path("/")) -> str | None:
    """Return why torch cannot use a GPU that this machine has, and what to do; None if the machine
    has none, or if the user hides it (`explain_hidden_gpu`).

    Only device files count: a driver alone may be that of the host of a container, which was given
    none of its GPUs. Call it if torch sees no GPU.

    Args:
        root: The root of the file system.
    """
    makers = list(_find_gpu_makers(root))
    if not makers or _find_hiding_variable() is not None:
        return None
    version = torch.__version__
    built = {"NVIDIA": torch.version.cuda, "AMD": torch.version.hip}
    if not any(built[maker] for maker in makers):
        kind = "CUDA" if "NVIDIA" in makers else "ROCm"
        other = " or ".join(name for name in ("CUDA", "ROCm") if built[_MAKER[name]])
        return (
            f"torch {version} is built for {other or 'CPUs only'}, and this is a GPU of "
            f"{makers[0]}; install torch's {kind} build (pytorch.org/get-started)"
        )
    driver, cuda = read_driver_version(root), torch.version.cuda
    if "NVIDIA" in makers and driver and cuda:
        least = _DRIVERS.get(int(cuda.partition(".")[0]), max(_DRIVERS.values()))
        if int(driver.partition(".")[0]) < least:
            return (
                f"the NVIDIA driver {driver} is too old for CUDA {cuda} of torch {version}, which "
                f"needs driver {least} or later; install one, or a torch built with an older CUDA"
            )
    return f"torch {version} cannot start it: {_read_torch_error()}"


def explain_hidden_gpu(root: Path = Path("/")) -> str | None:
    """Return why a run uses the CPU beside a GPU that torch is not meant to see, or None.

    The user hides it by a variable, or only its driver is here, as in a container without GPUs.

    Args:
        root: The root of the file system.
    """
    hiding = _find_hiding_variable()
    if hiding is not None and any(_find_gpu_makers(root)):
        return f"{hiding}={os.environ[hiding]} hides the GPUs of this machine"
    if not any(_find_gpu_makers(root)) and (driver := read_driver_version(root)):
        return (
            f"the NVIDIA driver {driver} is loaded, but there is no GPU among the devices; a "
            "container needs to be given GPUs (docker run --gpus all)"
        )
    return None


_MAKER = {"CUDA": "NVIDIA", "ROCm": "AMD"}


def _find_gpu_makers(root: Path) -> Iterator[str]:
    """Yield the makers of GPUs whose device files are there. In WSL NVIDIA's is `dxg`, next to a
    library of the driver."""
    if any(re.fullmatch(r"nvidia\d+", path.name) for path in root.glob("dev/nvidia*")) or (
        (root / "dev/dxg").exists() and (root / "usr/lib/wsl/lib/libcuda.so.1").exists()
    ):
        yield "NVIDIA"
    if (root / "dev/kfd").exists():
        yield "AMD"


def _find_hiding_variable() -> str | None:
    """Return the variable with which the user hides all GPUs, or None."""
    return next((name for name in _HIDING if os.environ.get(name) in ("", "-1", "none")), None)


def read_driver_version(root: Path) -> str | None:
    """Return the version of the loaded NVIDIA driver, or None."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", text)
    return version[1] if version else None


def _read_torch_error() -> str:
    """Return why torch cannot initialise CUDA, in the first line of its own words."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "it finds no device, and does not say why"


def read_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes of this machine's memory, or of the least limit on this process if that is
    less: of its container, or of a group of processes that it is in. root: as for
    `explain_unusable_gpu`."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = ("memory.max", "memory.limit_in_bytes")  # of the second and the first version
    return min([memory, *_read_limits(root, files)])


def read_host_swap(root: Path = Path("/")) -> int:
    """Return the bytes of this machine's swap, or of the least limit on this process if that is
    less. root: as for `explain_unusable_gpu`."""
    with suppress(OSError, ValueError, IndexError):
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        swap = 1024 * int(text.partition("SwapTotal:")[2].split()[0])
        return min([swap, *_read_limits(root, ("memory.swap.max",))])
    return 0


def _read_limits(root: Path, files: Sequence[str]) -> Iterator[int]:
    """Yield the limits in these files of the control groups of this process, from the innermost
    outward. In a container the outermost is at the root, whatever its name outside."""
    lines: list[str] = []
    with suppress(OSError, ValueError):
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    base = root / "sys/fs/cgroup"
    for number, controllers, group in (
        line.split(":", 2) for line in ("0::/", *lines) if line.count(":") >= 2
    ):
        if number != "0" and "memory" not in controllers.split(","):
            continue
        inner = PurePosixPath(group.lstrip("/"))
        if ".." in inner.parts:
            continue  # outside of what this process sees
        for folder in (inner, *inner.parents):
            for path in (base / folder, base / "memory" / folder):
                for file in files:
                    with suppress(OSError, ValueError):  # ValueError: there is no limit
                        yield int((path / file).read_text(encoding="utf-8"))


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return x on a device. A copy to a GPU goes through pinned memory, because the host would wait
    for a copy from pageable memory."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def set_deterministic() -> None:
    """Make torch use deterministic algorithms only. Call it before anything is created that reads
    this setting once, such as a cuBLAS handle or an NCCL group."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Otherwise torch would fill every empty tensor first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def tune_host_allocator() -> None:
    """Take less of a step's time for memory on a CPU: glibc keeps up to 128 MiB of what a step
    frees (another C library does as it likes), and torch takes huge pages for tensors over 2 MiB
    (where Linux lets programs choose them). torch reads its setting at the first tensor of the
    process, so call this before.

    By default glibc returns the end of the heap to the system in every step and takes it back page
    by page, which costs a small model 5 to 10% of its time. Tensors over 10 MiB get pages of their
    own, which leaves no holes in the heap; as small pages, the system would hand them out one by
    one in every step, for another 4 to 8% of its time (docs/log.md).
    """
    os.environ.setdefault(_HUGE_PAGES, "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 10 << 20)
        mallopt(_TRIM_THRESHOLD, 128 << 20)


def use_batch_scheduling() -> None:
    """On Linux, use batch scheduling, so that a process that wakes up waits until this one pauses
    or its time slice ends. Threads and processes that this thread starts later inherit the policy.

    By default a rank that gets a message preempts the rank that sends it. The sender then holds the
    lock of a gloo connection while its own second thread spins on that lock. With more ranks than
    processors, this took half of their time (docs/log.md).
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # some containers allow no change
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
