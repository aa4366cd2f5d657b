"""A run folder of somebody else: its links and pipes lead nowhere, and its page shows no file from
outside of it. A folder that its user has linked works."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_folders import make_lines, write
from tool_process import run_tool

from megaframe.data.indexed_dataset_writer import IndexedDatasetWriter

SECRET = "root:x:hunter22"
KEYS = (
    *("model.layers=1", "model.hidden=16", "model.heads=2", "model.vocab=257", "train.seq=8"),
    *("train.global_batch=2", "train.microbatch=2", "train.precision=fp32", "kernels.matmul=torch"),
    *("run.device=cpu", "checkpoint.every=2", "metrics.peak_tflops=1"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    with IndexedDatasetWriter(str(folder / "tokens"), np.dtype(np.uint16)) as writer:
        for number in range(30):
            writer.append(np.arange(20) + number)
    process = train(folder, "train.steps=2")
    assert process.returncode == 0, process.stderr
    return folder


def train(folder, *overrides):
    paths = (f"run.dir={folder}/run", f"data.sources=[{{path: {folder}/tokens}}]")
    return run_tool("pretrain_gpt.py", *KEYS, *paths, *overrides)


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of it, reached through a link, beside a file that must not change."""
    shutil.copytree(trained, tmp_path / "copy")
    (tmp_path / "copy/run").rename(tmp_path / "disk")
    (tmp_path / "copy/run").symlink_to(tmp_path / "disk")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/file").write_text(SECRET)
    yield tmp_path / "copy"
    assert os.listdir(tmp_path / "victim") == ["file"]
    assert (tmp_path / "victim/file").read_text() == SECRET


def test_a_resume_replaces_links(folder):
    names = ("config.yaml", "environment.json")
    for name in names:
        (folder / "run" / name).unlink()
        (folder / "run" / name).symlink_to(folder.parent / "victim/file")
    process = train(folder, "train.steps=4", "checkpoint.resume=latest")
    assert process.returncode == 0, process.stderr
    assert not any((folder / "run" / name).is_symlink() for name in names)
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "name", ["run.log", "metrics.jsonl", "faults", "faults/ledger.jsonl", "checkpoints"]
)
def test_a_resume_appends_to_no_link(folder, name):
    path = folder / "run" / name
    if path.is_dir():
        shutil.rmtree(path) if name == "faults" else path.rename(folder / "elsewhere")
    else:
        path.unlink()
    target = {"faults": folder.parent / "victim", "checkpoints": folder / "elsewhere"}
    path.symlink_to(target.get(name, folder.parent / "victim/file"))
    process = train(folder, "train.steps=4", "checkpoint.resume=latest")
    assert process.returncode == 2, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ") and str(path) in line and "link" in line
    assert not (folder / "elsewhere/step-00000004").exists()


def test_a_resume_waits_for_no_pipe(folder):
    (folder / "run/config.yaml").unlink()
    os.mkfifo(folder / "run/config.yaml")
    process = train(folder, "train.steps=4", "checkpoint.resume=latest")
    # What cannot be written ends no run, but is said, and the run does not end well.
    assert process.returncode == 2 and "config.yaml (Not a regular file)" in process.stderr


@pytest.mark.parametrize("config", ["extends", "link", "cluster"])
def test_a_page_shows_nothing_from_outside(tmp_path, config):
    run = write(tmp_path / "run", make_lines(20))
    secret = tmp_path / "secret.yaml"
    secret.write_text(f"{SECRET}: hunter22\nhunter22\n")
    written = ("report.md", "report.html", "dashboard.html")
    (tmp_path / "victim").write_text("precious")
    for name in written:
        (run / name).symlink_to("../victim")
    settings = {"extends": str(secret)} if config == "extends" else {}
    settings |= {"parallel": {"cluster": str(secret)}} if config == "cluster" else {}
    (run / "config.yaml").write_text(json.dumps({**settings, "model": {"vocab": 257}}))
    if config == "link":
        for name in ("config.yaml", "environment.json"):
            (run / name).unlink()
            (run / name).symlink_to("../secret.yaml")
    for tool in ("report", "dashboard"):
        process = run_tool(f"tools/{tool}.py", run)
        assert process.returncode == 0, process.stderr
        assert "hunter22" not in process.stdout + process.stderr
        if config == "extends":
            assert "extends: refused in a run folder" in process.stdout
    assert (tmp_path / "victim").read_text() == "precious"
    for name in written:
        assert not (run / name).is_symlink()
        assert "hunter22" not in Path(run / name).read_text()
