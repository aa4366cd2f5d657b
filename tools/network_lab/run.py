"""Runs one command on all hosts of a lab, as a launcher on a real cluster would.

The output of each host goes to a file, and that of the first host is also shown as it appears. They
are files rather than pipes so that a host with much output never waits for a reader.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megaframe.errors import UserError
from megaframe.io.regular_file import open_fresh
from network_lab.hosts import Host

PORT = 29400
"""Port on which the first host waits for the others; free, because a lab has its own network."""
GRACE_SECONDS = 60.0
"""Seconds that hosts have to end on their own after another one has failed."""
_PAUSE = 0.05


@dataclass(frozen=True)
class LinkOutage:
    """A loss of the link of host number `host`, `after` seconds after the start and for `length`
    seconds; None for ever."""

    host: int
    after: float
    length: float | None = None


@dataclass(frozen=True)
class HostsResult:
    """How a command ended.

    Attributes:
        statuses: Exit status of each host, negative for a signal; -9 for hosts that were killed
            after `GRACE_SECONDS`.
        link_bytes: Bytes that each host sent and received over its link meanwhile.
    """

    statuses: tuple[int, ...]
    seconds: float
    link_bytes: tuple[tuple[int, int], ...]

    @property
    def status(self) -> int:
        """The first exit status that is not 0, or 0."""
        return next((status for status in self.statuses if status), 0)


def run_on_hosts(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    outages: Sequence[LinkOutage] = (),
    output: TextIO = sys.stdout,
) -> HostsResult:
    """Run a command on every host and return when all have ended.

    Args:
        hosts: The hosts.
        command: The command.
        ranks: Number of ranks per host, passed to `torchrun`.
        folder: Where the files host-0.txt ... with the output of each host are written.
        outages: Of links meanwhile.
        output: Where the output of the first host is copied to.

    Raises:
        UserError: If the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}") from None
    before = [host.transferred_bytes() for host in hosts]
    started = time.monotonic()
    processes = []
    for number, host in enumerate(hosts):
        environment = {**os.environ, **make_launcher_variables(number, hosts, ranks)}
        with open_fresh(folder / f"host-{number}.txt", inside=folder) as file:
            line = (*host.command, *command)
            # In a session of its own, so that ctrl-C only reaches this process, which kills it.
            processes.append(
                subprocess.Popen(
                    line,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )
    try:
        with open(folder / "host-0.txt", encoding="utf-8", errors="replace") as first:
            _wait(hosts, processes, started, outages, first, output)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    seconds = time.monotonic() - started
    after = [host.transferred_bytes() for host in hosts]
    link_bytes = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]
    return HostsResult(
        tuple(process.returncode for process in processes), seconds, tuple(link_bytes)
    )


def _wait(
    hosts: Sequence[Host],
    processes: Sequence[subprocess.Popen[bytes]],
    started: float,
    outages: Sequence[LinkOutage],
    first: TextIO,
    output: TextIO,
) -> None:
    """Return when all hosts have ended, or `GRACE_SECONDS` seconds after one has failed; meanwhile
    cut and restore links, and copy the first host's output."""
    due = sorted(
        [(outage.after, outage.host, False) for outage in outages]
        + [
            (outage.after + outage.length, outage.host, True)
            for outage in outages
            if outage.length is not None
        ]
    )
    deadline = float("inf")
    running = True
    while running and time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        running = None in statuses
        if any(statuses):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        while due and time.monotonic() - started >= due[0][0]:
            moment, number, up = due.pop(0)
            hosts[number].set_connected(up)
            event = "is back" if up else "is lost"
            print(f"netlab: the link of host {number} {event} at {moment:g} s", file=output)
        output.write(first.read())
        output.flush()
        if running:
            time.sleep(_PAUSE)


def make_launcher_variables(number: int, hosts: Sequence[Host], ranks: int) -> Mapping[str, str]:
    """Return the environment variables for programs on a host. `torchrun` reads those that start
    with PET_ as its options; other launchers read the rest to find their place and the first host.

    Args:
        number: Of the host.
        hosts: All hosts.
        ranks: Number of ranks per host.
    """
    host, first = hosts[number], hosts[0]
    variables = {
        "PET_NNODES": len(hosts),
        "PET_NPROC_PER_NODE": ranks,
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{first.address}:{PORT}",
        "PET_RDZV_ID": "netlab",
        # torchrun's guess from host names fails, because all hosts have that of the machine.
        "PET_RDZV_CONF": f"is_host={int(number == 0)}",
        "PET_LOCAL_ADDR": host.address,
        "NNODES": len(hosts),
        "NODE_RANK": number,
        "NPROC_PER_NODE": ranks,
        "MASTER_ADDR": first.address,
        "MASTER_PORT": PORT,
    }
    # Defaults; the caller's environment goes first. Without the second, torch warns about host
    # names that cannot be resolved.
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    defaults |= {name: os.environ[name] for name in defaults if name in os.environ}
    return {name: str(value) for name, value in variables.items()} | defaults
