"""Sinks: what they write, read back as its users read it."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wandb_files import read_wandb_rows, without_wandb_key

from megaframe.config import RunConfig
from megaframe.errors import UserError
from megaframe.extensions.sink import TextSample
from megaframe.io.output_files import OutputFiles
from megaframe.io.run_files import METRICS_FILE, SAMPLES_FILE
from megaframe.metrics.sinks import JsonlSink, TensorBoardSink, WandbSink, flatten, open_sinks


def make_line(step, **fields):
    return {"step": step, "loss": 10.0 / step, "mfu": None, "time": {"data": 0.5}, **fields}


def list_steps(path):
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_flat_names():
    nested = {"step": 1, "a": {"b": 2.0, "c": {"d": 3.0}}, "none": None, "e": [4.0, 5.0]}
    rows = {"ranks": {"work": [1.0]}, "experts": {"tokens": {"0": [1.0]}, "dropped": 6.0}}
    expected = {"step": 1, "a/b": 2.0, "a/c/d": 3.0, "e/0": 4.0, "e/1": 5.0, "experts/dropped": 6.0}
    assert dict(flatten(nested | rows)) == expected


def test_lines_are_strict_json_and_on_disk_at_once(tmp_path):
    path = tmp_path / METRICS_FILE
    sink = JsonlSink(OutputFiles(tmp_path), 0)
    sink.write(make_line(1, grad_norm=math.inf, more={"x": math.nan, "y": 2}))
    parsed = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert parsed == {**make_line(1), "grad_norm": None, "more": {"x": None, "y": 2}}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=st.integers(0, 8), start=st.integers(0, 8), torn=st.integers(0, 200))
def test_a_resumed_run_continues_on_one_curve(tmp_path, written, start, torn):
    path = tmp_path / METRICS_FILE
    path.write_text("".join(json.dumps(make_line(step)) + "\n" for step in range(1, written + 1)))
    content = path.read_bytes()
    path.write_bytes(content + json.dumps(make_line(written + 1)).encode()[:torn])
    sink = JsonlSink(OutputFiles(tmp_path), start)
    for step in (start + 1, start + 2):
        sink.write(make_line(step))
    sink.close()
    before = [step for step in list_steps(path) if step <= start]
    # A last line that lost only its newline is complete, and kept.
    complete = written + (torn >= len(json.dumps(make_line(written + 1))))
    assert before == list(range(1, min(complete, start) + 1))
    assert list_steps(path) == [*before, start + 1, start + 2]
    assert [item.name for item in tmp_path.iterdir()] == [METRICS_FILE]


@pytest.mark.parametrize(
    "foreign",
    [b"hello\n", b'{"loss": 1}\n', b'{"step": true}\n', b"[" * 100_000 + b"\n", b"\xff\n"],
)
def test_a_file_that_is_no_metrics_file_is_refused_and_kept(tmp_path, foreign):
    path = tmp_path / METRICS_FILE
    content = b'{"step": 1}\n' + foreign + b'{"step": 2}\n'
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2, is not a JSON object"):
        JsonlSink(OutputFiles(tmp_path), 5)
    assert path.read_bytes() == content
    assert [item.name for item in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_full_disk_loses_no_line_and_ends_nothing(tmp_path):
    path, files = tmp_path / METRICS_FILE, OutputFiles(tmp_path)
    sink = JsonlSink(files, 0)
    sink.write(make_line(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        for step in (2, 3, 4):
            sink.write(make_line(step))
        (message,) = files.take_messages()
        assert f"cannot write {path}: File too large; the run goes on" in message
        assert "bytes could not be written (File too large)" in files.list_missing()[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    sink.rewind(3)
    sink.write(make_line(4, loss=0.0))
    assert list_steps(path) == [1, 2, 3, 4] and not files.list_missing()
    assert files.take_messages() == [f"{path} is written again"]


def test_a_run_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path / "file" / "run")}})
    with pytest.raises(UserError, match="cannot write"):
        open_sinks(config, 0, OutputFiles(Path(config.run.dir)))


@pytest.mark.parametrize("extra", ["tensorboard", "wandb"])
def test_a_missing_extra_is_named(tmp_path, extra, monkeypatch):
    value = True if extra == "tensorboard" else "project"
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path)}, "metrics": {extra: value}})
    module = "torch.utils.tensorboard" if extra == "tensorboard" else "wandb"
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(UserError, match=rf"metrics\.{extra}=.* pip install 'megaframe\[{extra}\]'"):
        open_sinks(config, 0, OutputFiles(Path(config.run.dir)))


SAMPLES = [TextSample("", "a\nb é"), TextSample("four", "teen")]


def test_samples_of_text_are_in_their_file_and_on_one_curve(tmp_path):
    config = RunConfig.model_validate({"train": {"sample_every": 2}})
    for start in (0, 2):  # killed after step 4, and continued after step 2
        files = OutputFiles(tmp_path)
        for sink in open_sinks(config, start, files):
            for step in (start + 2, start + 4):
                sink.write(make_line(step))
                sink.write_samples(step, SAMPLES)
        files.close()
    lines = [json.loads(text) for text in (tmp_path / SAMPLES_FILE).read_text().splitlines()]
    assert lines == [{"step": step, **vars(sample)} for step in (2, 4, 6) for sample in SAMPLES]
    assert list_steps(tmp_path / METRICS_FILE) == [2, 4, 6]


def test_tensorboard_shows_samples_of_text(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(OutputFiles(tmp_path), 0)
    sink.write_samples(2, SAMPLES)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["tensors"]) == [f"samples/{n}/text_summary" for n in (0, 1)]
    (event,) = events.Tensors("samples/1/text_summary")
    assert event.step == 2 and event.tensor_proto.string_val[0].decode().endswith("    fourteen")


def test_tensorboard_shows_one_curve_after_a_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, end, shift in ((0, 4, 100.0), (2, 5, 0.0)):  # the first was killed after step 4
        sink = TensorBoardSink(OutputFiles(tmp_path), start)
        for step in range(start + 1, end + 1):
            sink.write(make_line(step, shifted=step + shift))
        sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "shifted", "time/data"]
    curve = {event.step: event.value for event in events.Scalars("shifted")}
    assert curve == {1: 101.0, 2: 102.0, 3: 3.0, 4: 4.0, 5: 5.0}
    TensorBoardSink(OutputFiles(tmp_path), 3).close()  # killed again before it wrote a step
    events.Reload()
    assert [event.step for event in events.Scalars("shifted")] == [1, 2, 3]


def test_a_damaged_wandb_id_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=None))
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "wandb.id").write_text("../../x\n")
    with pytest.raises(UserError, match="holds no id"):
        WandbSink(OutputFiles(tmp_path), "project", {}, 1)


def test_wandb_offline_holds_the_same_values_under_one_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    without_wandb_key(monkeypatch, tmp_path)
    rows = []
    for start in (0, 2):
        time.sleep(1.0 if start else 0.0)  # wandb's folder names have whole seconds
        sink = WandbSink(OutputFiles(tmp_path), "project", {}, start)
        for step in (start + 1, start + 2):
            sink.write(make_line(step, loss_scale=65536.0))
            sink.write_samples(step, SAMPLES)
        sink.close()
    run_id = (tmp_path / "wandb.id").read_text().strip()
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(files) == 2
    for path in files:
        rows += read_wandb_rows(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert rows[3]["loss"] == 2.5 and rows[3]["time/data"] == 0.5
    assert rows[0]["loss_scale"] == 65536.0 and "mfu" not in rows[0]
    assert rows[3]["samples/nrows"] == len(SAMPLES)
