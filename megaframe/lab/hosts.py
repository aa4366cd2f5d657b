"""Hosts on one machine, joined by links of a given rate.

Each host is a network namespace whose only way out is a link to a switch, a bridge in a namespace
of its own, so nothing of the machine's own network is touched and all is gone with the namespaces.
Links are shaped in both directions by token buckets (`tc tbf`): a transfer takes as long as on a
wire of that rate, and the processor sleeps meanwhile. Linux, with the rights of root.

Programs of a host live in a process namespace whose first process dies with this one: nothing is
left running even where this process is killed. Its empty network namespaces then stay, and the
next lab removes them, for their names tell whose they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megaframe.errors import UserError

BURST, QUEUE = "128kb", "4mb"
"""What a link sends at once before its rate holds, and what waits in front of it."""
UPLINK = "uplink"
"""Name of each host's end of its link."""
MOST_HOSTS = 100
_TOOLS = ("ip", "tc", "unshare", "setpriv")
_RATE = re.compile(r"[0-9]+(\.[0-9]+)?([kmg]bit)", re.IGNORECASE)
_TIME = re.compile(r"[0-9]+(\.[0-9]+)?(us|ms|s)", re.IGNORECASE)
_OURS = re.compile(r"netlab-([0-9]+)-([0-9]+)-")


@dataclass(frozen=True)
class Link:
    """Between a host and the switch. rate: in each direction, as `tc` writes it, such as 500mbit.
    latency: of what the host sends, such as 1ms, or None; needs `netem` in the kernel."""

    rate: str
    latency: str | None = None


@dataclass(frozen=True)
class Host:
    """A host: `command` in front of one's own runs that there."""

    name: str
    address: str
    link: Link
    switch: str
    port: str

    @property
    def command(self) -> tuple[str, ...]:
        """Prefix of a command line. gloo and NCCL are told which of the interfaces is theirs."""
        interfaces = (f"GLOO_SOCKET_IFNAME={UPLINK}", f"NCCL_SOCKET_IFNAME={UPLINK}")
        alive = ("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.name)
        apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "env", *interfaces)
        return (*alive, *apart)

    def bytes_moved(self) -> tuple[int, int]:
        """Bytes that the host has sent and received over its link, as the interface counts them:
        with all headers."""
        text = _run("ip", "-n", self.name, "-s", "-j", "link", "show", UPLINK)
        counted = json.loads(text)[0]["stats64"]
        return counted["tx"]["bytes"], counted["rx"]["bytes"]

    def connect(self, up: bool) -> None:
        """Pull the cable out of the switch, or put it back."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "up" if up else "down")


@contextmanager
def hosts(links: Sequence[Link]) -> Iterator[list[Host]]:
    """A host for each link. At the end, however it comes, what still runs on them is killed.

    Raises `UserError`, with nothing made, where this machine or the links do not allow it.
    """
    check(links)
    remove_left_overs()
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace("switch"))
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        made = []
        for number, link in enumerate(links):
            name = stack.enter_context(_namespace(f"host{number}"))
            # Addresses of one width: torchrun orders nodes by theirs as text.
            address = f"10.0.0.{100 + number}"
            made.append(Host(name, address, link, switch, f"port{number}"))
            _join(made[-1])
        yield made


def check(links: Sequence[Link]) -> None:
    """Raise `UserError` where such a lab cannot be made here."""
    if not 1 <= len(links) <= MOST_HOSTS:
        raise UserError(f"{len(links)} hosts; use 1 to {MOST_HOSTS}")
    for link in links:
        check_rate(link.rate)
        if link.latency is not None and not _TIME.fullmatch(link.latency):
            raise UserError(f"latency {link.latency!r} is not a number with us, ms or s: 1ms")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise UserError(
            f"the network lab needs Linux with {', '.join(missing)}; Debian has them in the "
            "packages iproute2 and util-linux"
        )
    if os.geteuid() != 0:
        raise UserError("the network lab makes network namespaces, which needs root")
    if said := _refused("tbf", "rate", "1mbit", "burst", BURST, "limit", QUEUE):
        raise UserError(f"this machine cannot shape links (tc tbf): {said}")
    if any(link.latency for link in links) and (said := _refused("netem", "delay", "1ms")):
        raise UserError(
            f"a latency needs netem, which this kernel lacks (CONFIG_NET_SCH_NETEM): {said}; "
            "leave out the latency; the rate works without it"
        )


def check_rate(rate: str) -> None:
    """Raise `UserError` where it is none."""
    if not _RATE.fullmatch(rate) or not float(rate[:-4]):
        raise UserError(f"rate {rate!r} is not a number above 0 with kbit, mbit or gbit: 200mbit")


def remove_left_overs() -> list[str]:
    """Remove the namespaces of labs whose process is gone, with what still runs in them, and
    return their names."""
    found = []
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0] if line.split() else ""
        owner = _OURS.match(name)
        if owner and _started(int(owner[1])) != int(owner[2]):
            _remove(name)
            found.append(name)
    return found


def _refused(*discipline: str) -> str | None:
    """What the kernel says to a queueing discipline; None where it takes it. Tried in a namespace
    without a name, which ends with the command."""
    command = ("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *discipline)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = " ".join(done.stderr.split())
    return None if done.returncode == 0 else said or f"status {done.returncode}"


def _join(host: Host) -> None:
    """Give the host its link to the switch."""
    ends = ((host.name, UPLINK), (host.switch, host.port))
    pair = ("type", "veth", "peer", "name", host.port, "netns", host.switch)
    _run("ip", "link", "add", UPLINK, "netns", host.name, *pair)
    _run("ip", "-n", host.switch, "link", "set", host.port, "master", "bridge")
    _run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", UPLINK)
    for namespace, device in (*ends, (host.name, "lo")):
        _run("ip", "-n", namespace, "link", "set", device, "up")
    shape = ("tbf", "rate", host.link.rate, "burst", BURST, "limit", QUEUE)
    for namespace, device in ends:
        place = ["root"]
        add = ("tc", "-n", namespace, "qdisc", "add", "dev", device)
        if host.link.latency and device == UPLINK:
            _run(*add, "root", "handle", "1:", "netem", "delay", host.link.latency)
            place = ["parent", "1:1"]
        _run(*add, *place, *shape)


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    """A network namespace of this process's own, gone at the end with all that runs in it."""
    name = f"netlab-{os.getpid()}-{_started(os.getpid())}-{name}"
    try:
        _run("ip", "netns", "add", name)
        yield name
    finally:
        with _undisturbed():
            _remove(name)


def _remove(name: str) -> None:
    """Remove a namespace, where it is there, and kill what runs in it."""
    if not (Path("/run/netns") / name).exists():
        return
    for process in _run("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _run("ip", "netns", "delete", name)


def _started(process: int) -> int | None:
    """When a process began, in ticks since the machine did, for numbers of processes are used
    again; None where there is no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


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
    """What a command says; `UserError` with its complaint where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout
