"""The whole check of a GPU, in tiny sizes, in an environment like that of a node without a network:
it has torch and what comes with it, and not all that megaframe needs. What is missing comes from a
folder of wheels.

The environment consists of links to the packages that these tests run with, so nothing is
downloaded. The versions are therefore those of these tests.
"""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata

import pytest
from repo_copy import ROOT, copy_tracked

sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import training_gpu
from gpu_steps import STEPS
from megaframe_kernels.registry import KERNELS

HAS = (
    *("torch", "triton", "numpy", "pytest", "hypothesis", "safetensors", "sentencepiece"),
    *("PyYAML", "rich", "xxhash"),
)
LACKS = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection", "orjson")
ALIKE = ("gpt", "layouts", "sparse-slice")
"""Steps that start in a dry run what `gpt2`, `graphs` and `slice` start."""
STEP_NAMES = [step.name for step in STEPS if step.name not in ALIKE]


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
    names = ("PATH", "HOME", "OMP_NUM_THREADS")
    kept = {name: os.environ[name] for name in names if name in os.environ}
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


@pytest.fixture(scope="module")
def result(node, tmp_path_factory):
    """Return the result of a dry run of all steps but those that are `ALIKE`."""
    write_wheels(node.checkout / ".wheels")
    path = tmp_path_factory.mktemp("check") / "result.json"
    process = node("--seconds", "7200", "--write", str(path), "--steps", *STEP_NAMES)
    assert process.returncode == 0, process.stdout + process.stderr
    first = process.stdout.splitlines()[0]
    assert first.startswith("not in this environment, used from .wheels/: ")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_everything_runs_and_every_kernel_is_right(result):
    measured = {m["kernel"] for m in result["measurements"]}
    assert measured == set(KERNELS) - {"scaled_product"} == set(result["active"])
    assert not result["left_out_for_time"]
    assert set(result["steps"]) == {*STEP_NAMES}
    assert all(step["whole"] for step in result["steps"].values())
    for m in result["measurements"]:
        refused = m["trouble"] is not None and m["details"] is None
        assert refused or (m["trouble"] is None and m["error"] < 0.02), m
        assert refused or m["forward"]["seconds"] > 0, m
    triton = [m for m in result["measurements"] if m["implementation"] == "triton"]
    assert all(m["trouble"] is None for m in triton)
    assert result["order"]["router"] == ["triton"] == result["active"]["router"][:1]
    assert {choice["kernel"] for choice in result["chosen_over_best"]} >= {"attention", "norm"}
    assert result["smoke"]["loss_fp32"] == pytest.approx(result["smoke"]["cpu_loss"], rel=1e-4)
    assert {tests["outcome"] for tests in result["tests"].values()} == {"passed"}
    assert result["constants"]["product"] > 0


@pytest.mark.slow
def test_rows_run_and_both_contenders_start_alike(result):
    rows = {row["row"]: row for row in result["training"]}
    left_out = {row for step in STEPS if step.name in ALIKE for row in step.rows}
    expected = [row for row in training_gpu.ROWS if row.name not in left_out]
    assert set(rows) == {row.name for row in expected}
    for row in (rows[row.name] for row in expected if row.peer):
        assert row["same_start"], row
        for name in ("ours", "plain"):
            assert row[name]["host_seconds_per_step"] > 0 and row[name]["tflops_causal"] > 0
        assert row["ours"]["parts"]["compute"] > 0
        assert sum(row["ours"]["waterfall"].values()) == pytest.approx(1.0)
    few, many = rows["moe-slice-host"]["ours"]["host_seconds"]
    assert rows["moe-slice-host"]["ours"]["host_seconds_per_block"] == (many - few) / 4
