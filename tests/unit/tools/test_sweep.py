"""Sweeps on one machine: what is tried, what failures and interruptions change, and the table."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from bitwise import assert_same_losses
from entry_runs import read_losses, train
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE

from megaframe.dashboard.metrics_file import MetricsFile
from megaframe.dashboard.sweep import Sweep, read_values_after, summarize
from megaframe.dashboard.trials import Range, make_trials, parse_space
from megaframe.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/sweep.py"
_spec = importlib.util.spec_from_file_location("sweep_tool", TOOL)
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim.lr", "is not KEY="),
        ("optim.lr=[]", "is not KEY="),
        ("optim.lr=log:0:1", "above 0 for log"),
        ("optim.lr=uniform:2:1", "LOW < HIGH"),
        ("optim.lr=uniform:0:inf", "are numbers"),
        ("optim.lr=uniform:a:b", "are numbers"),
        ("run.dir=[a, b]", "every trial has its own folder"),
    ],
)
def test_what_is_no_space_is_refused(text, expected):
    with pytest.raises(UserError, match=expected):
        parse_space([text])


def test_a_sweep_over_nothing_and_over_a_key_twice_is_refused():
    with pytest.raises(UserError, match="nothing to sweep over"):
        parse_space([])
    with pytest.raises(UserError, match=r"optim\.lr is given twice"):
        parse_space(["optim.lr=[1]", "optim.lr=[2]"])


SPACES = st.dictionaries(
    st.sampled_from(["a.a", "a.b", "c.c", "c.d"]),
    st.one_of(
        st.lists(st.sampled_from("pqrs"), min_size=1, unique=True),
        st.tuples(st.floats(1e-6, 1), st.floats(2, 1e6), st.booleans()).map(lambda r: Range(*r)),
    ),
    min_size=1,
)


@given(SPACES, st.integers(1, 4), st.integers(0, 5), st.integers(0, 3), st.data())
def test_a_larger_sweep_has_the_trials_of_a_smaller_one(space, times, additional, seed, data):
    ranges = {key: values for key, values in space.items() if isinstance(values, Range)}
    if not ranges:
        times, additional = 1, 0
    trials = make_trials(space, times, seed)
    combinations = 1
    for kept in space.values():
        combinations *= 1 if isinstance(kept, Range) else len(kept)
    assert len(trials) == times * combinations == len({trial.name for trial in trials})
    for trial in trials:
        assert all(ranges[key].low <= float(trial.keys[key]) <= ranges[key].high for key in ranges)
        assert all(trial.keys[key] in space[key] for key in space.keys() - ranges.keys())
    wider = {key: values if key in ranges else [*values, "new"] for key, values in space.items()}
    wider_trials = make_trials(wider, times + additional, seed)
    assert {one.name for one in trials} <= {one.name for one in wider_trials}
    if ranges:
        other = make_trials(space, times, seed + 1)
        assert not {one.name for one in trials} & {one.name for one in other}


def test_a_grid_is_not_repeated():
    with pytest.raises(UserError, match=r"--trials 2 would repeat .* run\.seed=\[0, 1\]"):
        make_trials({"optim.lr": ["1", "2"]}, 2, 0)
    with pytest.raises(UserError, match="--trials 0 is too few"):
        make_trials({"optim.lr": ["1", "2"]}, 0, 0)


def test_values_are_checked_against_the_config_before_a_trial(overrides):
    sweep = Sweep.parse(overrides(), ["optim.lr=[1e-3]"], None)
    sweep.check([{"optim.lr": "1e-3"}])
    with pytest.raises(UserError, match="no_key"):
        sweep.check([{"optim.lr": "1e-3"}, {"optim.no_key": "1"}])


def test_a_loss_is_told_as_the_mean_of_a_few_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": n, "loss": float(n)}) + "\n" for n in range(1, 31)))
    metrics = MetricsFile(path)
    metrics.read()
    values = dict(read_values_after(metrics, "loss", 20))
    assert sorted(values) == list(range(21, 31))
    assert values[30] == pytest.approx(25.5)


def test_the_table_has_the_best_first_and_what_failed_last():
    results = [
        {"keys": {"a.b": key}, "step": step, "loss": loss, "folder": f"/x/{key}", "error": error}
        for key, step, loss, error in (
            ("one", 10, 3.0, None),
            ("two", 10, 2.0, None),
            ("three", 5, 1.0, None),
            ("four", 7, 0.5, "status 5: error: no"),
            ("five", None, None, None),
        )
    ]
    text, failed = summarize(results, {"a.b": []}, "loss")
    lines = [line.split() for line in text.splitlines()]
    assert [line[2] for line in lines[:4]] == ["a.b", "two", "one", "three"]
    assert [" ".join(line) for line in lines[4:]] == [
        "failed: a.b=four: status 5: error: no",
        "failed: a.b=five: no step was done",
        "best: a.b=two (/x/two)",
    ]
    assert failed == 2


def run(monkeypatch, capsys, *words):
    """Run the tool in this process; return its exit status, output and errors."""
    monkeypatch.setattr(sys, "argv", ["sweep.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


@pytest.mark.slow
def test_a_failed_trial_stops_no_other_and_is_the_only_one_tried_again(
    corpus, overrides, tmp_path, monkeypatch, capsys
):
    new_folder = tmp_path / "moved"
    sources = f"data.sources=[[{{path: {corpus}}}], [{{path: {new_folder}}}]]"
    words = ("--sweep", sources, "--jobs", 2, "--", *overrides(train__steps=3))
    status, output, _ = run(monkeypatch, capsys, *words)
    assert status == 0, output
    good, bad = json.loads((tmp_path / "run/sweep.json").read_text())
    assert (good["step"], good["error"]) == (3, None)
    assert good["loss"] == pytest.approx(sum(read_losses(Path(good["folder"]))) / 3)
    assert bad["step"] is None and f"cannot open {new_folder}.idx" in bad["error"]
    assert f'best: data.sources=[{{"path": "{corpus}"}}]' in output and "failed: " in output
    assert "data.sources" in (tmp_path / "run/sweep.html").read_text()
    written = (Path(good["folder"]) / "metrics.jsonl").stat().st_mtime_ns
    for suffix in (".bin", ".idx"):
        new_folder.with_suffix(suffix).write_bytes(Path(f"{corpus}{suffix}").read_bytes())
    status, output, _ = run(monkeypatch, capsys, *words)
    assert status == 0 and "failed: " not in output
    assert "2 trials in" in output and "1 done before" in output
    assert (Path(good["folder"]) / "metrics.jsonl").stat().st_mtime_ns == written


HOLDING = """
import time
from pathlib import Path
from typing import Literal

