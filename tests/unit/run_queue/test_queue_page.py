"""The page of a queue: what it says of each run, whatever is in their errors and metrics."""

import json

import pytest

from megaframe.run_queue.queue_file import RunOfQueue
from megaframe.run_queue.queue_page import PAGE, QueuePage, align_columns, format_seconds
from megaframe.run_queue.queue_state import RunRecord


def make_run(folder, name):
    return RunOfQueue(name, (), folder / name, (1,), steps=1000)


def write_metrics(folder, steps):
    folder.mkdir(exist_ok=True)
    lines = [{"step": step, "loss": 2.5, "mfu": 0.4, "seconds": 3.0} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_page_has_all_runs_with_their_progress_and_links_to_their_reports(tmp_path):
    runs = [
        (make_run(tmp_path, "a,b=1"), RunRecord([], "running", ranks=2, starts=3)),
        (make_run(tmp_path, "new"), RunRecord([])),
        (make_run(tmp_path, "bad"), RunRecord([], "failed", error="<b>no</b> [x](y) | **z**")),
    ]
    page = QueuePage(tmp_path)
    write_metrics(tmp_path / "a,b=1", range(1, 101))
    page.write(runs)
    assert page.estimate_seconds_left(runs[0][0]) == 900 * 3.0
    assert page.estimate_seconds_left(runs[1][0]) == 0
    heads, *rows = page.list_rows(runs)
    assert dict(zip(heads, rows[0], strict=True)) == {
        **{"run": "a,b=1", "state": "running", "priority": "0", "ranks": "2"},
        **{"step": "100 of 1,000", "done": "10%", "ETA": "0:45:00", "loss": "2.5000"},
        **{"MFU": "40.0%", "note": "3 starts"},
    }
    page.write(runs)
    html = (tmp_path / PAGE).read_text()
    assert '<a href="a%2Cb%3D1/report.html">a,b=1</a>' in html
    assert "1 running, 1 waiting, 1 failed" in html and 'http-equiv="refresh"' in html
    assert "&lt;b&gt;no&lt;/b&gt; [x](y) | **z**" in html and html.count("<a ") == 1
    write_metrics(tmp_path / "a,b=1", range(1, 1001))
    runs = [(runs[0][0], RunRecord([], "done"))]
    page.write(runs)
    html = (tmp_path / PAGE).read_text()
    assert "100%" in html and 'http-equiv="refresh"' not in html


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (61.6, "0:01:02"), (360_000, "100:00:00")]
)
def test_times_are_hours_minutes_and_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_columns_are_aligned():
    assert align_columns([["a", "bb", "note"], ["ccc", "d", ""]]) == "  a  bb  note\nccc   d"
