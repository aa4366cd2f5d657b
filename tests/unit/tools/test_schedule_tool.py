"""tools/schedule.py from the command line."""

import json
from xml.etree import ElementTree

import pytest
from slow_cases import slow
from tool_process import run_tool

from megaframe.schedule import SCHEDULE_NAMES


def run_schedule(*arguments):
    return run_tool("tools/schedule.py", *arguments)


def test_json_svg_and_trace(tmp_path):
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    size = ("--stages", 4, "--chunks", 2, "--microbatches", 8)
    files = ("--svg", svg, "--trace", trace)
    process = run_schedule(
        "--schedule", "interleaved", *size, "--costs", "F=1,B=2,W=1", "--json", *files
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == {
        "schedule": "interleaved",
        "stages": 4,
        "chunks": 2,
        "microbatches": 8,
        "bubble": 6 / 38,
        "bubble_time": 6,
        "time": 38,
        "peak_activations": [5.5, 4.5, 3.5, 2.5],
    }
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert len(json.loads(trace.read_text())["traceEvents"]) > 2 * 4 * 2 * 8
    assert sorted(tmp_path.iterdir()) == [trace, svg]


def test_a_file_is_drawn_and_its_lists_printed(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    size = ("--schedule", f"file:{path}", "--stages", 2, "--microbatches", 2)
    grid = run_schedule(*size).stdout
    assert "rank 1 .  F0 B0--- F1" in grid and "bubble_time       3\n" in grid
    assert "1RECV_F0" in run_schedule(*size, "--lowered").stdout


def test_updates_without_a_flush():
    size = ("--schedule", "1f1b", "--stages", 4, "--microbatches", 8, "--update-every")
    found = json.loads(run_schedule(*size, 1, "--json").stdout)
    assert (found["staleness"], found["weight_versions"]) == ([3, 2, 1, 0], [4, 3, 2, 1])
    assert (found["apart"], found["largest_rate"]) == (3, 0.2225)
    assert "staleness         1 1 1 0\n" in run_schedule(*size, 4).stdout


def test_compare_shows_every_schedule_with_chunks_that_it_takes():
    process = run_schedule("--compare", "--stages", 2, "--microbatches", 4, "--json")
    rows = json.loads(process.stdout)
    assert [row["schedule"] for row in rows] == list(SCHEDULE_NAMES)
    assert {row["schedule"]: row["chunks"] for row in rows}["zb-v"] == 2
    table = run_schedule("--compare", "--stages", 4, "--microbatches", 2).stdout
    assert "gpipe" in table and "left out" in table and "zb-h1" in table


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--schedule", "1f1", "--stages", 2), "did you mean 1f1b"),
        slow(("--schedule", "1f1b", "--stages", 0), "--stages 0"),
        slow(("--schedule", "1f1b", "--stages", 999_999_999), "at most 5,000,000"),
        slow(("--schedule", "1f1b", "--stages", 2, "--costs", "F=soon"), "'soon' is not a time"),
        (("--schedule", "1f1b", "--stages", 2, "--svg", "missing/a.svg"), "cannot write"),
        slow(("--compare", "--stages", 2, "--svg", "a.svg"), "--compare draws nothing"),
        slow(("--schedule", "1f1b", "--stages", 2, "--update-every", 3), "is: 2"),
        slow(("--schedule", "search", "--stages", 2, "--memory-limit", "nan"), "'nan'"),
    ],
)
def test_mistakes_end_with_a_message_and_status_2(arguments, words):
    process = run_schedule(*arguments, "--microbatches", 4)
    assert process.returncode == 2 and words in process.stderr
    assert "Traceback" not in process.stderr and not process.stdout
