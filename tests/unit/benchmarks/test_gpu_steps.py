"""Steps of the check of a GPU: what is worth most comes first, nothing that was measured is lost or
mixed with something else, and what came back is used.
"""

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import apply_results  # noqa: E402
import gpu_check  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_results  # noqa: E402
import gpu_steps  # noqa: E402
import training_gpu  # noqa: E402
from gpu_results import Results, merge, select_part  # noqa: E402
from gpu_steps import STEPS, Step, format_verdict, select_steps, was_done  # noqa: E402
from kernel_bench import Measurement, PassResult  # noqa: E402

from megaframe.hardware.cluster import load_cluster  # noqa: E402
from megaframe.planner import constants as planner_constants  # noqa: E402

ABOUT = {
    "chip": "h200",
    "device": "NVIDIA H200",
    "driver": "580.1",
    "commit": "abc",
    "versions": {"torch": "2.11.0"},
    "dry": False,
}
STEP = Step("kernels", 100.0, kernels=("norm",))


def make_measurement(name, seconds=1e-3, kernel="norm", **options):
    result = PassResult(seconds, seconds, seconds, 1.0, 1.0, 0.5, copy_share=0.9)
    return asdict(Measurement(kernel, "a", name, result, error=0.0, **options))


def test_steps_together_do_everything_once_and_within_the_limits_of_a_step():
    rows = [row for step in STEPS for row in step.rows]
    assert sorted(rows) == sorted(row.name for row in training_gpu.ROWS)
    assert len({*gpu_steps.KERNELS}) == len(gpu_steps.KERNELS)
    assert all(15 <= step.seconds <= 150 and step.parts for step in STEPS)
    assert [step.name for step in STEPS][:4] == ["smoke", "slice", "attention", "kernels"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"rows": ["llama-8b-slice"], "only_training": True, "skip_tests": True}, ["slice"]),
        ({"kernels": ["attention", "norm"], "skip_tests": True}, ["attention", "kernels"]),
        ({"names": ["slice", "smoke"]}, ["smoke", "slice"]),
        ({"names": ["graphs"], "skip_training": True}, []),
    ],
)
def test_options_select_parts_of_steps(asked, expected):
    steps = select_steps(**asked)
    assert [step.name for step in steps] == expected
    for kernel in asked.get("kernels", ()):
        assert any(kernel in step.kernels for step in steps)
    assert not any(step.tests for step in steps if asked.get("skip_tests"))


def test_both_halves_together_are_everything():
    halves = select_steps(only_training=True), select_steps(skip_training=True)
    parts = {part for half in halves for step in half for part in step.parts}
    assert parts == {part for step in STEPS for part in step.parts} - {"smoke", "constants"}


def test_each_step_has_a_file_of_its_own_and_reads_those_of_others(tmp_path):
    results = Results(ABOUT, tmp_path, step=STEP)
    results.add(measurements=[make_measurement("triton")])
    other = replace(STEP, name="smoke", kernels=(), smoke=True)
    results.step = other
    results.add(smoke={"cpu_loss": 1.0})
    assert {path.name for path in tmp_path.iterdir()} == {"kernels.json", "smoke.json"}
    assert not json.loads((tmp_path / "smoke.json").read_text())["measurements"]
    sections, line = gpu_results.read_earlier(ABOUT, [tmp_path])
    assert (sections, line) == (results.sections, "")
    results.add(measurements=[make_measurement("triton", 2e-3), make_measurement("torch")])
    measured = results.sections["measurements"]
    assert [m["forward"]["seconds"] for m in measured] == [2e-3, 1e-3]


@pytest.mark.parametrize("key", ["commit", "driver", "device", "versions"])
def test_a_result_of_something_else_is_told_and_kept(tmp_path, key):
    path = tmp_path / "kernels.json"
    content = {**merge({}, {"measurements": [make_measurement("triton")]}), **ABOUT, key: "other"}
    path.write_text(json.dumps(content))
    sections, line = gpu_results.read_earlier(ABOUT, [tmp_path])
    assert not sections["measurements"] and f"{key} other, not" in line
    assert f"{key} other" in gpu_results.keep_aside(path, ABOUT)
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == content and kept.name != path.name
    path.write_text("no JSON")
    assert "is no result" in gpu_results.keep_aside(path, ABOUT)
    assert len(list(tmp_path.iterdir())) == 2
    Results(ABOUT, tmp_path, step=STEP).write()
    assert gpu_results.keep_aside(path, ABOUT) is None and path.exists()


