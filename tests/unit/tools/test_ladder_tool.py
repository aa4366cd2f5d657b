"""The ladder's tool: rungs are run once, a law is written before the target is run, and what cannot
be done is said first."""

import json

import numpy as np
import pytest
from entry_runs import train
from programs import load_program
from rank_process import RankProcess
from token_files import write_token_file

from megaframe.config import load
from megaframe.run_queue.run_process import CONSOLE, RunProcess

tool = load_program("tools/ladder.py")
DEPTHS = ("--depths", "1,2,3", "--target", "4")


def test_a_dry_run_lists_the_rungs(overrides, call_main, tmp_path):
    status, output, _ = call_main(tool.main, *DEPTHS, "--dry-run", "--", *overrides())
    head, *rows = (line.split() for line in output.splitlines())
    assert status == 0 and head[:3] == ["layers", "hidden", "heads"]
    assert [row[:3] for row in rows] == [[str(n), str(8 * n), str(n)] for n in (1, 2, 3, 4)]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "change", "message"),
    [
        (("--depths", "1,2", "--target", "3"), {}, "needs 3; use --depths 1,2,3 and --target 4"),
        (DEPTHS, {"data__split": "[1, 0, 0]"}, "eval_every"),
        (DEPTHS, {"model__layers": 4}, "1 layers have no width"),
    ],
)
def test_what_cannot_be_run_is_said_before_any_run(words, change, message, overrides, call_main):
    status, _, errors = call_main(tool.main, *words, "--", *overrides(**change))
    assert status == 2 and message in errors


def start_forked(run, env, **_):
    """Start a run as `RunProcess.start` does, but from the server that has imported torch."""
    return RankProcess(train, run._command[2:], environment=env, errors=run.folder / CONSOLE)


@pytest.mark.slow
def test_rungs_are_run_once_and_the_target_after_its_prediction(
    overrides, call_main, monkeypatch, tmp_path
):
    monkeypatch.setattr(RunProcess, "start", start_forked)
    common = np.random.default_rng(0).geometric(0.3, (40, 400)).clip(0, 60)
    prefix = write_token_file(tmp_path / "common", [[words.tolist()] for words in common])
    keys = overrides(train__steps=20, data__sources=f"[{{path: {prefix}}}]")
    words = (*DEPTHS, "--tokens-per-parameter", 1, "--", *keys)
    status, output, errors = call_main(tool.main, *words)
    assert status == 0, errors
    assert "3 rungs in" in output and "predicted for depth-4" in output
    assert "% on the rungs that it was fitted to" in output
    folder = tmp_path / "run"
    record = json.loads((folder / "ladder.json").read_text())
    assert [rung["eval_loss"] is None for rung in record["rungs"]] == [False] * 3 + [True]
    assert (folder / "ladder.html").exists() and not (folder / "depth-4").exists()
    assert load(str(folder / "depth-3.yaml")).model.hidden == 24
    written = (folder / "depth-3/metrics.jsonl").stat().st_mtime_ns
    status, again, errors = call_main(tool.main, "--run-target", *words)
    assert status == 0, errors
    assert "3 done before" in again and "depth-4: predicted " in again
    assert (folder / "depth-3/metrics.jsonl").stat().st_mtime_ns == written
    after = json.loads((folder / "ladder.json").read_text())
    assert after["law"] == record["law"] and after["rungs"][-1]["eval_loss"] > 0
    status, _, errors = call_main(tool.main, *words, "optim.lr=0.02")
    assert status == 2 and "depth-1.yaml is the rung of another ladder" in errors
