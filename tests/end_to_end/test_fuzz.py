"""Changed inputs of every kind end with an answer or an error of one line; and the fuzzer finds
what it looks for when a program is made to do it."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import fuzz
import mutators
import pytest
from targets import Target, list_targets, make_nothing

from megaframe.config.load import load
from megaframe.dashboard import metrics_file
from megaframe.dashboard.metrics_file import MetricColumn
from megaframe.errors import UserError
from megaframe.extensions import load as extensions_load
from megaframe.inference import generation
from megaframe.io.run_files import CONFIG_FILE


def run_target(call, tmp_path, **settings):
    """Return the outcome of a target that calls `call`."""
    template = tmp_path / "template"
    template.mkdir(exist_ok=True)
    (template / "in.json").write_text('{"a": [1, 2, {"b": "c"}]}')
    target = Target("test", make_nothing, call, words=("word",), **settings)
    return fuzz.run_case(target, 0, 0, template, tmp_path / "case")


def raise_user_error(text):
    raise UserError(text)


def write_below(folder, name):
    """Write by a descriptor, which no audit hook can see."""
    os.write(os.open(name, os.O_WRONLY, dir_fd=folder), b"x")


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("answer", lambda: print("all is well")),
        ("refused", lambda: raise_user_error("use 4")),
        ("status", lambda: sys.exit(1)),
        ("status", lambda: sys.exit(2)),
        ("traceback", lambda: [][0]),
        ("traceback", lambda: bytearray(3 << 30)),
        ("died", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
        ("outside", lambda: open("../../planted", "w").close()),
        ("outside", lambda: os.mkdir("/tmp/../tmp/planted-by-the-fuzzer")),
        ("outside", lambda: subprocess.run(["true"])),
        ("outside", lambda: write_below(os.open("../outside", 0), "text")),
        ("outside", lambda: os.mkdir("planted", dir_fd=os.open("../outside", 0))),
        ("secret", lambda: print(Path("../outside/text").read_text())),
        ("secret", lambda: print(mutators.SECRET)),
        ("secret", lambda: Path("new").write_text(mutators.SECRET)),
        ("escape", lambda: print("\x1b[31m")),
    ],
)
def test_every_kind_of_outcome_is_recognised(kind, call, tmp_path):
    actual, text = run_target(call, tmp_path)
    assert actual == kind, text
    Path("/tmp/planted-by-the-fuzzer").exists() and os.rmdir("/tmp/planted-by-the-fuzzer")


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz, "SECONDS", 1)
    assert run_target(lambda: [None for _ in iter(int, 1)], tmp_path)[0] in ("slow", "traceback")
    monkeypatch.setattr(fuzz, "HANGING", 0.5)
    assert run_target(lambda: time.sleep(60), tmp_path)[0] == "hung"


def test_changes_follow_from_the_seed_and_change_something(tmp_path):
    def change_file(seed, name, text):
        path = tmp_path / f"{seed}" / name
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        path.write_bytes(text)
        mutators.change_file(random.Random(seed), path)
        plain = path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 22
        return path.read_bytes() if plain else b""

    text = b'{"a": [1, 2, {"b": "c"}], "d": 1.5}'
    for name in ("x.json", "x.yaml", "x.jsonl", "x.bin"):
        changes = [change_file(seed, name, text) for seed in range(40)]
        assert changes == [change_file(seed, name, text) for seed in range(40)]
        assert len({*changes}) > 20
    words = [
        tuple(mutators.change_arguments(random.Random(seed), ["--a", "b=c"])) for seed in range(40)
    ]
    assert len({*words}) > 25 and not any("\0" in word for line in words for word in line)


def run(seconds, seed, cases, tmp_path, names=()):
    """Run the fuzzer in a process of its own, whose only threads are those of libraries."""
    (tmp_path / "findings").mkdir()
    fuzzer = fuzz.Fuzzer(seed, tmp_path, names)
    fuzzer.run(seconds, cases)
    assert not fuzzer.findings, fuzzer.summary()
    return fuzzer.counts


def test_some_inputs_of_the_quick_targets_are_taken_or_refused(tmp_path):
    names = ("config", "overrides", "dashboard", "token files", "schedule", "goodput", "trace")
    counts = run(60, "always", 3, tmp_path, names)
    assert all(count.total() == 3 for count in counts.values()) and len(counts) == len(names)


def follow_links(patch):
    patch.setattr(os, "O_NOFOLLOW", 0)


def wait_for_pipes(patch):
    patch.setattr(os, "O_NONBLOCK", 0)
    patch.setattr(fuzz, "HANGING", 5)


def read_as_ones_own(patch):
    """Read the config of a run folder like one that the user names."""
    patch.setattr(extensions_load, "load_from_run", lambda folder: load(str(folder / CONFIG_FILE)))


def keep_all_columns(patch):
    """Keep every name of a metric, with a number for each line."""
    patch.setattr(metrics_file, "_MOST_COLUMNS", 1 << 60)
    patch.setattr(MetricColumn, "put", lambda self, line, value: self.values.extend([0.0] * line))


def plant(name):
    return lambda draw: mutators.plant(draw, Path(name))


def plant_lock(draw):
    Path("out.parts").mkdir()
    mutators.plant(draw, Path("out.parts/lock"))


def name_outside(draw):
    path = Path("run/config.yaml")
    mutators.change_json(draw, path, partial(mutators.name_outside, path=path))


def add_names(_):
    path = Path("run/metrics.jsonl")
    lines = path.read_text().splitlines()
    mutators.add_names(lines)
    path.write_text("\n".join(lines) + "\n")


def change_counts(draw):
    (path,) = Path().glob("run/checkpoints/step-*/manifest.json")
    mutators.change_json(draw, path, mutators.change_counts)


PROTECTIONS = {
    "links are not read": (follow_links, "dashboard", plant("run/run.log"), "secret"),
    "nor written": (follow_links, "preprocess", plant_lock, "outside"),
    "pipes do not block": (wait_for_pipes, "report", plant("run/config.yaml"), "hung"),
    "nothing is extended": (read_as_ones_own, "report", name_outside, "secret"),
    "columns are few": (keep_all_columns, "report", add_names, "slow traceback hung"),
    "counts are those of files": (
        lambda patch: patch.setattr(generation, "_check_size", lambda *_: None),
        "generate",
        change_counts,
        "traceback",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_what_a_protection_keeps_out_is_found_without_it(protection, tmp_path, monkeypatch):
    remove, name, change, sought = PROTECTIONS[protection]
    (tmp_path / "findings").mkdir()
    fuzzer = fuzz.Fuzzer("always", tmp_path, [name])
    (target,) = fuzzer.targets
    monkeypatch.setattr(fuzz, "change", lambda _, draw: (change(draw), (list(target.words), {}))[1])
    assert all(fuzzer.take(target, case)[0] in ("answer", "refused") for case in range(3))
    remove(monkeypatch)
    kinds = []
    while not kinds or (kinds[-1] not in sought.split() and len(kinds) < 60):
        kinds.append(fuzzer.take(target, len(kinds))[0])
    assert kinds[-1] in sought.split(), kinds


@pytest.mark.slow
def test_inputs_of_all_targets_are_taken_or_refused(tmp_path):
    """A number of inputs, so that all machines take the same; `make fuzz` takes new ones."""
    names = {target.name for target in list_targets()}
    counts = run(180, "always", 10, tmp_path, names)
    assert counts.keys() == names
    assert all(count.total() for count in counts.values())
    assert all(sum(count[kind] for count in counts.values()) for kind in ("answer", "refused"))
