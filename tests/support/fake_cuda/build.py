"""Compiles the C++ part of the stand-in, once for each version of its sources."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from fake_cuda.stubs import build_stubs

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]
_TORCH = Path(torch.__file__).parent
_NAME = "fake_cuda.so"
_OTHER_VERSIONS = ("2.11.0",)
"""Of torch, beside the pinned one, whose internals are as the stand-in expects."""


def explain_obstacle():
    """Return why the stand-in cannot run here, or None if it can."""
    pinned = re.search(r"^torch==(\S+)", (_ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    versions = (*_OTHER_VERSIONS, pinned)
    if torch.version.hip:
        return "the stand-in is for a build of torch with CUDA or without GPUs"
    if torch.__version__.split("+")[0] not in versions:
        known = " and ".join(versions)
        return f"the stand-in uses internals of torch {known}; this is {torch.__version__}"
    if sys.platform != "linux":
        return "the stand-in needs Triton, and Triton needs Linux"
    if shutil.which("g++") is None:
        return "there is no g++ to compile the stand-in"
    return None


def build_library():
    """Return the path of the compiled library. It is compiled first if its sources have changed."""
    digest = hashlib.sha256(f"{torch.__version__} {_TORCH}".encode())
    for source in sorted((*_HERE.glob("*.h"), *_HERE.glob("*.cpp"), _HERE / "stubs.py")):
        digest.update(source.read_bytes())
    folder = _ROOT / "build" / f"fake_cuda-{digest.hexdigest()[:16]}"
    if not folder.exists():
        _compile(folder)
    return folder / _NAME


def _compile(target):
    """Write the library, and what it stands for, to a folder: all of it or nothing."""
    target.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        folder = Path(temporary, target.name)
        folder.mkdir()
        command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", str(_HERE / "fake_cuda.cpp")]
        command += build_stubs(_TORCH / "lib", folder)
        command += [f"-I{_TORCH}/include", f"-L{_TORCH}/lib", f"-Wl,-rpath,{_TORCH}/lib"]
        command += ["-ltorch_cpu", "-lc10", "-o", str(folder / _NAME)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the stand-in does not compile:\n{done.stderr[-4000:]}")
        try:
            folder.rename(target)
        except OSError:  # unless somebody else has compiled it at the same time
            if not target.exists():
                raise


if __name__ == "__main__":
    if explain_obstacle() is None:
        build_library()
