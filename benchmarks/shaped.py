"""Hosts on one machine, joined by links of a given rate: for what depends on the network.

Each host is a network namespace whose only way out is a link to a switch, a bridge in a namespace
of its own, so nothing of the machine's own network is touched and all is gone with the namespaces.
Links are shaped in both directions by token buckets (`tc tbf`): a transfer takes as long as on a
wire of that rate, and the processor sleeps meanwhile. Linux, with the rights of root.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from harness import ROOT

BURST, QUEUE = "128kb", "4mb"
"""What a link sends at once before its rate holds, and what waits in front of it."""
UPLINK = "uplink"
"""Name of each host's end of its link."""
PORT = 29500
LIMIT = 600.0
"""Seconds after which ranks that have not answered are given up."""


@dataclass(frozen=True)
class Host:
    """A host: `command` in front of one's own runs that there."""

    name: str
    address: str

    @property
    def command(self) -> tuple[str, ...]:
        """Prefix of a command line. gloo is told which of the interfaces it is to use."""
        return ("ip", "netns", "exec", self.name, "env", f"GLOO_SOCKET_IFNAME={UPLINK}")


@contextmanager
def hosts(count: int, rate: str) -> Iterator[list[Host]]:
    """So many hosts, each with a link of `rate` (as `tc` writes it, such as 500mbit) in each
    direction. At the end, however it comes, what still runs on them is killed."""
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace("switch"))
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        made = []
        for number in range(count):
            name = stack.enter_context(_namespace(f"host{number}"))
            made.append(Host(name, f"10.0.{number // 250}.{number % 250 + 1}"))
            _join(made[-1], switch, f"port{number}", rate)
        yield made


def start_ranks(hosts: Sequence[Host], command: Sequence[str]) -> list[str]:
    """Run a Python program with `--rank` once on each host, as the ranks of one world with one
    thread each, and return what each printed. Ends the program when a rank fails."""
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


def _join(host: Host, switch: str, port: str, rate: str) -> None:
    ends = ((host.name, UPLINK), (switch, port))
    pair = ("type", "veth", "peer", "name", port, "netns", switch)
    _run("ip", "link", "add", UPLINK, "netns", host.name, *pair)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/16", "dev", UPLINK)
    shape = ("root", "tbf", "rate", rate, "burst", BURST, "limit", QUEUE)
    for namespace, device in (*ends, (host.name, "lo")):
        _run("ip", "-n", namespace, "link", "set", device, "up")
    for namespace, device in ends:
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *shape)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    """A network namespace of this process's own, gone at the end with all that runs in it."""
    name = f"shaped-{os.getpid()}-{name}"
    _run("ip", "netns", "add", name)
    try:
        yield name
    finally:
        with _undisturbed():
            for process in _run("ip", "netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _run("ip", "netns", "delete", name)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals wait, for this process and what it runs: ctrl-C reaches both, some send SIGTERM
    twice."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
