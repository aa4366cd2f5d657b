"""The metrics logger as a trainer uses it, on one rank."""

from __future__ import annotations

import json

import pytest
from logger_runs import make, step

from megaframe.metrics import PARTS, count_flops
from megaframe.model.model_chunk import list_model_specs

KEYS = [
    "step", "at", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tflops_per_second",
    "mfu", "mfu_full_attention", "hfu", "memory_bytes", "bytes", "seconds", "time",
    "lost",
]  # fmt: skip


def read(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_every_key_and_adds_up(tmp_path):
    config, logger = make(tmp_path)
    flops = count_flops(list_model_specs(config.model, config.train), config)
    for number in (1, 2):
        step(logger, number)
    logger.close()
    for number, line in enumerate(read(tmp_path), 1):
        assert list(line) == [*KEYS, "traffic_bytes"]
        assert (line["step"], line["loss"], line["lr"]) == (number, 5.0, None)
        assert list(line["time"]) == list(PARTS)
        assert sum(line["time"].values()) == line["seconds"] > 0
        assert line["time"]["data"] > 0
        assert line["tokens"] == 128 and line["traffic_bytes"] == {"data": number}
        rate = line["tokens_per_second"]
        assert rate == pytest.approx(128 / line["seconds"], rel=1e-12)
        for key, work in (
            ("mfu", flops.model),
            ("mfu_full_attention", flops.full_attention),
            ("hfu", flops.hardware),
        ):
            assert line[key] == pytest.approx(rate * work / 0.5e12, rel=1e-12)
        assert line["hfu"] > line["mfu"]
        assert 2**20 < line["memory_bytes"] < 2**40


def test_a_line_is_written_one_step_later_or_when_settled(tmp_path):
    _, logger = make(tmp_path)
    step(logger, 1)
    assert read(tmp_path) == []
    step(logger, 2)
    assert [line["step"] for line in read(tmp_path)] == [1]
    logger.write_pending_steps()
    logger.write_pending_steps()
    assert [line["step"] for line in read(tmp_path)] == [1, 2]
    step(logger, 3)
    logger.close()
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3]


def test_a_resumed_run_appends_to_the_same_file(tmp_path, capsys):
    _, logger = make(tmp_path)
    for number in range(1, 6):
        step(logger, number)  # a kill here leaves step 5 without a line
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "lo')
    _, logger = make(tmp_path, start=3)
    for number in range(4, 10):
        step(logger, number)
    logger.close()
    assert [line["step"] for line in read(tmp_path)] == list(range(1, 10))
    printed = capsys.readouterr().out
    assert "steps" in printed and "4 to 9" in printed
    log = (tmp_path / "run.log").read_text()
    assert "model FLOPs per token" in log and "metrics.peak_tflops=0.5" in log


def test_names_of_the_logger_itself_are_refused(tmp_path):
    _, logger = make(tmp_path)
    logger.record("mfu", 1.0)
    logger.flush(1)
    with pytest.raises(ValueError, match=r"\['mfu'\]"):
        logger.write_pending_steps()
