"""A run whose GPUs have too little memory is refused by the entry before anything is built."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megaframe import automatic
from megaframe.config import load
from megaframe.errors import UserError
from megaframe.layout import Layout
from megaframe.preflight import check_memory

ROOT = Path(__file__).resolve().parents[1]
OLD = ["parallel.zero=0", "train.recompute=none"]


def entry(*arguments, world=8, **environment):
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "WORLD_SIZE": str(world), **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def gpu(monkeypatch):
    """gpu(gib, name): let torch find a GPU with so much memory."""

    def found(gib, name="NVIDIA H100 80GB HBM3"):
        properties = SimpleNamespace(
            total_memory=int(gib * 2**30), name=name, multi_processor_count=132
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)

    return found


def test_a_dry_run_for_a_cluster_that_is_too_small_says_what_fits():
    command = ["--config", "llama3-8b", "--dry-run", "parallel.cluster=h100-ib"]
    status, said, wrong = entry(*command, *OLD)
    assert status == 2 and "memory per rank" in said
    assert "not enough memory: rank 0 needs 174.5 GiB by the plan, and its device (h100)" in wrong
    assert "    parallel.zero=2: 75.3 GiB" in wrong and "--force" in wrong
    status, said, wrong = entry(*command, *OLD, "--force")
    assert (status, wrong) == (0, "")
    assert said.splitlines()[-1].startswith("warning: started by --force without enough memory: ")
    status, said, wrong = entry(*command)
    assert (status, wrong) == (0, "") and "warning" not in said


def test_a_gpu_is_asked_for_its_memory(gpu):
    config, layout = load("llama3-8b"), Layout(data=8)
    gpu(79.1)
    assert check_memory(config, layout) == []
    gpu(67)
    (line,) = check_memory(config, layout)
    assert line.startswith("warning: rank 0 needs 63.9 GiB") and "good to a few percent" in line
    gpu(60)
    with pytest.raises(UserError, match=r"needs 6\d.\d GiB by the plan, .* has 60.0 GiB") as told:
        check_memory(config, layout)
    assert "parallel.zero=3: " in str(told.value)
    (line,) = check_memory(config, layout, force=True)
    assert line.startswith("warning: started by --force without enough memory: rank 0 needs 6")


def test_every_rank_says_the_same(gpu, monkeypatch):
    gpu(60)
    texts = set()
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(UserError) as told:
            check_memory(load("llama3-8b"), Layout(data=8))
        texts.add(str(told.value))
    assert len(texts) == 1


def test_a_run_is_not_checked_for_another_machine_but_a_dry_run_is(gpu):
    config, layout = load("llama3-8b", ["parallel.cluster=b200-ib", *OLD[1:]]), Layout(data=8)
    gpu(60)
    with pytest.raises(UserError, match=r"has 60\.0 GiB"):
        check_memory(config, layout)
    assert check_memory(config, layout, dry_run=True) == []


def test_of_a_chip_of_unknown_speed_only_memory_is_told(gpu):
    gpu(24, "Some Accelerator")
    with pytest.raises(UserError) as told:
        check_memory(load("llama3-8b"), Layout(data=8))
    lines = str(told.value).splitlines()
    assert "has 24.0 GiB" in lines[0] and lines[-1] == "  or run anyway with --force"
    offers = lines[2:-1]
    assert offers and all(re.search(r"=\S+: \d+\.\d GiB$", line) for line in offers)


def test_a_host_is_warned_of(monkeypatch):
    monkeypatch.setattr(automatic, "host_memory", lambda: 4 * 2**30)
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = load("gpt2-1.5b", ["run.device=cpu"])
    (line,) = check_memory(config, Layout(data=2))
    assert line.startswith("warning: not enough memory: rank 0 needs ")
    assert "its device (cpu) has 2.0 GiB" in line
    assert check_memory(load("demo", ["run.device=cpu"]), Layout(data=2)) == []
