"""Runs ranks of a Python program on the hosts of a network lab (`tools/network_lab`), one on each.

A launcher would choose ports and restart what fails. A measurement wants neither of these, but
needs the answer of every rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from harness import ROOT
from network_lab import Host, Link, emulate_hosts

__all__ = ["LIMIT", "Host", "open_hosts", "start_ranks"]

PORT = 29500
LIMIT = 600.0
"""Seconds after which ranks that have not answered are given up."""


@contextmanager
def open_hosts(count: int, rate: str) -> Iterator[list[Host]]:
    """Create this many hosts, each with a link of `rate` (in the syntax of `tc`, such as 500mbit)
    in each direction."""
    with emulate_hosts([Link(rate)] * count) as emulated:
        yield emulated


def start_ranks(hosts: Sequence[Host], command: Sequence[str]) -> list[str]:
    """Run a Python program with `--rank` on each host, as the ranks of one world with one thread
    each. Return what each printed. Ends the program if a rank fails."""
    ranks = []
    for rank, host in enumerate(hosts):
        place = {"RANK": rank, "WORLD_SIZE": len(hosts), "MASTER_ADDR": hosts[0].address}
        place |= {"MASTER_PORT": PORT, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
        place |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore::FutureWarning"}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        line = (*host.command, sys.executable, *command, f"--rank={rank}")
        ranks.append(subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [rank.communicate(timeout=LIMIT)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed; its message is above")
    return answers
