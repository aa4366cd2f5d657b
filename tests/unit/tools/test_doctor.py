"""The doctor: its report on a machine, and its exit status, which says whether a run can start."""

import pytest
import torch
from programs import load_program
from tool_process import run_tool

from megaframe.distributed import device

doctor = load_program("tools/doctor.py")
WELL = "0, NVIDIA H200, 580.65.06, 1980, 1980, 0x0000000000000001, Enabled, 0, 31, 5, 143771"


def run(*arguments):
    return run_tool("tools/doctor.py", *arguments)


def test_a_machine_that_can_run(tmp_path):
    process = run("--folder", tmp_path / "runs")
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.rstrip().endswith("a run can start")
    assert "kernel attention" in process.stdout and "MB/s durable" in process.stdout
    assert not list((tmp_path / "runs").iterdir())


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    process = run("--folder", tmp_path / "file")
    assert process.returncode == 1
    assert "X disk" in process.stdout and "a run cannot start: 1 errors" in process.stdout


@pytest.mark.parametrize(
    ("old", "new", "level", "expected"),
    [
        ("0x0000000000000001", "0x0000000000000040", "warning", "hardware thermal slowdown"),
        ("Enabled, 0", "Enabled, 3", "error", "3 uncorrected"),
        ("Enabled, 0", "Disabled, [N/A]", "warning", "ECC is off"),
        ("31, 5,", "31, 60000,", "warning", "60000 of 143771 MiB"),
    ],
)
def test_a_gpu_that_is_not_well(old, new, level, expected):
    well = list(doctor.judge_gpu(*doctor.read_gpus(WELL)))
    assert [f.level for f in well] == ["ok"] and "NVIDIA H200" in well[0].message
    findings = list(doctor.judge_gpu(*doctor.read_gpus(WELL.replace(old, new))))
    assert [f.level for f in findings] == ["ok", level] and expected in findings[1].message


def test_a_check_that_breaks_is_a_finding():
    def judge_luck():
        raise RuntimeError("out of it\nat length")
        yield

    (finding,) = doctor.run_checks([judge_luck])
    assert finding == doctor.HostFinding("luck", "broke: out of it", "error")


def test_a_gpu_that_torch_cannot_use_is_an_error(monkeypatch):
    monkeypatch.setattr(device, "explain_unusable_gpu", lambda: "its driver is too old")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    *_, last = doctor.judge_software()
    assert (last.level, last.subject) == ("error", "torch") and "driver is too old" in last.message
    monkeypatch.setattr(device, "explain_unusable_gpu", lambda: None)
    monkeypatch.setattr(device, "explain_hidden_gpu", lambda: "a variable hides it")
    *_, last = doctor.judge_software()
    assert last.level == "ok" and last.message.endswith("cores (a variable hides it)")
