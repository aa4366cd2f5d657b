"""Launching Triton kernels: on a GPU, in Triton's interpreter, or for a compiler without a GPU.

Every launch goes through `launch`, so that `capture_launches` can collect what a wrapper would
launch for given shapes. The ahead-of-time compiler thus compiles exactly what a GPU would run, with
the types, block sizes and warps that the wrapper chose; there is no second list of signatures to
maintain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter. It is fixed when this module is imported."""
if INTERPRETED:
    from megaframe_kernels import interpreter

    interpreter.patch_interpreter()
_INTERPRETED_PROCESSORS = 3
_TYPICAL_PROCESSORS = 132


@dataclass(frozen=True)
class Launch:
    """A launch: the kernel, its positional arguments, its constants by name, and its options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Sequence[Any]
    constants: dict[str, Any]
    warps: int
    stages: int


@dataclass(frozen=True)
class _Capture:
    take: Callable[[Launch], None]
    chip: int


_CAPTURE: ContextVar[_Capture | None] = ContextVar("capture", default=None)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int = 4,
    stages: int = 2,
    **constants: Any,
) -> None:
    """Run a Triton kernel over a grid of programs; an empty grid runs nothing.

    Args:
        kernel: A `triton.jit` function.
        grid: Number of programs in each dim.
        arguments: The positional arguments; the first tensor's device is the one to launch on.
        warps: Per program.
        stages: Of the software pipeline, in Triton's sense.
        constants: The `tl.constexpr` arguments, by name.
    """
    # The driver does not accept an empty grid.
    if 0 in grid:
        return
    capture = _CAPTURE.get()
    if capture is not None:
        capture.take(Launch(kernel, grid, arguments, constants, warps, stages))
        return
    # Triton launches on the current device, which may not be that of the tensors.
    place = next(a.device for a in arguments if isinstance(a, Tensor))
    if place.type == "cuda" and place.index != torch.cuda.current_device():
        with torch.cuda.device(place):
            kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)
    else:
        kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)


@contextmanager
def capture_launches(take: Callable[[Launch], None], chip: int) -> Iterator[None]:
    """Pass launches for a chip (its compute capability, such as 90) to `take` instead of running
    them."""
    token = _CAPTURE.set(_Capture(take, chip))
    try:
        yield
    finally:
        _CAPTURE.reset(token)


def read_generation(tensor: Tensor) -> int:
    """Return the generation of matrix units for which to shape a kernel: 8 (Ampere and similar), 9
    or 10."""
    capture = _CAPTURE.get()
    if capture is not None:
        return capture.chip // 10
    if tensor.device.type != "cuda":
        return 8
    major = read_capability(tensor.device.index)[0]
    # Any generation without block sizes of its own gets those of Ampere.
    return {9: 9, 10: 10, 11: 10}.get(major, 8)


@functools.lru_cache
def read_shared_memory(index: int) -> int:
    """Return how many bytes of shared memory a program may use on this GPU."""
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


@functools.lru_cache
def _count_gpu_processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def count_processors(tensor: Tensor) -> int:
    """Return the number of multiprocessors of the tensor's GPU; for a meta tensor, that of an
    H200."""
    if tensor.device.type == "cuda":
        return _count_gpu_processors(tensor.device.index)
    return _INTERPRETED_PROCESSORS if tensor.device.type == "cpu" else _TYPICAL_PROCESSORS


@functools.lru_cache
def read_capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(index)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is at least `number`, which must be at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(number: int, by: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // by)


def flatten_rows(x: Tensor) -> Tensor:
    """Return x as rows [rows, width] with adjacent elements. It is copied only if necessary."""
    # With a width of 0, torch cannot infer the number of rows.
    flat = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
