"""tools/plan.py from the command line.

Tests `megaframe.training.meta_step.compare` and `megaframe.planner.plan_record`.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slow_cases import slow
from tool_process import run_tool

from megaframe.config import load

ROOT = Path(__file__).resolve().parents[3]
KEYS = {
    "memory_bytes",
    "step_seconds",
    "mfu",
    "tflops_per_gpu",
    "tokens_per_second",
    "breakdown",
    "fits",
}


def plan(*arguments, status=0):
    process = run_tool("tools/plan.py", *arguments)
    assert process.returncode == status, process.stdout + process.stderr
    return process.stdout if status == 0 else process.stderr


def test_json_of_a_layout_has_the_keys_and_adds_up():
    overrides = ["parallel.tensor=4", "parallel.pipeline=2", "parallel.zero=1"]
    printed_plan = json.loads(
        plan("--config", "configs/llama3-8b.yaml", "--gpus", 64, "--json", *overrides)
    )
    assert printed_plan.keys() >= KEYS
    assert printed_plan["step_seconds"] == pytest.approx(sum(printed_plan["breakdown"].values()))
    assert printed_plan["memory_bytes"].keys() >= {
        "weights",
        "gradients",
        "optimizer",
        "activations",
    }
    assert printed_plan["fits"] == (sum(printed_plan["memory_bytes"].values()) <= 80 * 2**30)
    assert printed_plan["layout"]["data"] == 8


def test_the_planner_needs_no_torch():
    code = (
        "import runpy, sys; sys.modules['torch'] = None; "
        "sys.argv = ['plan.py', '--config', 'configs/demo.yaml', '--gpus', '4', '--search', "
        "'--cluster', 'cpu']; runpy.run_path('tools/plan.py', run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0 and "Use " in process.stdout, process.stderr


def test_a_search_writes_a_config_and_a_page_that_asks_no_network(tmp_path):
    best, page = tmp_path / "best.yaml", tmp_path / "plan.html"
    asked = ["--write", best, "--html", page, "--scaling"]
    output = plan(
        "--config", "configs/llama3-8b.yaml", "--gpus", 16, "--search", *asked, "parallel.tensor=2"
    )
    assert "Amdahl 1967: " in output and "Daly 2006: " not in output
    assert output.splitlines()[1].startswith("Use tensor 2, ")
    assert "of the best simulated" in output and "Other choices" in output
    written = json.loads(plan("--config", best, "--gpus", 16, "--json"))
    assert written["layout"]["tensor"] == 2 and written["fits"]
    text = page.read_text()
    assert len(re.findall(r'class="plotly-graph-div"', text)) == 4
    for explained in ("Amdahl 1967: ", "Ridge of memory: ", "Fastest all_reduce", "Daly 2006: "):
        assert explained in text
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="?http', text)


def test_a_budget_is_spent_on_a_model_and_its_layout(tmp_path):
    asked = ["--budget", "64 h100 for 7 days", "--json", "--collectives", "--write"]
    printed_plan = json.loads(plan(*asked, tmp_path / "best.yaml", "parallel.pipeline=1"))
    assert printed_plan["gpus"] == 64 and printed_plan["layout"]["pipeline"] == 1
    assert printed_plan["budget"]["title"] == "Budget: 64 h100 for 7 days"
    assert {"law", "parameters", "loss"} <= printed_plan["budget"]["table"][0].keys()
    assert printed_plan["collectives"]["table"]
    config = load(str(tmp_path / "best.yaml"))
    seconds = config.train.steps * printed_plan["step_seconds"]
    assert 0.98 < seconds / (7 * 86400) < 1.0
    assert config.optim.warmup < config.train.steps


@pytest.mark.slow
def test_a_phase_is_planned_as_a_run_of_its_own():
    """With its own samples and layout, and as many steps as reach its tokens."""
    keys = ["train.seq=8192", "train.global_batch=8", "parallel.context=2"]
    base = ("--config", "configs/llama3-8b.yaml", "--json", "--gpus", 16)
    short = ("train.seq=2048", "train.global_batch=64")
    phases = f"data.phases=[{{tokens: 8388608}}, {{tokens: 4194304, overrides: {keys}}}]"
    first, same, second = (
        json.loads(plan(*base, *words, *short, phases))
        for words in ((), ("--phase", 1), ("--phase", 2))
    )
    alone = json.loads(plan(*base, *keys))
    assert first == same and first["layout"]["context"] == 1
    assert second["layout"]["context"] == 2
    assert second["step_seconds"] == alone["step_seconds"] != first["step_seconds"]
    message = plan(*base, "--phase", 3, *short, phases, status=2)
    assert "--phase 3: data.phases has 2; use 1 to 2" in message
    assert "--phase 1: data.phases has none" in plan(*base, "--phase", 1, *short, status=2)


def test_a_dry_run_counts_what_the_plan_says():
    arguments = ["--gpus", 64, "--dry-run", "--rank", 37, "--json", "train.global_batch=16"]
    sizes = ["parallel.tensor=4", "parallel.pipeline=4", "parallel.zero=1", "model.layers=8"]
    rows = json.loads(plan("--config", "configs/llama3-8b.yaml", *arguments, *sizes))
    close = [row for row in rows if row["planned"] and row["name"] != "temporaries"]
    assert len(close) >= 6
    for row in close:
        assert row["counted"] == pytest.approx(row["planned"], rel=0.05), row


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cluster", "h100-id"], "use h100-ib"),
        slow(["--gpus", 0], "use 1 or more"),
        (["--gpus", 12, "parallel.tensor=8"], "parallel.tensor=8"),
        slow(["--gpus", 8, "--dry-run", "--rank", 8], "use 0 to 7"),
        slow(["--gpus", 2, "--search", "train.seq=131072"], "GPUs of h100-ib"),
        slow(["--overtrain", "2"], "--law and --overtrain belong to --budget"),
        slow(["--budget", "8 h10 for 1 day"], "chip h10 is unknown; use h100"),
        slow(["--budget", "8 h100 for 1 day", "--gpus", 4], "leave --gpus out"),
        slow(["--budget", "8 h100 for 1 day", "--overtrain", "0"], "1 is what the law wants"),
        slow(["--budget", "8 h100 for 1 day", "train.steps=9"], "train.steps follows from"),
    ],
)
def test_mistakes_are_told_with_what_would_work(arguments, words):
    message = plan("--config", "configs/llama3-8b.yaml", *arguments, status=2)
    assert words in message and "Traceback" not in message


def test_a_layout_that_does_not_fit_is_told_what_would():
    output = plan("--config", "configs/llama3-8b.yaml", "--gpus", 8, "parallel.zero=0")
    assert "it does not fit" in output and "Instead" in output
    assert re.search(r"^  parallel.zero=2: 64.9 GiB, \d+ s a step$", output, re.MULTILINE)


def test_what_is_assumed_is_said():
    arguments = ("--config", "configs/llama3-8b.yaml", "--gpus", 8, "--json", "parallel.zero=1")
    assumed = "no cluster is named, so h100-ib is assumed; name yours with --cluster"
    assert assumed in json.loads(plan(*arguments))["reasons"]
    named = json.loads(plan(*arguments, "--cluster", "b200-ib"))["reasons"]
    assert assumed not in named
    assert any(
        "not fitted to a b200" in reason and "those of an H100" in reason for reason in named
    )
    fitted = json.loads(plan(*arguments, "--cluster", "h100-ib"))["reasons"]
    assert not any("assumed" in reason or "not fitted" in reason for reason in fitted)
