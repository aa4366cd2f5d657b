"""Checkpoints with damage in each kind of file: it is named, and the run continues from an intact
checkpoint, on the same loss curve."""

import os

from bitwise import assert_same_losses
from entry_runs import read_losses
from fault_runs import log, main

KEYS = {"checkpoint__every": 2, "checkpoint__keep": 9, "checkpoint__resume": "latest"}


def flip_byte(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_run_continues_from_the_newest_that_all_ranks_can_read(pool, overrides, tmp_path):
    keys, home = overrides(**KEYS), tmp_path / "run/checkpoints"
    assert pool.run(2, main, keys) == [0, 0]
    unbroken = read_losses(tmp_path / "run")
    flip_byte(home / "step-00000012/rank-00001.safetensors", -1)  # read by one rank alone
    flip_byte(home / "step-00000010/rank-00000.safetensors", 20)  # its header
    os.truncate(home / "step-00000008/rank-00001.safetensors", 99)
    (home / "step-00000006/rank-00000.safetensors").unlink()
    flip_byte(home / "step-00000004/manifest.json", 50)
    flip_byte(home / "latest", 3)
    assert pool.run(2, main, keys) == [0, 0]
    assert_same_losses(
        read_losses(tmp_path / "run"), unbroken, because="a checkpoint has every bit of the state"
    )
    text = log(tmp_path / "run")
    for phrase in (
        f"{home}/latest names no checkpoint",
        "step-00000012/rank-00001.safetensors is damaged: tensor",
        "step-00000010/rank-00000.safetensors is damaged: its header",
        "step-00000008/rank-00001.safetensors is damaged: 99 bytes instead of",
        "step-00000006/rank-00000.safetensors cannot be read: No such file",
        "step-00000004/manifest.json is damaged",
        "step-00000002 is used instead",
    ):
        assert phrase in text, text
