"""Console output, on a terminal without any capability.

Tests `megaframe.metrics.totals`.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaframe.config import RunConfig
from megaframe.io.output_files import OutputFiles
from megaframe.metrics.console import ConsoleSink, align, choose_column_widths, format_duration


def make_line(step, **fields):
    return {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tokens": 2048,
        "sources": [10.0 * step, 6.0 * step],
        "tokens_per_second": 1024.0,
        "tflops_per_second": 0.25,
        "mfu": None,
        "mfu_full_attention": None,
        "hfu": None,
        "memory_bytes": 3 * 2**20,
        "bytes": {"data": 3 * 2**19},
        "seconds": 2.0,
        "time": {"compute": 1.5, "other": 0.5, "data": 0.0},
        **fields,
    }


@pytest.fixture
def print_lines(tmp_path, capsys, monkeypatch):
    """print_lines(lines, start=0, **keys of the config) -> what a console sink prints of them."""
    monkeypatch.setenv("TERM", "dumb")

    def show(lines, start=0, **keys):
        folder = tmp_path / "run [a]"
        folder.mkdir()
        train = {"seq": 128, "global_batch": 16, **keys.pop("train", {})}
        config = RunConfig.model_validate({"run": {"dir": str(folder)}, "train": train, **keys})
        sink = ConsoleSink(config.train, config.data, config.metrics, start, OutputFiles(folder))
        sink.note("a [note]")
        for record in lines:
            sink.write(record)
        sink.close()
        printed = capsys.readouterr().out
        assert (folder / "run.log").read_text() == printed
        assert printed.isascii() and "\x1b" not in printed and "\r" not in printed
        return printed

    return show


def test_lines_header_and_summary(print_lines):
    lines = [make_line(step) for step in range(1, 11)]
    lines[3] = make_line(4, eval_loss=2.25, eval_perplexity=9.4877, eval_bits_per_byte=1.5)
    lines[6] = make_line(7, eval_loss=2.5, eval_tasks={"choose": {"acc": 0.25, "acc_norm": 0.5}})
    printed = print_lines(lines, train={"steps": 10}, metrics={"every": 4}).splitlines()
    assert printed[0] == "a [note]"
    assert re.split(r"\s\s+", printed[1].strip()) == [
        "step", "loss", "grad norm", "lr", "tokens/s", "TFLOP/s", "MFU", "seconds", "ETA",
    ]  # fmt: skip
    rows = [text.split() for text in printed if re.match(r" *\d+/10 ", text)]
    assert [row[0] for row in rows] == ["1/10", "4/10", "8/10", "10/10"]
    assert rows[1] == ["4/10", "2.5000", "1.500", "3.00e-04", "1,024", "0.25", "n/a", "2", "12s"]
    header, first = printed[1], printed[2]
    assert len(header) == len(first)
    assert "step 4: validation loss 2.2500, perplexity 9.488, 1.5000 bits per byte" in printed
    assert "step 7: validation loss 2.5000" in printed
    assert "step 7: task choose: acc 0.2500, acc_norm 0.5000" in printed
    assert sum("grad norm" in text for text in printed) == 1
    summary = "\n".join(printed)
    for part in (
        r"steps +1 to 10\n",
        r"tokens +20,480\n",
        r"final loss +1\.0000\n",
        r"best validation loss +2\.2500\n",
        r"tokens/s +1,024\n",
        r"MFU +n/a\n",
        r"sent by a rank in a step +data 1\.5 MiB\n",
        r"time +compute 75\.0%, other 25\.0%\n",
        r"peak memory of a rank +3 MiB\n",
        r"files .*run \[a\]: metrics\.jsonl, run\.log",
    ):
        assert re.search(part, summary), part


def test_figures_of_speed_are_means_since_the_line_before(print_lines):
    lines = [make_line(1), make_line(2, seconds=1.0, mfu=0.9), make_line(3, seconds=3.0, mfu=0.1)]
    lines[0]["mfu"] = 0.5
    printed = print_lines(lines, train={"steps": 3}, metrics={"every": 3})
    row = next(text for text in printed.splitlines() if text.lstrip().startswith("3/3")).split()
    assert row[4:8] == ["1,024", "0.25", "30.0%", "2"]  # 0.3 = (0.9 * 1 + 0.1 * 3) / 4


def test_the_time_left_counts_the_tokens_of_a_batch_that_grows(print_lines):
    ramp = {"start": 4, "increment": 4, "samples": 24}  # 2 steps of 4, 1 of 8, 1 of 12, then 16
    samples = [4, 4, 8, 12, 16, 16]
    seen = [sum(samples[: step + 1]) for step in range(6)]
    lines = [
        make_line(step + 1, seconds=size / 2, tokens=128 * size, sources=[seen[step]])
        for step, size in enumerate(samples)
    ]
    printed = print_lines(lines, train={"steps": 6, "batch_ramp": ramp})
    left = [text.split()[-1] for text in printed.splitlines() if re.match(r" *\d/6 ", text)]
    assert left == [f"{sum(samples[step:]) // 2}s" for step in range(1, 7)]


def test_unknown_and_infinite_values_are_shown(print_lines):
    odd_line = make_line(6, loss=float("nan"), grad_norm=float("inf"), lr=None)
    printed = print_lines([odd_line], start=5, train={"steps": 9})
    assert printed.splitlines()[2].split()[:4] == ["6/9", "nan", "inf", "n/a"]
    assert "6 to 6" in printed


def test_a_run_without_steps_has_no_summary(print_lines):
    assert print_lines([]) == "a [note]\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (185, "3m 05s"),
        (3599.7, "1h 00m"),
        (7680, "2h 08m"),
        (273600, "3d 04h"),
        (float("inf"), "n/a"),
    ],
)
def test_durations_as_text(seconds, text):
    assert format_duration(seconds) == text


@given(st.lists(st.text("x", max_size=20), min_size=9, max_size=9))
def test_cells_that_are_too_long_still_stay_apart(cells):
    widths = choose_column_widths(10**7)
    row = align(widths, [cell or "-" for cell in cells])
    assert row.split() == [cell or "-" for cell in cells]
