"""Exposed transfers in a trace of a GPU, compared with counting microseconds one by one."""

import gzip
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tool_process import run_tool
from torch.profiler import ProfilerActivity, profile

from megaframe.errors import UserError
from megaframe.metrics.overlap_report import IdleGap, measure_overlap

TOOL = "tools/overlap_report.py"
NAMES = {
    "compute": ("kernel", "sm90_gemm"),
    "communication": ("kernel", "ncclDevKernel_ReduceScatter_Sum_bf16"),
    "copies": ("gpu_memcpy", "Memcpy DtoH"),
}


def make_event(kind, start, lasted, device=0):
    category, name = NAMES[kind]
    fields = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": lasted}
    return {**fields, "args": {"device": device, "stream": 7}}


def write_trace(path, events):
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 500}
    path.write_text(json.dumps({"traceEvents": [host, *events]}))
    return path


SPANS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.integers(0, 60), st.integers(1, 20)),
    min_size=1,
    max_size=12,
)


@given(spans=SPANS)
def test_parts_are_what_counting_finds(spans, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "one.json"
    (report,) = measure_overlap(write_trace(path, [make_event(*span) for span in spans]))
    at = [{kind for kind, start, lasted in spans if start <= t < start + lasted} for t in range(80)]
    used = [t for t, kinds in enumerate(at) if kinds]
    inside = at[used[0] : used[-1] + 1]

    def seconds(kinds):
        return pytest.approx(sum(map(kinds, inside)) / 1e6, abs=1e-12)

    assert report.span == seconds(lambda kinds: True)
    assert report.compute == seconds(lambda kinds: "compute" in kinds)
    assert report.communication == seconds(lambda kinds: "communication" in kinds)
    assert report.exposed_communication == seconds(
        lambda kinds: "communication" in kinds and "compute" not in kinds
    )
    assert report.copies == seconds(lambda kinds: "copies" in kinds)
    assert report.exposed_copies == seconds(lambda kinds: kinds == {"copies"})
    assert report.idle == seconds(lambda kinds: not kinds)


def test_devices_are_apart_and_gaps_say_what_stands_around_them(tmp_path):
    events = [
        make_event("compute", 0, 10),
        make_event("copies", 30, 10),
        make_event("compute", 2, 3),
        make_event("compute", 45, 5),
        make_event("communication", 0, 7, device=1),
    ]
    first, second = measure_overlap(write_trace(tmp_path / "two.json", events), gaps=1)
    assert (first.device, second.device) == (0, 1)
    assert first.gaps == (IdleGap(20e-6, NAMES["compute"][1], NAMES["copies"][1]),)
    assert second.exposed_communication == second.span == pytest.approx(7e-6)


def test_a_trace_of_a_cpu_is_told_from_one_of_a_gpu(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as running:
        torch.ones(8, 8) @ torch.ones(8, 8)
    path = tmp_path / "cpu.json.gz"
    running.export_chrome_trace(str(path))
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    with pytest.raises(UserError, match=r"none of a GPU.*run\.device=cuda"):
        measure_overlap(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is not a trace"),
        ("[1]", "no list of events"),
        ('{"traceEvents": 3}', "no list of events"),
        ('{"ours": []}', "is not a trace"),
        ('[{"ph": "X", "cat": "kernel", "ts": 1}]', "a kernel without time, name or device"),
    ],
)
def test_what_is_no_trace_is_refused(text, expected, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(UserError, match=expected):
        measure_overlap(path)


@pytest.mark.slow
def test_the_tool_reads_a_folder_and_says_the_worst_first(tmp_path):
    write_trace(tmp_path / "good.json", [make_event("compute", 0, 1000)])
    slow = [
        make_event("compute", 0, 250),
        make_event("communication", 200, 300),
        make_event("copies", 900, 100),
    ]
    write_trace(tmp_path / "slow.json", slow)
    process = run_tool(TOOL, tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split("\n")[0].startswith(
        "slow, GPU 0, computes least: 25.0% of its time"
    )
    assert "idle 400 us: ncclDevKernel_ReduceScatter_Sum_bf16 | Memcpy DtoH" in process.stdout
    _, slowest = json.loads(run_tool(TOOL, tmp_path, "--json").stdout)
    assert slowest["exposed_communication"] == pytest.approx(250e-6)
    empty = tmp_path / "empty"
    empty.mkdir()
    process = run_tool(TOOL, empty)
    assert process.returncode == 2 and "metrics.profile" in process.stderr
