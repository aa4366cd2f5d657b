"""Data parallel training on two emulated hosts with two ranks each, compared with peers, on slow
links.

The hosts are a network lab on this machine (`tools/network_lab`, which requires root). The
contenders are those of `data_cpu.py`, run in turns in separate processes with one thread per rank.
Ours runs at each ZeRO stage over all ranks, and with `parallel.data_replicate=2`, which shards
within a host and sends each gradient over the link once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from data_cpu import OURS
from data_cpu import make_contenders as contenders_of
from harness import (
    PEERS,
    Contender,
    add_common_arguments,
    check_losses,
    format_table,
    run_alternately,
    summarise,
    write_results,
)
from lab_ranks import open_hosts
from ranks import PLACES
from workload import WORKLOAD

HOSTS, RANKS = 2, 4
REPLICATED = (1, 3)
"""Stages at which ours also runs sharded within a host only."""


def make_contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Return the contenders of `data_cpu.py`, and ours with replicas."""
    chosen = contenders_of(arguments, RANKS, arguments.precision)
    for stage in REPLICATED:
        settings = (*OURS, f"parallel.zero={stage}", "parallel.data_replicate=2")
        size = (
            "--ranks",
            str(RANKS),
            "--precision",
            arguments.precision,
            "--steps",
            str(arguments.steps),
        )
        command = (sys.executable, str(PEERS / "data_ours.py"), *size, *settings)
        chosen.append(Contender(f"megaframe {stage}, 2x2", command, ours=True))
    return chosen


def main() -> None:
    parser = add_common_arguments(__doc__)
    parser.set_defaults(threads=1, rounds=2)
    parser.add_argument("--rates", nargs="+", default=["800mbit"], help="of each host's link")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each run")
    parser.add_argument("--megatron-python", type=Path, help="an interpreter with megatron-core")
    parser.add_argument("--deepspeed-python", type=Path, help="an interpreter with DeepSpeed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that hosts are removed
    results = {}
    for rate in arguments.rates:
        print(f"\n{HOSTS} hosts of {RANKS // HOSTS} ranks, links of {rate}")
        chosen = make_contenders(arguments)
        with open_hosts(HOSTS, rate) as hosts:
            os.environ[PLACES] = json.dumps([hosts[0].address, [host.command for host in hosts]])
            outcomes = run_alternately(chosen, arguments.rounds, arguments.threads)
            del os.environ[PLACES]
        check_losses(outcomes, math.log(WORKLOAD.vocab))
        lines = summarise(chosen, outcomes)
        print(format_table(lines))
        results[f"{HOSTS}x{RANKS // HOSTS}, {rate}"] = (lines, outcomes)
    if arguments.write:
        config = {**asdict(WORKLOAD), "steps": arguments.steps, "rounds": arguments.rounds}
        write_results(arguments.write, config, arguments.threads, results)


if __name__ == "__main__":
    main()
