"""Transfers that fail or hang while all ranks are alive: they begin again in their processes."""

import json

import pytest
from fault_runs import break_connections, log, lose_a_message, losses, main

KEYS = {
    "parallel__pipeline": 2,
    "train__microbatch": 1,
    "checkpoint__every": 5,
    "checkpoint__memory_every": 2,
    "checkpoint__resume": "latest",
}


@pytest.fixture
def run(pool, overrides, tmp_path):
    """run(name, *fault) -> statuses of four ranks; the run is in tmp_path/name."""

    def make(name, *fault):
        memory = tmp_path / f"memory-{name}"
        memory.mkdir()
        keys = overrides(run__dir=tmp_path / name, checkpoint__memory_dir=memory, **KEYS)
        return pool.run(4, main, keys, *fault)

    return make


def test_all_begin_again_and_the_curve_is_that_of_an_undisturbed_run(run, tmp_path):
    assert run("whole") == [0] * 4
    assert run("broken", break_connections, 2, 8) == [0] * 4
    assert run("hung", lose_a_message, None, 8) == [0] * 4
    said = {
        "broken": "no rank is gone, but ranks lost each other: look at the network between them",
        "hung": "step 9 took more than faults.step_timeout=1 s: ",
    }
    for name, what in said.items():
        text = log(tmp_path / name)
        assert text.count("begun again in the same processes") == 1, text
        assert f"begun again in the same processes (1 of faults.restarts=3): {what}" in text
        assert "continued from copies in memory of step 8; the newest that is saved is of" in text
        assert losses(tmp_path / name) == losses(tmp_path / "whole")
        events = (tmp_path / name / "faults/ledger.jsonl").read_text().splitlines()
        starts = [one for one in map(json.loads, events) if one["event"] == "start"]
        assert [one["step"] for one in starts] == [0, 8]
