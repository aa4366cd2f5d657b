"""The kernel benchmark, on tiny sizes: everything runs, is checked and is recorded; a failure costs
only its own measurement.
"""

import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import gpu_check  # noqa: E402
import gpu_parts  # noqa: E402
import kernel_bench  # noqa: E402
import kernel_timing  # noqa: E402
import training_gpu  # noqa: E402
from gpu_goals import Goal, evaluate_goals, format_table, order_of  # noqa: E402
from gpu_results import RESULTS, Results, derive, merge, read_commit  # noqa: E402
from gpu_steps import KERNELS as MEASURED  # noqa: E402
from kernel_bench import Ceilings, Measurement, PassResult, Timing, compute_error, pass_of, share  # noqa: E402
from kernel_cases import MIDDLE, REAL, TINY, KernelCase, LeastWork, list_cases  # noqa: E402
from megaframe_kernels.registry import KERNELS  # noqa: E402


def run_check(*arguments):
    command_line = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu" / "gpu_check.py"),
        "--dry",
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    return subprocess.run(command_line, capture_output=True, text=True, env=environment)


def test_a_kernel_that_is_none_is_an_error_that_lists_them():
    process = run_check("--only", "norms")
    assert process.returncode == 2 and "attention_backward" in process.stderr


def test_some_kernels_alone_overwrite_no_result(monkeypatch):
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--skip-tests", "--only", "norm"])
    assert gpu_check.find_target(gpu_check.parse_arguments(), "h200") is None
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--steps", "smoke"])
    assert gpu_check.find_target(gpu_check.parse_arguments(), "h200") == RESULTS / "h200"


def test_sizes_have_the_same_cases_and_work_that_counts():
    real, middle, tiny = (list(list_cases(size)) for size in (REAL, MIDDLE, TINY))
    assert [c.kernel for c in real] == [c.kernel for c in tiny] == [c.kernel for c in middle]
    assert {c.kernel for c in real} == set(MEASURED)
    for case in real:
        assert case.forward.bytes > 1e5 or case.forward.flops > 1e10
    causal = next(c for c in real if c.kernel == "attention")
    assert causal.forward.flops == pytest.approx(4 * 8192**2 / 2 * 32 * 128, rel=1e-3)
    assert causal.backward.flops == 2.5 * causal.forward.flops
    grouped = [c for c in real if c.kernel == "grouped_product"]
    assert {c.name for c in grouped} >= {"8 experts", "64 experts"}
    assert grouped[0].forward.products == ((32768, 14336, 4096),)
    assert grouped[0].backward.flops == 2 * grouped[0].forward.flops
    # The backward pass reads the gradient of each token once, and writes its copies.
    unpermute = next(c for c in real if c.kernel == "unpermute")
    assert unpermute.backward.bytes == (1 + 2) * 2 * 16384 * 4096


def test_the_share_is_of_the_ceiling_that_binds():
    ceilings = Ceilings(copy=4e12, product=8e14)
    assert share(LeastWork(bytes=4e9), 2e-3, ceilings) == pytest.approx(0.5)
    assert share(LeastWork(bytes=4e9, flops=8e12), 2e-2, ceilings) == pytest.approx(0.5)


def test_a_pass_stands_beside_a_copy_or_bare_products(monkeypatch):
    monkeypatch.setattr(kernel_bench, "time_copy", lambda size, dry: size / 1e9)
    monkeypatch.setattr(kernel_bench, "time_product", lambda shape, dry: 1e-3)
    ceilings, timing = Ceilings(4e12, 8e14), Timing(4e-3, 3e-3, 5e-3)
    result = pass_of(LeastWork(bytes=6e6), timing, ceilings, True)
    assert result.copy_share == pytest.approx(0.75) and result.product_share is None
    assert (result.low, result.high) == (3e-3, 5e-3)
    multiplied = pass_of(LeastWork(flops=1e9, products=((1, 2, 3),) * 3), timing, ceilings, True)
    assert multiplied.product_share == pytest.approx(0.75) and multiplied.copy_share is None


