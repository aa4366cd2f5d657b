"""The tools that measure links and kernels, run for real on two ranks of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megaframe.plan.cluster import load_cluster

ROOT = Path(__file__).parents[2]
FEW = ["--device", "cpu", "--times", "1", "--smallest", "65536", "--largest", "1048576"]


def run(command, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )


def torchrun(ranks, *given):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), str(ROOT / "tools/measure_links.py"), *given]


def test_measured_links_become_a_cluster(tmp_path):
    done = run(torchrun(2, *FEW, "--write", "mine.yaml"), tmp_path)
    assert done.returncode == 0, done.stderr
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert f"node        {operation}" in done.stdout
    cluster = load_cluster(str(tmp_path / "mine.yaml"))
    assert [(tier.name, tier.size) for tier in cluster.tiers] == [("node", 2)]
    assert 1e7 < cluster.tiers[0].bandwidth < 1e12


def test_links_of_each_axis_are_measured(tmp_path):
    done = run(torchrun(4, *FEW, "--tensor", "2"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tensor      all_gather" in done.stdout and "data        all_gather" in done.stdout


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--chip", "h1000"], "--chip h1000 is unknown; use h100"),
        ([], "links need 2 ranks or more"),
        (["--smallest", "64", "--largest", "64"], "--smallest 64 must be at least 4 and less than"),
    ],
)
def test_wrong_questions_about_links(given, said, tmp_path):
    done = run([sys.executable, str(ROOT / "tools/measure_links.py"), *given], tmp_path)
    assert done.returncode == 2 and said in done.stderr


def test_kernels_explain_the_products_they_were_fitted_to(tmp_path):
    command = [sys.executable, str(ROOT / "tools/measure_kernels.py"), "--json", "--device", "cpu"]
    done = run([*command, "--largest", "256", "--precision", "fp32"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found[key] > 0 for key in ("product", "memory", "attention", "launch"))
    assert max(map(abs, found["errors"])) < 1.0
