"""The CUDA C++ kernels of `kernels/cuda`: a library that is built at first use and cached.

Its functions take addresses, lengths and a stream, and use nothing of torch. It therefore builds in
seconds, and one build works with every version of torch. If it cannot be built, one line says why,
and other implementations run instead.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from megaframe_kernels.cuda_build import (
    CHIPS,
    BuildError,
    build,
    find_cached_library,
    find_prebuilt_library,
)

_POINTER, _LENGTH = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "megaframe_probe": (ctypes.c_int, ()),
    "megaframe_expert_order_blocks": (ctypes.c_int, (_LENGTH,)),
    "megaframe_expert_order": (
        ctypes.c_int,
        (_POINTER, _LENGTH, ctypes.c_int, *([_POINTER] * 5)),
    ),
}


def load(library: Path) -> ctypes.CDLL:
    """Load a built library and declare the types of its functions.

    Args:
        library: Path of the library.

    Raises:
        BuildError: If it does not load.
    """
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"the built CUDA kernels do not load: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        # A library that lacks one of the functions loads too.
        function = getattr(loaded, name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
    return loaded


@functools.lru_cache
def _find() -> ctypes.CDLL | str:
    """Return the library, built if necessary, or the reason why there is none."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    major, minor = torch.cuda.get_device_capability()
    chip = 10 * major + minor
    try:
        # A build ahead has machine code for CHIPS only; others are built for the chip at hand.
        path = (
            find_prebuilt_library()
            if find_prebuilt_library().is_file() and chip in CHIPS
            else find_cached_library(chip)
        )
        if not path.is_file():
            build(path, (chip,))
        loaded = load(path)
    except (BuildError, OSError) as error:
        return str(error)
    # Loading succeeds even if the driver is too old; only a call shows it.
    code = loaded.megaframe_probe()
    return loaded if code == 0 else f"the CUDA kernels find no GPU that they can use: error {code}"


def explain_missing_library() -> str | None:
    """Return why the CUDA kernels cannot be used, or None. Builds them if necessary."""
    library = _find()
    return library if isinstance(library, str) else None


def call(name: str, like: Tensor, *arguments: object) -> None:
    """Call a function of the library on a tensor's GPU; the GPU's stream is its last argument.

    Args:
        name: The function's name.
        like: A tensor on the GPU.
        arguments: Those before the stream.

    Raises:
        BuildError: If there is no library.
        RuntimeError: If the function returns a CUDA error.
    """
    library = _find()
    if isinstance(library, str):
        raise BuildError(library)
    if like.device.type == "cuda":
        with torch.cuda.device(like.device):
            # torch's stream orders the kernels after the work that makes their inputs.
            stream = torch.cuda.current_stream(like.device).cuda_stream
            code = getattr(library, name)(*arguments, stream)
    else:
        code = getattr(library, name)(*arguments, None)
    if code:
        raise RuntimeError(f"{name} ended with CUDA error {code}")


def count(name: str, *arguments: object) -> int:
    """Return the result of a function of the library that launches nothing.

    Raises:
        BuildError: If the library cannot be loaded.
    """
    library = _find()
    if isinstance(library, str):
        raise BuildError(library)
    return getattr(library, name)(*arguments)
