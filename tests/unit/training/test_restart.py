"""Transfers that fail or hang while all ranks are alive: the ranks restart in-process."""

import json

from bitwise import assert_same_losses
from entry_runs import read_losses
from fault_runs import break_and_hang, log, main

KEYS = {
    "parallel__pipeline": 2,
    "train__global_batch": 4,
    "train__microbatch": 1,
    "checkpoint__every": 5,
    "checkpoint__memory_every": 2,
    "checkpoint__resume": "latest",
}
AGAIN = "restarted in the same processes"


def test_all_begin_again_and_the_curve_is_that_of_an_undisturbed_run(pool, overrides, tmp_path):
    for name, fault in (("whole", ()), ("run", (break_and_hang, None, 5, 8))):
        memory = tmp_path / f"memory-{name}"
        memory.mkdir()
        keys = overrides(run__dir=tmp_path / name, checkpoint__memory_dir=memory, **KEYS)
        assert pool.run(4, main, keys, *fault) == [0] * 4
    text = log(tmp_path / "run")
    assert text.count(AGAIN) == 3  # the second restart reports both
    broken = "no rank is gone, but ranks lost contact: check the network between them"
    assert f"{AGAIN} (1 of faults.restarts=3): {broken}; rank" in text
    hung = "step 9 took more than faults.step_timeout=1 s: rank 1"
    assert f"{AGAIN} (2 of faults.restarts=3): {hung}" in text
    assert "copies in memory of step 8 are used; the newest saved checkpoint is of step 5" in text
    losses, whole = read_losses(tmp_path / "run"), read_losses(tmp_path / "whole")
    assert_same_losses(losses, whole, because="a checkpoint has every bit of the state")
    events = (tmp_path / "run/faults/ledger.jsonl").read_text().splitlines()
    starts = [entry["step"] for entry in map(json.loads, events) if entry["event"] == "start"]
    assert starts[0] == 0 and starts[1] in (4, 5) and starts[2] == 8
