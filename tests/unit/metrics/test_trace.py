"""A trace of real ranks: it has every action of the schedule, on aligned clocks."""

import json
import time
from collections import defaultdict
from itertools import pairwise

import pytest
from entry_runs import run_prepared
from patience import PATIENCE

from megaframe.architecture.pipeline import build_step_schedule
from megaframe.config import load
from megaframe.distributed.mesh import Mesh, read_global_rank
from megaframe.distributed.object_collectives import gather_bytes, measure_clock_offset
from megaframe.layout import Layout
from megaframe.schedule import lower

AHEAD = 3.0


def shift_clock(patch):
    """Set the second rank's clock ahead, as another machine's may be."""
    if read_global_rank() == 1:
        plain = time.perf_counter_ns
        patch.setattr(time, "perf_counter_ns", lambda: plain() + int(AHEAD * 1e9))


def measure_offset(seconds):
    mesh = Mesh(Layout(data=2), device="cpu", timeout=PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        shift_clock(patch)
        offsets = (
            measure_clock_offset(mesh.world, mesh.device),
            gather_bytes(bytes([mesh.rank]) * (1000 * mesh.rank), mesh.world, mesh.device),
        )
    mesh.finish()
    return offsets


def test_clocks_and_bytes_come_to_the_first_rank(pool):
    (first, collected), (second, nothing) = pool.run(2, measure_offset, AHEAD)
    assert first == 0 and second / 1e9 == pytest.approx(-AHEAD, abs=0.2)
    assert collected == [b"", b"\1" * 1000] and nothing == []


def test_a_trace_has_the_actions_of_the_schedule_and_what_was_sent_arrives_later(
    pool, overrides, tmp_path
):
    changes = {"parallel__pipeline": 2, "train__microbatch": 2}
    keys = overrides(train__steps=4, metrics__trace="[2,3]", **changes)
    pool.run(2, run_prepared, keys, shift_clock)
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    slices = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            slices[one["pid"], threads[one["pid"], one["tid"]]].append(one)
            assert one["ts"] >= 0 and one["dur"] >= 0
    config = load(None, keys)
    lowered = lower(build_step_schedule(config, 4)).ranks
    for rank in range(2):
        lanes = ("compute", "send", "recv", "grad")
        done = sorted((s for lane in lanes for s in slices[rank, lane]), key=lambda s: s["ts"])
        assert [s["name"] for s in done] == 2 * [str(action) for action in lowered[rank]]
        assert slices[rank, "parts of the step"]
    for kind, of, (source, target) in (("F", "1", (0, 1)), ("BW", "0", (1, 0))):
        sent = [s for s in slices[source, "compute"] if s["cat"] == kind]
        received = [s for s in slices[target, "compute"] if s["cat"] == kind and s["name"][0] == of]
        for one, other in zip(sent, received, strict=True):
            # The sender's action ends before the action that uses its result.
            assert one["ts"] + one["dur"] <= other["ts"] + other["dur"]
    for group in slices.values():
        group.sort(key=lambda entry: entry["ts"])
        for one, other in pairwise(group):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01
