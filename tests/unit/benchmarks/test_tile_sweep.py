"""The sweep over sizes of tiles: it begins with those of the tables, and runs on a CPU when dry."""

import json
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
from megaframe_kernels.attention import launches
from megaframe_kernels.elementwise import norm
from tool_process import run_tool

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import tile_sweep  # noqa: E402


def test_the_sizes_of_the_tables_are_among_those_that_are_compared():
    tables = launches.FORWARD, launches.BACKWARD_QUERIES, launches.BACKWARD_KEYS
    for kind, table in zip(("forward", "queries", "keys"), tables, strict=True):
        assert astuple(table[9][128]) in tile_sweep.VARIANTS[kind]
        assert len({*tile_sweep.VARIANTS[kind]}) == len(tile_sweep.VARIANTS[kind])
    assert norm.WARPS_PER_PROCESSOR in {per for _, per in tile_sweep.VARIANTS["norm"]}


@pytest.mark.slow
def test_a_dry_sweep_times_every_kind(tmp_path):
    path = tmp_path / "sweep.json"
    words = "benchmarks/gpu/tile_sweep.py", "--dry", "--write", path
    process = run_tool(*words, environment={"TRITON_INTERPRET": "1"})
    assert process.returncode == 0, process.stderr
    results = json.loads(path.read_text())
    assert [result["kind"] for result in results] == [*tile_sweep.VARIANTS]
    for result in results:
        times = {name: value for name, value in result.items() if ", " in name}
        assert "trouble" not in result and times and min(times.values()) > 0


def test_a_variant_that_does_not_run_says_why(monkeypatch):
    monkeypatch.setattr(tile_sweep, "select", lambda *_: None)
    monkeypatch.setattr(tile_sweep, "list_passes", lambda *_: iter([("a, forward", lambda: 1 / 0)]))
    found = tile_sweep.measure_variant("keys", (16, 16, 4, 1), timed=True, dry=True)
    assert found["trouble"].startswith("ZeroDivisionError")
