"""The benchmark of whole steps on a GPU, in a tiny size on a CPU: both contenders train the same
model, and every row's config is one that a run accepts.
"""

import contextlib
import gzip
import json
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from megaframe.config import load
from megaframe.validate.run import validate_config

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "benchmarks" / name) for name in ("gpu", "peers")]
import gpu_workload  # noqa: E402
import training_gpu  # noqa: E402


@pytest.mark.parametrize("row", training_gpu.ROWS, ids=lambda row: row.name)
def test_a_row_is_a_config_that_a_run_takes(row):
    validate_config(load(str(ROOT / row.path), row.list_overrides(dry=False)), 1, data=False)


def test_the_slice_divides_and_recomputes_nothing():
    (row,) = (row for row in training_gpu.ROWS if row.name == "llama-8b-slice")
    config = load(str(ROOT / row.path), row.list_overrides(dry=False))
    assert (config.parallel.zero, config.train.recompute) == (0, "none")


def test_rows_have_names_of_their_own():
    assert len({row.name for row in training_gpu.ROWS}) == len(training_gpu.ROWS)


def test_ratios_are_of_rows_of_one_model():
    rows = [
        {"row": "a", "ours": {"tokens_per_second": 2.0}},
        {"row": "a-fp8", "ours": {"tokens_per_second": 3.0}},
        {"row": "b-fp8", "ours": {"trouble": "none"}},
        {"row": "c-fp8", "trouble": "left out for time"},
        {"row": "a-latents", "ours": {"tokens_per_second": 5.0}},
    ]
    first, second, *others = training_gpu.with_ratios(rows)
    assert second["times_bf16"] == 1.5 and others[-1]["times_heads"] == 2.5
    assert all("times_bf16" not in row for row in (first, *others))


def run_script(tmp_path, monkeypatch, text):
    """Run `text` as the script of a contender."""
    (tmp_path / "one.py").write_text(f"import json, os, sys\n{text}\n")
    monkeypatch.setattr(training_gpu, "PEERS", tmp_path)
    return training_gpu.run_contender("one.py", training_gpu.ROWS[0], dry=True, seconds=30.0)


def test_a_contender_finds_what_its_caller_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller")
    result = run_script(
        tmp_path, monkeypatch, "print(json.dumps({'path': os.environ['PYTHONPATH']}))"
    )
    assert result["path"].split(":") == [str(ROOT), str(ROOT / "kernels"), "/of/the/caller"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("print('no JSON')", {"trouble": "it printed no result"}),
        ("sys.exit('out of memory')", {"trouble": "out of memory"}),
        (
            "print(json.dumps({'step_seconds': 1.0}), flush=True); sys.exit('no profiler')",
            {"step_seconds": 1.0, "incomplete": "no profiler"},
        ),
    ],
)
def test_a_contender_that_breaks_says_why_and_keeps_what_it_had(
    tmp_path, monkeypatch, text, expected
):
    result = run_script(tmp_path, monkeypatch, text)
    result.pop("details")
    assert result == expected


def test_rows_without_time_are_left_out():
    rows = list(training_gpu.measure(dry=True, until=time.monotonic() + 1))
    assert [row["trouble"] for row in rows] == ["left out for time"] * len(training_gpu.ROWS)
    assert all(map(training_gpu.format_line, rows))


def test_a_profile_says_how_long_the_gpu_does_nothing(tmp_path, monkeypatch):
    def make_event(name, start, lasted):
        fields = {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": lasted}
        return {**fields, "args": {"device": 0}}

    class Profiled(contextlib.nullcontext):
        def export_chrome_trace(self, path):
            events = [make_event("gemm", 0, 60), make_event("norm", 80, 20)]
            Path(path).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))

        def __enter__(self):
            return self

    monkeypatch.setattr(gpu_workload, "profile", lambda activities: Profiled())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    steps, profile_path = [], tmp_path / "results" / "h200-row.json.gz"
    arguments = partial(steps.append, 1), torch.device("cuda")
    profile = gpu_workload.profile_steps(*arguments, profile_path)
    assert len(steps) == 2 and profile_path.exists()
    assert profile["gpu_idle"] == pytest.approx(0.2) and profile["gpu_exposed_communication"] == 0
    assert profile["gpu_gaps"][0]["after"] == "norm"
    assert [kernel["name"] for kernel in profile["gpu_kernels"]] == ["gemm", "norm"]
    monkeypatch.setattr(gpu_workload, "_MOST_TRACE", 1)
    gpu_workload.profile_steps(*arguments, tmp_path / "large.json.gz")
    assert not (tmp_path / "large.json.gz").exists()
    assert gpu_workload.profile_steps(arguments[0], torch.device("cpu"), profile_path) == {}


def test_the_longest_kernels_of_a_trace(tmp_path):
    def make_event(name, lasted, category="kernel"):
        return {"ph": "X", "cat": category, "name": name, "ts": 0, "dur": lasted}

    events = [
        make_event("a", 10),
        make_event("b", 25),
        make_event("a", 20),
        make_event("host", 99, "cpu_op"),
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    first, second = gpu_workload.find_longest_kernels(path)
    assert (first["name"], first["seconds"], first["calls"]) == ("a", pytest.approx(30e-6), 2)
    assert second["share"] == pytest.approx(25 / 55)
    assert len(gpu_workload.find_longest_kernels(path, 1)) == 1