def test_a_disk_that_is_full_is_told_first_and_loses_nothing(tmp_path, monkeypatch, capsys):
    usage = SimpleNamespace(free=1 << 20)
    monkeypatch.setattr(gpu_results.shutil, "disk_usage", lambda folder: usage)
    assert "1 MiB free" in gpu_results.check_disk(tmp_path)
    assert "cannot be written" in gpu_results.check_disk(Path("/proc/results"))
    results = Results(ABOUT, tmp_path, step=STEP)
    results.add(measurements=[make_measurement("triton")])

    def write_nothing(path, text):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as full:
        full.setattr(gpu_results, "write_json", write_nothing)
        results.add(measurements=[make_measurement("torch")])
        results.add(measurements=[make_measurement("liger")])
    assert capsys.readouterr().out.count("No space left") == 1
    assert len(json.loads((tmp_path / "kernels.json").read_text())["measurements"]) == 1
    results.write()
    assert len(json.loads((tmp_path / "kernels.json").read_text())["measurements"]) == 3


def test_a_step_that_was_done_is_not_done_again():
    record = {"limit": 100.0, "seconds": 30.0, "whole": True, "parts": ["norm", "loss"]}
    assert was_done(STEP, record) and not was_done(STEP, None)
    assert not was_done(STEP, {**record, "parts": ["loss"]})
    assert not was_done(STEP, {**record, "seconds": None}), "its call ended before it did"
    assert not was_done(STEP, {**record, "whole": False, "limit": 50.0})
    assert was_done(STEP, {**record, "whole": False}), "more time than it may take"


HANGING = """
import json, sys, time
print(json.dumps({"todo": [["norm", "a", "x"]]}))
print(json.dumps({"begun": 0}), flush=True)
time.sleep(600)
"""


def test_a_step_that_hangs_costs_its_own_limit_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "kernel_bench.py").write_text(HANGING)
    (tmp_path / "gpu_smoke.py").write_text("print('{\"cpu_loss\": 1.5}')")
    monkeypatch.setattr(gpu_parts, "HERE", tmp_path)
    monkeypatch.setattr(gpu_parts, "LEAST_SECONDS", 0.2)
    monkeypatch.setattr(gpu_check, "LEAST_SECONDS", 0.2)
    steps = [replace(STEP, seconds=1.5), Step("smoke", 40.0, smoke=True)]
    results, begun = Results(ABOUT, tmp_path / "out"), time.monotonic()
    assert gpu_check.run_steps(steps, results, begun + 60.0, dry=True) == 1
    assert time.monotonic() - begun < 50.0
    output = capsys.readouterr().out
    assert "norm x, a: not finished after" in output and "cpu_loss 1.5" in output
    records = results.sections["steps"]
    assert (records["kernels"]["whole"], records["smoke"]["whole"]) == (False, True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"kernels.json", "smoke.json"}


def test_a_verdict_has_at_most_five_lines():
    broken = make_measurement("torch", trouble="CUDA error", details="Traceback")
    sections = merge({}, {"measurements": [make_measurement("triton"), broken]})
    sections |= {"active": {"norm": ["triton"]}, "left_out_for_time": ["norm: b: liger"]}
    sections["steps"] = {"kernels": {"limit": 100, "seconds": 30, "whole": False, "parts": []}}
    part = select_part(sections, STEP)
    part |= gpu_results.derive(part)
    lines = format_verdict(STEP, part, gpu_parts.describe(part) * 50)
    assert len(lines) == 5 and max(map(len, lines)) < 500
    for line, words in zip(
        lines,
        ("not whole", "triton 1,000 us", "missed: norm forward", "CUDA error", "liger"),
        strict=True,
    ):
        assert words in line


