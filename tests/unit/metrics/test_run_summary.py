"""What a run shows: console modes, Prometheus, profiles, and the report of memory.

Tests `megaframe.metrics.profiler`.
"""

import json
import urllib.error
import urllib.request

import pytest
import torch
from entry_runs import make_trainer
from logger_runs import make, step

from megaframe.config import load
from megaframe.errors import UserError
from megaframe.metrics.memory import explain_out_of_memory, read_allocator_metrics
from megaframe.metrics.peak_flops import DevicePeak
from megaframe.metrics.prometheus import PrometheusSink, to_exposition_format
from megaframe.training.auto_layout import resolve_config
from megaframe.training.dry_run import describe_run
from megaframe.training.train_step import TrainStep


@pytest.mark.parametrize("console", ["lines", "quiet", "json"])
def test_console_modes(console, tmp_path, capsys):
    """What few users need, such as the peak that MFU is measured against, is only in the log."""
    _, logger = make(tmp_path, console=console, port=0)
    for number in (1, 2):
        step(logger, number)
    logger.close()
    printed = capsys.readouterr().out
    log = (tmp_path / "run.log").read_text()
    assert "1/9" in log and "Summary" in log and "line is at http://127.0.0.1:" in log
    if console == "json":
        printed_lines = [json.loads(line) for line in printed.splitlines()]
        assert [entry["step"] for entry in printed_lines if "step" in entry] == [1, 2]
        assert any("line is at http" in entry.get("note", "") for entry in printed_lines)
        assert printed_lines[-1]["summary"]["steps"] == "1 to 2"
    else:
        assert ("1/9" in printed) == (console == "lines")
        assert "Summary" in printed and "line is at http" in printed
        details = [line for line in log.splitlines(keepends=True) if line not in printed]
        assert console == "quiet" or "".join(details) == "".join(log.splitlines(keepends=True)[:2])
    assert "peak_tflops" in log and "FLOPs per token" in log
    assert "peak_tflops" not in printed and "FLOPs per token" not in printed


def test_an_unknown_peak_is_no_detail(tmp_path, monkeypatch, capsys):
    unknown = DevicePeak(None, "mfu n/a: set me")
    monkeypatch.setattr("megaframe.metrics.metrics_logger.find_device_peak", lambda *_: unknown)
    make(tmp_path)
    assert capsys.readouterr().out == "mfu n/a: set me\n"


def test_the_latest_line_is_served_to_this_machine(tmp_path):
    sink = PrometheusSink(0, 'a"b')
    try:
        sink.write({"step": 3, "loss": 1.5, "mfu": None, "time": {"communication/data": 0.5}})
        with urllib.request.urlopen(sink.address) as answer:
            served = answer.read().decode().splitlines()
        assert served == [
            "# TYPE megaframe_step gauge",
            'megaframe_step{run="a\\"b"} 3.0',
            "# TYPE megaframe_loss gauge",
            'megaframe_loss{run="a\\"b"} 1.5',
            "# TYPE megaframe_time gauge",
            'megaframe_time{run="a\\"b",of="communication/data"} 0.5',
        ]
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(sink.address.removesuffix("metrics"))
        with pytest.raises(UserError, match=rf"cannot listen on metrics\.port={sink.port}"):
            PrometheusSink(sink.port, "b")
    finally:
        sink.close()
    assert to_exposition_format({"step": 1}, "r").endswith("1.0\n")


def test_a_profile_has_the_operators_of_its_step(tmp_path):
    _, logger = make(tmp_path, profile=[2])
    for number in (1, 2, 3):
        torch.ones(8, 8) @ torch.ones(8, 8)
        step(logger, number)
    logger.close()
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "step-00000002-rank-00000.json"
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("aten::mm") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
def test_out_of_memory_leaves_a_snapshot_on_a_gpu(tmp_path):
    resident = torch.ones(1 << 20, device="cuda")
    message = str(explain_out_of_memory(3, {"weights": resident.nbytes}, resident.device, tmp_path))
    assert "weights 0.00 GiB" in message and "memory-rank-3.txt" in message
    assert {path.name for path in tmp_path.iterdir()} == {
        "memory-rank-3.txt", "memory-rank-3.pickle"
    }  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")
def test_a_gpu_tells_of_fragmentation():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = read_allocator_metrics(torch.device("cuda"))
    blocks = [torch.empty(3 << 20, dtype=torch.uint8, device="cuda") for _ in range(12)]
    del blocks[::2]  # leaves holes of 3 MiB between used blocks
    after = read_allocator_metrics(torch.device("cuda"))
    assert after["reserved_bytes"] >= before["reserved_bytes"] + (36 << 20) - (20 << 20)
    assert after["fragmented_bytes"] >= 3 << 20


def test_a_cpu_has_no_allocator_of_torchs_to_tell_of():
    assert read_allocator_metrics(torch.device("cpu")) == {}


def test_the_total_of_a_run_counts_the_steps_before_a_changed_batch_as_they_were(
    overrides, tmp_path
):
    def train(**changes):
        trainer = make_trainer(load(None, overrides(checkpoint__every=3, **changes)))
        trainer.run()
        trainer.mesh.close()

    train(train__steps=3)
    train(train__steps=7, train__global_batch=4, checkpoint__resume="latest")
    log = (tmp_path / "run/run.log").read_text()
    assert "batch       8 samples, 128 tokens a step, 384 in the run" in log
    total = (3 * 8 + 4 * 4) * 16
    assert f"batch       4 samples, 64 tokens a step, {total} in the run" in log


def test_the_total_of_a_plan_follows_the_ramp(overrides):
    ramp = "{start: 2, increment: 2, samples: 9}"
    keys = {"train__global_batch": 6, "train__microbatch": 2, "train__batch_ramp": ramp}
    words = overrides(train__steps=5, **keys)
    config, layout, _ = resolve_config(load(None, words), 1)
    total = (2 + 2 + 2 + 4 + 6) * 16  # the batch grows after 4.5 and after 9 samples
    assert f"6 samples, 96 tokens a step, {total} in the run" in describe_run(config, layout)


def test_out_of_memory_says_what_held_it_and_what_to_change(overrides, monkeypatch):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(TrainStep, "train", fail)
    trainer = make_trainer(load(None, overrides()))
    with pytest.raises(UserError, match=r"rank 0 ran out .* activations .* GiB.*train\.recompute"):
        trainer.run()
