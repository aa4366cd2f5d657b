"""Sinks of extensions: each gets every step once, and none can end a run.

Tests `megaframe.metrics.extension_sink`.
"""

import csv
import json

import logger_runs
import pytest
from repo_copy import ROOT

from megaframe.config import explain
from megaframe.config.registry import Registry, use_registry
from megaframe.errors import UserError
from megaframe.extensions import TextSample, load_extensions, load_with_extensions

EXAMPLE = f"run.extensions=[{ROOT / 'examples/sink.py'}]"
SOURCE = '''
import json
from typing import Literal
from megaframe.extensions import Sink, SinkPart

class Calls(Sink):
    def __init__(self, path, start_step, fails):
        self.path, self.fails = path, fails
        self.add("made", start_step)

    def add(self, name, value):
        with self.path.open("a") as file:
            file.write(json.dumps([name, value]) + "\\n")
        if name in self.fails:
            raise ConnectionError(f"{name} is\\nrefused")

    def write(self, line):
        self.add("write", line["step"])
        line.clear()

    def write_samples(self, step, samples):
        self.add("samples", [step, *(sample.text for sample in samples)])

    def flush(self):
        self.add("flush", None)

    def rewind(self, step):
        self.add("rewind", step)

    def close(self):
        self.add("close", None)

class CallsPart(SinkPart):
    kind: Literal["calls"] = "calls"
    """Notes its calls."""
    fails: tuple[str, ...] = ()
    """Which of them fail."""

    def make_sink(self, config, folder, start_step):
        return Calls(folder / "calls.jsonl", start_step, self.fails)

def register(registry):
    registry.register(CallsPart)
'''


@pytest.fixture(autouse=True)
def registry():
    with use_registry(Registry()):
        yield


def load_calls(tmp_path):
    path = tmp_path / "calls.py"
    path.write_text(SOURCE)
    load_extensions(None, [f"run.extensions=[{path}]"])


def read_calls(folder):
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def run(folder, fails=()):
    """Return what is missing after three steps, of which the second is undone."""
    _, logger = logger_runs.make(folder, sinks=[{"kind": "calls", "fails": fails}])
    logger_runs.step(logger, 1)
    logger.add_samples(1, [TextSample("", "said")])
    logger_runs.step(logger, 2)
    logger.write_pending_steps()
    logger.rewind(1)
    logger_runs.step(logger, 2)
    logger_runs.step(logger, 3)
    return logger.close()


def test_a_sink_gets_each_step_once_in_order_and_is_closed(tmp_path):
    load_calls(tmp_path)
    assert run(tmp_path / "run") == []
    calls = read_calls(tmp_path / "run")
    assert [call for call in calls if call[0] != "flush"] == [
        ["made", 0],
        ["write", 1],
        ["samples", [1, "said"]],
        ["write", 2],
        ["rewind", 1],
        ["write", 2],
        ["write", 3],
        ["close", None],
    ]
    assert calls.count(["flush", None]) == 2 and calls[-2] == ["flush", None]
    # It has a line of its own: the console is given each after it.
    assert "steps                     2 to 3" in (tmp_path / "run/run.log").read_text()


@pytest.mark.parametrize("call", ["write", "samples", "flush", "rewind", "close"])
def test_a_failure_is_said_once_and_ends_nothing(call, tmp_path):
    load_calls(tmp_path)
    (missing,) = run(tmp_path / "run", fails=[call])
    assert missing.startswith("sink calls does not ")
    assert missing.endswith(f"ConnectionError: {call} is refused") and "calls.py:" in missing
    assert read_calls(tmp_path / "run")[-1] == ["close", None]
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert (tmp_path / "run/run.log").read_text().count("warning: sink calls") == 1


def test_one_that_cannot_be_made_is_one_message(tmp_path):
    load_calls(tmp_path)
    with pytest.raises(UserError, match=r"calls: CallsPart.make_sink .* fails at .*: made is"):
        run(tmp_path / "run", fails=["made"])


def test_the_example_continues_its_table(tmp_path):
    load_extensions(None, [EXAMPLE])
    assert "metrics.sinks[csv].columns\n  Names in a line" in explain("metrics.sinks")
    with pytest.raises(UserError, match=r"metrics.sinks.0=tsv: takes csv"):
        load_with_extensions(None, [EXAMPLE, "metrics.sinks=[tsv]"])
    sinks = [{"kind": "csv", "columns": ["step", "loss"]}]
    for start in (0, 2):
        _, logger = logger_runs.make(tmp_path, start, sinks=sinks)
        for number in (start + 1, start + 2, start + 3):
            logger_runs.step(logger, number)
        logger.close()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [*csv.reader(file)]
    assert rows == [["step", "loss"], *([str(step), "5.0"] for step in range(1, 6))]