def test_the_time_of_one_step_that_is_asked_for_is_that_of_the_call(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(gpu_check, "run_step", lambda step, *_: given.append(step.seconds))
    monkeypatch.setattr(gpu_check, "print_verdict", lambda *_: None)
    command = ["gpu_check.py", "--dry", "--skip-tests", "--only-training", "--write"]
    command += [str(tmp_path / "one.json"), "--rows", "llama-8b-slice", "--minutes", "4"]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu_check.main() == 0 and given == [240.0]


@pytest.mark.parametrize("why", ["its driver 450.1 is too old for CUDA 13.0", None])
def test_no_gpu_is_said_first_and_nothing_is_written(why, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("megaframe.distributed.device.explain_unusable_gpu", lambda: why)
    monkeypatch.setattr("megaframe.distributed.device.explain_hidden_gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "run_steps", None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--write", str(tmp_path / "new")])
    assert gpu_check.main() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"torch sees no GPU: {why}: nothing" if why else "torch sees no GPU: no")
    assert not (tmp_path / "new").exists()


# What is measured is used.


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Results of two chips, and copies of the files that are written."""
    for name in ("CHOICES", "CONSTANTS", "GUIDE", "README", "PLOT"):
        path = getattr(apply_results, name)
        copy = tmp_path / path.name
        if path.exists():
            copy.write_text(path.read_text())
        monkeypatch.setattr(apply_results, name, copy)
    folders = []
    for chip, device, fast in (
        ("h200", "NVIDIA H200", "triton"),
        ("h100", "NVIDIA H100 80GB HBM3", "torch"),
    ):
        results = Results({**ABOUT, "chip": chip, "device": device}, tmp_path / chip)
        slow = "torch" if fast == "triton" else "triton"
        for step in (STEPS[1], STEP, replace(STEP, name="constants", constants=True)):
            results.step = step
            results.add(
                measurements=[make_measurement(fast), make_measurement(slow, 2e-3)],
                active={"norm": ["triton", "torch"]},
                constants={k: 0.5 for k in apply_results._MEASURED},
                training=[
                    {
                        "row": "llama-8b-slice",
                        "ours": {"tokens_per_second": 9e3, "mfu_causal": 0.61},
                    }
                ],
            )
        folders.append(tmp_path / chip)
    return folders


def test_a_result_is_all_that_must_come_back(places, monkeypatch):
    aside = places[0] / "kernels.older.json"
    aside.write_text((places[1] / "kernels.json").read_text())
    apply_results.apply(apply_results.read_chips(places))
    choices = json.loads(apply_results.CHOICES.read_text())
    assert choices["h200"]["norm"] == ["triton", "torch"]
    assert choices["h100"]["norm"] == ["torch", "triton"]
    assert (
        choices["unmeasured"]
        == json.loads((ROOT / "kernels/megaframe_kernels/choices.json").read_text())["unmeasured"]
    )
    assert "an MFU of 61.0%" in apply_results.README.read_text()
    guide = apply_results.GUIDE.read_text()
    assert "| goal | to reach on one H200 | NVIDIA H100 80GB HBM3 | NVIDIA H200 |" in guide
    assert "| llama-8b-slice: mfu_causal | at least 0.6 | 0.61 (met) | 0.61 (met) |" in guide
    assert "<svg" in apply_results.PLOT.read_text()
    measured = json.loads(apply_results.CONSTANTS.read_text())
    assert measured["h200"]["measured_on"].startswith("NVIDIA H200, torch 2.11.0, commit abc")
    monkeypatch.setattr(planner_constants, "MEASURED", measured)
    constants = planner_constants.get_cluster_constants(load_cluster("h200-ib"))
    assert constants.product == 0.5 and "NVIDIA H200" in constants.measured_on


def test_results_that_are_used_twice_change_nothing_more(places):
    chips = apply_results.read_chips(places)
    written = apply_results.apply(chips)
    before = [path.read_text() for path in written]
    assert [path.read_text() for path in apply_results.apply(chips)] == before


def test_a_dry_run_is_no_measurement(places):
    for path in places[0].iterdir():
        path.write_text(json.dumps({**json.loads(path.read_text()), "dry": True}))
    assert list(apply_results.read_chips(places)) == ["h100"]


def test_documents_have_what_the_results_say():
    folders = sorted(path for path in gpu_results.RESULTS.iterdir() if path.is_dir())
    chips = apply_results.read_chips(folders)
    assert apply_results.format_goals(chips) in apply_results.GUIDE.read_text()
    assert apply_results.format_line(chips) in apply_results.README.read_text()