class Clocked:
    """Stands for an event of a GPU that executes everything immediately."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clocked.now

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


@pytest.mark.parametrize(
    ("each", "few", "calls"),
    [(1e-4, False, 3 + 100), (5e-3, False, 3 + 30), (1.0, False, 3 + 10), (1.0, True, 1 + 3)],
)
def test_a_timing_has_enough_samples_and_nothing_of_what_precedes_a_call(
    monkeypatch, each, few, calls
):
    def pass_time(seconds):
        Clocked.now += seconds

    monkeypatch.setattr(torch.cuda, "Event", Clocked)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: pass_time(cycles / 2e9))
    filler = SimpleNamespace(zero_=lambda: pass_time(1e-4))
    monkeypatch.setattr(kernel_timing, "_cache_filler", lambda: filler)
    ran = []

    def run():
        ran.append(pass_time(each * (1.5 if len(ran) % 2 else 1.0)))

    timing = kernel_timing.measure_timing(run, False, few)
    assert len(ran) == pytest.approx(calls, abs=20 if each == 5e-3 else 0)
    assert timing.low == pytest.approx(each, rel=0.2) and timing.high == pytest.approx(1.5 * each)
    assert timing.low <= timing.seconds <= timing.high


class Doubled(torch.autograd.Function):
    """A function with a correct forward and a wrong backward."""

    @staticmethod
    def forward(ctx, x):
        return 2.0 * x, (x > 0).int()

    @staticmethod
    def backward(ctx, d_out, _):
        return 2.5 * d_out


def test_what_is_checked_is_gradients_and_whole_numbers_too():
    def given():
        return (torch.linspace(-1, 1, 8).requires_grad_(),)

    def reference(x):
        return 2.0 * x, (x > 0).int()

    case, kernel = (
        KernelCase("any", "any", given, LeastWork(1.0)),
        SimpleNamespace(reference=reference),
    )
    assert compute_error(kernel, reference, case) == 0.0  # twice a number is exact
    assert compute_error(kernel, Doubled.apply, case) == pytest.approx(0.25)
    with pytest.raises(ValueError, match="output 1 differs"):
        compute_error(kernel, lambda x: (2.0 * x, (x > 0.5).int()), case)
    with pytest.raises(ValueError, match="output 0 is off by nan"):
        compute_error(kernel, lambda x: (2.0 * x / 0.0 * 0.0, (x > 0).int()), case)


def test_what_cannot_be_checked_is_timed_and_says_so(monkeypatch):
    monkeypatch.setattr(kernel_bench, "compute_error", lambda *_: 1 / 0)
    case = next(c for c in list_cases(TINY) if c.kernel == "norm")
    measurement = kernel_bench.measure(
        case, case, KERNELS["norm"], "torch", Ceilings(1.0, 1.0), dry=True
    )
    assert measurement.forward.seconds > 0 and measurement.trouble.startswith(
        "check: ZeroDivisionError"
    )
    assert "Traceback" in measurement.details


def make_measurement(case, name, seconds, error=0.0, trouble=None, **options):
    pass_result = (
        PassResult(seconds, seconds, seconds, 1.0, 1.0, 0.5, **options) if seconds else None
    )
    return asdict(Measurement("norm", case, name, pass_result, error=error, trouble=trouble))


def test_the_order_is_of_speed_and_leaves_out_what_is_wrong():
    entry = make_measurement
    measurements = [
        *(entry("a", "triton", 1.0), entry("a", "torch", 3.0), entry("a", "liger", 0.5, error=0.5)),
        *(entry("b", "triton", 2.0), entry("b", "torch", 1.0), entry("b", "reference", 0.1)),
    ]
    assert order_of(measurements) == ["triton", "torch"]
    assert order_of([entry("a", "triton", None, trouble="x")]) == []
    assert order_of([entry("a", "triton", 1.0, trouble="check: x")]) == []
    # Within one percent is as fast: there the known order stays.
    equal = [entry("a", "torch", 1.0), entry("a", "triton", 1.009), entry("a", "liger", 1.02)]
    assert order_of(equal, ["liger", "triton", "torch"]) == ["triton", "torch", "liger"]
    assert order_of(equal) == ["torch", "triton", "liger"]


def test_8_bits_are_compared_with_16_that_another_call_measured():
    rows = [
        {"row": "llama-8b-slice-fp8", "ours": {"tokens_per_second": 30.0}},
        {"row": "llama-8b-slice", "ours": {"tokens_per_second": 20.0}},
    ]
    result = {"measurements": [], "active": {}, "training": rows, "chosen_over_best": []}
    goals = {goal["name"]: goal["measured"] for goal in evaluate_goals(result)}
    assert goals["llama-8b-slice-fp8: times_bf16"] == 1.5


def test_goals_are_of_what_a_run_takes_and_of_the_worst_case():
    measurements = [
        make_measurement("a", "triton", 1.0, copy_share=0.99),
        make_measurement("a", "torch", 0.5, copy_share=1.0),
        make_measurement("b", "triton", None, trouble="refused"),
        make_measurement("b", "torch", 1.0, copy_share=0.98),
    ]
    for m in measurements[:2]:
        m["backward"] = {**m["forward"], "copy_share": 0.5}
    pass_result = PassResult(1e-3, 1e-3, 1e-3, 0.0, 0.6e12, 0.5)
    causal = "causal, head 128, 8192 tokens"
    measurements.append(
        asdict(Measurement("attention", causal, "triton", pass_result, pass_result))
    )
    fast = asdict(Measurement("attention", causal, "cudnn", pass_result, pass_result, error=0.5))
    rows = [
        {
            "row": "llama-8b-slice",
            "times_plain": 1.2,
            "ours": {"mfu_causal": 0.5, "gpu_idle": 0.01},
        },
        {"row": "llama-8b-slice-fp8", "times_bf16": 1.31, "ours": {}},
        {"row": "gpt2-124m-graph", "ours": {"host_seconds_per_step": 9e-4}},
        {"row": "moe-slice", "trouble": "left out for time"},
    ]
    active = {"norm": ["triton", "torch", "reference"], "attention": ["cudnn", "triton"]}
    sections = merge({}, {"active": active, "measurements": [*measurements, fast]})
    sections["training"] = rows
    result = {**sections, **derive(sections)}
    reached = {goal["name"]: goal for goal in evaluate_goals(result)}
    assert reached["norm forward over a copy"]["measured"] == 0.98
    assert reached["norm forward over a copy"]["met"] is True
    assert reached["norm backward over a copy"]["met"] is False
    assert reached["rotary forward over a copy"]["met"] is None
    assert reached["own attention forward, TFLOP/s"]["measured"] == pytest.approx(600.0)
    assert reached["own attention backward, TFLOP/s"]["measured"] == pytest.approx(600.0)
    # The chosen implementation gives wrong results, so its speed does not meet the goal.
    assert reached["chosen attention over the best"]["met"] is None
    assert reached["llama-8b-slice: mfu_causal"]["met"] is False
    assert reached["llama-8b-slice: over plain torch.compile"]["met"] is True
    assert reached["llama-8b-slice: idle GPU of a step"]["met"] is False
    assert reached["llama-8b-slice-fp8: times_bf16"]["met"] is True
    assert reached["gpt2-124m-graph: host_seconds_per_step"]["met"] is True
    assert reached["moe-slice: mfu_causal"]["met"] is None
    (first, *_) = (choice for choice in result["chosen_over_best"] if choice["case"] == "a")
    assert (first["chosen"], first["best"], first["ratio"]) == ("triton", "torch", 0.5)
    assert "llama-8b-slice: mfu_causal" in format_table(evaluate_goals(result))
    broken = make_measurement("a", "triton", None, trouble="CUDA error") | {"details": "Traceback"}
    alone = merge({}, {"active": active, "measurements": [broken, measurements[1]]})
    assert not derive(alone)["chosen_over_best"]


def test_rates_are_goals_for_the_chip_that_they_were_set_for():
    rate, share = Goal("a", 500.0, 400.0, per_second=True), Goal("b", 0.9, 0.8)
    assert (rate.is_met("h200"), share.is_met("h200")) == (False, False)
    assert (rate.is_met("h100-80gb-hbm3"), share.is_met("h100-80gb-hbm3")) == (None, False)


BROKEN = """
import json, os, sys
begin = int(sys.argv[sys.argv.index("--begin") + 1])
print(json.dumps({"todo": [["norm", "a", name] for name in "xyz"]}))
for number in range(begin, 3):
    print(json.dumps({"begun": number}), flush=True)
    if number == 1:
        print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os.abort()
    one = {"kernel": "norm", "case": "a", "implementation": "xyz"[number]}
    one["forward"] = {"seconds": 1.0, "share": 0.5}
    one |= {"backward": None, "error": None, "trouble": None, "details": None}
    print(json.dumps({"measured": one}), flush=True)
