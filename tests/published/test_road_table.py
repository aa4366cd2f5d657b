"""Tokens, hours and prices in docs/road.md are what its commands say."""

import json
import re
import shlex

import pytest
from repo_copy import ROOT
from tool_process import run_tool

from megaframe.config import load
from megaframe.hardware.cluster import load_cluster

TEXT = (ROOT / "docs/road.md").read_text()
COMMANDS = re.findall(r"^\.venv/bin/python (tools/plan\.py .*)$", TEXT, re.MULTILINE)
ROW = r"^\| [\d.]+ \w+ \| (\d) \| [\w ,-]+ \| ([\d.]+) (\w+) \| ([\d.]+) \| \$([\d.,]+) \|$"
ROWS = re.findall(ROW, TEXT, re.MULTILINE)
UNITS = {"million": 1e6, "billion": 1e9}


def test_each_row_has_a_command():
    assert len(COMMANDS) == len(ROWS) == 6


@pytest.mark.parametrize("number", range(6))
def test_a_row_is_what_its_command_says(number):
    """To the digits that it shows."""
    words = shlex.split(COMMANDS[number])
    gpus, tokens, unit, hours, price = ROWS[number]
    plan = json.loads(run_tool(*words, "--json").stdout)
    config = load(words[2], words[5:])
    assert words[4] == gpus and plan["fits"]
    planned_hours = plan["step_seconds"] * config.train.steps / 3600
    planned_price = planned_hours * int(gpus) * load_cluster(plan["cluster"]).price
    total = config.train.steps * config.train.global_batch * config.train.seq
    for shown, planned in (
        (tokens, total / UNITS[unit]),
        (hours, planned_hours),
        (price, planned_price),
    ):
        last_digit = 10.0 ** -len(shown.partition(".")[2])
        assert float(shown.replace(",", "")) == pytest.approx(planned, abs=0.6 * last_digit)
