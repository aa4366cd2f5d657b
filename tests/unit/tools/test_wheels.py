"""Packages for nodes without a network: what is missing, and how it is used from `.wheels/`."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"
USE = """
import sys
from pathlib import Path
import wheels
wheels.list_required = lambda: dict.fromkeys(sys.argv[2:])
print(wheels.use_wheels(Path(sys.argv[1])), flush=True)
import subprocess
if "absent-part" in sys.argv:
    child = "import absent_part; print(absent_part.WHERE, flush=True)"
    subprocess.run([sys.executable, "-c", child], check=True)
import numpy
print(Path(numpy.__file__).parent.parent.name)
"""


def write_wheel(folder, name, tag="py3-none-any"):
    """Write a wheel whose module says in WHERE that it was imported."""
    module, folder_of_facts = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{module}-1.0-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{module}.py", "WHERE = 'from the wheel'\n")
        facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        wheel.writestr(f"{folder_of_facts}/METADATA", facts)
        wheel.writestr(f"{folder_of_facts}/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
        wheel.writestr(f"{folder_of_facts}/RECORD", "")


def use(folder, *names):
    command = [sys.executable, "-c", USE, str(folder), *names]
    environment = {"PYTHONPATH": str(TOOLS), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_missing_package_is_imported_from_its_wheel_here_and_in_children(tmp_path):
    folder = tmp_path / "wheels"
    write_wheel(folder, "absent-part")
    write_wheel(folder, "numpy")  # which this environment has: its own stays in use
    for _ in range(2):  # unpacked, and found unpacked
        process = use(folder, "absent-part", "numpy")
        assert process.returncode == 0, process.stderr
        line, child, place = process.stdout.splitlines()
        assert line == "not in this environment, used from wheels/: absent-part"
        assert child == "from the wheel" and place == "site-packages"
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 1


def test_nothing_is_said_or_made_if_nothing_is_missing(tmp_path):
    write_wheel(tmp_path / "wheels", "absent-part")
    process = use(tmp_path / "wheels", "numpy", "torch")
    assert process.stdout.splitlines() == ["None", "site-packages"], process.stderr
    assert len(list((tmp_path / "wheels").iterdir())) == 1


@pytest.mark.parametrize("tag", [None, "cp33-cp33m-manylinux1_x86_64"], ids=["none", "another"])
def test_what_is_missing_is_one_line_that_says_how_to_bring_it(tmp_path, tag):
    folder = tmp_path / "wheels"
    if tag:
        write_wheel(folder, "absent-part", tag)
    process = use(folder, "absent-part", "numpy")
    assert process.returncode == 1 and process.stdout == ""
    (line,) = process.stderr.strip().splitlines()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert line.startswith("missing packages: absent-part. With a network: pip install")
    assert f"`make wheels PYTHON={version}`" in line
    assert ("was of no use: ERROR: No matching distribution found" in line) == bool(tag)
    assert not folder.exists() or len(list(folder.iterdir())) == 1


def test_what_is_required_is_what_the_project_names_without_what_torch_brings():
    command = [sys.executable, "-c", "import wheels; print(*wheels.list_required())"]
    output = subprocess.check_output(command, text=True, cwd=TOOLS)
    assert {"pydantic", "numpy", "pyyaml", "safetensors"} <= set(output.split())
    assert not {"torch", "triton"} & set(output.split())


@pytest.mark.parametrize("python", ["3.12", sys.executable])
def test_the_python_of_the_nodes_is_a_version_or_a_program(python):
    command = [sys.executable, "-c", f"import wheels; print(wheels.read_version({python!r}))"]
    assert re.fullmatch(r"3\.\d+\n", subprocess.check_output(command, text=True, cwd=TOOLS))


def test_a_python_that_does_not_run_is_named():
    process = subprocess.run(
        [sys.executable, str(TOOLS / "wheels.py"), "--python", "python9"],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 1 and "PYTHON=python9 is neither" in process.stderr