from megaframe.extensions import Callback, CallbackPart


class HoldingConfig(CallbackPart):
    kind: Literal["holding"] = "holding"
    file: str

    def make_callback(self, config):
        return Holding(Path(self.file))


class Holding(Callback):
    def __init__(self, file):
        self._file = file

    def before_step(self, run):
        while run.step == 6 and self._file.exists():
            time.sleep(0.02)


def register(registry):
    registry.register(HoldingConfig)
"""
"""An extension that keeps runs from going on while a file exists."""


@pytest.mark.slow
def test_an_interrupted_sweep_continues_its_trials_on_the_same_curves(
    pool, overrides, tmp_path, monkeypatch, capsys
):
    """They save when they are asked to leave."""
    (tmp_path / "holding.py").write_text(HOLDING)
    hold = tmp_path / "hold"
    hold.touch()
    keys = overrides(
        **{"train__steps": 60, "checkpoint__every": 10**6, "run__dir": tmp_path / "sweep"},
        run__extensions=f"[{tmp_path / 'holding.py'}]",
        run__callbacks=f"[{{kind: holding, file: {hold}}}]",
    )
    words = ["--sweep", "optim.lr=[0.01, 0.02]", "--jobs", "2", "--", *keys]
    process = subprocess.Popen(
        [sys.executable, TOOL, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background of a shell, as the tests may be, ignores this signal.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        metrics = list((tmp_path / "sweep").glob("*/metrics.jsonl"))
        if len(metrics) == 2 and all(path.read_text().count("\n") >= 3 for path in metrics):
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert "the same command continues" in process.stderr.readline()
    hold.unlink()
    process.communicate()
    assert process.returncode == 130
    assert len(list((tmp_path / "sweep").glob("*/checkpoints/latest"))) == 2
    status, output, errors = run(monkeypatch, capsys, *words)
    assert status == 0, output + errors
    for trial in json.loads((tmp_path / "sweep/sweep.json").read_text()):
        folder = tmp_path / trial["keys"]["optim.lr"]
        single_run = [*keys, f"optim.lr={trial['keys']['optim.lr']}", f"run.dir={folder}"]
        pool.run(1, train, single_run)
        losses, alone = read_losses(Path(trial["folder"])), read_losses(folder)
        assert_same_losses(losses, alone, because="the trial is the same command")


@pytest.mark.slow
def test_each_job_has_gpus_of_its_own(overrides, tmp_path, monkeypatch):
    """The entry is one that writes what it sees, and there are no GPUs here."""
    entry = tmp_path / "entry.py"
    entry.write_text("import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n")
    monkeypatch.setattr("megaframe.dashboard.sweep.ENTRY", str(entry))
    words = ["--sweep", "optim.lr=[1, 2]", "--jobs", "2", "--ranks", "2", "--gpus", "4,5,6,7"]
    monkeypatch.setattr(sys, "argv", ["sweep.py", *words, "--", *overrides()])
    with pytest.raises(SystemExit):
        tool.main()
    devices = [path.read_text().split() for path in (tmp_path / "run").glob("*/console.txt")]
    assert sorted(map(sorted, devices)) == [["4,5", "4,5"], ["6,7", "6,7"]]


@pytest.mark.parametrize(
    ("words", "keys", "expected"),
    [
        (["--jobs", "0"], {}, "--jobs 0 is too few"),
        (["--ranks", "0"], {}, "--ranks 0 is too few"),
        (["--jobs", "2", "--gpus", "0"], {}, "need 2 GPUs, and --gpus 0 names 1"),
        (["--metric", "eval_loss"], {}, "with train.eval_every=0 there is none"),
        ([], {"checkpoint__folder": "/x"}, "checkpoint.folder=/x would be shared by all trials"),
        (["--sweep", "optim.beta2=[1.5]"], {}, "optim.beta2=1.5"),
    ],
)
def test_what_cannot_be_swept_is_said_before_a_trial(
    words, keys, expected, overrides, tmp_path, monkeypatch, capsys
):
    words = ["--sweep", "optim.lr=[0.1]", *words, "--", *overrides(**keys)]
    status, _, errors = run(monkeypatch, capsys, *words)
    assert status == 2 and expected in errors and errors.startswith("error: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["{", "[1]", '[{"keys": {}}]', "{}x"])
def test_a_damaged_result_is_said_and_kept(damage, overrides, tmp_path, monkeypatch, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/sweep.json").write_text(damage)
    words = ("--sweep", "optim.lr=[0.1]", "--", *overrides())
    status, _, errors = run(monkeypatch, capsys, *words)
    assert status == 2 and "is not the result of a sweep; move it away" in errors
    assert (tmp_path / "run/sweep.json").read_text() == damage
