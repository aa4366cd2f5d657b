"""Queues of runs on one machine: who runs when and where, what failures and kills change, and the
page."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from entry_runs import read_losses
from held_runs import make_holding_words
from patience import PATIENCE, count_lines, wait_until
from programs import load_program
from tolerances import promised

from megaframe.run_queue.queue_file import read_queue_file

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools/run_queue.py"
tool = load_program(TOOL)


@pytest.fixture
def run(call_main):
    """run(*words) -> the exit status, the output and the errors of the tool in this process."""

    def call(*words):
        called = call_main(tool.main, *words)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return called

    return call


ENTRY = """
import json, os, signal, sys, time
from functools import partial
from pathlib import Path

keys = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder, rate = Path(keys["run.dir"]), float(keys["optim.lr"])
print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if (folder.parent / "broken").exists() and rate == 2:
    sys.exit(f"error: {folder.parent}/broken is there")
if rate == 3:
    print("error: never", file=sys.stderr)
    sys.exit(2)
path = folder / "metrics.jsonl"
step = path.read_text().count("\\n") if path.exists() else 0
while step < int(keys["train.steps"]):
    step += 1
    line = {"step": step, "loss": rate, "seconds": 0.5, "mfu": 0.25, "tokens": 1}
    with open(path, "a") as file:
        file.write(json.dumps(line) + "\\n")
    time.sleep(0.02 if rate < 4 else 0.2 if rate == 4 or step < 3 else 300)
