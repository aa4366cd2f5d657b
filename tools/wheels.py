"""Bring the packages that a node without a network lacks: `make wheels PYTHON=3.12`.

Many nodes with GPUs have an image with torch and reach no package index. This collects the wheels
of everything else that megaframe needs in `.wheels/`: names from `pyproject.toml`, versions from
`constraints.txt`. On the node `use_wheels` unpacks those that are missing beside the wheels, where
only the process that asked for them and what it starts look; the environment stays as it is.
Nothing here imports more than Python's standard library.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / ".wheels"
WITH_TORCH = ("torch", "triton")
"""Packages that an image for GPUs brings itself, built for its CUDA."""
_GLIBC = (17, 28)
"""Minor versions of glibc 2: wheels for the oldest that is in use, and for torch's own."""


def list_required(project: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Return the requirements of megaframe that do not come with torch, by their names.

    Where megaframe is installed instead of checked out, whoever installed it has brought them.
    """
    if not project.is_file():
        return {}
    # Python 3.10 has no reader of its own, but its pip has one.
    toml = importlib.import_module(
        "tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli"
    )
    listed = toml.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    texts = [text.partition(";")[0].strip() for text in listed]
    required = {normalize(re.split(r"[<>=!~\[ ]", text)[0]): text for text in texts}
    return {name: text for name, text in required.items() if name not in WITH_TORCH}


def normalize(name: str) -> str:
    """Return the name of a distribution as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_installed(name: str) -> bool:
    """Return whether this Python finds a distribution of that name."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def list_missing() -> list[str]:
    """Return the required packages that this Python does not find."""
    return [name for name in list_required() if not is_installed(name)]


def use_wheels(folder: Path = WHEELS) -> str | None:
    """Make missing packages importable from a folder of wheels, here and in child processes.

    Returns:
        None if nothing is missing; else a line that says what was missing and where it was found.

    Raises:
        SystemExit: Packages are missing that the folder does not have, with the way to bring them.
    """
    if not (missing := list_missing()):
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = {normalize(path.name.split("-")[0]) for path in folder.glob("*.whl")}
    names = sorted(name for name in wheels if not is_installed(name))
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:8]
    unpacked = folder / f"python{version}-{digest}"
    trouble = None if unpacked.is_dir() or not names else _unpack(folder, names, unpacked)
    _add_to_path(unpacked)
    if not (lacking := list_missing()):
        return f"not in this environment, used from {folder.name}/: {', '.join(missing)}"
    packages = " ".join(lacking)
    sys.exit(
        f"missing packages: {packages}. With a network: pip install -c constraints.txt {packages}. "
        f"Without one: `make wheels PYTHON={version}` in a checkout on a machine that has one "
        f"collects them in {folder.name}/; copy that folder into this checkout"
        + (f". The one that is here was of no use: {trouble}" if trouble else "")
    )


def _unpack(folder: Path, names: Sequence[str], target: Path) -> str | None:
    """Unpack some packages out of a folder of wheels. Return what went wrong."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--disable-pip-version-check", "--find-links", str(folder), *names, "--target"]
    # What pip is told on this machine could name other places to look at.
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    with tempfile.TemporaryDirectory(dir=folder) as new:
        made = Path(new) / "packages"
        completed = subprocess.run(
            [*command, str(made)], capture_output=True, text=True, env=environment
        )
        if completed.returncode:
            lines = completed.stderr.strip().splitlines()
            return lines[-1] if lines else f"pip ended with {completed.returncode}"
        with suppress(OSError):  # another rank was faster
            made.rename(target)
    return None


def _add_to_path(folder: Path) -> None:
    # It has only what the environment lacks: a child looks here before it looks there.
    sys.path.append(str(folder))
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*inherited, str(folder)])
    importlib.invalidate_caches()


def collect(version: str, machine: str, folder: Path) -> None:
    """Download the wheels of all required packages and of what they require.

    Args:
        version: Of the Python that will use them, such as 3.12.
        machine: Its processor, such as x86_64 or aarch64.
    """
    first, last = _GLIBC
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(last, first - 1, -1)]
    command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--python-version"]
    command += [version, "--implementation", "cp", "--dest", str(folder)]
    command += [f"--platform={name}" for name in (*platforms, f"manylinux2014_{machine}")]
    command += ["--constraint", str(ROOT / "constraints.txt"), *list_required().values()]
    if subprocess.run(command).returncode:
        sys.exit(f"pip could not download every wheel for Python {version} on {machine} (above)")
    print(f"{folder}: {len(list(folder.glob('*.whl')))} wheels for Python {version} on {machine}")


def read_version(python: str) -> str:
    """Return the version of Python, given itself or as a program that is asked for its own.

    Raises:
        SystemExit: It is neither.
    """
    if re.fullmatch(r"3\.\d+", python):
        return python
    question = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.check_output([python, "-c", question], text=True)
    except (OSError, subprocess.CalledProcessError):
        sys.exit(f"PYTHON={python} is neither a version such as 3.12 nor a Python that runs here")
    return answer.strip()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="python3", help="version, or a program that has it")
    parser.add_argument("--machine", default=platform.machine(), help="processor of the node")
    parser.add_argument("--folder", type=Path, default=WHEELS)
    arguments = parser.parse_args()
    collect(read_version(arguments.python), arguments.machine, arguments.folder)


if __name__ == "__main__":
    main()
