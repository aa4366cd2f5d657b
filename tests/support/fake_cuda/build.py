"""Compiles the C++ part of the stand-in, once for each version of its sources."""

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[2]
_TORCH = Path(torch.__file__).parent


def explain_obstacle():
    """Return why the stand-in cannot run here, or None if it can."""
    pinned = (_ROOT / "constraints.txt").read_text()
    pinned_version = re.search(r"^torch==(\S+)", pinned, re.MULTILINE)[1]
    if torch.version.cuda or torch.version.hip:
        return "the stand-in is for a build of torch without GPUs"
    if torch.__version__.split("+")[0] != pinned_version:
        return f"the stand-in uses internals of torch {pinned_version}; this is {torch.__version__}"
    if sys.platform != "linux":
        return "the stand-in needs Triton, and Triton needs Linux"
    if shutil.which("g++") is None:
        return "there is no g++ to compile the stand-in"
    return None


def build_library():
    """Return the path of the compiled library. It is compiled first if its sources have changed."""
    digest = hashlib.sha256(torch.__version__.encode())
    for source in sorted((*_HERE.glob("*.h"), *_HERE.glob("*.cpp"))):
        digest.update(source.read_bytes())
    library_path = _ROOT / "build" / f"fake_cuda-{digest.hexdigest()[:16]}.so"
    if not library_path.exists():
        _compile(library_path)
    return library_path


def _compile(target):
    target.parent.mkdir(exist_ok=True)
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", str(_HERE / "fake_cuda.cpp")]
    command += [f"-I{_TORCH}/include", f"-L{_TORCH}/lib", f"-Wl,-rpath,{_TORCH}/lib"]
    command += ["-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        temporary = Path(folder, target.name)
        done = subprocess.run([*command, "-o", str(temporary)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the stand-in does not compile:\n{done.stderr[-4000:]}")
        temporary.replace(target)  # complete, whoever else compiles at the same time


if __name__ == "__main__":
    if explain_obstacle() is None:
        build_library()