"""


def test_an_implementation_that_ends_its_process_costs_only_itself(tmp_path):
    results = Results()
    script = [sys.executable, "-c", BROKEN]
    gpu_parts.measure_group(script, ["norm"], results, time.monotonic() + 100)
    by_implementation = {m["implementation"]: m for m in results.sections["measurements"]}
    assert list(by_implementation) == ["x", "y", "z"]
    assert (
        by_implementation["y"]["trouble"] == "ended by SIGABRT"
        and "illegal" in by_implementation["y"]["details"]
    )
    assert by_implementation["z"]["trouble"] is None and not results.sections["left_out_for_time"]


def test_what_never_begins_is_told_once_and_what_has_no_time_is_listed():
    results = Results()
    script = [sys.executable, "-c", "raise SystemExit('no such library')"]
    gpu_parts.measure_group(script, ["norm"], results, time.monotonic() + 100)
    (measurement,) = results.sections["measurements"]
    assert measurement["trouble"] == "no such library"
    gpu_parts.measure_group(script, ["norm", "rotary"], results, time.monotonic() + 1)
    assert results.sections["left_out_for_time"] == ["norm", "rotary"]


def test_rows_that_are_left_out_stay_as_they_were(monkeypatch):
    row = {"row": "gpt-1.3b", "ours": {"mfu_causal": 0.5}}
    results = Results()
    results.add(training=[row])
    rows = [{"row": name, "trouble": "left out for time"} for name in ("moe-slice", "gpt-1.3b")]
    monkeypatch.setattr(training_gpu, "measure", lambda *_: iter(rows))
    gpu_parts.check_training(results, (), 0.0, dry=True)
    assert results.sections["training"] == [row]
    assert results.sections["left_out_for_time"] == ["moe-slice", "gpt-1.3b"]


def test_the_commit_is_told_also_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("MEGAFRAME_COMMIT", raising=False)
    assert read_commit() == "unknown"
    monkeypatch.setenv("MEGAFRAME_COMMIT", "1234abc")
    assert read_commit() == "1234abc"
