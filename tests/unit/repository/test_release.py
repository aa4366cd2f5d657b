"""A wheel has everything that a run needs, and works in a fresh environment, from any folder."""

import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest
import yaml
from megaframe_kernels import cuda_library
from megaframe_kernels.cuda_build import BuildError, find_nvcc, find_prebuilt_library
from repo_copy import ROOT, copy_tracked

from megaframe import __version__
from megaframe.config import load
from megaframe.errors import UserError

PACKED = (".py", ".json", ".css", ".js", ".typed", ".cu", ".cuh", ".yaml", ".sh")
PLACES = {
    "megaframe/": "megaframe/",
    "kernels/megaframe_kernels/": "megaframe_kernels/",
    "kernels/cuda/": "megaframe_kernels/cuda/",
    "configs/clusters/": "megaframe_configs/clusters/",
    "tools/": "megaframe_tools/",
    "tools/launch/": "megaframe_tools/launch/",
    "tools/launch/kubernetes/": "megaframe_tools/launch/kubernetes/",
}


def run(command, **options):
    process = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    assert process.returncode == 0, f"{command}\n{process.stdout}\n{process.stderr}"
    return process.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a copy of what git tracks."""
    return copy_tracked(tmp_path_factory.mktemp("source"))


def build_wheel(source, folder, **options):
    """Build the wheel of a source tree in `folder`; return its path."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    run([*pip, "--no-index", "-w", folder, source], **options)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(source):
    return source, build_wheel(source, source / "dist")


def test_the_wheel_has_every_file_that_is_imported_or_read(wheel):
    source, built = wheel
    packed = set(zipfile.ZipFile(built).namelist())
    expected = {"pretrain_gpt.py"}
    expected |= {f"megaframe_configs/{path.name}" for path in (source / "configs").glob("*.yaml")}
    for folder, place in PLACES.items():
        below = folder in ("megaframe/", "kernels/megaframe_kernels/")
        paths = (source / folder).rglob("*") if below else (source / folder).glob("*")
        expected |= {
            place + path.relative_to(source / folder).as_posix()
            for path in paths
            if path.is_file() and path.suffix in PACKED
        }
    assert not expected - packed
    assert {"megaframe/dashboard/page.css", "megaframe_kernels/choices.json"} <= packed
    assert not [name for name in packed if name.startswith(("tests", "docs", "benchmarks"))]


@pytest.mark.slow
def test_a_wheel_with_the_cuda_kernels_is_for_its_platform_and_they_load(wheel, tmp_path):
    try:
        find_nvcc()
    except BuildError as error:
        pytest.skip(str(error))
    source, plain = wheel
    assert plain.name.endswith("-py3-none-any.whl")
    environment = {**os.environ, "MEGAFRAME_BUILD_CUDA": "1"}
    built = build_wheel(source, tmp_path / "dist", env=environment)
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert built.name.endswith(f"-py3-none-{machine}.whl")
    zipfile.ZipFile(built).extractall(tmp_path / "here")
    library = tmp_path / "here/megaframe_kernels" / find_prebuilt_library().name
    assert cuda_library.load(library).megaframe_expert_order_blocks(10_000) > 0
    assert not list((source / "kernels/megaframe_kernels").glob("*.so"))


def test_the_version_stands_in_one_place_and_is_in_the_changes(wheel):
    packed = zipfile.ZipFile(wheel[1])
    (name,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(packed.read(name))
    assert metadata["Version"] == __version__ and metadata["Requires-Python"] == ">=3.10"
    assert {"data", "hf", "evaluate", "dev"} <= set(metadata.get_all("Provides-Extra"))
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, re.MULTILINE)[0] == __version__
    assert f'"{__version__}"' not in (ROOT / "pyproject.toml").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


@pytest.mark.slow
def test_a_wheel_runs_in_an_environment_of_its_own_from_another_folder(wheel, tmp_path):
    """Only megaframe is installed there; other packages are this environment's, to save minutes."""
    venv.create(tmp_path / "fresh", with_pip=False)
    python = tmp_path / "fresh/bin/python"
    (site_packages,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    (site_packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    options = {"cwd": elsewhere, "env": environment}
    run([*pip, "--no-index", "--no-compile", wheel[1]], **options)
    entry = tmp_path / "fresh/bin/megaframe"
    assert str(site_packages) in run(
        [python, "-c", "import megaframe; print(megaframe.__file__)"], **options
    )
    assert run([entry, "--version"], **options) == f"megaframe {__version__}\n"
    assert "parameters" in run([entry, "--config", "demo", "--dry-run"], **options)
    plan = ["-m", "megaframe_tools.plan", "--config", "llama3-8b", "--gpus", 8]
    assert json.loads(run([python, *plan, "parallel.zero=3", "--json"], **options))["fits"]


def test_a_config_of_ours_is_found_by_its_name():
    assert load("gpt2-124m") == load(str(ROOT / "configs/gpt2-124m.yaml"))
    with pytest.raises(UserError, match="no such file or shipped config; use llama3-8b"):
        load("lama3-8b")