"""
"""A run that only writes metrics. With a rate of 2 it fails while something is broken, with 3 it is
a mistake; with 4 it is slow, and with 5 it goes no further than to the third step."""


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """Let runs be `ENTRY`."""
    path = tmp_path / "entry.py"
    path.write_text(ENTRY)
    monkeypatch.setattr("megaframe.run_queue.run_process.ENTRY", str(path))


def read_records(folder):
    return json.loads((folder / "queue.json").read_text())["runs"]


def test_a_failed_run_stops_no_other_and_is_tried_again(entry, overrides, tmp_path, run):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "broken").touch()
    words = ["--sweep", "optim.lr=[1, 2, 3]", "--devices", "2", "--retries", "1"]
    words += ["--", *overrides(train__steps=3)]
    status, output, _ = run(*words)
    assert status == 0, output
    records = read_records(folder)
    assert {name: (one["state"], one["starts"]) for name, one in records.items()} == {
        "lr=1": ("done", 1), "lr=2": ("failed", 2), "lr=3": ("failed", 1)}  # fmt: skip
    assert records["lr=2"]["error"] == f"status 1: error: {folder}/broken is there"
    assert "lr=2: status 1: " in output and "; tried again" in output
    assert "failed: optim.lr=3: status 2: error: never" in output
    assert "best: optim.lr=1 " in output
    page = (folder / "queue.html").read_text()
    assert 'href="lr%3D1/report.html">lr=1</a>' in page and "status 2: error: never" in page
    assert "25.0%" in page and "1.0000" in page and "3 of 3" in page
    assert '"name":"lr=1"' in (folder / "dashboard.html").read_text()
    written = (folder / "lr=1/metrics.jsonl").stat().st_mtime_ns
    (folder / "broken").unlink()
    status, output, _ = run(*words)
    assert status == 0 and "3 runs in" in output and "1 done before" in output
    states = {name: one["state"] for name, one in read_records(folder).items()}
    assert states == {"lr=1": "done", "lr=2": "done", "lr=3": "failed"}
    assert (folder / "lr=1/metrics.jsonl").stat().st_mtime_ns == written


def test_trials_that_are_behind_are_stopped_and_each_run_has_gpus_of_its_own(
    entry, overrides, tmp_path, run
):
    words = ["--sweep", "optim.lr=[4, 5]", "--gpus", "6,7", "--grace", "2"]
    words += ["--", *overrides(train__steps=8)]
    status, output, _ = run(*words)
    assert status == 0, output
    states = {name: one["state"] for name, one in read_records(tmp_path / "run").items()}
    assert states == {"lr=4": "done", "lr=5": "stopped"}
    assert "lr=5: asked to leave, because other trials are better" in output
    seen = [(tmp_path / "run" / name / "console.txt").read_text() for name in states]
    assert [line.split() for line in seen] == [["devices", "6"], ["devices", "7"]]


@pytest.mark.slow
def test_a_run_that_leaves_for_another_continues_under_another_layout_also_if_the_queue_is_killed(
    overrides, tmp_path
):
    """Two ranks are there. `low` has both until `urgent` is added to the file, and then one. The
    queue is killed meanwhile."""
    output = tmp_path / "output"
    wait = partial(wait_until, describe=output.read_text)
    held, hold = make_holding_words(tmp_path, step=6)
    keys = overrides(train__steps=12, checkpoint__every=100)
    elastic = [*keys, "parallel.tensor=2", "faults.elastic=true"]
    low = {"ranks": "1:2", "overrides": [*elastic, *held]}
    urgent = {"priority": 1, "overrides": keys}
    file, folder = tmp_path / "queue.yaml", tmp_path / "queue"
    file.write_text(json.dumps({"folder": str(folder), "runs": {"low": low}}))
    command = [sys.executable, TOOL, file, "--devices", "2"]
    with open(output, "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        wait(lambda: count_lines(folder / "low/metrics.jsonl") >= 3, process)
        file.write_text(json.dumps({"folder": str(folder), "runs": {"low": low, "urgent": urgent}}))
        wait(lambda: "make room for urgent" in output.read_text(), process)
        process.kill()
        process.wait()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        wait(lambda: "low: still runs" in output.read_text(), process)
        hold.unlink()
        assert process.wait(PATIENCE) == 0, output.read_text()
    said = re.findall(r"^(?:\d of \d: )?(\w+): (.*?)(?:, loss.*)?$", output.read_text(), re.M)
    assert said[:3] == [
        ("low", "started on 2 ranks"),
        ("low", "asked to leave, to make room for urgent"),
        ("low", "still runs; asked to leave"),
    ]
    assert ("urgent", "started on 1 rank") in said and ("low", "continues on 1 rank") in said
    assert said[3][1].startswith("has left: step ")
    states = {name: (one["state"], one["starts"]) for name, one in read_records(folder).items()}
    assert states == {"low": ("done", 2), "urgent": ("done", 1)}
    # Nothing has disturbed the other, which has the same config on one rank.
    assert read_losses(folder / "low") == promised(read_losses(folder / "urgent"))


@pytest.mark.parametrize(
    ("words", "keys", "expected"),
    [
        (["--ranks", "0"], {}, "ranks 0 is neither a number nor two"),
        (["--ranks", "2:1"], {}, "ranks 2:1 is neither a number nor two"),
        (["--ranks", "1:2"], {}, "ranks 1:2 needs faults.elastic=true"),
        (["--ranks", "2"], {}, "needs 2 ranks, and there is room for 1"),
        (["--ranks", "2", "--gpus", "0"], {}, "needs 2 ranks, and there is room for 1"),
        (["--ranks", "5:7"], {"faults__elastic": True}, "so many; the nearest uses 2"),
        (["--metric", "eval_loss"], {}, "with train.eval_every=0 there is none"),
        ([], {"checkpoint__folder": "/x"}, "checkpoint.folder=/x would be shared by all runs"),
        (["--sweep", "optim.beta2=[1.5]"], {}, "optim.beta2=1.5"),
        (["--sweep", "optim.no_key=[1]"], {}, "no_key"),
        (["queue.yaml"], {}, "belong into queue.yaml, or take its place"),
    ],
)
def test_what_cannot_be_swept_is_said_before_a_trial(
    words, keys, expected, overrides, tmp_path, run
):
    words = ["--sweep", "optim.lr=[0.1]", *words, "--", *overrides(**keys)]
    status, _, errors = run(*words)
    assert status == 2 and expected in errors and errors.startswith("error: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not the file of a queue: line 1"),
        ("[1]", "is not the file of a queue|valid dictionary"),
        ("{runs: {}}", "folder: missing; the keys are folder, runs"),
        ("{folder: q, runs: {a: {priorty: 1}}}", r"runs\.a\.priorty: unknown; the keys are config"),
        ("{folder: q, runs: {a: {priority: high}}}", r"runs\.a\.priority: .*valid integer"),
        ("{folder: q, runs: {../a: {}}}", r"runs\.\.\./a: a name has letters"),
        ("{folder: q, runs: {a: {overrides: [optim.no_key=1]}}}", "no_key"),
        ("{folder: q, runs: {a: {overrides: [checkpoint.every=0]}}}", "start from scratch"),
    ],
)
def test_mistakes_in_the_file_of_a_queue_are_said_with_their_place(text, expected, tmp_path):
    file = tmp_path / "queue.yaml"
    file.write_text(text)
    with pytest.raises(tool.UserError, match=expected) as raised:
        read_queue_file(file)
    assert str(raised.value).startswith(str(file))


def test_a_run_has_the_numbers_of_ranks_that_a_layout_uses(overrides, tmp_path):
    """Of four samples three ranks could only use two; the runs of a sweep have names of their
    own."""
    keys = overrides(train__global_batch=4, train__microbatch=1, faults__elastic=True,
        checkpoint__every=2)  # fmt: skip
    runs = {
        "all": {"overrides": keys, "ranks": "1:4"},
        "rates": {"overrides": keys, "sweep": ["optim.lr=[1, 2]"], "priority": 3, "grace": 5},
    }
    file = tmp_path / "queue.yaml"
    file.write_text(json.dumps({"folder": str(tmp_path / "q"), "runs": runs}))
    folder, (whole, first, second) = read_queue_file(file)
    assert folder == tmp_path / "q" and whole.sizes == (1, 2, 4)
    assert (first.name, second.name) == ("rates-lr=1", "rates-lr=2")
    assert (second.sweep, second.keys, second.priority) == ("rates", {"optim.lr": "2"}, 3)
    assert f"run.dir={folder / 'rates-lr=2'}" in second.words
    assert whole.words[-1] == "checkpoint.resume=latest"


def test_a_changed_file_is_taken_over_only_if_it_is_right(entry, overrides, tmp_path, run):
    """While a slow run goes on, another one is added, and the first taken from the list. A second
    queue of the same folder is refused."""
    folder, file, output = tmp_path / "q", tmp_path / "queue.yaml", tmp_path / "output"
    wait = partial(wait_until, describe=output.read_text)

    def write(**rates):
        runs = {
            name: {"overrides": overrides(optim__lr=rate, train__steps=600, checkpoint__every=1)}
            for name, rate in rates.items()
        }
        (tmp_path / "new").write_text(json.dumps({"folder": str(folder), "runs": runs}))
        os.replace(tmp_path / "new", file)

    write(slow=4)
    program = (
        f"import sys; sys.path.insert(0, {str(TOOL.parent)!r}); import run_queue as tool;"
        "import megaframe.run_queue.run_process as process;"
        f"process.ENTRY = {str(tmp_path / 'entry.py')!r}; tool.main()"
    )
    with open(output, "w") as log:
        command = [sys.executable, "-c", program, file, "--devices", "2"]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        wait(lambda: "slow: started" in output.read_text(), process)
        file.write_text("{")
        wait(lambda: "the runs stay as they were" in output.read_text(), process)
        write(slow=4, other=5)
        wait(lambda: "other: started on 1 rank" in output.read_text(), process)
        write(other=5)
        wait(lambda: "no longer listed" in output.read_text(), process)
        wait(lambda: list(read_records(folder)) == ["other"], process)
        status, _, errors = run(file)
        assert status == 2 and f"process {process.pid}" in errors
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
    assert "the same command continues" in output.read_text()
    assert read_records(folder)["other"]["state"] == "waiting"


@pytest.mark.parametrize("damage", ["{", "[1]", '{"runs": {"a": {}}}', "{}x"])
def test_a_damaged_state_is_said_and_kept(damage, entry, overrides, tmp_path, run):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/queue.json").write_text(damage)
    words = ("--sweep", "optim.lr=[0.1]", "--", *overrides())
    status, _, errors = run(*words)
    assert status == 2 and "is not the state of a queue; move it away" in errors
    assert (tmp_path / "run/queue.json").read_text() == damage
