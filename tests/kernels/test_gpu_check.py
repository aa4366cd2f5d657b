"""The bench of kernels, on tiny sizes: everything runs, is right, and is written down."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check  # noqa: E402
from gpu_check import Measurement, order_of, share  # noqa: E402
from kernel_cases import REAL, TINY, Work, cases  # noqa: E402
from megaframe_kernels.registry import KERNELS  # noqa: E402


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "result.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--dry", "--skip-tests"]
    command += ["--skip-training"]
    done = subprocess.run([*command, "--write", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def test_every_kernel_is_measured_and_right(result):
    measured = {m["kernel"] for m in result["measurements"]}
    assert measured == set(KERNELS) - {"scaled_product"}
    assert not result["left_out_for_time"]
    for m in result["measurements"]:
        refused = m["trouble"] is not None and "Error" not in m["trouble"]
        assert refused or m["error"] < 0.02, m
        assert refused or m["forward_seconds"] > 0, m
    triton = [m for m in result["measurements"] if m["implementation"] == "triton"]
    assert all(m["trouble"] is None for m in triton)
    assert result["order"]["router"] == ["triton"]


def test_sizes_have_the_same_cases_and_work_that_counts():
    real, tiny = list(cases(REAL)), list(cases(TINY))
    assert [c.kernel for c in real] == [c.kernel for c in tiny]
    for case in real:
        assert case.forward.bytes > 1e5 or case.forward.flops > 1e10
    causal = next(c for c in real if c.kernel == "attention")
    assert causal.forward.flops == pytest.approx(4 * 8192**2 / 2 * 32 * 128, rel=1e-3)
    assert causal.backward.flops == 2.5 * causal.forward.flops


def test_the_share_is_of_the_ceiling_that_binds():
    ceilings = gpu_check.Ceilings(copy=4e12, product=8e14)
    assert share(Work(bytes=4e9), 2e-3, ceilings) == pytest.approx(0.5)
    assert share(Work(bytes=4e9, flops=8e12), 2e-2, ceilings) == pytest.approx(0.5)
    assert share(None, 1.0, ceilings) is None and share(Work(1.0), None, ceilings) is None


def test_the_order_is_of_speed_and_leaves_out_what_is_wrong():
    def one(case, name, seconds, error=0.0, trouble=None):
        return Measurement("norm", case, name, seconds, 0.5, error=error, trouble=trouble)

    measured = [
        *(one("a", "triton", 1.0), one("a", "torch", 3.0), one("a", "liger", 0.5, error=0.5)),
        *(one("b", "triton", 2.0), one("b", "torch", 1.0), one("b", "reference", 0.1)),
    ]
    assert order_of(measured) == ["triton", "torch"]
    assert order_of([one("a", "triton", None, trouble="x")]) == []


def test_the_order_goes_into_the_table(tmp_path):
    table = tmp_path / "choices.json"
    table.write_text(json.dumps({"unmeasured": {"norm": ["torch"]}, "h200": {"rotary": ["torch"]}}))
    gpu_check.choose({"chip": "h200", "order": {"norm": ["triton", "torch"]}}, table)
    assert json.loads(table.read_text()) == {
        "unmeasured": {"norm": ["torch"]},
        "h200": {"rotary": ["torch"], "norm": ["triton", "torch"]},
    }
