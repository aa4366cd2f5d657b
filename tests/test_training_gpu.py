"""The bench of whole steps on a GPU, in a tiny size on a CPU: both contenders train the same model,
and every row has a config that a run would take.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megaframe.config import load
from megaframe.plan.check import check

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import training_gpu  # noqa: E402


def test_rows_run_and_both_contenders_start_alike(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "training_gpu.py"), "--dry"]
    command += ["--only", "moe-slice", "--write", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (experts,) = json.loads(path.read_text())
    assert experts["same_start"], experts
    for name in ("ours", "plain"):
        found = experts[name]
        assert found["host_seconds_per_block"] > 0 and found["tflops_causal"] > 0


@pytest.mark.parametrize("row", training_gpu.ROWS, ids=lambda row: row.config)
def test_a_row_is_a_config_that_a_run_takes(row):
    check(load(str(ROOT / row.path), row.overrides), 1, data=False)


def test_ratios_are_of_rows_of_one_model():
    rows = [
        {"config": "configs/bench/a.yaml", "ours": {"tokens_per_second": 2.0}},
        {"config": "configs/bench/a-fp8.yaml", "ours": {"tokens_per_second": 3.0}},
        {"config": "configs/bench/b-fp8.yaml", "ours": {"trouble": "none"}},
    ]
    first, second, third = training_gpu.with_ratios(rows)
    assert second["times_bf16"] == 1.5 and "times_bf16" not in {**first, **third}
