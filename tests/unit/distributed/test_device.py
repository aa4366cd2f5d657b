"""The device of a rank, GPUs that a run would leave unused, and what a rank requests from its
host."""

import os
import subprocess
import sys

import pytest
import torch
from patience import PATIENCE

from megaframe.distributed import device
from megaframe.distributed.device import (
    explain_hidden_gpu,
    explain_unusable_gpu,
    read_host_memory,
    read_host_swap,
    select_device,
)
from megaframe.distributed.mesh import Mesh
from megaframe.errors import UserError
from megaframe.layout import Layout


@pytest.mark.skipif(sys.platform != "linux", reason="schedulers of Linux")
def test_no_thread_of_a_rank_takes_the_processor_of_another(pool):
    for policies in pool.run(2, read_thread_policies):
        assert len(policies) > 3
        assert set(policies) == {os.SCHED_BATCH}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pages of Linux")
def test_large_tensors_of_a_run_on_a_cpu_lie_on_whole_pages():
    """torch can give them huge pages only if it knows of it before its first tensor, so nothing
    that a run imports may make one. A user may have set the variable, as in the second process."""
    program = """
import mmap, os, torch, megaframe.training.restart
from megaframe.layout import Layout
from megaframe.distributed.mesh import Mesh
child = os.fork()
if child:
    os.waitpid(child, 0)
    os.environ["THP_MEM_ALLOC_ENABLE"] = "0"
Mesh(Layout(), device="cpu")
offset = torch.empty(1 << 20).data_ptr() % mmap.PAGESIZE
print(offset, os.environ["THP_MEM_ALLOC_ENABLE"], flush=True)
"""
    before = {name: x for name, x in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    run = subprocess.run(
        [sys.executable, "-c", program], env=before, capture_output=True, text=True, check=True
    )
    ours, users = (line.split() for line in run.stdout.splitlines())
    assert ours == ["0", "1"] and users[1] == "0"


def read_thread_policies():
    """Return the scheduling policies of the threads that a mesh starts to carry messages."""
    before = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    mesh = Mesh(Layout(data=2), device="cpu", timeout=PATIENCE)
    new_threads = set(os.listdir("/proc/self/task")) - before
    policies = [os.sched_getscheduler(int(thread)) for thread in new_threads]
    mesh.finish()
    return policies


# ------------------------------------------------------------------------------------ GPUs unused

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Sep 12 22:40:06 UTC 2024"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(files, cuda, hip, hiding) -> root of a machine with these files, where torch is built
    with CUDA or ROCm of this version and sees no GPU."""

    def make(files=(), cuda=None, hip=None, hiding=None):
        for name, text in dict(files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr(torch, "__version__", "2.13.0")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for name in device._HIDING:
            monkeypatch.delenv(name, raising=False)
        if hiding is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hiding)
        return tmp_path

    return make


def make_nvidia_files(driver, form=CLOSED):
    return {
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "proc/driver/nvidia/version": form.format(driver),
    }


@pytest.mark.parametrize(
    ("files", "cuda", "hip", "expected"),
    [
        (
            make_nvidia_files("535.183.01"),
            "13.0",
            None,
            ["driver 535.183.01 is too old for CUDA 13.0 of torch 2.13.0", "driver 580 or later"],
        ),
        (make_nvidia_files("470.82.01", OPEN), "12.8", None, ["470.82.01", "525 or later"]),
        (
            make_nvidia_files("535.183.01"),
            None,
            None,
            ["built for CPUs only", "torch's CUDA build"],
        ),
        (make_nvidia_files("535.183.01"), None, "6.4", ["built for ROCm", "a GPU of NVIDIA"]),
        ({"dev/nvidia3": ""}, None, None, ["built for CPUs only"]),
        ({"dev/kfd": ""}, "12.8", None, ["built for CUDA", "a GPU of AMD", "ROCm build"]),
        ({"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}, None, None, ["GPU of NVIDIA"]),
        (make_nvidia_files("580.65.06"), "13.0", None, ["cannot start it: it says so"]),
        ({"dev/kfd": ""}, None, "6.4", ["cannot start it: it says so"]),
    ],
)
def test_a_gpu_that_torch_cannot_use_has_a_reason(machine, monkeypatch, files, cuda, hip, expected):
    def refuse():
        raise RuntimeError("it says so\nat length")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    root = machine(files, cuda, hip)
    reason = explain_unusable_gpu(root)
    assert all(part in reason for part in expected), reason
    assert explain_hidden_gpu(root) is None
    monkeypatch.setattr(device, "explain_unusable_gpu", lambda: explain_unusable_gpu(root))
    for requested in ("auto", "shared", "cuda"):
        with pytest.raises(UserError) as error:
            select_device(requested)
        assert reason in str(error.value) and f"run.device={requested}" in str(error.value)
        assert "use run.device=cpu" in str(error.value)
    assert select_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("files", "hiding", "expected"),
    [
        ({}, None, None),
        ({"dev/nvidiactl": "", "dev/nvidia-uvm": ""}, None, None),
        ({"dev/dxg": ""}, None, None),
        (make_nvidia_files("470.82.01"), "", "CUDA_VISIBLE_DEVICES= hides the GPUs"),
        (make_nvidia_files("470.82.01"), "-1", "CUDA_VISIBLE_DEVICES=-1 hides the GPUs"),
        ({}, "-1", None),
        (
            {"proc/driver/nvidia/version": CLOSED.format("470.82.01")},
            None,
            "driver 470.82.01 is loaded, but there is no GPU among the devices; a container",
        ),
    ],
)
def test_a_machine_without_gpus_or_with_hidden_ones_is_a_cpu(
    machine, monkeypatch, files, hiding, expected
):
    root = machine(files, "13.0", hiding=hiding)
    assert explain_unusable_gpu(root) is None
    reason = explain_hidden_gpu(root)
    assert reason is None if expected is None else expected in reason
    monkeypatch.setattr(device, "explain_unusable_gpu", lambda: explain_unusable_gpu(root))
    assert select_device("auto") == select_device("shared") == torch.device("cpu")
    with pytest.raises(UserError, match=r"torch sees no GPU here; use run\.device=cpu or auto"):
        select_device("cuda")


def test_memory_of_the_host_is_at_most_that_of_its_container(tmp_path):
    host_bytes = read_host_memory(tmp_path)
    assert 2**28 < host_bytes < 2**50
    limit = tmp_path / "sys/fs/cgroup/memory.max"
    limit.parent.mkdir(parents=True)
    for text, expected in (("max", host_bytes), (str(2**26), 2**26), (str(2**60), host_bytes)):
        limit.write_text(text + "\n")
        assert read_host_memory(tmp_path) == expected


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_of_the_groups_that_a_process_is_in_counts(version, tmp_path):
    groups = {1: "5:cpu:/elsewhere\n4:memory:/job/step\n0::/\n", 2: "0::/job/step\n"}
    write(tmp_path / "proc/self/cgroup", groups[version])
    base = tmp_path / "sys/fs/cgroup" / {1: "memory", 2: ""}[version]
    name = {1: "memory.limit_in_bytes", 2: "memory.max"}[version]
    write(base / "job/step" / name, f"{2**27}\n")
    write(base / "elsewhere" / name, f"{2**20}\n")
    assert read_host_memory(tmp_path) == 2**27
    write(base / "job" / name, f"{2**26}\n")
    assert read_host_memory(tmp_path) == 2**26
    write(tmp_path / "proc/self/cgroup", "0::/../../elsewhere\n:\n")
    assert read_host_memory(tmp_path) > 2**27


def test_swap_is_what_the_machine_has_and_the_container_may_use(tmp_path):
    assert read_host_swap(tmp_path) == 0
    write(tmp_path / "proc/meminfo", "MemTotal: 8 kB\nSwapTotal:       4096 kB\n")
    assert read_host_swap(tmp_path) == 2**22
    write(tmp_path / "sys/fs/cgroup/memory.swap.max", "0\n")
    assert read_host_swap(tmp_path) == 0
