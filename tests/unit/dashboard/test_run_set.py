"""Which folders are runs, what they are called, and the texts that they have."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import make_lines, write

from megaframe.dashboard.find_runs import find_runs, name_runs
from megaframe.dashboard.page_data import build_page_data
from megaframe.dashboard.run_folder import RunFolder, flatten_config
from megaframe.dashboard.run_set import MOST_RUNS, RunSet
from megaframe.dashboard.run_texts import read_log, read_samples
from megaframe.errors import UserError


def test_a_folder_of_a_sweep_is_its_runs_in_the_order_of_their_values(tmp_path):
    for rate in ("1e-2", "3e-4", "1e-3"):
        write(tmp_path / "sweep" / f"lr={rate}", make_lines(2))
    (tmp_path / "sweep" / "empty").mkdir()
    run = write(tmp_path / "run", make_lines(2))
    (tmp_path / "sweep" / "link").symlink_to(run)
    runs = RunSet([tmp_path / "sweep", run, run])
    assert [one.name for one in runs.runs] == ["lr=3e-4", "lr=1e-3", "lr=1e-2", "run"]
    version = runs.version
    write(tmp_path / "sweep" / "lr=2e-3", make_lines(1))
    runs.read()
    assert [one.name for one in runs.runs][2] == "lr=2e-3" and runs.version != version


def test_a_folder_without_runs_is_refused_and_one_of_runs_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"it is not a run folder$"):
        RunSet([tmp_path])
    with pytest.raises(UserError, match="is not a run folder"):
        RunSet([tmp_path / "nowhere"])
    write(tmp_path / "lr=1", make_lines(2))
    with pytest.raises(UserError, match="it is not a run folder; runs in it: lr=1"):
        RunFolder(tmp_path)


def test_of_very_many_runs_those_written_to_last_are_shown_in_a_page_of_bounded_size(tmp_path):
    for number in range(MOST_RUNS + 5):
        folder = write(tmp_path / f"run{number}", make_lines(100 if number < 3 else 3))
        (folder / "run.log").write_text("x" * 99 + "\n")
    for number in range(5):
        os.utime(tmp_path / f"run{number}" / "metrics.jsonl", (number, number))
    runs = RunSet([tmp_path])
    assert [run.name for run in runs.runs] == [f"run{n}" for n in range(5, MOST_RUNS + 5)]
    assert runs.notes == ["100 of 105 runs are shown, those written to last"]
    data = build_page_data([RunFolder(tmp_path / "run0")] * 16)
    assert {len(run["x"]["step"]) for run in data["runs"]} == {100}
    data = build_page_data([RunFolder(tmp_path / "run0")] * 100)
    assert {len(run["x"]["step"]) for run in data["runs"]} == {80}
    assert len({run["colour"] for run in data["runs"]}) == 100


@given(st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4), min_size=1, max_size=6))
def test_names_of_runs_are_the_shortest_that_tell_them_apart(tmp_path_factory, paths):
    root = tmp_path_factory.getbasetemp()
    folders = [root.joinpath(*parts) for parts in dict.fromkeys(map(tuple, paths))]
    names = name_runs(folders)
    assert len(set(names)) == len(folders)
    for folder, name in zip(folders, names, strict=True):
        assert folder.as_posix().endswith("/" + name)
        shorter = name.partition("/")[2]
        others = [other.as_posix() for other in folders if other != folder]
        assert not shorter or any(other.endswith("/" + shorter) for other in others)


def test_names_of_trials_are_what_differs_between_them(tmp_path):
    folders = [tmp_path / f"beta2=0.95,lr={rate},seed=1" for rate in ("1e-3", "3e-3")]
    assert name_runs(folders) == ["lr=1e-3", "lr=3e-3"]
    assert name_runs(folders[:1]) == [folders[0].name]
    assert name_runs([*folders, tmp_path / "other"])[0] == folders[0].name


def test_the_same_run_twice_has_two_names(tmp_path):
    assert name_runs([tmp_path, tmp_path]) == [tmp_path.name, f"{tmp_path.name} (2)"]
    assert find_runs(tmp_path) == []


def test_of_a_long_log_the_end_is_read(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("".join(f"line {number:06d}\n" for number in range(100_000)))
    log = read_log(tmp_path, 1200)
    assert log["lines"] == [f"line {number:06d}" for number in range(99_901, 100_000)]
    assert log["skipped"] == path.stat().st_size - 12 * 99
    path.write_bytes(b"\xff\x1b[2J\tend\r\n" + b"x" * 5000)
    lines = read_log(tmp_path, 1 << 16)["lines"]
    assert lines[0] == "\ufffd\\x1b[2J   end" and lines[1].endswith("... (5,000 characters)")


def test_a_log_that_is_a_link_or_missing_is_not_shown(tmp_path):
    assert read_log(tmp_path, 100) == {} and read_samples(tmp_path, 100) == []
    (tmp_path / "secret").write_text('{"step": 1, "prompt": "a", "text": "b"}\n')
    for name in ("run.log", "samples.jsonl"):
        (tmp_path / name).symlink_to(tmp_path / "secret")
    assert read_log(tmp_path, 100) == {} and read_samples(tmp_path, 100) == []


def write_samples(folder, steps, text="t"):
    lines = [
        json.dumps({"step": step, "prompt": prompt, "text": f"{text}{step}"})
        for step in steps
        for prompt in ("one", "two")
    ]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")


def test_samples_of_repeated_steps_are_the_later_ones(tmp_path):
    write_samples(tmp_path, [10, 20, 30, 20])
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('no sample\n{"step": true, "prompt": "", "text": ""}\n{"step": 40, "pro')
    samples = read_samples(tmp_path, 10_000)
    assert [(one["step"], one["prompt"]) for one in samples] == [
        (10, "one"), (10, "two"), (20, "one"), (20, "two"),
    ]  # fmt: skip


def test_of_many_samples_the_first_the_last_and_some_between_are_shown(tmp_path):
    write_samples(tmp_path, range(1, 1001), text="x" * 1000)
    samples = read_samples(tmp_path, 100_000)
    steps = sorted({one["step"] for one in samples})
    assert steps[0] == 1 and steps[-1] == 1000 and 45 <= len(steps) <= 55
    assert sum(len(one["text"]) for one in samples) < 120_000
    write_samples(tmp_path, [1], text="x" * 100_000)
    assert read_samples(tmp_path, 100)[0]["text"].endswith("(100,001 characters)")


def test_long_values_of_a_config_that_differ_stay_different():
    (one,), (other,) = (flatten_config({"key": "x" * 1000 + end}) for end in "ab")
    assert one != other and len(one[1]) < 600
