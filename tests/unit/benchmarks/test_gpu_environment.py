"""The check of a GPU in an environment like that of a node without a network: it has torch and what
comes with it, and not all that megaframe needs. What is missing comes from a folder of wheels.

The environment consists of links to the packages that these tests run with, so nothing is
downloaded. The versions are therefore those of these tests.
"""

import os
import re
import subprocess
import venv
import zipfile
from importlib import metadata

import pytest
from repo_copy import copy_tracked

HAS = (
    *("torch", "triton", "numpy", "pytest", "hypothesis", "safetensors", "sentencepiece"),
    *("PyYAML", "rich", "xxhash"),
)
LACKS = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "orjson")


def list_with_required(names):
    """Return distributions and all that they need here, by name."""
    found, left = {}, [*names]
    while left:
        name = re.split(r"[ ;<>=!~\[(]", left.pop())[0].lower()
        if name in found or name in LACKS:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another system, or of an extra
        left += [line for line in found[name].requires or () if "extra ==" not in line]
    return found


def make_environment(folder):
    """Make an environment whose packages are links, with pip, which unpacks wheels. Return its
    Python."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in list_with_required((*HAS, "pip")).values():
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(distribution.locate_file(top))
    return folder / "bin" / "python"


def write_wheels(folder):
    """Write what the environment lacks as wheels, from what is installed here."""
    folder.mkdir()
    for name in LACKS:
        distribution = metadata.distribution(name)
        stem = f"{name.replace('-', '_')}-{distribution.version}-py3-none-any"
        with zipfile.ZipFile(folder / f"{stem}.whl", "w") as wheel:
            for file in distribution.files or ():
                if ".." not in file.parts and file.suffix != ".pyc":
                    wheel.write(distribution.locate_file(file), str(file))


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """node(*arguments) calls the check in a checkout of such a node, whose folder it has."""
    folder = tmp_path_factory.mktemp("node")
    python, checkout = make_environment(folder / "environment"), folder / "checkout"
    checkout.mkdir()
    copy_tracked(checkout)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = {**kept, "MEGAFRAME_COMMIT": "copy"}

    def run(*arguments):
        command = [python, "benchmarks/gpu/gpu_check.py", "--dry", *arguments]
        return subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True
        )

    run.checkout = checkout
    return run


def test_what_is_missing_is_said_first(node):
    process = node("--steps", "smoke")
    assert process.returncode == 1 and not process.stdout
    assert process.stderr.startswith("missing packages: orjson pydantic. ")


@pytest.mark.slow
def test_the_check_runs_with_what_an_image_with_torch_has(node, tmp_path):
    write_wheels(node.checkout / ".wheels")
    steps = ("smoke", "products", "graphs", "constants")
    process = node("--seconds", "3600", "--write", str(tmp_path), "--steps", *steps)
    assert process.returncode == 0, process.stdout + process.stderr
    first = process.stdout.splitlines()[0]
    assert first.startswith("not in this environment, used from .wheels/: ")
    assert {path.stem for path in tmp_path.iterdir()} == {*steps}
